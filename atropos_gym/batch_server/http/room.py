"""Room for bodies on their way: with all that is kept they stay within a limit, but for one body.

A body takes room by the length that its sender tells before any of it is read, and more as it turns out to
be longer: inflated, or of a sender that tells no length. Bodies that are read side by side could then fill up
all room and wait for each other for ever; so one of them may go beyond the limit, and comes to its end.
While others wait for room, that one must go on: else it is refused for now.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["SILENT_SECONDS", "Place", "Room"]

SILENT_SECONDS = 30.0
"""So long may a body beyond the limit bring nothing while others wait for room: no piece of a large one, and
not its end."""


class Room:
    """The bytes that all bodies on their way have taken.

    Args:
        held: bytes that are kept for good.
        limit: most bytes of both.
        changed: called when there is more room and somebody waits for it.

    Attributes:
        arriving: bytes of bodies that are read, or whose senders have told of them, until they are parsed.
        beyond: the one that has gone beyond the limit.
        waiting: bodies that wait for room.

    >>> room = Room(lambda: 50, lambda: 100)
    >>> first, second = Place(room), Place(room)
    >>> first.take(30), second.take(30), first.take(31)
    (True, True, False)
    >>> second.leave()
    >>> first.take(31), room.arriving
    (True, 31)
    """

    def __init__(
        self, held: Callable[[], int], limit: Callable[[], int], changed: Callable[[], None] = lambda: None
    ) -> None:
        self.arriving = 0
        self.waiting = 0
        self.changed = changed
        self.beyond: Place | None = None
        self._held = held
        self._limit = limit

    @property
    def free(self) -> int:
        """Bytes up to the limit; negative beyond it."""
        return self._limit() - self._held() - self.arriving

    def hurry(self, now: float) -> None:
        """Stops the body beyond the limit where it has brought nothing for long; somebody waits for room."""
        if self.beyond is not None and now - self.beyond.heard > SILENT_SECONDS:
            self.beyond.stop()


class Place:
    """What one body has taken of the room.

    Attributes:
        size: bytes that it has taken.
        heard: when its sender brought something for the last time.
        stop: ends the reading of it; nothing where it is not being read.
    """

    def __init__(self, room: Room) -> None:
        self.size = 0
        self.heard = math.inf
        self.stop: Callable[[], None] = lambda: None
        self._room = room

    def take(self, size: int, *, anyway: bool = False) -> bool:
        """Takes room for so many bytes in all; returns whether it is there.

        Args:
            size: of the body, as far as that is known.
            anyway: whether there is room or not.
        """
        room, more = self._room, max(0, size - self.size)
        if not anyway and room.beyond is not self and (more or not self.size):
            free = room.free
            if free < 0 or not (free or self.size):  # a new body needs some room to begin with
                return False
            if more > free:
                if room.beyond is not None:
                    return False
                room.beyond = self
        room.arriving += more
        self.size += more
        return True

    def leave(self) -> None:
        """Gives it all back; more than once is no mistake."""
        room, had = self._room, self.size
        room.arriving -= had
        self.size = 0
        if room.beyond is self:
            room.beyond = None
        if had and room.waiting:
            room.changed()
