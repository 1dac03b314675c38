"""GET ``/batch``: waits for a batch and hands it over, or takes it back where it did not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from atropos_gym.batch_server._desk import Desk, watch
from atropos_gym.batch_server.leases import Lease
from atropos_gym.batch_server.stock import Request

__all__ = ["BatchReply"]

CHUNK_BYTES = 256 * 1024
"""A body goes out in pieces, so that a client that stops reading is noticed before the end."""


class BatchReply(Response):
    """The answer to GET ``/batch``. A plain read counts only once its whole body was handed over.

    Args:
        desk: where batches come from.
        request: what is asked for.
        wait_seconds: how long to wait for it.
        trainer_id: who asks; None where it does not say.
    """

    media_type = "application/json"

    def __init__(self, desk: Desk, request: Request, wait_seconds: float, trainer_id: str | None) -> None:
        super().__init__()
        self.desk = desk
        self.request = request
        self.wait_seconds = wait_seconds
        self.trainer_id = trainer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits, then answers with a batch or with null."""
        async with watch(receive) as gone:
            lease = await self.desk.hold(self.wait_seconds, self._look, gone)
            if lease is None and self.request.partial and not gone():
                lease = self._look(partial=True)
            if lease is None:
                body = to_json({"batch": None, **self._why()})
                await _start(send, len(body), {})
                await _body(send, body, more=False)
                return
            arrived = False
            try:
                arrived = await self._hand_over(lease, gone, send)
            finally:
                if not arrived:
                    self.desk.store.put_back(lease)
                    self.desk.notify()

    async def _hand_over(self, lease: Lease, gone: Callable[[], bool], send: Send) -> bool:
        """Sends a batch; returns whether the client was there up to the last byte."""
        body = _body_of(lease)
        counts = {"x-batch-sequences": str(lease.sequences), "x-batch-groups": str(lease.group_count)}
        await _start(send, len(body), counts)
        # All but the last byte, then one empty piece that waits until the socket has taken them. A client
        # that has everything may close at once, so after the last byte its leaving would mean nothing.
        ends = [*range(CHUNK_BYTES, len(body) - 1, CHUNK_BYTES), len(body) - 1]
        for start, end in zip([0, *ends], [*ends, len(body) - 1], strict=True):
            await _body(send, body[start:end], more=True)
            await _settle()
            if gone():
                return False
        self.desk.store.delivered(lease)
        await _body(send, body[-1:], more=False)
        return True

    def _look(self, *, partial: bool = False) -> Lease | None:
        """Takes the batch if there is one now."""
        now = self.desk.now()
        self.desk.store.trainer_seen(now, self.trainer_id)
        if not self.desk.store.registered:  # reset while this request was held
            return None
        return self.desk.store.take(replace(self.request, partial=partial), now)

    def _why(self) -> dict[str, str]:
        store = self.desk.store
        return {"reason": store.reason} if store.exact and store.reason else {}


async def _settle() -> None:
    """Gives the loop the turns that it takes from a broken connection to the watcher of this request."""
    for _ in range(3):
        await asyncio.sleep(0)


def _body_of(lease: Lease) -> bytes:
    """The groups as they are stored, put one behind the other."""
    body = b'{"batch":[' + b",".join(group.payload for group in lease.groups) + b"]"
    if lease.seconds is None:
        return body + b"}"
    about: dict[str, Any] = {
        "batch_id": lease.batch_id,
        "expires_at": lease.expires_at,
        "lease_seconds": lease.seconds,
        "step": lease.step,
        "group_ids": [group.group_id for group in lease.groups],
        "delivery": lease.delivery,
    }
    return body + b"," + to_json(about)[1:]


async def _start(send: Send, length: int, headers: dict[str, str]) -> None:
    everything = {"content-type": "application/json", "content-length": str(length), **headers}
    raw = [(name.encode(), value.encode()) for name, value in everything.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _body(send: Send, piece: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})
