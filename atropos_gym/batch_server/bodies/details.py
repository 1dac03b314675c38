"""What is wrong with a body, as the ``detail`` of a 422: short, whatever came."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from atropos_gym.batch_server.state.refusals import Problem

__all__ = ["MAX_ECHO", "MAX_ENTRIES", "Path", "entry", "problem_details", "validation_details"]

Path = tuple[str | int, ...]
"""Where something is, from the root: ``("body", "masks", 3)``."""

MAX_ENTRIES = 20
"""Most entries in the ``detail`` of one refusal."""

MAX_ECHO = 200
"""Longest input that is shown again to its sender, in characters."""


def validation_details(error: ValidationError, root: Path) -> Iterable[dict[str, Any]]:
    """Turns pydantic's errors into the entries of a 422, the first ones."""
    for one in error.errors(include_url=False, include_context=False)[:MAX_ENTRIES]:
        yield entry(one["type"], (*root, *one["loc"]), one["msg"], one["input"])


def problem_details(problems: Sequence[Problem], root: Path, *, many: bool) -> list[dict[str, Any]]:
    """Turns a store's problems into the entries of a 422, the first ones."""
    return [
        entry(problem.kind, (*root, *((problem.index,) if many else ()), *problem.path), problem.message)
        for problem in problems[:MAX_ENTRIES]
    ]


def entry(kind: str, path: Path, message: str, value: Any = None) -> dict[str, Any]:
    """One entry; the input is shown only where it is a short scalar."""
    found: dict[str, Any] = {"type": kind, "loc": list(path), "msg": message}
    if isinstance(value, str | int | float) and len(shown := repr(value)[: MAX_ECHO + 1]) <= MAX_ECHO:
        found["input"] = value if not isinstance(value, float) or math.isfinite(value) else shown
    return found
