"""Runs async work from plain code, whether or not an event loop runs in this thread already (a notebook)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["close_anywhere", "run_anywhere"]

_Result = TypeVar("_Result")


def run_anywhere(runner: asyncio.Runner, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs ``work`` to its end and returns its result; Ctrl-C cancels it first.

    Args:
        runner: has the event loop in which ``work`` runs.
        work: what to run; in a thread of its own where an event loop runs in this one.

    Raises:
        Exception: whatever ``work`` raises.
    """
    if not _in_loop():
        return runner.run(work)
    tasks: list[asyncio.Task[Any]] = []

    async def known() -> _Result:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await work

    with ThreadPoolExecutor(1, thread_name_prefix="collect") as thread:
        future = thread.submit(lambda: runner.run(known()))
        try:
            return future.result()
        except BaseException:
            if not future.done():
                for task in tasks:
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise


def close_anywhere(runner: asyncio.Runner) -> None:
    """Closes the runner's loop, wherever the garbage collector happens to be at work."""
    if not _in_loop():
        runner.close()
        return
    close: Callable[[], None] = runner.close
    with ThreadPoolExecutor(1) as thread:
        thread.submit(close).result()


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
