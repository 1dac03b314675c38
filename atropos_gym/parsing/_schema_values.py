"""What a JSON schema says of one value by itself: its type, its choices, its limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

__all__ = ["TYPES", "Schema", "Violation", "check_limits", "check_type", "choices_of", "types_of"]

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Violation:
    """What is wrong with the arguments, and where: ``path`` is such as ``filter.tags[2]``, or empty."""

    kind: Literal["missing_argument", "unexpected_argument", "wrong_type"]
    path: str
    detail: str


#: name of a type -> whether a value is of it; nothing passes as something else
TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}

# keyword -> (the types it speaks of, whether a value keeps it, what to say where it does not)
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "minimum": ("number", lambda value, limit: value >= limit, "must be at least {}"),
    "maximum": ("number", lambda value, limit: value <= limit, "must be at most {}"),
    "exclusiveMinimum": ("number", lambda value, limit: value > limit, "must be above {}"),
    "exclusiveMaximum": ("number", lambda value, limit: value < limit, "must be below {}"),
    "multipleOf": ("number", lambda value, limit: _is_multiple(value, limit), "must be a multiple of {}"),
    "minLength": ("string", lambda value, limit: len(value) >= limit, "must have at least {} characters"),
    "maxLength": ("string", lambda value, limit: len(value) <= limit, "must have at most {} characters"),
    "pattern": ("string", lambda value, limit: bool(re.search(limit, value)), "must match {!r}"),
    "minItems": ("array", lambda value, limit: len(value) >= limit, "must have at least {} items"),
    "maxItems": ("array", lambda value, limit: len(value) <= limit, "must have at most {} items"),
    "uniqueItems": ("array", lambda value, limit: not limit or _are_unique(value), "must not repeat an item"),
    "minProperties": ("object", lambda value, limit: len(value) >= limit, "must have at least {} entries"),
    "maxProperties": ("object", lambda value, limit: len(value) <= limit, "must have at most {} entries"),
}


def types_of(schema: Schema) -> list[str]:
    """Returns the names of the types that a schema allows; none where it says nothing."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def choices_of(schema: Schema) -> list[Any]:
    """Returns the values that a schema lists; none where it lists none."""
    return [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]


def check_type(value: Any, schema: Schema, path: str) -> Violation | None:
    """Checks ``type``, ``enum`` and ``const``."""
    types = types_of(schema)
    if unknown := set(types) - TYPES.keys():
        raise TypeError(f"there is no type {unknown.pop()!r}")
    if types and not any(TYPES[name](value) for name in types):
        return Violation("wrong_type", path, f"must be of type {' or '.join(types)}, got {_shown(value)}")
    choices = choices_of(schema)
    is_number = "number" in types and isinstance(value, (int, float))
    if choices and not any(_is_equal(value, choice, is_number) for choice in choices):
        allowed = ", ".join(map(_shown, choices))
        return Violation("wrong_type", path, f"must be one of {allowed}; got {_shown(value)}")
    return None


def check_limits(value: Any, schema: Schema, path: str) -> Violation | None:
    """Checks what bounds a number, a length or a count."""
    for keyword in schema:
        if keyword not in _LIMITS:
            continue
        kind, keeps, message = _LIMITS[keyword]
        if TYPES[kind](value) and not keeps(value, schema[keyword]):
            return Violation("wrong_type", path, message.format(schema[keyword]))
    return None


def _is_equal(first: Any, second: Any, is_number: bool = False) -> bool:
    """JSON equality that tells true from 1, and 1.0 from 1 unless any number is welcome."""
    if is_number:
        return not isinstance(second, bool) and bool(first == second)
    return _canonical(first) == _canonical(second)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _are_unique(items: list[Any]) -> bool:
    return len(set(map(_canonical, items))) == len(items)


def _is_multiple(value: float, step: float) -> bool:
    # As they are written: 0.3 is a multiple of 0.1.
    return Fraction(str(value)) % Fraction(str(step)) == 0


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "…"
