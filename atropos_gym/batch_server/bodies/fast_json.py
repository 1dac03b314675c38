"""Groups from JSON straight into arrays, with no Python object for a number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from atropos_gym.batch_server.bodies.fast_check import Odd, read, trained_by
from atropos_gym.batch_server.state.intake import Incoming

try:
    import simdjson
except ImportError:  # no wheels for this Python: the exact validator reads everything
    simdjson = None  # type: ignore[assignment]

__all__ = ["read_json_groups"]

MOST_CONTAINERS = 20_000
"""Lists and objects from which on a body is not plain: each costs time, however short it is."""

MOST_NAMES = 64
"""Fields of a group from which on it is not plain: each is searched for from the first on."""

SELDOM = 200

DEEP = 150
"""Brackets in free fields from which on their nesting is looked at; the validator allows 200 levels."""


def read_json_groups(body: bytes, *, many: bool) -> list[Incoming] | None:
    """Reads one group, or a list of them; None where the exact validator must look.

    Args:
        body: JSON.
        many: whether it is a list of groups.
    """
    if simdjson is None or (b"\\" in body and b"\\u005b" in body.lower()):
        return None
    brackets = _count(body, b"[")
    if brackets + _count(body, b"{") > MOST_CONTAINERS:
        return None
    try:
        root = simdjson.Parser().parse(body)
        values = list(root) if many and isinstance(root, simdjson.Array) else [root]
        sources = [_JsonGroup(value) for value in values]
        incoming = [read(source) for source in sources]
    except (Odd, KeyError, ValueError, TypeError, RuntimeError, RecursionError, MemoryError):
        return None
    # Arrays of numbers come out flat. If one had a list among its numbers, there are more brackets than the
    # rows have: then its shape is not what it seems.
    if brackets != many + sum(source.brackets for source in sources):
        return None
    return incoming


def _count(body: bytes, one: bytes) -> int:
    """How often a character occurs. Where that is seldom, searching is ten times as fast as counting."""
    at = -1
    for found in range(SELDOM):
        at = body.find(one, at + 1)
        if at < 0:
            return found
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(one)))


class _JsonGroup:
    """One group of a parsed body; ``brackets`` is how many ``[`` what was read of it has."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, simdjson.Object):
            raise Odd
        self._value: Any = value
        self.names = list(value.keys())
        self.brackets = 0
        # Of a name that comes twice the last one counts, but the first is found; each name is searched for.
        if len(self.names) > MOST_NAMES or len(set(self.names)) != len(self.names):
            raise Odd

    def ids(self, name: str) -> tuple[list[int], NDArray[np.integer[Any]]]:
        """Lengths of the rows, and all their integers."""
        rows = self._value[name]
        lengths = self._lengths(rows)
        return lengths, np.frombuffer(rows.as_buffer(of_type="i"), np.int64)

    def trained(self, ids: NDArray[np.integer[Any]]) -> tuple[list[int], NDArray[np.bool_]]:
        """Lengths of the masks' rows, and where the mask is the id of the token."""
        lengths, masks = self.ids("masks")
        return lengths, trained_by(masks, ids)

    def floats(self, name: str) -> tuple[list[int], NDArray[np.floating[Any]]] | None:
        """Lengths of the rows and all their numbers; None where the field is absent or empty."""
        rows = self._value[name] if name in self.names else None
        if rows is None:
            return None
        lengths = self._lengths(rows)
        if not lengths:
            return None
        return lengths, np.frombuffer(rows.as_buffer(of_type="d"), np.float64)

    def scores(self) -> NDArray[np.float64]:
        """The scores."""
        values = self._value["scores"]
        if not isinstance(values, simdjson.Array):
            raise Odd
        self.brackets += 1
        return np.frombuffer(values.as_buffer(of_type="d"), np.float64)

    def free(self, name: str) -> Any:
        """Any other field, as Python objects."""
        value: Any = self._value[name]
        if isinstance(value, simdjson.Object):
            value = value.as_dict()
        elif isinstance(value, simdjson.Array):
            value = value.as_list()
        text = to_json({name: value})
        self.brackets += text.count(b"[")
        if text.count(b"[") + text.count(b"{") > DEEP:
            from_json(text)
        return value

    def _lengths(self, rows: Any) -> list[int]:
        if not isinstance(rows, simdjson.Array):
            raise Odd
        lengths = []
        for row in rows:
            if not isinstance(row, simdjson.Array):
                raise Odd
            lengths.append(len(row))
        self.brackets += 1 + len(lengths)
        return lengths
