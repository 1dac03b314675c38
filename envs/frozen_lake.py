"""atropos/FrozenLake-v0 and FrozenLake8x8-v0: Gymnasium's FrozenLake, told and played in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from atropos_gym.envs._tabular import TabularModel
from atropos_gym.wrappers._simulators import make_simulator
from atropos_gym.wrappers.gym_text_env import GymTextEnv

__all__ = ["FrozenLake", "FrozenLake8x8"]


class FrozenLake(GymTextEnv):
    """A walk over ice to a goal, past holes.

    Description:
        The player walks from S to G on a grid of ice. Slippery ice may move the player to a side instead.

    Actions:
        ``left``, ``down``, ``right`` or ``up`` in ``<action>`` tags. Anything else costs a turn.

    Observations:
        Rules and map once; each turn the place and what lies around it. With ``describe="terse"`` the place
        alone (``row 1 col 2``).

    Rewards:
        The simulator's (1 at the goal, else 0); -0.1 for an invalid reply.

    Episode end:
        At the goal, in a hole, or after ``max_turns`` (100; 200 on the larger map).

    Arguments:
        map_name: ``"4x4"`` or ``"8x8"``.
        desc: a map of one's own, a list of equally long strings of S, F, H and G.
        is_slippery: as in Gymnasium; so are ``success_rate`` and ``reward_schedule``.
        keywords: those of ``GymTextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 100
    max_turn_tokens = 64
    max_feedback_tokens = 256

    simulator_id = "FrozenLake-v1"
    default_map = "4x4"

    def __init__(
        self,
        *,
        map_name: str | None = None,
        desc: Sequence[str] | None = None,
        is_slippery: bool = True,
        success_rate: float = 1 / 3,
        reward_schedule: Sequence[float] = (1, 0, 0),
        **keywords: Any,
    ) -> None:
        lake = {
            "map_name": map_name or self.default_map,
            "desc": None if desc is None else tuple(desc),
            "is_slippery": bool(is_slippery),
            "success_rate": float(success_rate),
            "reward_schedule": tuple(reward_schedule),
        }
        self._lake = (self.simulator_id, *lake.items())
        super().__init__(self.simulator_id, simulator_kwargs=lake, **{"invalid_reward": -0.1, **keywords})

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of random and of optimal play on this map within ``max_turns``."""
        return _scores(self._lake, self.max_turns)


class FrozenLake8x8(FrozenLake):
    """``FrozenLake`` on the map of 8 by 8, with 200 turns."""

    max_turns = 200
    simulator_id = "FrozenLake8x8-v1"
    default_map = "8x8"


@lru_cache(maxsize=64)
def _scores(lake: tuple[Any, ...], turns: int) -> Mapping[str, float]:
    simulator: Any = make_simulator(lake[0], dict(lake[1:]))[0].unwrapped
    model = TabularModel(TabularModel.rows(simulator.P), simulator.initial_state_distrib)
    return {"random": model.random(turns), "optimal": model.optimal(turns)}
