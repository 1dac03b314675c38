"""Which groups are in flight: starts them in order, hands them over, ends cleanly.

A run keeps ``concurrency`` episodes in flight. With a limit it starts a group for each one that is still
wanted, and another for each that is lost; without one it goes on until it is stopped, with a bounded number
of finished groups that nobody has taken yet.
"""

from __future__ import annotations

import asyncio
from collections import deque

from atropos_gym.errors import CollectionFailed
from atropos_gym.rollout._group import GroupPlayer, Lost
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["Run"]

#: Groups that filters may take out in a row: a filter that keeps nothing at all is a mistake.
FILTERED_IN_A_ROW = 2000


class Run:
    """Groups ``first_number``, ``first_number + 1``, ... of one ``collect`` or ``stream``, in one event loop.

    Args:
        player: plays a group.
        concurrency: most episodes in flight.
        first_number: of the first group.
        limit: groups wanted; None for no end.

    Attributes:
        next_number: of the group that would be started next.
    """

    def __init__(
        self, player: GroupPlayer, *, concurrency: int, first_number: int, limit: int | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.next_number = first_number
        self._player = player
        self._accounting = player.accounting
        self._concurrency = concurrency
        self._limit = limit
        self._most_ready = max(1, concurrency // player.group_size)
        # An outage loses everything in flight at once; twice that is more than an outage.
        self._patience = 2 * -(-concurrency // player.group_size) + 8
        self._slots = asyncio.Semaphore(concurrency)
        self._members = 0
        self._delivered = 0
        self._lost_in_a_row = {"failed": 0, "filtered": 0}
        self._tasks: set[asyncio.Task[EpisodeGroup | Lost]] = set()
        self._ready: deque[EpisodeGroup] = deque()
        self._changed = asyncio.Event()
        self._stopped = False
        self._error: BaseException | None = None

    async def next(self) -> EpisodeGroup | None:
        """Returns a finished group, in order of finishing; None once all wanted came or the run is stopped.

        Raises:
            CollectionFailed: too many groups were lost in a row.
            UnequalStarts: a group's members began differently.
        """
        return self._take() if await self._any_ready() else None

    async def burst(self) -> list[EpisodeGroup]:
        """Returns all groups that are finished, at least one; none once all wanted came or it is stopped.

        Where environments are about to hear answers that came with theirs, it waits for what they finish.

        Raises:
            CollectionFailed: too many groups were lost in a row.
            UnequalStarts: a group's members began differently.
        """
        if await self._any_ready():
            # The pool may be busy with another run's: only tasks of this one can finish a group of its own.
            while self._tasks and self._error is None and self._player.pool.busy:
                if len(self._ready) >= self._most_ready:
                    break
                await asyncio.sleep(0)
        return [self._take() for _ in range(len(self._ready))]

    async def _any_ready(self) -> bool:
        """Waits for a finished group; returns whether there is one."""
        while True:
            self._fill()
            if self._error is not None:
                raise self._error
            if self._ready:
                return True
            if not self._tasks:
                return False
            self._changed.clear()
            await self._changed.wait()

    def _take(self) -> EpisodeGroup:
        group = self._ready.popleft()
        self._delivered += 1
        self._accounting.deliver()
        self._fill()
        return group

    async def stop(self) -> None:
        """Starts no further group and cancels those in flight; finished ones can still be taken."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._changed.set()

    async def close(self) -> None:
        """Stops, and counts what nobody took as failed."""
        await self.stop()
        while self._ready:
            self._ready.popleft()
            self._accounting.fail("stopped")

    def _fill(self) -> None:
        """Starts groups while there is room for another episode."""
        while self._members < self._concurrency and self._may_start():
            number, self.next_number = self.next_number, self.next_number + 1
            self._accounting.begin()
            self._members += self._player.group_size
            task = self.loop.create_task(self._player.play(number, self._slots, self._member_done))
            self._tasks.add(task)
            task.add_done_callback(self._group_done)

    def _may_start(self) -> bool:
        if self._stopped or self._error is not None:
            return False
        if self._limit is None:
            return len(self._ready) < self._most_ready
        return self._delivered + len(self._ready) + len(self._tasks) < self._limit

    def _member_done(self) -> None:
        self._members -= 1
        self._fill()

    def _group_done(self, task: asyncio.Task[EpisodeGroup | Lost]) -> None:
        self._tasks.discard(task)
        if task.cancelled() and self._stopped:
            self._accounting.fail("stopped")
        elif task.cancelled():  # by whoever scores or filters: without a limit it would be tried for ever
            self._lose(Lost("failed", "score: CancelledError", "scoring was cancelled from within"))
        elif (error := task.exception()) is not None:
            self._accounting.fail(f"error: {type(error).__name__}", str(error))
            self._error = self._error or error
        elif isinstance(outcome := task.result(), Lost):
            self._lose(outcome)
        else:
            self._lost_in_a_row = {"failed": 0, "filtered": 0}
            self._ready.append(outcome)
        self._fill()
        self._changed.set()

    def _lose(self, lost: Lost) -> None:
        if lost.kind == "filtered":
            self._accounting.filter(lost.reason)
            most = FILTERED_IN_A_ROW
        else:
            self._accounting.fail(lost.reason, lost.message)
            most = self._patience
        self._lost_in_a_row[lost.kind] += 1
        if self._lost_in_a_row[lost.kind] >= most and self._error is None:
            name = self._player.pool.name
            self._error = CollectionFailed(
                f"{name}: {most} groups in a row were {lost.kind}, the last one by {lost.reason}"
                + (f" ({lost.message})" if lost.message else "")
            )
