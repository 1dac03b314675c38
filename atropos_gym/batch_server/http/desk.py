"""What the routes share: the store, the time, and waiting for something to change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from starlette.types import Receive

from atropos_gym.batch_server.bodies.reader_process import reader
from atropos_gym.batch_server.clock import Clock
from atropos_gym.batch_server.http.room import Room
from atropos_gym.batch_server.state.intake import Incoming, Receipt
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.store import Store

__all__ = ["Audience", "Desk", "settle", "watch"]

LOOK_AGAIN = 1.0
"""Seconds after which a held request looks again by itself: leases run out without a request."""

Found = TypeVar("Found")


class Audience(Protocol):
    """Who hears what happens at a desk, and changes nothing."""

    def received(self, incoming: Sequence[Incoming], receipts: Sequence[Receipt], now: float) -> None:
        """Hears of groups that were accepted."""
        ...

    def delivered(self, lease: Lease) -> None:
        """Hears of a batch whose last byte is about to go out."""
        ...


class Desk:
    """The store with its clock, and the requests that wait at it.

    Attributes:
        store: what the server knows.
        clock: what time it is.
        closed: the server stops: nobody waits any more.
        audience: who hears what happens here.
        held_posts: posts that wait because too much is queued.
        hold_seconds: for which posts have been held so far, all together.
        room: for bodies on their way.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.closed = False
        self.audience: list[Audience] = []
        self.held_posts = 0
        self.hold_seconds = 0.0
        self.room = Room(lambda: store.held_bytes, lambda: store.limits.hard_bytes, self.notify)
        self._change = asyncio.Event()
        self._in_line = 0

    @property
    def arriving(self) -> int:
        """Bytes of bodies that are read, or of which their senders have told, until they are parsed."""
        return self.room.arriving

    def now(self) -> float:
        """The time, after doing what is due by then."""
        now = self.clock.time()
        self.store.tick(now)
        return now

    def notify(self) -> None:
        """Wakes every request that waits."""
        self._change.set()
        self._change = asyncio.Event()

    async def turn(self) -> None:
        """Waits for a turn of the loop in which no other long piece of work is done.

        Each of them takes milliseconds, and whoever asks for little waits for one of them, not for all.
        """
        ahead = self._in_line
        self._in_line += 1
        try:
            for _ in range(ahead + 1):
                await asyncio.sleep(0)
        finally:
            self._in_line -= 1

    def close(self) -> None:
        """Lets every held request answer now."""
        self.closed = True
        self.notify()
        reader().interrupt()

    async def hold(
        self, seconds: float, look: Callable[[], Found | None], gone: Callable[[], bool] = lambda: False
    ) -> Found | None:
        """Looks again at every change until something is there, the time is up or the client has left.

        Args:
            seconds: how long to wait at most; 0 looks once.
            look: returns what is waited for, or None.
            gone: whether the client has left.
        """
        until = self.clock.time() + seconds
        while not gone():
            change = self._change
            if (found := look()) is not None:
                return found
            left = until - self.clock.time()
            if left <= 0 or self.closed:
                return None
            await self.clock.wait(change, min(left, LOOK_AGAIN))
        return None

    async def hold_post(
        self,
        free: Callable[[], bool],
        gone: Callable[[], bool] = lambda: False,
        seconds: float | None = None,
    ) -> bool:
        """Holds a post while there is no room; returns whether there is room now.

        Args:
            free: whether there is room.
            gone: whether the sender has left.
            seconds: how long at most, unless the limit is what counts.
        """
        if seconds is None:
            seconds = self.store.limits.hold_seconds
        if free():
            return True
        since = self.clock.time()
        self.held_posts += 1
        try:
            return await self.hold(seconds, lambda: free() or None, gone) is not None
        finally:
            self.held_posts -= 1
            self.hold_seconds += self.clock.time() - since


@asynccontextmanager
async def watch(receive: Receive) -> AsyncIterator[Callable[[], bool]]:
    """Watches whether the client leaves while its request is worked on; the body must have been read."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(until_gone())
    try:
        await asyncio.sleep(0)  # one look before anything is handed out
        yield watcher.done
    finally:
        watcher.cancel()


async def settle() -> None:
    """Gives the loop the turns that it takes from a broken connection to the watcher of this request."""
    for _ in range(3):
        await asyncio.sleep(0)
