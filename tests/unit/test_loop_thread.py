"""An event loop in a thread of its own: whoever submits is answered, however its end comes in between."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from atropos_gym.engines._loop import LoopThread
from atropos_gym.errors import EngineError


async def for_ever() -> None:
    await asyncio.Event().wait()


def submit_until_refused(thread: LoopThread) -> None:
    """Returns once nothing is taken any more and whatever was taken is ended."""
    futures: list[Future[None]] = []
    with pytest.raises(EngineError, match="closed"):
        while True:
            futures.append(thread.submit(for_ever()))
    for future in futures:
        with pytest.raises(EngineError, match="closed"):
            future.result()


def test_what_runs_at_the_end_is_cancelled() -> None:
    thread = LoopThread("ends")
    running = [thread.submit(for_ever()) for _ in range(10)]
    thread.close()
    for future in running:
        with pytest.raises(EngineError, match="the engine is closed"):
            future.result(timeout=60)


def test_what_begins_as_others_end_is_cancelled_too() -> None:
    thread = LoopThread("ends")
    begun: list[Future[None]] = []

    async def begin_another() -> None:
        try:
            await for_ever()
        finally:
            task = asyncio.get_running_loop().create_task(for_ever())
            future: Future[None] = Future()
            task.add_done_callback(lambda task: future.set_result(None))
            begun.append(future)

    running = thread.submit(begin_another())
    thread.wait(asyncio.sleep(0))
    thread.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        running.result(timeout=60)
    assert [future.result(timeout=60) for future in begun] == [None]


def test_whoever_submits_during_the_end_is_answered_or_refused() -> None:
    for _ in range(3):
        thread = LoopThread("ends")
        others = [threading.Thread(target=submit_until_refused, args=(thread,)) for _ in range(2)]
        for other in others:
            other.start()
        thread.close()
        for other in others:
            other.join(timeout=60)
            assert not other.is_alive()
