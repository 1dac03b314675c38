"""Taxi in words: the map once, then taxi, passenger and destination."""

from __future__ import annotations

import re
from typing import Any

import gymnasium
import numpy as np

from atropos_gym.wrappers.describers.base import Describer

__all__ = ["TaxiDescriber", "TerseTaxiDescriber"]

_PLACES = ("red", "green", "yellow", "blue")
_STATE = re.compile(
    r"The taxi is at row (\d), column (\d)\. "
    r"The passenger is (?:at (\w+) \(.*?\)|in the taxi) and wants to go to (\w+) "
)
_TERSE = re.compile(r"taxi (\d) (\d) passenger (\w+) to (\w+)")


class TaxiDescriber(Describer):
    """Full sentences; rows and columns count from 0 at the top left.

    Example:
        >>> taxi = TaxiDescriber(gymnasium.make("Taxi-v4"))
        >>> taxi.describe(337)[:54]
        'The taxi is at row 3, column 1. The passenger is in th'
        >>> taxi.parse(taxi.describe(337))
        337
    """

    names = ("south", "north", "east", "west", "pickup", "dropoff")
    aliases = {
        "move south": 0,
        "move north": 1,
        "move east": 2,
        "move west": 3,
        "pick up": 4,
        "drop off": 5,
    }

    def __init__(self, simulator: gymnasium.Env[int, int]) -> None:
        self._taxi: Any = simulator.unwrapped
        self._where = {name: f"{name} (row {row}, column {column})" for name, (row, column) in self._named()}
        self._texts: dict[int, str] = {}  # a town has 500 states: each is put into words once

    def _named(self) -> list[tuple[str, tuple[int, int]]]:
        return list(zip(_PLACES, self._taxi.locs, strict=True))

    def rules(self) -> str:
        """Returns the task and the map."""
        town = "\n".join("".join(row) for row in np.asarray(self._taxi.desc).astype("U1"))
        # The simulator keeps no flag for rain: it rains where one move has several ends.
        rains = any(len(ends) > 1 for actions in self._taxi.P.values() for ends in actions.values())
        weather = " It rains: a move may drift to a side." if rains else ""
        if getattr(self._taxi, "fickle_passenger", False):
            weather += " The passenger may change the destination once, on the first move aboard."
        return (
            "You drive a taxi in a town of 5 rows and 5 columns, counted from 0 at the top left. Pick up the "
            "passenger and drop the passenger off at the destination, in as few moves as you can. South is "
            "down, east is right. You cannot drive through a wall |, only through :."
            f"{weather} The town:\n{town}"
        )

    def describe(self, observation: int) -> str:
        """Returns where taxi, passenger and destination are."""
        text = self._texts.get(observation)
        if text is None:
            text = self._texts[int(observation)] = self._say(int(observation))
        return text

    def _say(self, state: int) -> str:
        row, column, passenger, destination = self._taxi.decode(state)
        rider = "in the taxi" if passenger == len(_PLACES) else f"at {self._where[_PLACES[passenger]]}"
        goal = self._where[_PLACES[destination]]
        return (
            f"The taxi is at row {row}, column {column}. The passenger is {rider} and wants to go to {goal}."
        )

    def parse(self, text: str) -> int:
        """Returns the state that a description tells of."""
        match = _STATE.search(text)
        if match is None:
            raise ValueError(f"no taxi in {text!r}")
        passenger = len(_PLACES) if match[3] is None else _PLACES.index(match[3])
        return int(self._taxi.encode(int(match[1]), int(match[2]), passenger, _PLACES.index(match[4])))

    def success(self, observation: int, reward: float, terminated: bool) -> bool:
        """Returns whether the passenger was delivered: nothing else ends the drive by itself."""
        return terminated

    def outcome(self, observation: int, reward: float, terminated: bool) -> str:
        """Returns how the drive ended."""
        return "You delivered the passenger." if terminated else "You run out of time."


class TerseTaxiDescriber(TaxiDescriber):
    """The state alone, the same text in every turn.

    Example:
        >>> TerseTaxiDescriber(gymnasium.make("Taxi-v4")).describe(337)
        'taxi 3 1 passenger aboard to green'
    """

    terse = True

    def rules(self) -> str:
        """Returns nothing: the state is all that is said."""
        return ""

    def _say(self, state: int) -> str:
        row, column, passenger, destination = self._taxi.decode(state)
        rider = "aboard" if passenger == len(_PLACES) else _PLACES[passenger]
        return f"taxi {row} {column} passenger {rider} to {_PLACES[destination]}"

    def parse(self, text: str) -> int:
        """Returns the state that a description tells of."""
        match = _TERSE.fullmatch(text)
        if match is None:
            raise ValueError(f"no taxi in {text!r}")
        passenger = len(_PLACES) if match[3] == "aboard" else _PLACES.index(match[3])
        return int(self._taxi.encode(int(match[1]), int(match[2]), passenger, _PLACES.index(match[4])))
