"""What groups begin with as training goes on: the options of their ``reset``.

Two things move, and both can be resumed. The *item* of a group follows from its number alone: ``in_turn``
goes through all items once a pass. A *curriculum* follows from the trainer's step and from how the groups
went: a function that is asked at each new step for what groups begin with from then on, such as a difficulty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_gym.errors import ConfigError
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.seeds import start_seed

__all__ = ["Curriculum", "Lessons", "Options", "Progress", "in_turn"]

Options = Mapping[str, Any] | Callable[[int], Mapping[str, Any] | None] | None
"""Options of ``reset``, or a function from a group's number to them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How the groups went that were posted since the curriculum was last asked.

    Attributes:
        groups: their number.
        episodes: of all of them.
        mean_return: of the episodes; None where there are none.
        success: share of the episodes that succeeded; None where none of them says.
    """

    groups: int = 0
    episodes: int = 0
    mean_return: float | None = None
    success: float | None = None


Curriculum = Callable[[int, Progress], Mapping[str, Any] | None]
"""From the trainer's step, and how the last groups went, to options of ``reset``.

An object that has ``state_dict()`` (plain JSON) and ``load_state_dict(state)`` besides is resumed too.
"""


def in_turn(items: int, *, seed: int = 0) -> Callable[[int], dict[str, int]]:
    """Options that take each item once a pass, in another order each time, instead of drawing them by chance.

    Args:
        items: how many there are.
        seed: of the orders.

    Returns:
        A function from a group's number to ``{"item": k}``; nothing but the number counts.

    Raises:
        ConfigError: there are no items.

    Example:
        >>> options = in_turn(4, seed=1)
        >>> [options(number)["item"] for number in range(8)]
        [0, 3, 1, 2, 0, 3, 2, 1]
    """
    if items < 1:
        raise ConfigError(f"items must be >= 1, got {items}: this environment has none to go through")

    @lru_cache(2)
    def order(of_pass: int) -> NDArray[np.int64]:
        return np.random.default_rng(start_seed(seed, of_pass)).permutation(items)

    return lambda number: {"item": int(order(number // items)[number % items])}


class Lessons:
    """A curriculum at work: what groups begin with now, and what is to be remembered of it.

    Args:
        curriculum: is asked; None adds nothing.
        options: that hold besides; the curriculum's win.
        state: what :attr:`state` gave in an earlier process.
        what: the name of that state's file, for errors.

    Raises:
        ConfigError: the state has a curriculum's state, and the curriculum cannot take it.
    """

    def __init__(
        self,
        curriculum: Curriculum | None,
        options: Options = None,
        *,
        state: Mapping[str, Any] | None = None,
        what: str = "the state",
    ) -> None:
        self._curriculum = curriculum
        self._options = options
        self._step: int | None = None
        self._now: Mapping[str, Any] = {}
        self._returns: list[float] = []
        self._successes: list[bool] = []
        self._groups = 0
        if curriculum is not None and state:
            self._step, self._now = state["step"], dict(state["options"])
            if "state" in state:
                load = getattr(curriculum, "load_state_dict", None)
                if load is None:
                    raise ConfigError(
                        f"{what} holds the state of a curriculum, but {curriculum!r} has no load_state_dict"
                    )
                load(state["state"])

    def options(self, number: int) -> dict[str, Any] | None:
        """What ``reset`` is told for the group of this number; None where nothing."""
        given = self._options(number) if callable(self._options) else self._options
        return {**(given or {}), **self._now} or None

    def reached(self, step: int) -> bool:
        """Asks the curriculum where the trainer's step is a new one; returns whether it was asked."""
        if self._curriculum is None or step == self._step:
            return False
        self._now = dict(self._curriculum(step, self._progress()) or {})
        self._step = step
        self._groups, self._returns, self._successes = 0, [], []
        return True

    def posted(self, groups: Sequence[EpisodeGroup]) -> None:
        """Notes how groups went."""
        if self._curriculum is None:
            return
        episodes = [episode for group in groups for episode in group.episodes]
        self._groups += len(groups)
        self._returns += [episode.episode_return for episode in episodes]
        self._successes += [bool(episode.success) for episode in episodes if episode.success is not None]

    @property
    def state(self) -> dict[str, Any] | None:
        """What the next process must know, as plain JSON; None without a curriculum."""
        if self._curriculum is None:
            return None
        state: dict[str, Any] = {"step": self._step, "options": dict(self._now)}
        if hasattr(self._curriculum, "state_dict"):
            state["state"] = self._curriculum.state_dict()
        return state

    def _progress(self) -> Progress:
        def mean(values: Sequence[float]) -> float | None:
            return sum(values) / len(values) if values else None

        return Progress(self._groups, len(self._returns), mean(self._returns), mean(self._successes))
