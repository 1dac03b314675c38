"""From a JSON value to a member of a Gymnasium space: checked, never coerced, clipped or wrapped round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._words import find_words
from atropos_gym.parsing.parsed import ParsedAction, Reason, invalid

__all__ = ["ARRAY_SPACES", "check_space", "parts_of", "read_value"]

ARRAY_SPACES = (Box, MultiDiscrete, MultiBinary)
"""Spaces whose members are arrays of numbers."""


class _Unfit(Exception):
    """A part does not fit its space."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


def check_space(space: Space[Any], names: Any = None, aliases: Any = None) -> None:
    """Says what is wrong with a space, or with the names and aliases that must mirror it.

    Raises:
        ConfigError: an action of this space cannot be written, or a name stands for no action.
    """
    if isinstance(space, Discrete):
        find_words(space, names, aliases)
    elif isinstance(space, (Dict, Tuple)):
        for _, part, part_names, part_aliases in parts_of(space, names, aliases):
            check_space(part, part_names, part_aliases)
    elif not isinstance(space, ARRAY_SPACES):
        raise ConfigError(
            f"an action of {space} cannot be written as text: give parse=, a function from text to action"
        )
    elif names or aliases:
        raise ConfigError(
            f"names and aliases belong to Discrete spaces, got {names or aliases!r} for {space}"
        )
    elif isinstance(space, Box) and space.dtype.kind not in "iuf":
        raise ConfigError(f"a Box must hold integers or floats to be written as text, got {space}")


def parts_of(
    space: Dict | Tuple[Any], names: Any = None, aliases: Any = None
) -> list[tuple[Any, Space[Any], Any, Any]]:
    """Returns ``(key, space, names, aliases)`` of each part; keys of a Tuple are its positions.

    Raises:
        ConfigError: names or aliases do not mirror the space.
    """
    parts = dict(space.spaces) if isinstance(space, Dict) else dict(enumerate(space.spaces))
    if isinstance(space, Dict) and (odd := [key for key in parts if not isinstance(key, str)]):
        raise ConfigError(f"keys of a Dict action must be strings, got {odd[0]!r}")
    given = {"names": names, "aliases": aliases}
    for what, mirror in given.items():
        if mirror is None:
            given[what] = {}
        elif isinstance(space, Dict):
            if not isinstance(mirror, Mapping) or (unknown := mirror.keys() - parts.keys()):
                extra = f"no part is called {sorted(unknown)[0]!r}" if isinstance(mirror, Mapping) else mirror
                raise ConfigError(f"{what} must be a mapping by the parts {list(parts)}: {extra}")
        elif isinstance(mirror, (str, Mapping)) or len(mirror) != len(parts):
            raise ConfigError(
                f"{what} must have one entry for each of the {len(parts)} parts, got {mirror!r}"
            )
        else:
            given[what] = dict(enumerate(mirror))
    return [(key, part, given["names"].get(key), given["aliases"].get(key)) for key, part in parts.items()]


def read_value(value: Any, space: Space[Any], names: Any = None, aliases: Any = None) -> ParsedAction:
    """Reads what a JSON reader returned as a member of ``space``.

    Example:
        >>> read_value({"move": "left", "force": [0.5]}, Dict(move=Discrete(2), force=Box(0, 1, (1,))),
        ...     names={"move": ("left", "right")}).value
        {'move': 0, 'force': array([0.5], dtype=float32)}
        >>> read_value([1.5], Box(0, 1, (1,))).reason, read_value(True, Discrete(2)).reason
        ('out_of_range', 'not_an_action')
    """
    if isinstance(space, Discrete):
        words = find_words(space, names, aliases)
        if isinstance(value, str):
            return words.read(value)
        return words.at(value) if type(value) is int else invalid("not_an_action")
    if isinstance(space, (Dict, Tuple)):
        return _read_parts(value, space, names, aliases)
    try:
        array = _read_array(value, space)
    except _Unfit as unfit:
        return invalid(unfit.reason)
    return ParsedAction(array, True)


def _read_parts(value: Any, space: Dict | Tuple[Any], names: Any, aliases: Any) -> ParsedAction:
    """All parts and no others, each by the rules of its own space."""
    is_dict = isinstance(space, Dict)
    if not isinstance(value, dict if is_dict else list):
        return invalid("not_an_action")
    parts = parts_of(space, names, aliases)
    if len(value) != len(parts) or (is_dict and any(key not in value for key, *_ in parts)):
        return invalid("wrong_shape")
    members: dict[Any, Any] = {}
    for key, part, part_names, part_aliases in parts:
        read = read_value(value[key], part, part_names, part_aliases)
        if not read.valid:
            return read
        members[key] = read.value
    return ParsedAction(members if is_dict else tuple(members.values()), True)


def _read_array(value: Any, space: Any) -> np.ndarray[Any, Any]:
    """An array of the space's shape and dtype, every number within its bounds."""
    shape: tuple[int, ...] = space.shape
    if shape == (1,) and not isinstance(value, list):
        value = [value]
    numbers: list[Any] = []
    _flatten(value, shape, numbers)
    if isinstance(space, Box) and space.dtype.kind == "f":
        return _floats(numbers, space).reshape(shape)
    if any(type(number) is not int for number in numbers):
        raise _Unfit("not_an_action")
    low, high = _integer_bounds(space)
    if any(
        not least <= number <= most for number, least, most in zip(numbers, low.flat, high.flat, strict=True)
    ):
        raise _Unfit("out_of_range")
    return np.array(numbers, dtype=space.dtype).reshape(shape)


def _flatten(value: Any, shape: tuple[int, ...], numbers: list[Any]) -> None:
    """Appends the numbers of nested lists of exactly this shape."""
    if not shape:
        if isinstance(value, list):
            raise _Unfit("wrong_shape")
        if type(value) not in (int, float):
            raise _Unfit("not_an_action")
        numbers.append(value)
        return
    if not isinstance(value, list):
        raise _Unfit("wrong_shape" if type(value) in (int, float) else "not_an_action")
    if len(value) != shape[0]:
        raise _Unfit("wrong_shape")
    for part in value:
        _flatten(part, shape[1:], numbers)


def _integer_bounds(space: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bounds as Python integers, so that no comparison can overflow; a Box keeps them within its dtype."""
    if isinstance(space, MultiBinary):
        return np.zeros(space.shape, object), np.ones(space.shape, object)
    if isinstance(space, MultiDiscrete):
        start = np.asarray(space.start).astype(object)
        return start, start + np.asarray(space.nvec).astype(object) - 1
    return space.low.astype(object), space.high.astype(object)


def _floats(numbers: list[Any], space: Box) -> np.ndarray[Any, Any]:
    """Numbers in the float dtype of a Box, finite there and within its bounds as they are written.

    0.1 is within a bound that prints as 0.1, whatever the dtype makes of it, and 1.00000001 is above 1 even
    where the dtype rounds it to 1.
    """
    for number, low, high in zip(numbers, space.low.flat, space.high.flat, strict=True):
        if not float(str(low)) <= number <= float(str(high)):
            raise _Unfit("out_of_range" if _is_finite(number) else "not_finite")
    with np.errstate(over="ignore"):
        try:
            array = np.array(numbers, dtype=np.float64).astype(space.dtype)
        except OverflowError:  # an integer beyond any float
            raise _Unfit("not_finite") from None
    if not np.isfinite(array).all():
        raise _Unfit("not_finite")
    return array


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:
        return False
