"""atropos/Taxi-v0: Gymnasium's Taxi-v4, told and played in words."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from atropos_gym.envs._tabular import Outcome, TabularModel
from atropos_gym.wrappers._simulators import make_simulator
from atropos_gym.wrappers.gym_text_env import GymTextEnv

__all__ = ["Taxi"]


class Taxi(GymTextEnv):
    """A taxi fetches a passenger and brings the passenger to a destination.

    Description:
        A town of 5 by 5 with walls and four marked places.

    Actions:
        ``south``, ``north``, ``east``, ``west``, ``pickup`` or ``dropoff`` in ``<action>`` tags. Legal is
        what changes the state; anything else costs a turn.

    Observations:
        Rules and map once; each turn where taxi, passenger and destination are, and the legal actions.

    Rewards:
        -1 a move, 20 for the delivery; -1 for an invalid reply.

    Episode end:
        The delivery, or ``max_turns`` (200).

    Info:
        ``action_mask`` and ``legal_actions``.

    Arguments:
        is_rainy: as in Gymnasium; so are ``fickle_passenger``, ``rainy_probability``, ``fickle_probability``.
        keywords: those of ``GymTextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 200
    max_turn_tokens = 64
    max_feedback_tokens = 384

    def __init__(
        self,
        *,
        is_rainy: bool = False,
        fickle_passenger: bool = False,
        rainy_probability: float = 0.8,
        fickle_probability: float = 0.3,
        **keywords: Any,
    ) -> None:
        town = {
            "is_rainy": bool(is_rainy),
            "fickle_passenger": bool(fickle_passenger),
            "rainy_probability": float(rainy_probability),
            "fickle_probability": float(fickle_probability),
        }
        self._town = tuple(town.items())
        super().__init__("Taxi-v4", simulator_kwargs=town, **keywords)

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of random legal and of optimal play within ``max_turns``."""
        return _scores(self._town, self.max_turns)


@lru_cache(maxsize=16)
def _scores(town: tuple[tuple[str, Any], ...], turns: int) -> Mapping[str, float]:
    simulator: Any = make_simulator("Taxi-v4", dict(town))[0].unwrapped
    rows = TabularModel.rows(simulator.P)
    start = np.asarray(simulator.initial_state_distrib, dtype=np.float64)
    allowed = np.array([simulator.action_mask(state) for state in range(len(rows))], dtype=bool)
    if simulator.fickle_passenger:
        rows = _with_change_of_mind(simulator, rows)
        start = np.concatenate((start, np.zeros_like(start)))
        allowed = np.concatenate((allowed, allowed))
    model = TabularModel(rows, start, allowed)
    return {"random": model.random(turns), "optimal": model.optimal(turns)}


def _with_change_of_mind(taxi: Any, rows: list[list[list[Outcome]]]) -> list[list[list[Outcome]]]:
    """Doubles the states: state + n is the same, after the first move with the passenger aboard.

    A fickle passenger may change the destination at that move, to any of the other three.
    """
    n, chance = len(rows), float(taxi.fickle_probability)
    aboard = len(taxi.locs)
    first: list[list[list[Outcome]]] = []
    for state, actions in enumerate(rows):
        row, column, passenger, goal = taxi.decode(state)
        changed: list[list[Outcome]] = []
        for outcomes in actions:
            ends: list[Outcome] = []
            for probability, after, reward, over in outcomes:
                new_row, new_column, rider, _ = taxi.decode(after)
                if passenger != aboard or (row, column) == (new_row, new_column):
                    ends.append((probability, after, reward, over))
                    continue
                ends.append((probability * (1 - chance), after + n, reward, over))
                for other in range(aboard):
                    if other != goal:
                        elsewhere = taxi.encode(new_row, new_column, rider, other) + n
                        ends.append((probability * chance / (aboard - 1), elsewhere, reward, over))
            changed.append(ends)
        first.append(changed)
    later = [
        [[(p, after + n, reward, over) for p, after, reward, over in ends] for ends in row] for row in rows
    ]
    return first + later
