"""GET ``/batch``: waits for a batch and hands it over, or takes it back where it did not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from fastapi.responses import Response
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from atropos_gym.batch_server.bodies.codings import squeezer
from atropos_gym.batch_server.bodies.forms import LARGE_BYTES, Form
from atropos_gym.batch_server.bodies.msgpack import pack
from atropos_gym.batch_server.http.desk import Desk, settle, watch
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.packed import PackedGroup
from atropos_gym.batch_server.state.parts import Part
from atropos_gym.batch_server.state.refusals import NotSaved
from atropos_gym.batch_server.state.stock import Request

__all__ = ["BatchReply"]

CHUNK_BYTES = 256 * 1024
"""A body goes out in pieces, so that a client that stops reading is noticed before the end."""

Result = TypeVar("Result")


class BatchReply(Response):
    """The answer to GET ``/batch``. A plain read counts only once its whole body was handed over.

    Args:
        desk: where batches come from.
        request: what is asked for.
        wait_seconds: how long to wait for it.
        trainer_id: who asks; None where it does not say.
    """

    def __init__(self, desk: Desk, request: Request, wait_seconds: float, trainer_id: str | None) -> None:
        super().__init__()
        self.desk = desk
        self.request = request
        self.wait_seconds = wait_seconds
        self.trainer_id = trainer_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Waits, then answers with a batch or with null."""
        wanted = _Wanted(Form.of(Headers(scope=scope)))
        async with watch(receive) as gone:
            lease = await self.desk.hold(self.wait_seconds, self._look, gone)
            if lease is None and self.request.partial and not gone():
                lease = self._look(partial=True)
            if lease is None:
                body, headers = wanted.reply({"batch": None, **self._why()})
                await _start(send, len(body), headers)
                await _body(send, body, more=False)
                return
            self.desk.notify()  # posts may be held until there is room
            arrived = False
            try:
                arrived = await self._hand_over(lease, wanted, gone, send)
            finally:
                if not arrived:
                    self.desk.store.put_back(lease)
                    self.desk.notify()

    async def _hand_over(self, lease: Lease, wanted: _Wanted, gone: Callable[[], bool], send: Send) -> bool:
        """Sends a batch; returns whether the client was there up to the last byte, and read on."""
        counts = {"x-batch-sequences": str(lease.sequences), "x-batch-groups": str(lease.group_count)}
        body, headers = await wanted.batch(lease, await self._groups(lease))
        await _start(send, len(body), headers | counts)
        # All but the last byte, then one empty piece that waits until the socket has taken them. A client
        # that has everything may close at once, so after the last byte its leaving would mean nothing.
        ends = [*range(CHUNK_BYTES, len(body) - 1, CHUNK_BYTES), len(body) - 1]
        for start, end in zip([0, *ends], [*ends, len(body) - 1], strict=True):
            try:
                async with asyncio.timeout(self.desk.store.limits.receive_seconds):
                    await _body(send, body[start:end], more=True)
            except TimeoutError:  # stopped, but connected: its groups are for someone who reads
                return False
            await settle()
            if gone():
                return False
        for listener in self.desk.audience:
            listener.delivered(lease)
        self.desk.store.delivered(lease)
        await _body(send, body[-1:], more=False)
        return True

    async def _groups(self, lease: Lease) -> list[PackedGroup]:
        """The batch's groups; what lies on disk only is read in a thread meanwhile.

        Raises:
            NotSaved: the disk did not answer in time.
        """
        store = self.desk.store
        reading = store.fetch(lease)
        if reading.done():
            return reading.result()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(reading), store.limits.save_seconds)
        except TimeoutError:
            raise NotSaved(store.failing or "the disk is too slow: a batch was not read in time") from None

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


class _Wanted:
    """A batch in the form in which its client takes it."""

    def __init__(self, form: Form) -> None:
        self.form = form

    def reply(self, content: Any) -> tuple[bytes, dict[str, str]]:
        """Body and headers of a short answer."""
        return pack(content) if self.form.packed else to_json(content), self.form.headers

    async def batch(self, lease: Lease, groups: list[PackedGroup]) -> tuple[bytes, dict[str, str]]:
        """Body and headers of a batch. Others get their turn after each step, and during large ones."""
        large = any(len(group.data) > LARGE_BYTES for group in groups)
        todo = iter((self._msgpack_pieces if self.form.packed else self._json_pieces)(lease, groups))
        squeeze = None if self.form.coding is None else squeezer(self.form.coding)

        async def step(work: Callable[..., Result], *arguments: Any) -> Result:
            await asyncio.sleep(0)
            return await asyncio.to_thread(work, *arguments) if large else work(*arguments)

        pieces: list[bytes] = []
        while (piece := await step(next, todo, None)) is not None:
            pieces.append(piece if squeeze is None else await step(squeeze.compress, piece))
        if squeeze is None:
            return b"".join(pieces), self.form.headers
        pieces.append(await step(squeeze.flush))
        return b"".join(pieces), {**self.form.headers, "content-encoding": str(self.form.coding)}

    @staticmethod
    def _json_pieces(lease: Lease, groups: list[PackedGroup]) -> Iterable[bytes]:
        about = to_json(_about(lease))[1:]
        return chain(
            (b'{"batch":[' + b"".join(group.to_json() for group in groups[:1]),),  # a part may be empty
            (b"," + group.to_json() for group in groups[1:]),
            (b"]" + (b"," if len(about) > 1 else b"") + about,),
        )

    @staticmethod
    def _msgpack_pieces(lease: Lease, groups: list[PackedGroup]) -> Iterable[bytes]:
        about = _about(lease)
        # A map of 1 + len(about) pairs, its first key, and an array of so many items; then the items.
        yield bytes([0x80 | (1 + len(about))]) + pack("batch") + b"\xdd" + len(groups).to_bytes(4, "big")
        for group in groups:
            yield pack(group.to_map())
        yield b"".join(pack(one) for pair in about.items() for one in pair)


def _about(lease: Lease) -> dict[str, Any]:
    """What the reply says of a lease; nothing where the batch is not leased."""
    if lease.seconds is None:
        return {}
    about = {
        "batch_id": lease.batch_id,
        "expires_at": lease.expires_at,
        "lease_seconds": lease.seconds,
        "step": lease.step,
        "group_ids": [group.group_id for group in lease.groups],
        "delivery": lease.delivery,
    }
    if isinstance(lease, Part) and (whole := lease.whole) is not None:
        about |= {"rank": lease.rank, "world_size": whole.world_size}
        about |= {"batch_sequences": whole.sequences, "batch_groups": whole.group_count}
    return about


async def _start(send: Send, length: int, headers: dict[str, str]) -> None:
    everything = {"content-length": str(length), **headers}
    raw = [(name.encode(), value.encode()) for name, value in everything.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _body(send: Send, piece: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": more})
