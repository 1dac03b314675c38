"""Small ASGI classes in front of the routes: how a body gets in, and when an answer may go out.

Each wraps an application and answers by itself what it refuses; the answer is always JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_gym.batch_server.bodies.codings import FEED_BYTES, BrokenStream, Inflater
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.http.room import Place
from atropos_gym.batch_server.limits import QUEUE_FULL
from atropos_gym.batch_server.state.refusals import NotSaved
from atropos_gym.batch_server.store import Store
from atropos_gym.errors import ServerError

__all__ = ["BODY", "Bodies", "Saved", "drop_body"]

SAVE_SOON = 0.02
"""Seconds until what follows an answer is saved: that it has arrived, or that a batch was read."""

RETRY_AFTER = 5
"""Seconds after which a client should try again what could not be saved, or had no room."""

CODINGS = ("gzip", "x-gzip", "zstd")

GROUP_PATHS = ("/scored_data", "/scored_data_list")
"""Where bodies bring what is to be kept."""

SETTINGS_BYTES = 2**18
"""Largest body elsewhere."""

BODY = "atropos_gym.body"
"""Where a request's scope holds its plain body."""

PLACE = "atropos_gym.place"
"""Where it holds the room that the body takes."""


class Saved:
    """Holds every answer back until what it says is saved: then it is still true after a crash.

    Reads that change nothing do not wait for what others have changed.

    Args:
        app: what answers.
        store: what is saved.
    """

    def __init__(self, app: ASGIApp, store: Store) -> None:
        self.app = app
        self.store = store
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; answers 503 in its place where nothing can be saved."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        waits = scope["method"] != "GET" or scope["path"] in ("/batch", "/reset_data")

        async def send_saved(message: Message) -> None:
            if message["type"] == "http.response.start":
                saved = self.store.save()
                if saved is not None and waits:
                    await self._wait(saved)
            await send(message)

        try:
            await self.app(scope, receive, send_saved)
        except NotSaved as error:
            await _later(str(error))(scope, receive, send)
        finally:
            self._save_soon()

    def _save_soon(self) -> None:
        """Saves what was changed after the answer, unless another answer does so before."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SAVE_SOON, self._save_now)

    def _save_now(self) -> None:
        self._timer = None
        self.store.save()

    async def _wait(self, saved: Future[None]) -> None:
        try:
            async with asyncio.timeout(self.store.limits.save_seconds):
                await asyncio.wrap_future(saved)
        except TimeoutError:
            raise NotSaved(self.store.failing or "the disk is too slow: not saved yet") from None
        except ServerError as error:
            raise NotSaved(str(error)) from None


def _later(detail: str) -> JSONResponse:
    content = {"detail": detail, "retry_after": RETRY_AFTER}
    return JSONResponse(content, 503, {"Retry-After": str(RETRY_AFTER)})


class _Refusal(Exception):
    """A body that does not get in."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _Full(Exception):
    """There is no room for a body, or for the rest of it."""


class _Left(Exception):
    """The client went away before its body was complete."""


class Bodies:
    """Reads and inflates a whole body before the application sees the request, within limits.

    The limit is counted on what comes in and on what comes out, piece by piece: a small body cannot become a
    large one in memory, one of empty members has an end, and what a header claims does not matter. Where no
    more groups can be kept, their bodies stay unread for a while, also in the middle, and are then refused
    for now. However often a body waits for room, it waits ``hold_seconds`` in all, and its sender has its
    ``receive_seconds`` besides.

    Args:
        app: gets the request with its plain body.
        desk: its limits say how large a body may be and how much is kept.
    """

    def __init__(self, app: ASGIApp, desk: Desk) -> None:
        self.app = app
        self.desk = desk
        self.max_bytes = desk.store.limits.max_body_bytes
        self.seconds = desk.store.limits.receive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400, 408, 413, 415 or 503, or passes the request on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        scope[BODY], scope[PLACE] = b"", Place(self.desk.room)
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            await self.app(scope, receive, send)
            return
        brings_groups = scope["path"] in GROUP_PATHS
        limit = self.max_bytes if brings_groups else min(self.max_bytes, SETTINGS_BYTES)
        try:
            scope[BODY] = await self._read(headers, receive, limit, scope[PLACE], waits=brings_groups)
            await self.app(scope, receive, send)
        except _Left:
            return  # nobody is there to be answered, and nothing of it is kept
        except _Full:
            await _later(QUEUE_FULL)(scope, receive, send)
        except _Refusal as refusal:
            if brings_groups:
                self.desk.store.count_refused(None, 1, f"status_{refusal.status}")
            await JSONResponse({"detail": str(refusal)}, refusal.status)(scope, receive, send)
        finally:
            drop_body(scope)

    async def _read(
        self, headers: Headers, receive: Receive, limit: int, place: Place, *, waits: bool
    ) -> bytes:
        """The body, which has its place until it is dropped; ``waits``: it needs room for that."""
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", *CODINGS):
            raise _Refusal(415, f"Content-Encoding {coding[:100]!r} is not supported: use gzip, zstd or none")
        if _length(headers) > limit:
            raise _too_large(limit)
        settling = _Settling(self.desk, place, waits=waits)
        await settling.take(_length(headers))
        kept: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.seconds) as receiving:
                with settling.reading(receiving):
                    pieces = _bounded(_chunks(receive), limit)
                    if coding != "identity":
                        pieces = _bounded(_inflated(pieces, Inflater(coding)), limit)
                    async for piece in pieces:
                        size += len(piece)
                        await settling.take(size)
                        kept.append(piece)
        except TimeoutError:
            if settling.stopped:
                raise _Full from None
            raise _Refusal(408, f"body did not arrive within {self.seconds:g} s") from None
        except BrokenStream as error:
            raise _Refusal(400, str(error)) from None
        return b"".join(kept)


class _Settling:
    """A body takes room as it comes, and waits for it in all as long as posts are held.

    Args:
        desk: whose room it is.
        place: what the body takes.
        waits: whether it needs room at all.

    Attributes:
        stopped: it was silent beyond the limit while others waited.
    """

    def __init__(self, desk: Desk, place: Place, *, waits: bool) -> None:
        self.stopped = False
        self._desk = desk
        self._place = place
        self._waits = waits
        self._left = desk.store.limits.hold_seconds
        self._receiving: asyncio.Timeout | None = None

    @contextmanager
    def reading(self, receiving: asyncio.Timeout) -> Iterator[None]:
        """The body is read, within a time that stands still while it waits for room."""
        self._receiving = receiving
        self._place.stop = self._stop
        try:
            yield
        finally:
            self._receiving = None
            self._place.stop = lambda: None

    async def take(self, size: int) -> None:
        """Takes room for so many bytes in all; raises ``_Full`` where there is none in time."""
        self._place.heard = self._desk.clock.time()
        if self._place.take(size, anyway=not self._waits):
            return
        receiving, loop = self._receiving, asyncio.get_running_loop()
        ends = None if receiving is None else receiving.when()
        left = 0.0 if ends is None else ends - loop.time()
        if receiving is not None:
            receiving.reschedule(None)
        since = self._desk.clock.time()
        self._desk.room.waiting += 1
        try:
            if not await self._desk.hold_post(lambda: self._look(size), seconds=self._left):
                raise _Full
        finally:
            self._desk.room.waiting -= 1
            self._place.heard = self._desk.clock.time()
            self._left -= self._place.heard - since
        if receiving is not None:
            receiving.reschedule(loop.time() + left)

    def _look(self, size: int) -> bool:
        self._desk.room.hurry(self._desk.clock.time())
        return self._place.take(size)

    def _stop(self) -> None:
        if self._receiving is not None and not self._receiving.expired():
            self.stopped = True
            self._receiving.reschedule(asyncio.get_running_loop().time())


def drop_body(scope: Scope) -> None:
    """Forgets a request's body once it was read: its answer may be held for long."""
    scope[BODY] = b""
    scope[PLACE].leave()


def _length(headers: Headers) -> int:
    """How long the body is to be, as its sender says; 0 where it does not."""
    length = headers.get("content-length", "")
    return int(length[:18]) if length.isascii() and length.isdigit() else 0


def _too_large(limit: int) -> _Refusal:
    return _Refusal(413, f"body is larger than {limit} bytes")


async def _bounded(pieces: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """Stops where the pieces together are too large."""
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        yield piece


async def _inflated(chunks: AsyncIterator[bytes], inflater: Inflater) -> AsyncIterator[bytes]:
    """What comes out of a coding; others get their turn after each large piece, in or out."""
    fed = 0
    async for chunk in chunks:
        for start in range(0, len(chunk), FEED_BYTES):
            part = chunk[start : start + FEED_BYTES]
            for piece in inflater.feed(part):
                yield piece
                if len(piece) == inflater.PIECE_BYTES:
                    await asyncio.sleep(0)
            fed += len(part)
            if fed >= FEED_BYTES:  # nothing may come of it, and that can take as long
                fed = 0
                await asyncio.sleep(0)
    if not inflater.complete:
        raise BrokenStream(f"invalid {inflater.coding} body: it is cut off")


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Left
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
