"""SpokenActions: how the actions of one space are asked for, read, drawn and said."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from atropos_gym.errors import ConfigError
from atropos_gym.parsing import ACTION_FORMATS, ParsedAction, format_action, parse_action

__all__ = ["Choice", "SpokenActions", "action_words", "default_format"]

MAX_LISTED = 64
"""More actions than this are told as a range of numbers, unless they have names."""

MAX_ANSWERS = 1024
"""More replies than this are not listed in ``answers``."""


def default_format(space: spaces.Space[Any]) -> str:
    """Returns the format in which actions of a space are most easily said.

    Example:
        >>> default_format(spaces.Discrete(2)), default_format(spaces.Box(-1, 1, (2,)))
        ('tag', 'box')
        >>> default_format(spaces.Dict({"go": spaces.Discrete(2)}))
        'json'
    """
    if isinstance(space, spaces.Discrete):
        return "tag"
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return "box"
    return "json"


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be chosen now among discrete actions.

    Attributes:
        mask: 1 where an action is legal, in order; None where the simulator gives no mask.
        actions: the legal actions.
        words: their words.
        hint: how to answer.
    """

    mask: tuple[int, ...] | None
    actions: Sequence[int]
    words: tuple[str, ...]
    hint: str


class SpokenActions:
    """The actions of one space in one format.

    Args:
        space: the action space.
        format: one of ``ACTION_FORMATS``.
        names: one word for each discrete action; for ``Dict`` and ``Tuple`` they mirror the space.
        aliases: further texts and the actions they stand for.
        dialect: of tool calls.

    Raises:
        ConfigError: the format or the names do not fit the space; space and remedy are named.

    Example:
        >>> spoken = SpokenActions(spaces.Discrete(2), "tag", names=("stick", "hit"))
        >>> spoken.choice(None).hint
        'Possible actions: stick, hit. Answer as <action>NAME</action>.'
        >>> spoken.choice((0, 1)).words
        ('hit',)
        >>> spoken.read("I take <action>hit</action>", None).value
        1
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        format: str,
        *,
        names: Any = None,
        aliases: Mapping[str, int] | None = None,
        dialect: str | None = None,
    ) -> None:
        if format not in ACTION_FORMATS:
            raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")
        self.space = space
        self.format = format
        self._names = names or None
        self._how: dict[str, Any] = {"names": self._names, "aliases": aliases}
        if format == "tool_call":
            self._how["dialect"] = dialect or "hermes"
        parse_action("", space, format, **self._how)  # says now what would be wrong at every reply
        self._first, self._n = (
            (int(space.start), int(space.n)) if isinstance(space, spaces.Discrete) else (0, 0)
        )
        self._choices: dict[tuple[int, ...] | None, Choice] = {}

    def in_dialect(self, dialect: str | None) -> SpokenActions:
        """Returns the same actions as calls in another dialect; None leaves the one they have."""
        if dialect is None:
            return self
        how = {**self._how, "dialect": dialect}
        return SpokenActions(self.space, self.format, **how)

    @property
    def discrete(self) -> bool:
        """Whether actions are words of a ``Discrete`` space; only these can be masked."""
        return self._n > 0

    @property
    def max_chars(self) -> int:
        """About the most UTF-8 bytes of a reply that is an action and nothing else, and its end id."""
        if self.discrete:
            ends = range(self._n) if self._names else (0, self._n - 1)
            return max(len(self.say(self._first + k).encode()) for k in ends) + 1
        own = copy.deepcopy(self.space)
        own.seed(0)
        return 2 * len(self.say(own.sample()).encode()) + 16  # drawn numbers are not the longest

    # --- discrete actions ---

    def word(self, action: int) -> str:
        """Returns a discrete action's name, or its number where it has none."""
        return str(self._names[action - self._first]) if self._names else str(action)

    def choice(self, mask: Sequence[int] | None) -> Choice:
        """Returns what may be chosen under a mask; without one, any action.

        Args:
            mask: shape ``(n,)``, nonzero where an action is legal.

        Raises:
            ConfigError: the mask has not one entry for each action.
        """
        key = None if mask is None else tuple(mask.tolist() if isinstance(mask, np.ndarray) else mask)
        known = self._choices.get(key)
        if known is None:
            known = self._make_choice(key)
            if len(self._choices) < MAX_ANSWERS:
                self._choices[key] = known
        return known

    def _make_choice(self, key: tuple[Any, ...] | None) -> Choice:
        mask = None if key is None else tuple(int(bool(allowed)) for allowed in key)
        actions: Sequence[int] = range(self._first, self._first + self._n)
        if mask is not None:
            if len(mask) != self._n:
                raise ConfigError(
                    f"info['action_mask'] must have an entry for each of {self._n} actions, got {len(mask)}"
                )
            actions = tuple(action for action, allowed in zip(actions, mask, strict=True) if allowed)
        listed = self._n if self._names else min(self._n, MAX_LISTED)
        words = tuple(map(self.word, actions)) if mask is not None or listed == self._n else ()
        return Choice(mask, actions, words, self._hint(actions, words))

    @property
    def answers(self) -> tuple[str, ...] | None:
        """Every reply that can be legal, where they are few."""
        if not 0 < self._n <= MAX_ANSWERS:
            return None
        return tuple(map(self.say, range(self._first, self._first + self._n)))

    # --- any space ---

    def read(self, content: str, legal: Sequence[int] | None) -> ParsedAction:
        """Returns the action in a reply; ``legal`` are the discrete actions allowed now, None allows all."""
        return parse_action(content, self.space, self.format, legal=legal, **self._how)

    def say(self, action: Any) -> str:
        """Returns an action as a policy that keeps to the format would say it."""
        return format_action(self.word(action), self.format)

    def draw(self, player: np.random.Generator, legal: Sequence[int] | None) -> str | None:
        """Returns a legal action, drawn uniformly where the space is bounded; None where none is legal."""
        if self._n:
            actions = range(self._first, self._first + self._n) if legal is None else legal
            return self.say(int(actions[int(player.integers(len(actions)))])) if len(actions) else None
        space = copy.copy(self.space)  # its own generator, so the simulator's space is left as it is
        space.seed(int(player.integers(2**31)))
        return self.say(space.sample())

    def _hint(self, actions: Sequence[int], words: Sequence[str]) -> str:
        """Returns how to answer, with the words that are legal now."""
        listed = ", ".join(words) or f"{self._first} to {self._first + self._n - 1}"
        if self.format == "bare_word":
            return f"Answer with one of these words: {listed}."
        if self.format == "tag":
            return f"Possible actions: {listed}. Answer as <action>NAME</action>."
        if self.format == "number":
            if self._names:
                pairs = zip(actions, words, strict=True)
                listed = ", ".join(f"{action} ({word})" for action, word in pairs)
            return f"Possible actions: {listed}. Answer with the number of one."
        if words:
            asked = f"one of {', '.join(map(json.dumps, words) if self._names else words)}"
        else:
            asked = action_words(self.space, self._names)
        if self.format == "box":
            return f"Answer with {asked}, in brackets."
        if self.format == "tool_call":
            return f"Answer with one call of the tool act; its argument action is {asked}."
        return f'Answer as {{"action": ACTION}}, where ACTION is {asked}.'


def action_words(space: spaces.Space[Any], names: Any = None) -> str:
    """Returns what an action of a space looks like in JSON, in words.

    Example:
        >>> action_words(spaces.Box(-2, 2, (1,)))
        'a list of 1 number from -2 to 2'
        >>> action_words(spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(3)]), (("no", "yes"), None))
        'a list of: one of "no", "yes"; a list of 3 numbers, each 0 or 1'
    """
    if isinstance(space, spaces.Discrete):
        if names:
            return f"one of {', '.join(json.dumps(str(name)) for name in names)}"
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Dict):
        named = names or {}
        parts = (f'"{key}": {action_words(part, named.get(key))}' for key, part in space.spaces.items())
        return f"an object with {'; '.join(parts)}"
    if isinstance(space, spaces.Tuple):
        named = names or [None] * len(space.spaces)
        parts = (action_words(part, own) for part, own in zip(space.spaces, named, strict=True))
        return f"a list of: {'; '.join(parts)}"
    return _array_words(space)


def _array_words(space: spaces.Space[Any]) -> str:
    """What an array looks like."""
    shape = space.shape or ()
    whole = not (isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating))
    kind = "whole number" if whole else "number"
    if isinstance(space, spaces.MultiBinary):
        bounds = ["0 or 1"] * int(np.prod(shape))
        kind = "number"
    elif isinstance(space, spaces.MultiDiscrete):
        last = (space.start + space.nvec - 1).ravel().tolist()
        bounds = [
            f"from {low} to {high}" for low, high in zip(space.start.ravel().tolist(), last, strict=True)
        ]
    elif isinstance(space, spaces.Box):
        bounds = [_bounds(low, high) for low, high in zip(space.low.flat, space.high.flat, strict=True)]
    else:
        return str(space)
    one = len(set(bounds)) == 1
    if not shape:
        return f"a {kind} {bounds[0]}".rstrip()
    size = "x".join(map(str, shape)) if len(shape) > 1 else str(shape[0])
    listed = "nested lists" if len(shape) > 1 else "a list"
    plural = kind if size == "1" else f"{kind}s"
    if one and not bounds[0]:
        return f"{listed} of {size} {plural}"
    if one:
        return f"{listed} of {size} {plural}{'' if size == '1' else ', each'} {bounds[0]}"
    return f"{listed} of {size} {plural}: {', '.join(bound or 'any' for bound in bounds)}"


def _bounds(low: Any, high: Any) -> str:
    """``from -1 to 1``, ``at least 0``, or nothing where there is no bound."""
    bounded = (bool(np.isfinite(low)), bool(np.isfinite(high)))
    if bounded == (True, True):
        return f"from {_short(low)} to {_short(high)}"
    if bounded == (True, False):
        return f"at least {_short(low)}"
    return f"at most {_short(high)}" if bounded[1] else ""


def _short(value: Any) -> str:
    """A bound as its dtype prints it, without a needless ``.0``."""
    return str(value).removesuffix(".0")
