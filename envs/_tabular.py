"""Exact mean returns in a simulator that shows its transition table, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Outcome", "TabularModel"]

Outcome = tuple[float, int, float, bool]
"""(probability, next state, reward, episode over): an entry of a toy_text simulator's table ``P``."""


class TabularModel:
    """The table as arrays of shape ``(states, actions, outcomes)``.

    Args:
        table: for each state, for each action, its outcomes.
        start: probability of each first state, shape ``(states,)``.
        allowed: whether an action is legal, shape ``(states, actions)``; None allows all.

    Example:
        >>> coin = TabularModel([[[(1.0, 0, 0.0, True)], [(1.0, 0, 1.0, True)]]], [1.0])
        >>> coin.random(1), coin.optimal(1)
        (0.5, 1.0)
    """

    def __init__(
        self,
        table: Sequence[Sequence[Sequence[Outcome]]],
        start: Sequence[float] | NDArray[np.float64],
        allowed: NDArray[np.bool_] | None = None,
    ) -> None:
        width = max(len(outcomes) for actions in table for outcomes in actions)
        shape = (len(table), len(table[0]), width)
        self._probability = np.zeros(shape)
        self._reward = np.zeros(shape)
        self._next = np.zeros(shape, dtype=np.int64)
        self._goes_on = np.zeros(shape, dtype=bool)
        for state, actions in enumerate(table):
            for action, outcomes in enumerate(actions):
                for k, (probability, after, reward, over) in enumerate(outcomes):
                    self._probability[state, action, k] = probability
                    self._reward[state, action, k] = reward
                    self._next[state, action, k] = after
                    self._goes_on[state, action, k] = not over
        self._start = np.asarray(start, dtype=np.float64)
        self._allowed = np.ones(shape[:2], dtype=bool) if allowed is None else allowed

    @staticmethod
    def rows(table: Mapping[int, Mapping[int, Sequence[Outcome]]]) -> list[list[list[Outcome]]]:
        """Returns a simulator's nested dicts as lists, in order."""
        return [[list(table[state][action]) for action in sorted(table[state])] for state in sorted(table)]

    def _action_values(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        after = self._reward + self._goes_on * values[self._next]
        return np.asarray((self._probability * after).sum(-1), dtype=np.float64)

    def random(self, turns: int) -> float:
        """Returns the mean return of a uniformly random legal player within ``turns``."""
        chance = self._allowed / np.maximum(self._allowed.sum(-1, keepdims=True), 1)
        values = np.zeros(len(self._start))
        for _ in range(turns):
            values = (chance * self._action_values(values)).sum(-1)
        return float(self._start @ values)

    def optimal(self, turns: int) -> float:
        """Returns the best mean return within ``turns``, by a player who may look at the clock."""
        values = np.zeros(len(self._start))
        for _ in range(turns):
            best = np.where(self._allowed, self._action_values(values), -np.inf).max(-1)
            values = np.where(self._allowed.any(-1), best, 0.0)
        return float(self._start @ values)
