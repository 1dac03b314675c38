"""Time as the server sees it: the system's, or one that a test moves by hand."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Tells the time and waits."""

    def time(self) -> float:
        """Unix seconds."""
        ...

    async def wait(self, event: asyncio.Event, timeout: float) -> None:
        """Returns when the event is set or after ``timeout`` seconds, whichever comes first."""
        ...


class SystemClock:
    """The real time."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    async def wait(self, event: asyncio.Event, timeout: float) -> None:
        """Returns when the event is set or after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass


class ManualClock:
    """A clock that stands still until it is moved.

    >>> clock = ManualClock(1000.0)
    >>> clock.advance(30)
    >>> clock.time()
    1030.0
    """

    def __init__(self, now: float = 1_767_000_000.0) -> None:
        self._now = now
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def time(self) -> float:
        """Unix seconds."""
        return self._now

    @property
    def waiting(self) -> int:
        """How many waits are going on: what a test polls before it moves the clock."""
        return len(self._sleepers)

    def advance(self, seconds: float) -> None:
        """Moves the clock and wakes whoever waited for that moment."""
        self._now += seconds
        for until, alarm in self._sleepers:
            if until <= self._now:
                alarm.set()

    async def wait(self, event: asyncio.Event, timeout: float) -> None:
        """Returns when the event is set or when the clock was moved by ``timeout`` seconds."""
        sleeper = (self._now + timeout, asyncio.Event())
        self._sleepers.append(sleeper)
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(sleeper[1].wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._sleepers.remove(sleeper)
            for wait in waits:
                wait.cancel()
