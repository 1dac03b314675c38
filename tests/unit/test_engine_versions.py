"""Locks the life of a policy version, on the scripted engine: the hf engine keeps versions by the same table.

1. ``hold`` keeps its version alive; ``version=None`` is the newest at the time of asking.
2. Nothing is unloaded while someone holds it or a request under it runs.
3. Name and folder are new for each version; the same publish again changes nothing.
4. At most ``max_live_versions``: one more waits for the oldest, then drops its holders, counted.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, VersionExpired

PARAMS = SamplingParams(max_tokens=4)


def make(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, params, number: [1], **options)


def folder(version: int) -> Path:
    return Path(f"runs/a-v{version}")


async def ask(engine: ScriptedEngine, version: int | None = None) -> Completion:
    return (await engine.generate([1], PARAMS, version=version))[0]


async def settle() -> None:
    """Lets every task get as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_an_episode_keeps_the_version_it_began_with() -> None:
    async def main() -> None:
        engine = make()
        async with engine.hold() as old:
            assert (old.version, (await ask(engine)).version) == (0, 0)
            await engine.publish(3, folder(3))
            assert (await ask(engine, old.version)).version == 0
            assert (await ask(engine)).version == engine.newest == 3
            async with engine.hold() as new:
                assert new.version == 3
        assert engine.live_versions == (0, 3)

    asyncio.run(main())


def test_holds_work_without_an_event_loop() -> None:
    engine = make()
    with engine.hold() as held:
        assert held.version == 0
        with pytest.raises(EngineError, match="already entered"), held:
            pass


def test_retire_waits_for_holders_and_requests_in_either_order() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        engine = make(delay=lambda number: gate.wait())
        await engine.publish(1, folder(1))
        hold = engine.hold()
        await hold.__aenter__()
        running = asyncio.create_task(ask(engine))
        await settle()
        await engine.publish(2, folder(2))
        retired = asyncio.create_task(engine.retire(1))
        await settle()
        with pytest.raises(VersionExpired, match=r"version 1 is no longer served \(served: 0, 2\)"):
            await engine.hold(1).__aenter__()
        inside = asyncio.create_task(ask(engine, 1))  # a holder's next turn
        await settle()
        assert engine.live_versions == (0, 1, 2)
        await hold.__aexit__(None, None, None)
        await settle()
        assert not retired.done()
        with pytest.raises(VersionExpired):
            await ask(engine, 1)  # nobody holds it any more
        gate.set()
        assert (await running).version == (await inside).version == 1
        await retired
        assert engine.live_versions == (0, 2)
        await engine.retire(1)
        assert engine.counters == {"published": 2, "retired": 1, "version_expired": 0}

    asyncio.run(main())


def test_requests_without_a_holder_end_before_the_unload() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        engine = make(delay=lambda number: gate.wait())
        await engine.publish(1, folder(1))
        running = [asyncio.create_task(ask(engine, 1)) for _ in range(3)]
        await settle()
        await engine.publish(2, folder(2))
        retired = asyncio.create_task(engine.retire(1))
        await settle()
        assert not retired.done()
        running[0].cancel()
        gate.set()
        await asyncio.gather(*running, return_exceptions=True)
        await retired
        assert engine.live_versions == (0, 2)

    asyncio.run(main())


def test_a_fourth_version_waits_for_the_oldest() -> None:
    async def main() -> None:
        engine = make()
        for version in (1, 2, 3):
            await engine.publish(version, folder(version))
        async with engine.hold(1):
            fourth = asyncio.create_task(engine.publish(4, folder(4)))
            await settle()
            assert not fourth.done() and engine.newest == 3
            assert (await ask(engine, 1)).version == 1
        await fourth
        assert (engine.newest, engine.live_versions) == (4, (0, 2, 3, 4))
        assert engine.counters["version_expired"] == 0
        with pytest.raises(VersionExpired, match="version 1 is no longer served"):
            await ask(engine, 1)

    asyncio.run(main())


def test_after_publish_timeout_the_oldest_holders_are_dropped_and_counted() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        gate.set()
        engine = make(publish_timeout=0.0, delay=lambda number: gate.wait())
        await engine.publish(1, folder(1))
        holds = [engine.hold(1) for _ in range(3)]
        for hold in holds:
            await hold.__aenter__()
        await engine.publish(2, folder(2))
        await engine.publish(3, folder(3))
        gate.clear()
        running = asyncio.create_task(ask(engine, 1))
        await settle()
        fourth = asyncio.create_task(engine.publish(4, folder(4)))
        await settle()
        assert not fourth.done()  # what runs is still answered
        with pytest.raises(VersionExpired):
            await ask(engine, 1)
        gate.set()
        assert (await running).version == 1
        await fourth
        assert engine.counters["version_expired"] == 3
        for hold in holds:
            await hold.__aexit__(None, None, None)  # leaving late is no error
        assert engine.live_versions == (0, 2, 3, 4)
        async with engine.hold() as held:
            assert held.version == 4

    asyncio.run(main())


@pytest.mark.parametrize("most", [1, 2])
def test_few_live_versions_are_enough(most: int) -> None:
    """d19: load the new one, switch requests, wait for the old one's, unload."""

    async def main() -> None:
        engine = make(max_live_versions=most)
        await engine.publish(1, folder(1))
        async with engine.hold() as held:
            second = asyncio.create_task(engine.publish(2, folder(2)))
            await settle()
            assert second.done() == (most == 2)
            assert (engine.newest, held.version) == (2, 1)
            assert (await ask(engine)).version == 2
            assert (await ask(engine, 1)).version == 1
        await second
        assert len(engine.live_versions) == most + 1

    asyncio.run(main())


def test_the_same_publish_again_changes_nothing() -> None:
    async def main() -> None:
        engine = make()
        await engine.publish(1, folder(1))
        await engine.publish(1, folder(1).resolve())
        await asyncio.gather(*(engine.publish(2, folder(2)) for _ in range(3)))
        assert [version for version, _ in engine.published] == [1, 2]
        await engine.retire(1)
        with pytest.raises(VersionExpired, match="version 1 is no longer served"):
            await engine.publish(1, folder(1))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("version", "where", "message"),
    [
        (2, 3, "version 2 was published from .*a-v2 already"),  # d18: the name again
        (3, 2, "folder .*a-v2 holds version 2 already"),  # d18: the folder again
        (1, 1, "version 1 must be greater than the newest, 2"),
        (0, 9, "0 is the base"),
        (-1, 9, "got -1"),
        (True, 9, "got True"),
    ],
)
def test_reused_names_and_folders_are_refused(version: int, where: int, message: str) -> None:
    async def main() -> None:
        engine = make()
        await engine.publish(2, folder(2))
        with pytest.raises(EngineError, match=message):
            await engine.publish(version, folder(where))
        assert engine.newest == 2
        await engine.publish(3, folder(3))

    asyncio.run(main())


def test_what_cannot_be_retired_is_said() -> None:
    async def main() -> None:
        engine = make()
        await engine.publish(1, folder(1))
        for version, message in [(0, "is the base"), (1, "is the newest"), (5, "never published")]:
            with pytest.raises(EngineError, match=message):
                await engine.retire(version)
        with pytest.raises(EngineError, match="version 5 was never published; the newest is 1"):
            await ask(engine, 5)

    asyncio.run(main())


def test_cancelled_publishers_and_retirers_leave_no_trace() -> None:
    async def main() -> None:
        engine = make()
        for version in (1, 2, 3):
            await engine.publish(version, folder(version))
        async with engine.hold(1):
            publishing = asyncio.create_task(engine.publish(4, folder(4)))
            queued = [asyncio.create_task(engine.publish(v, folder(v))) for v in (5, 6)]
            retiring = asyncio.create_task(engine.retire(1))
            await settle()
            for task in (publishing, queued[0], retiring):
                task.cancel()
            await settle()
            assert [t.cancelled() for t in (publishing, queued[0], retiring)] == [True] * 3
            assert engine.newest == 3 and not queued[1].done()
        await queued[1]
        assert (engine.newest, engine.live_versions) == (6, (0, 2, 3, 6))
        async with engine.hold(2):
            retiring = asyncio.create_task(engine.retire(2))
            await settle()
            retiring.cancel()
            await settle()
            async with engine.hold(2) as again:  # nobody retires it any more
                assert again.version == 2

    asyncio.run(main())


def test_closing_wakes_who_waits() -> None:
    async def main() -> None:
        engine = make()
        for version in (1, 2, 3):
            await engine.publish(version, folder(version))
        async with engine.hold(1):
            waiting = [
                asyncio.create_task(engine.publish(4, folder(4))),
                asyncio.create_task(engine.publish(5, folder(5))),
                asyncio.create_task(engine.retire(1)),
            ]
            await settle()
            await engine.close()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [str(r) for r in results] == ["the engine is closed"] * 3
        with pytest.raises(EngineError, match="closed"):
            await ask(engine)

    asyncio.run(main())


def test_a_hold_in_one_thread_keeps_a_version_from_another() -> None:
    engine = make()
    asyncio.run(engine.publish(1, folder(1)))
    asyncio.run(engine.publish(2, folder(2)))
    held, leave = threading.Event(), threading.Event()

    def service() -> None:
        async def main() -> None:
            async with engine.hold(1):
                held.set()
                while not leave.is_set():
                    await asyncio.sleep(0)

        asyncio.run(main())

    thread = threading.Thread(target=service)
    thread.start()
    assert held.wait(30)

    async def main() -> None:
        retired = asyncio.create_task(engine.retire(1))
        await settle()
        assert not retired.done()
        leave.set()
        await asyncio.wait_for(retired, 30)

    asyncio.run(main())
    thread.join(30)
    assert engine.live_versions == (0, 2)


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_live_versions must be >= 1, got 0"):
        make(max_live_versions=0)
    with pytest.raises(ConfigError, match="publish_timeout must be >= 0 seconds, got -1"):
        make(publish_timeout=-1)
