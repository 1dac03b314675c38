"""Coroutines from plain code, all in one event loop: an engine's connections belong to theirs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

from atropos_gym.errors import ConfigError
from atropos_gym.rollout._anywhere import close_anywhere, run_anywhere

__all__ = ["Sync"]

_Result = TypeVar("_Result")


class Sync:
    """Runs coroutines to their end, also where an event loop runs already (a notebook).

    Example:
        >>> sync = Sync()
        >>> sync(asyncio.sleep(0, "done"))
        'done'
        >>> sync.close()
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._finalizer = weakref.finalize(self, close_anywhere, self._runner)

    def __call__(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Returns what the coroutine returns; blocks."""
        if not self._finalizer.alive:
            work.close()
            raise ConfigError("this learner is closed: make a new one, or load it")
        return run_anywhere(self._runner, work)

    def close(self) -> None:
        """Closes the loop; idempotent."""
        self._finalizer()
