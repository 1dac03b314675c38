"""atropos/CliffWalking-v0: Gymnasium's CliffWalking-v1, told and played in words."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from atropos_gym.envs._tabular import TabularModel
from atropos_gym.wrappers._simulators import make_simulator
from atropos_gym.wrappers.gym_text_env import GymTextEnv

__all__ = ["CliffWalking"]


class CliffWalking(GymTextEnv):
    """A walk along a cliff, as short as one dares.

    Description:
        The player walks from S to G on a grid of 4 by 12 whose lowest row is a cliff. A step into the cliff
        puts the player back at the start. Slippery ground may move the player to a side instead.

    Actions:
        ``up``, ``right``, ``down`` or ``left`` in ``<action>`` tags. Anything else costs a turn.

    Observations:
        Rules and map once; each turn the place and what lies around it. With ``describe="terse"`` the place
        alone (``row 3 col 0``).

    Rewards:
        -1 a step, -100 for a step into the cliff; -1 for an invalid reply.

    Episode end:
        At the goal, or after ``max_turns`` (100): the simulator has no limit of its own.

    Arguments:
        is_slippery: as in Gymnasium, where ``CliffWalkingSlippery-v1`` has it set.
        keywords: those of ``GymTextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 100
    max_turn_tokens = 64
    max_feedback_tokens = 256

    def __init__(self, *, is_slippery: bool = False, **keywords: Any) -> None:
        self._slippery = bool(is_slippery)
        super().__init__("CliffWalking-v1", simulator_kwargs={"is_slippery": self._slippery}, **keywords)

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of random and of optimal play within ``max_turns``."""
        return _scores(self._slippery, self.max_turns)


@cache
def _scores(slippery: bool, turns: int) -> Mapping[str, float]:
    simulator: Any = make_simulator("CliffWalking-v1", {"is_slippery": slippery})[0].unwrapped
    model = TabularModel(TabularModel.rows(simulator.P), simulator.initial_state_distrib)
    return {"random": model.random(turns), "optimal": model.optimal(turns)}
