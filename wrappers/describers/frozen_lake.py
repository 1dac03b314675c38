"""FrozenLake in words."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from atropos_gym.wrappers.describers.grid import GridDescriber

__all__ = ["FrozenLakeDescriber", "TerseFrozenLakeDescriber"]


class FrozenLakeDescriber(GridDescriber):
    """Full sentences; rows and columns count from 0 at the top left.

    Example:
        >>> print(FrozenLakeDescriber(gymnasium.make("FrozenLake-v1")).describe(4))
        You are at row 1, column 0. left: the edge, down: ice, right: a hole, up: ice.
    """

    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    tiles = {"S": "ice", "F": "ice", "H": "a hole", "G": "the goal"}

    def __init__(self, simulator: gymnasium.Env[int, int]) -> None:
        lake: Any = simulator.unwrapped
        super().__init__(["".join(row) for row in np.asarray(lake.desc).astype("U1")])
        # The simulator keeps no flag: ice is slippery where one action has several ends.
        self._slippery = any(len(ends) > 1 for actions in lake.P.values() for ends in actions.values())

    def task(self) -> str:
        """Returns what to do, and whether one may slide."""
        slip = (
            "The ice is slippery: you may slide to a side instead."
            if self._slippery
            else "The ice is not slippery."
        )
        return (
            "You cross a frozen lake from the start S to the goal G. F is ice; a hole H ends the walk. "
            f"{slip}"
        )

    def success(self, observation: int, reward: float, terminated: bool) -> bool:
        """Returns whether the goal was reached."""
        return terminated and self.letter(observation) == "G"

    def outcome(self, observation: int, reward: float, terminated: bool) -> str:
        """Returns where the walk ended."""
        if not terminated:
            return "You run out of steps."
        return "You reach the goal." if self.letter(observation) == "G" else "You fall into a hole."


class TerseFrozenLakeDescriber(FrozenLakeDescriber):
    """The place alone, the same text in every turn: ``row 1 col 2``."""

    terse = True
