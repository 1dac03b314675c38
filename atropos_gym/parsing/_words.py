"""The words of one discrete space, and how a short text is read as one of its actions."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

from gymnasium.spaces import Discrete

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._text import MAX_ACTION_CHARS, TRAILING, WRAPPING, ZERO_WIDTH, fold
from atropos_gym.parsing.parsed import ParsedAction, invalid

__all__ = ["Words", "find_words"]

# A name is a whole word: no letter, digit, hyphen, apostrophe or zero-width character touches it.
_TOUCH = rf"[\w\-'\u2019{ZERO_WIDTH}]"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.A)
_REMARKED = re.compile(r"([+-]?[0-9]{1,18})(?:\s*\((.*)\)|\s*:(.*)|\s+[-\u2013\u2014]\s(.*))", re.A | re.S)
_LONE_INTEGER = re.compile(r"(?<![\w.])[+-]?[0-9]{1,18}(?![\w.])", re.A)

_Aliases = tuple[tuple[str, int], ...]


class Words:
    """The names, aliases and integers of one ``Discrete`` space, compiled once.

    Attributes:
        start: the first action.
        n: how many there are.
        names: one word for each action as it was declared, or none.
        values: folded name or alias -> action.
        exact: what a policy that knows the format says, letter by letter: (format, dialect) -> text ->
            action. Filled by whoever writes the formats; the path taken nearly always.
    """

    __slots__ = ("exact", "n", "names", "pattern", "start", "values")

    def __init__(self, n: int, start: int, names: tuple[str, ...], aliases: _Aliases) -> None:
        if names and len(names) != n:
            raise ConfigError(f"names must hold one word for each of the {n} actions, got {list(names)}")
        self.n, self.start, self.names = n, start, names
        self.values: dict[str, int] = {}
        for word, value in (*zip(names, range(start, start + n), strict=False), *aliases):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError(f"the alias {word!r} must stand for an action's number, got {value!r}")
            self._add(word, operator.index(value))
        words = sorted(self.values, key=len, reverse=True)
        body = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words)
        self.pattern = re.compile(rf"(?<!{_TOUCH})(?:{body})(?!{_TOUCH})") if words else None
        self.exact: dict[tuple[str, str | None], dict[str, ParsedAction]] = {}

    def _add(self, word: str, value: int) -> None:
        key = " ".join(fold(word).split()) if isinstance(word, str) else ""
        if not key or key != key.lstrip(WRAPPING).rstrip(TRAILING) or _INTEGER.fullmatch(key):
            raise ConfigError(f"an action's name must be a word without marks at its ends, got {word!r}")
        if self.values.get(key, value) != value:
            raise ConfigError(f"the name {word!r} stands for two actions, {self.values[key]} and {value}")
        if not self.start <= value < self.start + self.n:
            last = self.start + self.n - 1
            raise ConfigError(f"the name {word!r} stands for {value}, but actions are {self.start} to {last}")
        self.values[key] = value

    def word(self, value: int) -> str:
        """Returns an action's name, or its number where actions have none."""
        return self.names[value - self.start] if self.names else str(value)

    def named_in(self, text: str) -> list[tuple[int, int, int]]:
        """``(start, end, value)`` of each whole word in folded ``text`` that is a name."""
        if self.pattern is None:
            return []
        found = self.pattern.finditer(text)
        return [(m.start(), m.end(), self.values[" ".join(m.group().split())]) for m in found]

    def read(self, content: str) -> ParsedAction:
        """Reads a text that must be one action as a whole: a name, an integer, an integer with a remark."""
        text = content.lstrip(WRAPPING).rstrip(TRAILING)
        if len(text) > MAX_ACTION_CHARS:
            return invalid("too_long")
        text = " ".join(fold(text).split())
        if text in self.values:
            return ParsedAction(self.values[text], True)
        if _INTEGER.fullmatch(text):
            return self.at(int(text))
        if remarked := _REMARKED.fullmatch(text):
            return self._with_remark(int(remarked[1]), remarked[remarked.lastindex or 1])
        several = len({value for _, _, value in self.named_in(text)}) > 1
        return invalid("several_actions" if several else "not_an_action")

    def at(self, value: int) -> ParsedAction:
        """Returns the action of this number."""
        if self.start <= value < self.start + self.n:
            return ParsedAction(value, True)
        return invalid("out_of_range")

    def _with_remark(self, value: int, remark: str) -> ParsedAction:
        """An index with a remark, which may repeat the action's name but name no other action."""
        named = {value for _, _, value in self.named_in(remark)}
        numbers = {int(m.group()) for m in _LONE_INTEGER.finditer(remark)}
        named |= {number for number in numbers if self.at(number)}
        return invalid("conflict") if named - {value} else self.at(value)


@lru_cache(maxsize=256)
def _words(n: int, start: int, names: tuple[str, ...], aliases: _Aliases) -> Words:
    return Words(n, start, names, aliases)


def _in_order(names: Any, start: int) -> tuple[str, ...]:
    """The names in the order of their actions; a mapping says which is whose, either way round.

    Raises:
        TypeError: they have no order.
    """
    if names is None:
        return ()
    if isinstance(names, bytes | Set):
        raise TypeError
    if not isinstance(names, Mapping):
        return tuple(names)
    by_value = {value: word for word, value in names.items()}
    if any(isinstance(value, str) for value in by_value):
        by_value = dict(names)
    in_order = [by_value.get(value) for value in range(start, start + len(names))]
    if not all(isinstance(word, str) for word in in_order):
        raise TypeError
    return tuple(map(str, in_order))


def find_words(
    space: Discrete,
    names: Sequence[str] | Mapping[Any, Any] | None = None,
    aliases: Mapping[str, Any] | None = None,
) -> Words:
    """Returns the words of a space; the same object for the same words.

    Raises:
        ConfigError: names or aliases do not fit the space.
    """
    try:
        return _words(
            int(space.n),
            int(space.start),
            tuple(names) if isinstance(names, tuple | list) else _in_order(names, int(space.start)),
            tuple(aliases.items()) if aliases else (),
        )
    except (AttributeError, TypeError):
        raise ConfigError(
            f"names must be words and aliases a mapping from text to action for {space}, "
            f"got {names!r} and {aliases!r}"
        ) from None
