"""Checks of what comes into a TextEnv: actions from outside, messages and info from a task's author."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Message
from atropos_gym.spaces import TokenSequence

__all__ = ["action_ids", "author_messages", "finite_reward", "plain_info", "positive"]

#: What TextEnv itself writes into ``info``.
_RESERVED = frozenset({"segment", "turn", "max_new_tokens", "success", "is_success"})


def positive(name: str, value: Any) -> int:
    """Returns ``value`` as an int >= 1.

    Example:
        >>> positive("max_turns", 3)
        3
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} must be an int >= 1, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name} must be >= 1, got {value}")
    return int(value)


def action_ids(action: Any, space: TokenSequence) -> list[int]:
    """Returns the ids of an action as Python ints, checked against the space.

    Args:
        action: int array, list or tuple of ints, shape ``(length,)``.
        space: the action space.

    Raises:
        TypeError: no 1-D sequence of integers.
        ValueError: an id or the length is outside the space.

    Example:
        >>> action_ids(np.array([7, 258]), TokenSequence(264, 4))
        [7, 258]
    """
    if isinstance(action, np.ndarray):
        if action.ndim != 1:
            raise TypeError(f"an action must be 1-D, got shape {action.shape}")
        if action.dtype.kind not in "iu":
            raise TypeError(f"an action must hold integers, got dtype {action.dtype}")
        ids: list[int] = action.tolist()
    elif isinstance(action, (list, tuple)):
        for position, value in enumerate(action):
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                kind = type(value).__name__
                raise TypeError(
                    f"an action must hold integers, got {value!r} ({kind}) at position {position}"
                )
        ids = [int(value) for value in action]
    else:
        raise TypeError(f"an action must be a 1-D integer array, got {type(action).__name__}")
    if not space.min_length <= len(ids) <= space.max_length:
        raise ValueError(
            f"an action must have at most {space.max_length} ids (max_turn_tokens), got {len(ids)}"
        )
    if ids and (min(ids) < 0 or max(ids) >= space.vocab_size):
        position = next(i for i, value in enumerate(ids) if not 0 <= value < space.vocab_size)
        raise ValueError(
            f"an action's ids must be in [0, {space.vocab_size}), got {ids[position]} at position {position}"
        )
    return ids


def author_messages(content: Any, owner: str, where: str) -> list[Message]:
    """Returns what an author said as fresh messages; a string is one user message, None is nothing.

    Args:
        content: a string, messages, or (in feedback) None.
        owner: the environment's class name, for errors.
        where: which value this is, for errors.

    Raises:
        TypeError: anything else; the wanted form is named.
        ValueError: ``begin`` said nothing.

    Example:
        >>> author_messages("hi", "Reverse", "begin()")
        [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(content, str):
        if content or where != "begin()":
            return [Message(role="user", content=content)] if content else []
    elif content is None and where != "begin()":
        return []
    elif isinstance(content, Sequence):
        for position, message in enumerate(content):
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise TypeError(
                    f"{owner}: {where} must be a str or messages with role and content, "
                    f"got {message!r:.80} at position {position}"
                )
        if content or where != "begin()":
            return [cast(Message, dict(message)) for message in content]
    else:
        raise TypeError(f"{owner}: {where} must be a str or a list of messages, got {type(content).__name__}")
    raise ValueError(f"{owner}: begin() said nothing: return a str or at least one message")


def finite_reward(value: Any, owner: str) -> float:
    """Returns a reward as a Python float.

    Raises:
        TypeError: no number.
        ValueError: not finite.

    Example:
        >>> finite_reward(np.float32(1), "Reverse")
        1.0
    """
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: Feedback.reward must be a number, got {value!r:.60}") from None
    if not math.isfinite(reward):
        raise ValueError(f"{owner}: Feedback.reward must be finite, got {reward}")
    return reward


def plain_info(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Returns entries of ``info`` as plain Python values: numpy becomes ints, floats, bools and lists.

    Raises:
        TypeError: a value that is none of int, float, str, bool, list or one flat dict of floats.
        ValueError: a key that TextEnv writes itself.

    Example:
        >>> plain_info({"mask": np.array([1, 0]), "legal_actions": ("hit", "stick")})
        {'mask': [1, 0], 'legal_actions': ['hit', 'stick']}
    """
    taken = _RESERVED & entries.keys()
    if taken:
        raise ValueError(f"info[{min(taken)!r}] is written by TextEnv itself: use another key")
    return {key: _plain(key, value) for key, value in entries.items()}


def _plain(key: str, value: Any) -> Any:
    """Returns one value of ``info`` as a fresh plain one."""
    if isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(key, item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): float(number) for name, number in value.items()}
    kind = type(value).__name__
    raise TypeError(
        f"info[{key!r}] must be an int, float, str, bool, list or a flat dict of floats, got {kind}"
    )
