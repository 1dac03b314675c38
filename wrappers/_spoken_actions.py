"""SpokenActions: how the actions of one space are asked for, read, drawn and said."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Reply
from atropos_gym.parsing import ParsedAction, describe_format, format_action, format_call, parse_action

__all__ = ["Choice", "SpokenActions", "default_format"]

MAX_ANSWERS = 1024
"""More replies than this are not listed, more masks than this are not remembered."""


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
    """What may be chosen now.

    Attributes:
        mask: 1 where a discrete action is legal, in order; None where the simulator gives no mask.
        actions: the legal actions; None where all are.
        words: their words.
        hint: how to answer.
    """

    mask: tuple[int, ...] | None
    actions: tuple[int, ...] | None
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
        >>> text = "I take <action>hit</action>"
        >>> spoken.read(Reply(text=text, content=text), spoken.choice(None)).value
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
        self.space = space
        self.format = format
        self.dialect = dialect
        is_ordered = names is not None and not isinstance(names, Mapping | Set)
        self._names: Any = (tuple(names) or None) if is_ordered else names
        self._aliases = aliases or None
        # Says now what would be wrong at every reply.
        parse_action("", space, format, names=self._names, aliases=self._aliases, dialect=dialect)
        self._first, self._n = (
            (int(space.start), int(space.n)) if isinstance(space, spaces.Discrete) else (0, 0)
        )
        self._choices: dict[tuple[Any, ...] | None, Choice] = {}

    def in_dialect(self, dialect: str | None) -> SpokenActions:
        """Returns the same actions as calls in a model's own dialect; None leaves the one they have."""
        if self.format != "tool_call" or dialect is None:
            return self
        return SpokenActions(
            self.space, self.format, names=self._names, aliases=self._aliases, dialect=dialect
        )

    def rules(self) -> str:
        """Returns what is said once: how a call of a tool is written; nothing in other formats."""
        if self.format != "tool_call":
            return ""
        called = format_call("act", {"action": "ACTION"}, self.dialect or "hermes")
        return f"You act by calling the tool act, written so:\n{called}"

    def choice(self, mask: Sequence[int] | None) -> Choice:
        """Returns what may be chosen under a mask; without one, any action.

        Args:
            mask: shape ``(n,)``, nonzero where an action is legal; of no use where actions are not discrete.

        Raises:
            ConfigError: the mask has not one entry for each action.
        """
        if mask is None or not self._n:
            key = None
        else:
            key = tuple(mask.tolist() if isinstance(mask, np.ndarray) else mask)
        try:
            known = self._choices.get(key)
        except TypeError:
            raise ConfigError(f"info['action_mask'] must have shape ({self._n},), got {mask!r}") from None
        if known is None:
            known = self._make_choice(key)
            if len(self._choices) < MAX_ANSWERS:
                self._choices[key] = known
        return known

    def _make_choice(self, key: tuple[Any, ...] | None) -> Choice:
        if key is None:
            return Choice(None, None, (), describe_format(self.format, self.space, names=self._names))
        if len(key) != self._n:
            raise ConfigError(
                f"info['action_mask'] must have an entry for each of {self._n} actions, got {len(key)}"
            )
        mask = tuple(int(bool(allowed)) for allowed in key)
        legal = tuple(self._first + k for k, allowed in enumerate(mask) if allowed)
        words = tuple(
            format_action(k, "bare_word", space=self.space, names=self._names) if self._names else str(k)
            for k in legal
        )
        hint = describe_format(self.format, self.space, names=self._names, legal=legal)
        return Choice(mask, legal, words, hint)

    @property
    def answers(self) -> tuple[str, ...] | None:
        """Every reply that can be legal, where they are few."""
        return self.replies(self.choice(None))

    def replies(self, choice: Choice) -> tuple[str, ...] | None:
        """Returns the replies that may be chosen, where they are few."""
        legal = range(self._first, self._first + self._n) if choice.actions is None else choice.actions
        return tuple(map(self.say, legal)) if self._n and len(legal) <= MAX_ANSWERS else None

    def read(self, reply: Reply, choice: Choice | None) -> ParsedAction:
        """Returns the action in a reply."""
        content = reply.content
        if self.format == "tool_call" and self.dialect is None and reply.tool_calls:
            # A template of channels has taken the calls out of the text.
            content += "".join(format_call(call.name, call.arguments) for call in reply.tool_calls)
        return parse_action(
            content,
            self.space,
            self.format,
            names=self._names,
            aliases=self._aliases,
            legal=None if choice is None else choice.actions,
            dialect=self.dialect,
        )

    def say(self, action: Any) -> str:
        """Returns an action as a policy that keeps to the format would say it."""
        return format_action(action, self.format, space=self.space, names=self._names, dialect=self.dialect)

    def draw(self, player: np.random.Generator, choice: Choice) -> str | None:
        """Returns a legal action, drawn uniformly where the space is bounded; None where none is legal."""
        if self._n:
            if choice.actions is None:
                return self.say(self._first + int(player.integers(self._n)))
            legal = choice.actions
            return self.say(legal[int(player.integers(len(legal)))]) if legal else None
        space = copy.deepcopy(self.space)  # drawing leaves the simulator's own space as it is
        space.seed(int(player.integers(2**31)))
        return self.say(space.sample())

    @property
    def max_chars(self) -> int:
        """About the most UTF-8 bytes of a reply that is an action and nothing else, and its end id."""
        if self._n:
            ends = range(self._n) if self._names else (0, self._n - 1)
            return max(len(self.say(self._first + k).encode()) for k in ends) + 1
        space = copy.deepcopy(self.space)
        space.seed(0)
        return 2 * len(self.say(space.sample()).encode()) + 16  # drawn numbers are not the longest
