"""What comes out of reading a text: one action, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

__all__ = ["REASONS", "ParsedAction", "Reason", "invalid", "is_same"]

Reason = Literal[
    "no_container",
    "cut_off",
    "unclosed_think",
    "not_an_action",
    "several_actions",
    "conflict",
    "out_of_range",
    "not_legal",
    "bad_json",
    "wrong_shape",
    "not_finite",
    "too_long",
]

#: reason -> what it says of a reply, in words that fit after "Your answer is not valid: ".
REASONS: dict[Reason, str] = {
    "no_container": "it does not have the form that was asked for",
    "cut_off": "it was cut off",
    "unclosed_think": "its thinking was not closed",
    "not_an_action": "it names no action",
    "several_actions": "it names several actions",
    "conflict": "its number and its word differ",
    "out_of_range": "it is out of range",
    "not_legal": "that action is not possible now",
    "bad_json": "it is not strict JSON",
    "wrong_shape": "it has too few or too many parts",
    "not_finite": "it has a number that is not finite",
    "too_long": "it is too long",
}


def is_same(first: Any, second: Any) -> bool:
    """Returns whether two members of a space are one action: arrays, dicts and tuples by their parts."""
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(is_same(part, second[key]) for key, part in first.items())
        )
    if isinstance(first, (tuple, list)):
        return (
            isinstance(second, (tuple, list))
            and len(first) == len(second)
            and all(map(is_same, first, second))
        )
    return bool(first == second)


@dataclass(frozen=True, slots=True, eq=False)
class ParsedAction:
    """One action, or the reason why there is none. True only where it is valid.

    Attributes:
        value: a member of the action space, or None.
        valid: whether there is an action.
        reason: None where valid; else one of ``REASONS``.

    Example:
        >>> ParsedAction(1, True) == ParsedAction(np.int64(1), True), bool(invalid("cut_off"))
        (True, False)
    """

    value: Any
    valid: bool
    reason: Reason | None = None

    def __bool__(self) -> bool:
        return self.valid

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ParsedAction):
            return NotImplemented
        return self.reason == other.reason and is_same(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]  # a value may be an array


@cache
def invalid(reason: Reason) -> ParsedAction:
    """Returns the result that holds no action, for this reason."""
    return ParsedAction(None, False, reason)
