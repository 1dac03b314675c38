"""FrozenLake in words: the map once, then where one stands and what lies around."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np

from atropos_gym.wrappers.describers.base import Describer

__all__ = ["FrozenLakeDescriber", "TerseFrozenLakeDescriber"]

_STATE = re.compile(r"You are at row (\d+), column (\d+)\.")
_TERSE = re.compile(r"row (\d+) col (\d+)")
_TILES = {"S": "ice", "F": "ice", "H": "a hole", "G": "the goal"}
_STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


class FrozenLakeDescriber(Describer):
    """Full sentences; rows and columns count from 0 at the top left.

    Example:
        >>> print(FrozenLakeDescriber(gymnasium.make("FrozenLake-v1")).describe(4))
        You are at row 1, column 0. left: the edge, down: ice, right: a hole, up: ice.
    """

    names = tuple(_STEPS)

    def __init__(self, simulator: gymnasium.Env[int, int]) -> None:
        lake: Any = simulator.unwrapped
        self._rows = ["".join(row) for row in np.asarray(lake.desc).astype("U1")]
        self._width = len(self._rows[0])
        # The simulator keeps no flag: ice is slippery where one action has several ends.
        self._slippery = any(len(ends) > 1 for actions in lake.P.values() for ends in actions.values())

    def _tile(self, row: int, column: int) -> str:
        if 0 <= row < len(self._rows) and 0 <= column < self._width:
            return _TILES.get(self._rows[row][column], "ice")
        return "the edge"

    def _here(self, observation: int) -> str:
        return self._rows[observation // self._width][observation % self._width]

    def rules(self) -> str:
        """Returns the task and the map."""
        slip = (
            "The ice is slippery: you may slide to a side instead."
            if self._slippery
            else "The ice is not slippery."
        )
        return (
            "You cross a frozen lake from the start S to the goal G. F is ice; a hole H ends the walk. "
            f"{slip} Rows and columns count from 0 at the top left. The lake:\n" + "\n".join(self._rows)
        )

    def describe(self, observation: int) -> str:
        """Returns the place and its four neighbours."""
        row, column = divmod(int(observation), self._width)
        around = ", ".join(
            f"{name}: {self._tile(row + dr, column + dc)}" for name, (dr, dc) in _STEPS.items()
        )
        return f"You are at row {row}, column {column}. {around}."

    def parse(self, text: str) -> int:
        """Returns the place that a description tells of."""
        return self._place(_STATE.search(text), text)

    def _place(self, match: re.Match[str] | None, text: str) -> int:
        if match is None:
            raise ValueError(f"no place on the lake in {text!r}")
        return int(match[1]) * self._width + int(match[2])

    def success(self, observation: int, reward: float, terminated: bool) -> bool:
        """Returns whether the goal was reached."""
        return terminated and self._here(observation) == "G"

    def outcome(self, observation: int, reward: float, terminated: bool) -> str:
        """Returns where the walk ended."""
        if not terminated:
            return "You run out of steps."
        return "You reach the goal." if self._here(observation) == "G" else "You fall into a hole."


class TerseFrozenLakeDescriber(FrozenLakeDescriber):
    """The place alone, the same text in every turn: ``row 1 col 2``."""

    terse = True

    def rules(self) -> str:
        """Returns nothing: the state is all that is said."""
        return ""

    def describe(self, observation: int) -> str:
        """Returns the place."""
        row, column = divmod(int(observation), self._width)
        return f"row {row} col {column}"

    def parse(self, text: str) -> int:
        """Returns the place that a description tells of."""
        return self._place(_TERSE.fullmatch(text), text)
