"""Coroutines from plain code, also where an event loop runs already (a notebook)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["Sync"]

_Result = TypeVar("_Result")


class Sync:
    """Runs coroutines to their end, all in one event loop: an engine's connections belong to the loop.

    Example:
        >>> sync = Sync()
        >>> sync(asyncio.sleep(0, "done"))
        'done'
        >>> sync.close()
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __call__(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Returns what the coroutine returns; blocks."""
        return self._here(self._runner.run, work)

    def close(self) -> None:
        """Closes the loop; idempotent."""
        self._here(self._runner.close)

    @staticmethod
    def _here(call: Any, *arguments: Any) -> Any:
        """Calls in this thread, or in another one where an event loop runs in this one."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call(*arguments)
        with ThreadPoolExecutor(1, thread_name_prefix="learner") as thread:
            return thread.submit(call, *arguments).result()
