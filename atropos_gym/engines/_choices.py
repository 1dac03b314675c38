"""Whole replies as the only ones that can be sampled (``SamplingParams.choices``): masks over their trie.

After each sampled id only those ids are left that go on towards a choice; logprobs are of what is left,
renormalised, so that those of all choices sum to one. A learner's plain softmax is something else: what was
sampled so is marked as not trainable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from atropos_gym.engines._ids import check_ids
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import AnswerRefused, ContextFull, EngineError

__all__ = ["Choices", "check_choices", "check_chosen", "following"]

Choices = tuple[tuple[int, ...], ...]
"""Replies as ids, the end id included."""


@lru_cache(maxsize=256)
def following(choices: Choices) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """Returns the trie of the choices: each beginning of one, and the ids that can follow it, ascending.

    A whole choice is no key: nothing follows it.

    Example:
        >>> following(((104, 105, 258), (104, 258)))
        {(): (104,), (104,): (105, 258), (104, 105): (258,)}
    """
    found: dict[tuple[int, ...], set[int]] = {}
    for choice in choices:
        for k, value in enumerate(choice):
            found.setdefault(choice[:k], set()).add(value)
    return {beginning: tuple(sorted(ids)) for beginning, ids in found.items()}


def check_choices(params: SamplingParams, rows: int, room: int) -> None:
    """Refuses choices that cannot be sampled whole, and one for one.

    Args:
        params: with or without choices.
        rows: ids are below it.
        room: ids that the context has left.

    Raises:
        EngineError: a choice has an id outside the vocabulary, no end of its own, an end inside it, or more
            than ``max_tokens``; it is named.
        ContextFull: the longest one does not fit in what the context has left.
    """
    if params.choices is None:
        return
    longest = max(map(len, params.choices))
    if longest > params.max_tokens:
        raise EngineError(
            f"a choice has {longest} ids and max_tokens is {params.max_tokens}: it would be cut; raise "
            "max_tokens, or leave it out"
        )
    _check_ends(params.choices, params.stop_ids, rows)
    if longest > room:
        raise ContextFull(f"a choice has {longest} ids, and the context has {room} left")


@lru_cache(maxsize=256)
def _check_ends(choices: Choices, stop_ids: tuple[int, ...], rows: int) -> None:
    for choice in choices:
        check_ids(choice, rows, f"choice {_shown(choice)}")
        if choice[-1] not in stop_ids:
            raise EngineError(
                f"choice {_shown(choice)} does not end with one of stop_ids={stop_ids}: without its end it "
                "may be the beginning of another; ChatRenderer.say(text) gives ids with their end"
            )
        if not set(choice[:-1]).isdisjoint(stop_ids):
            raise EngineError(
                f"choice {_shown(choice)} goes on behind one of stop_ids={stop_ids}: sampling ends there"
            )
        if choice[-1] != choices[0][-1]:
            raise EngineError(
                f"choices {_shown(choices[0])} and {_shown(choice)} end with different ids: engines that "
                "choose by a grammar know one end for all; write both with the same renderer"
            )


def check_chosen(ids: Sequence[int], choices: Choices) -> None:
    """Refuses an answer that is none of the choices.

    Raises:
        AnswerRefused: its ids are named.
    """
    if tuple(ids) not in choices:
        raise AnswerRefused(
            f"{_shown(ids)} was sampled, which is none of {len(choices)} choices: the server does not know "
            "structured_outputs, or a proxy drops it; vLLM 0.32 knows it"
        )


def _shown(ids: Sequence[int]) -> str:
    """The ids for a message, cut where they are many."""
    return str(list(ids)) if len(ids) <= 12 else f"{str(list(ids[:12]))[:-1]}, … {len(ids)} ids]"
