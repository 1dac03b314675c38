"""Walks on a grid in words: the map once, then where one stands and what lies around."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from atropos_gym.wrappers.describers.base import Describer

__all__ = ["GridDescriber"]

_FULL = re.compile(r"You are at row (\d+), column (\d+)\.")
_TERSE = re.compile(r"row (\d+) col (\d+)")


class GridDescriber(Describer):
    """Base for simulators whose state is a cell, counted row by row from the top left.

    A subclass says what the task is (``task``) and what the letters of the map stand for; a terse one says
    the place alone, the same text in every turn.

    Attributes:
        steps: for each action, in order, its name and its move as (rows down, columns right).
        tiles: what each letter of the map is, in words.

    Args:
        rows: the map, one letter a cell.
    """

    steps: Mapping[str, tuple[int, int]] = {}
    tiles: Mapping[str, str] = {}

    def __init__(self, rows: Sequence[str]) -> None:
        self.names = tuple(self.steps)
        self.map = tuple(rows)
        self._width = len(self.map[0])
        self._texts: dict[int, str] = {}  # a grid has few cells: each is put into words once

    def task(self) -> str:
        """Returns the task in words, without the map."""
        raise NotImplementedError(f"{type(self).__name__} must define task(self)")

    def rules(self) -> str:
        """Returns the task and the map; nothing where terse."""
        if self.terse:
            return ""
        return (
            f"{self.task()} Rows and columns count from 0 at the top left. The map:\n{chr(10).join(self.map)}"
        )

    def describe(self, observation: int) -> str:
        """Returns the place and, unless terse, its neighbours."""
        text = self._texts.get(observation)
        if text is None:
            text = self._texts[int(observation)] = self._say(*divmod(int(observation), self._width))
        return text

    def _say(self, row: int, column: int) -> str:
        if self.terse:
            return f"row {row} col {column}"
        around = ", ".join(
            f"{name}: {self._tile(row + down, column + right)}" for name, (down, right) in self.steps.items()
        )
        return f"You are at row {row}, column {column}. {around}."

    def _tile(self, row: int, column: int) -> str:
        if 0 <= row < len(self.map) and 0 <= column < self._width:
            return self.tiles[self.map[row][column]]
        return "the edge"

    def letter(self, observation: int) -> str:
        """Returns the letter of the map at a place."""
        row, column = divmod(int(observation), self._width)
        return self.map[row][column]

    def parse(self, text: str) -> int:
        """Returns the place that a description tells of."""
        match = _TERSE.fullmatch(text) if self.terse else _FULL.search(text)
        if match is None:
            raise ValueError(f"no place on the map in {text!r}")
        return int(match[1]) * self._width + int(match[2])
