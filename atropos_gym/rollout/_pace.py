"""How much work of many episodes one turn of an event loop takes.

Where hundreds of answers arrive at once, hundreds of environments are to be stepped; done in one go, nothing
else in the loop would run meanwhile: no heartbeat, no request of another episode. It counts and reads no
clock: what runs in which order does not depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

__all__ = ["Pace"]

#: Steps of environments take a fraction of a millisecond each; those that take more have ``blocking``.
STEPS = 4


class Pace:
    """Lets a few through in each turn of an event loop, first come, first served; each loop for itself.

    Args:
        most: how many.
    """

    def __init__(self, most: int = STEPS) -> None:
        self._most = most
        self._local = threading.local()  # .queue: one event loop runs in a thread at a time

    async def step(self) -> None:
        """Returns when it is one's turn: await it before what keeps the loop busy."""
        if (turn := self._queue().enter()) is not None:
            await turn

    @property
    def busy(self) -> bool:
        """Whether anybody came in this turn of the running loop, or waits for the next."""
        return self._queue().counting

    def _queue(self) -> _Queue:
        loop = asyncio.get_running_loop()
        queue: _Queue | None = getattr(self._local, "queue", None)
        if queue is None or queue.loop is not loop:
            queue = self._local.queue = _Queue(loop, self._most)
        return queue


class _Queue:
    """Who waits in one event loop."""

    __slots__ = ("_left", "_most", "_waiting", "counting", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.loop = loop
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.counting = False

    def enter(self) -> asyncio.Future[None] | None:
        """Returns what to wait for, if anything."""
        if not self.counting:
            self.counting = True
            self.loop.call_soon(self._next_turn)
        if self._left:
            self._left -= 1
            return None
        turn: asyncio.Future[None] = self.loop.create_future()
        self._waiting.append(turn)
        return turn

    def _next_turn(self) -> None:
        self._left = self._most
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its episode was cancelled
                turn.set_result(None)
                self._left -= 1
        self.counting = self._left < self._most
        if self.counting:
            self.loop.call_soon(self._next_turn)
