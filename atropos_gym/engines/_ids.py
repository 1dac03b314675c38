"""Ids as an engine takes them: prompts, stop ids, allowed ids."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atropos_gym.errors import ContextFull, EngineError

if TYPE_CHECKING:
    from atropos_gym.engines.base import SamplingParams

__all__ = ["as_ids", "check_ids", "check_samplable", "room_left"]


def as_ids(prompt_ids: Any) -> tuple[int, ...]:
    """Returns a list, tuple or integer array as Python ints.

    Raises:
        EngineError: an element is no integer; its position is named.

    Example:
        >>> as_ids([1, 2])
        (1, 2)
    """
    ids = tuple(prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    checked = []
    for position, value in enumerate(ids):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise EngineError(f"prompt has {value!r} at position {position}; wanted an integer id")
        checked.append(operator.index(value))
    return tuple(checked)


def check_ids(ids: Sequence[int], rows: int, where: str) -> None:
    """Refuses ids outside ``[0, rows)``.

    Raises:
        EngineError: names the first one and its position.
    """
    if ids and (min(ids) < 0 or max(ids) >= rows):
        position = next(i for i, value in enumerate(ids) if not 0 <= value < rows)
        raise EngineError(
            f"{where} has id {ids[position]} at position {position}, outside the vocabulary of {rows}"
        )


def check_samplable(params: SamplingParams) -> None:
    """Refuses parameters under which no id is left to be sampled.

    Raises:
        EngineError: ``min_tokens`` forbids all allowed ids.
    """
    if params.min_tokens and params.allowed_ids and set(params.allowed_ids) <= set(params.stop_ids):
        raise EngineError(
            f"min_tokens={params.min_tokens} forbids stop ids, and allowed_ids={params.allowed_ids} are all "
            "stop ids: nothing can be sampled"
        )


def room_left(prompt: Sequence[int], max_context: int) -> int:
    """Returns how many ids a reply can have.

    Raises:
        ContextFull: none.

    Example:
        >>> room_left([5, 6, 7], 8)
        5
    """
    room = max_context - len(prompt)
    if room < 1:
        raise ContextFull(
            f"the prompt has {len(prompt)} ids and max_context is {max_context}: no room for a reply"
        )
    return room
