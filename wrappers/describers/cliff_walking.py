"""CliffWalking in words."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from atropos_gym.wrappers.describers.grid import GridDescriber

__all__ = ["CliffWalkingDescriber", "TerseCliffWalkingDescriber"]


class CliffWalkingDescriber(GridDescriber):
    """Full sentences; rows and columns count from 0 at the top left.

    Example:
        >>> print(CliffWalkingDescriber(gymnasium.make("CliffWalking-v1")).describe(36))
        You are at row 3, column 0. up: ground, right: the cliff, down: the edge, left: the edge.
    """

    steps = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    tiles = {"S": "ground", ".": "ground", "C": "the cliff", "G": "the goal"}

    def __init__(self, simulator: gymnasium.Env[int, int]) -> None:
        walk: Any = simulator.unwrapped
        letters = np.where(walk._cliff, "C", ".")
        letters.flat[int(walk.start_state_index)] = "S"
        outcomes = [end for actions in walk.P.values() for ends in actions.values() for end in ends]
        for _, place, _, over in outcomes:
            if over:
                letters.flat[int(place)] = "G"
        super().__init__(["".join(row) for row in letters])
        self._slippery = bool(walk.is_slippery)

    def task(self) -> str:
        """Returns what to do, and whether one may slide."""
        slip = " The ground is slippery: you may slide to a side instead." if self._slippery else ""
        return (
            "You walk along a cliff from the start S to the goal G, in as few steps as you can. A dot is "
            "ground. A step into the cliff C costs as much as a hundred steps and puts you back at the "
            f"start.{slip}"
        )

    def success(self, observation: int, reward: float, terminated: bool) -> bool:
        """Returns whether the goal was reached: nothing else ends the walk by itself."""
        return terminated

    def outcome(self, observation: int, reward: float, terminated: bool) -> str:
        """Returns how the walk ended."""
        return "You reach the goal." if terminated else "You run out of steps."


class TerseCliffWalkingDescriber(CliffWalkingDescriber):
    """The place alone, the same text in every turn: ``row 3 col 0``."""

    terse = True
