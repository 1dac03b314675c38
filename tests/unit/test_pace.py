"""How much of a collector's work one turn of the event loop takes.

What is promised:
1. However many are ready at once, a turn of the loop lets a few through, and they go in order of asking.
2. One who is cancelled while waiting takes nobody's place; each loop counts for itself.
3. A collector with hundreds of episodes in flight steps a few environments at a time, and what answers that
   came together finish is still handed over together.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.rollout._pace import STEPS, Pace
from atropos_gym.rollout._schedule import Run
from atropos_gym.rollout.accounting import Accounting
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.evaluation import aevaluate
from tests.tools.text_tasks import Guess


class Turns:
    """Counts turns of the running event loop."""

    def __init__(self) -> None:
        self.now = 0
        self._next()

    def _next(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize(("most", "steps"), [(1, 1), (4, 1), (4, 3)])
def test_a_turn_of_the_loop_lets_a_few_through_in_order(most: int, steps: int) -> None:
    pace = Pace(most)
    done: list[tuple[int, int]] = []

    async def worker(number: int, turns: Turns) -> None:
        for _ in range(steps):
            await pace.step()
            done.append((number, turns.now))

    async def all_of_them() -> None:
        turns = Turns()
        await asyncio.gather(*(worker(number, turns) for number in range(50)))
        turns.stop()

    asyncio.run(all_of_them())
    assert [*dict(done)] == [*range(50)]  # by their first steps
    # Those that were let through in the turn before run in the same one as those that find room.
    assert max(Counter(turn for _, turn in done).values()) <= 2 * most


def test_who_is_alone_does_not_wait() -> None:
    async def alone() -> None:
        turns, pace = Turns(), Pace(1)
        for _ in range(5):
            before = turns.now
            await pace.step()
            assert turns.now == before
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        turns.stop()

    asyncio.run(alone())


def test_a_cancelled_one_takes_nobodys_place() -> None:
    pace = Pace(1)
    done: list[int] = []

    async def worker(number: int) -> None:
        await pace.step()
        done.append(number)

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(worker(number)) for number in range(6)]
        await asyncio.sleep(0)
        for task in tasks[1:4]:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(end, asyncio.CancelledError) for end in ends] == [False, *[True] * 3, False, False]

    asyncio.run(all_of_them())
    assert done == [0, 4, 5]


def test_each_event_loop_counts_for_itself() -> None:
    pace = Pace(1)

    async def leave_one_waiting() -> None:
        await pace.step()
        asyncio.create_task(pace.step())  # noqa: RUF006  (cancelled when the loop ends)
        await asyncio.sleep(0)

    asyncio.run(leave_one_waiting())
    asyncio.run(asyncio.wait_for(pace.step(), 60))


def test_a_collector_steps_a_few_environments_at_a_time() -> None:
    now: list[Turns] = []
    steps: Counter[int] = Counter()

    class Counted(Guess):
        def begin(self, options: dict[str, Any]) -> list[Message]:
            steps[now[0].now] += 1
            return super().begin(options)

        def respond(self, reply: Reply) -> Feedback:
            steps[now[0].now] += 1
            return super().respond(reply)

    engine = ScriptedEngine(lambda prompt, params, number: [*b"x", 258])
    collector = GroupCollector(Counted, engine, group_size=8, concurrency=128, seed=1)

    async def play() -> None:
        now.append(Turns())
        groups = await collector.acollect(20)
        now[0].stop()
        assert [group.number for group in groups] == list(range(20))

    asyncio.run(play())
    collector.close()
    assert steps.total() == 20 * 8 * (1 + Guess.max_turns)
    assert max(steps.values()) <= 2 * STEPS


def test_an_evaluation_makes_a_few_environments_at_a_time() -> None:
    now: list[Turns] = []
    made: Counter[int] = Counter()

    class Counted(Guess):
        def __init__(self, **keywords: Any) -> None:
            super().__init__(**keywords)
            made[now[0].now] += 1

    engine = ScriptedEngine(lambda prompt, params, number: [*b"x", 258])

    async def play() -> None:
        now.append(Turns())
        await aevaluate(Counted, engine, 100, seed=1, concurrency=50)
        now[0].stop()

    asyncio.run(play())
    assert made.total() >= 10
    assert max(made.values()) <= 2 * STEPS


def test_what_is_finished_by_answers_that_came_together_is_handed_over_together() -> None:
    answered: list[asyncio.Event] = []

    async def together(number: int) -> None:
        if number % 64 == 0:
            answered.append(asyncio.Event())
        event = answered[-1]
        if number % 64 == 63:
            event.set()
        await event.wait()

    engine = ScriptedEngine(lambda prompt, params, number: [*b"x", 258], delay=together)
    collector = GroupCollector(Guess, engine, group_size=8, concurrency=64, seed=1)

    async def play() -> list[int]:
        bursts = collector.bursts()
        sizes = [len(await anext(bursts)) for _ in range(3)]
        await bursts.aclose()
        return sizes

    assert asyncio.run(asyncio.wait_for(play(), 60)) == [8, 8, 8]
    collector.close()


def test_a_burst_does_not_wait_for_what_another_run_of_the_collector_does() -> None:
    """One run has all it wanted, another one an error: what goes on in the pool is not theirs."""

    class Player:
        group_size = 1

        def __init__(self) -> None:
            self.accounting = Accounting()
            self.pool = self
            self.seen = asyncio.Event()

        @property
        def busy(self) -> bool:
            self.seen.set()
            return True  # somebody else always steps an environment

        async def play(self, number: int, *others: Any) -> Any:
            if number == 1:
                await self.seen.wait()
                raise ValueError("this one")
            if number > 1:
                await asyncio.Event().wait()
            return SimpleNamespace(number=number)

    async def play() -> None:
        run = Run(cast(Any, Player()), concurrency=8, first_number=0, limit=1)
        assert [group.number for group in await run.burst()] == [0]
        assert await run.burst() == []
        run = Run(cast(Any, Player()), concurrency=8, first_number=0)
        assert [group.number for group in await run.burst()] == [0]
        with pytest.raises(ValueError, match="this one"):
            await run.burst()
        await run.close()

    asyncio.run(asyncio.wait_for(play(), 60))
