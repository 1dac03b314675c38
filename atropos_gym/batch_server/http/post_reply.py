"""The answer to posted groups, which is kept in case it does not arrive."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3
from fastapi import HTTPException, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from atropos_gym.batch_server.bodies.details import entry
from atropos_gym.batch_server.http.desk import Desk, watch
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.replies import KeptReply

__all__ = ["ACCEPT_POST", "PostReply", "digest_of", "key_of"]

ACCEPT_POST = "application/json, application/msgpack"
"""What answers to environments say of the forms in which groups can be posted."""

LONGEST_KEY = 128

DIGEST_KIND = b"\x01"
"""Goes before a digest; stores have older ones of 32 bytes, which are of SHA-256."""


class PostReply(Response):
    """A kept answer on its way. While too much is queued it waits: that slows its sender down.

    The groups themselves are safe before that, whatever the sender does while it is held.

    Args:
        desk: where it is kept.
        kept: the answer.
        replayed: it was given before.
    """

    def __init__(self, desk: Desk, kept: KeptReply, *, replayed: bool) -> None:
        headers = {"Accept-Post": ACCEPT_POST} | ({"Idempotency-Replayed": "true"} if replayed else {})
        super().__init__(kept.body, headers=headers, media_type="application/json")
        self.desk = desk
        self.kept = kept
        self.replayed = replayed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, and notes whether anyone was there to read it."""
        arrived = False
        try:
            async with watch(receive) as gone:
                if not self.replayed and self.desk.store.crowded:
                    self.desk.store.save()
                    await self.desk.hold_post(lambda: not self.desk.store.crowded, gone)
                start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                await send(start)  # waits until the groups are safe
                arrived = not gone()
                await send({"type": "http.response.body", "body": self.body})
        finally:
            self.desk.store.reply_arrived(self.kept, arrived=arrived)


def key_of(request: Request) -> str | None:
    """The name that a sender gave its post; raises ``HTTPException`` 422 where it is none."""
    key = request.headers.get("idempotency-key")
    if key is None or (0 < len(key) <= LONGEST_KEY and all("!" <= one <= "~" for one in key)):
        return key
    message = f"Idempotency-Key must be 1 to {LONGEST_KEY} visible ASCII characters, got {key[:40]!r}"
    raise HTTPException(422, [entry("key_invalid", ("header", "idempotency-key"), message)])


def digest_of(groups: Iterable[Incoming], *, many: bool) -> bytes:
    """BLAKE3 of what was posted, after a byte for its kind: of its content, however it was written."""
    digest = blake3(b"list" if many else b"group")
    for group in groups:
        digest.update(len(group.packed.data).to_bytes(8, "little"))
        digest.update(group.packed.data)
    return DIGEST_KIND + digest.digest()
