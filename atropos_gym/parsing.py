"""From an assistant's text to one action of a Gymnasium space.

The parser never guesses, never samples, never clips and never raises on a text: a reply is one action, or
it is invalid with a reason. What an invalid action costs is the environment's affair. Every format takes
time linear in the text's length.

Two formats so far, both for ``Discrete`` spaces: ``tag`` (``<action>hit</action>``) and ``bare_word`` (the
word itself, or after a phrase such as "I choose").
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from gymnasium import Space
from gymnasium.spaces import Discrete

from atropos_gym.errors import ConfigError

__all__ = ["ACTION_FORMATS", "ActionFormat", "ParsedAction", "format_action", "parse_action"]

ActionFormat = Literal["tag", "bare_word"]
ACTION_FORMATS: tuple[str, ...] = ("tag", "bare_word")

MAX_ACTION_CHARS = 1000
"""A container with more text than this is no action."""


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """One action, or the reason why there is none. True only where it is valid.

    Attributes:
        value: a member of the action space, or None.
        valid: whether there is an action.
        reason: None where valid; else ``no_container``, ``cut_off``, ``unclosed_think``, ``not_an_action``,
            ``several_actions``, ``conflict``, ``out_of_range``, ``not_legal`` or ``too_long``.
    """

    value: Any
    valid: bool
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.valid


# --- characters ------------------------------------------------------------------------------------------
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"
_BLANK = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_BLANK += _ZERO_WIDTH
_WRAPPING = _BLANK + "*`\"'\u201c\u201d\u2018\u2019"
_TRAILING = _WRAPPING + ".,!;:"
# A name is a whole word: no letter, digit, hyphen, apostrophe or zero-width character touches it.
_TOUCH = rf"[\w\-'\u2019{_ZERO_WIDTH}]"

_TAG = re.compile(r"<(/?)action>", re.I | re.A)
_TURN_MARKER = re.compile(
    r"^[ \t]*(?:observation|user|human):|<observation>|<tool_response>"
    r"|<\|im_start\|>|<\|im_end\|>|<\|eot_id\|>|</s>",
    re.I | re.A | re.M,
)
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.A)
_REMARKED = re.compile(r"([+-]?[0-9]{1,18})(?:\s*\((.*)\)|\s*:(.*)|\s+[-\u2013\u2014]\s(.*))", re.A | re.S)
_LONE_INTEGER = re.compile(r"(?<![\w.])[+-]?[0-9]{1,18}(?![\w.])", re.A)
_PHRASE = re.compile(
    r"\b(?:action|move|answer|choice)[*_`\"]{0,4}\s{0,8}(?:is\b\s{0,8}:?|[:=])"
    r"|\bI(?:\s{1,8}will|['\u2019]ll)?\s{1,8}(?:choose|pick|select|go\s{1,8}with|play)\b"
    r"|\bchoosing\b",
    re.I | re.A,
)
_NEGATED = re.compile(
    r"\b(?:not|never|no|avoid|cannot|instead\s+of|rather\s+than|\w+n['\u2019]t)\s+[*_`\"]*$", re.I | re.A
)
_NEGATION_WINDOW = 32
_JOINED = re.compile(r"[\s*`\"',/]*(?:or|and|,|/)\s*[*`\"']*", re.I | re.A)


def _fold(text: str) -> str:
    """Lower case, where that is reversible: the Kelvin sign is not the letter k."""
    if text.isascii():
        return text.lower()
    return "".join(low if (low := char.lower()).upper() == char else char for char in text)


def _visible(text: str) -> str | None:
    """What follows the last closing think tag; None where a think block is still open."""
    end = text.rfind("</think>")
    if end >= 0:
        text = text[end + len("</think>") :]
    return None if "<think>" in text else text


# --- the words of one space ------------------------------------------------------------------------------
_Aliases = tuple[tuple[str, int], ...]


class _Words:
    """The names, aliases and integers of one ``Discrete`` space, compiled once."""

    __slots__ = ("exact", "n", "pattern", "start", "values")

    def __init__(self, n: int, start: int, names: tuple[str, ...], aliases: _Aliases) -> None:
        if names and len(names) != n:
            raise ConfigError(f"names must hold one word for each of the {n} actions, got {list(names)}")
        self.n, self.start = n, start
        self.values: dict[str, int] = {}
        for word, value in (*zip(names, range(start, start + n), strict=False), *aliases):
            self._add(word, int(value))
        words = sorted(self.values, key=len, reverse=True)
        body = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words)
        self.pattern = re.compile(rf"(?<!{_TOUCH})(?:{body})(?!{_TOUCH})") if words else None
        # What a policy that knows the format says, letter by letter: the path taken nearly always.
        spellings = {name: start + k for k, name in enumerate(names)} | self.values
        self.exact: dict[str, dict[str, int]] = {
            "bare_word": spellings,
            "tag": {f"<action>{word}</action>": value for word, value in spellings.items()},
        }

    def _add(self, word: str, value: int) -> None:
        key = " ".join(_fold(word).split())
        if not key or key != key.strip(_TRAILING) or _INTEGER.fullmatch(key):
            raise ConfigError(f"an action's name must be a word without marks at its ends, got {word!r}")
        if self.values.get(key, value) != value:
            raise ConfigError(f"the name {word!r} stands for two actions, {self.values[key]} and {value}")
        if not self.start <= value < self.start + self.n:
            last = self.start + self.n - 1
            raise ConfigError(f"the name {word!r} stands for {value}, but actions are {self.start} to {last}")
        self.values[key] = value

    def named_in(self, text: str) -> list[tuple[int, int, int]]:
        """``(start, end, value)`` of each whole word in folded ``text`` that is a name."""
        if self.pattern is None:
            return []
        found = self.pattern.finditer(text)
        return [(m.start(), m.end(), self.values[" ".join(m.group().split())]) for m in found]

    def read(self, content: str) -> ParsedAction:
        """Reads a text that must be one action as a whole."""
        text = content.lstrip(_WRAPPING).rstrip(_TRAILING)
        if len(text) > MAX_ACTION_CHARS:
            return _invalid("too_long")
        text = " ".join(_fold(text).split())
        if text in self.values:
            return ParsedAction(self.values[text], True)
        if _INTEGER.fullmatch(text):
            return self._in_range(int(text))
        if remarked := _REMARKED.fullmatch(text):
            return self._with_remark(int(remarked[1]), remarked[remarked.lastindex or 1])
        several = len({value for _, _, value in self.named_in(text)}) > 1
        return _invalid("several_actions" if several else "not_an_action")

    def _in_range(self, value: int) -> ParsedAction:
        if self.start <= value < self.start + self.n:
            return ParsedAction(value, True)
        return _invalid("out_of_range")

    def _with_remark(self, value: int, remark: str) -> ParsedAction:
        """An index with a remark, which may repeat the action's name but name no other action."""
        named = {value for _, _, value in self.named_in(remark)}
        numbers = {int(m.group()) for m in _LONE_INTEGER.finditer(remark)}
        named |= {number for number in numbers if self._in_range(number)}
        return _invalid("conflict") if named - {value} else self._in_range(value)


@lru_cache(maxsize=256)
def _words(n: int, start: int, names: tuple[str, ...], aliases: _Aliases) -> _Words:
    return _Words(n, start, names, aliases)


_INVALID: dict[str, ParsedAction] = {}


def _invalid(reason: str) -> ParsedAction:
    return _INVALID.setdefault(reason, ParsedAction(None, False, reason))


# --- formats ---------------------------------------------------------------------------------------------
def _read_tag(text: str, words: _Words) -> ParsedAction:
    """The last ``<action>...</action>``; neighbours with only blanks or commas between are a list."""
    containers: list[tuple[int, int, int, int]] = []  # opener, content start, content end, closer end
    opener: re.Match[str] | None = None
    limit = len(text)
    for tag in _TAG.finditer(text):
        if tag.start() >= limit:
            break
        if not tag[1]:
            opener = tag
        elif opener is not None:
            containers.append((opener.start(), opener.end(), tag.start(), tag.end()))
            opener = None
            if len(containers) == 1 and (marker := _TURN_MARKER.search(text, tag.end())):
                limit = marker.start()
    if opener is not None:
        return _invalid("cut_off")
    if not containers:
        return _invalid("no_container")
    result = words.read(text[containers[-1][1] : containers[-1][2]])
    for k in range(len(containers) - 1, 0, -1):
        if text[containers[k - 1][3] : containers[k][0]].strip(_BLANK + ","):
            break
        other = words.read(text[containers[k - 1][1] : containers[k - 1][2]])
        if other != result:
            return _invalid("several_actions")
    return result


def _read_bare_word(text: str, words: _Words) -> ParsedAction:
    """The whole text, or what stands after the last phrase, or the one name that occurs."""
    text = _cut_next_turn(text, words)
    whole = words.read(text)
    if whole.valid or whole.reason in ("out_of_range", "conflict"):
        return whole
    folded = _fold(text)
    if len(folded) != len(text):  # a letter whose lower case has another length: positions would not agree
        folded = text
    if phrases := deque(_PHRASE.finditer(text), maxlen=1):
        begin = phrases[0].end()
        end = text.find("\n", begin)
        rest = slice(begin, len(text) if end < 0 else end)
        exact = words.read(text[rest])
        return exact if exact.valid else _first_name(folded[rest], words)
    free = {v for start, _, v in words.named_in(folded) if not _negated(folded, start)}
    if len(free) == 1:
        return ParsedAction(free.pop(), True)
    return _invalid("several_actions" if free else "not_an_action")


def _negated(text: str, start: int) -> bool:
    return _NEGATED.search(text[max(0, start - _NEGATION_WINDOW) : start]) is not None


def _first_name(rest: str, words: _Words) -> ParsedAction:
    """The name that stands first, unless another is joined to it."""
    rest = rest.lstrip(_WRAPPING)
    named = words.named_in(rest)
    if not named or named[0][0] != 0:
        return _invalid("not_an_action")
    for before, after in zip(named, named[1:], strict=False):
        if not _JOINED.fullmatch(rest, before[1], after[0]):
            break
        if after[2] != before[2]:
            return _invalid("several_actions")
    return ParsedAction(named[0][2], True)


def _cut_next_turn(text: str, words: _Words) -> str:
    """Drops what follows a turn marker that stands after an action."""
    marker = _TURN_MARKER.search(text)
    if marker is None:
        return text
    if words.read(text[: marker.start()]).valid:
        return text[: marker.start()]
    folded = _fold(text)
    if len(folded) != len(text):
        folded = text
    for start, end, _ in words.named_in(folded):
        if not _negated(folded, start):
            marker = _TURN_MARKER.search(text, end)
            return text if marker is None else text[: marker.start()]
    return text


_READERS: dict[str, Callable[[str, _Words], ParsedAction]] = {"tag": _read_tag, "bare_word": _read_bare_word}


# --- public ----------------------------------------------------------------------------------------------
def parse_action(
    completion: str,
    space: Space[Any],
    format: str = "tag",
    *,
    names: Sequence[str] | None = None,
    aliases: Mapping[str, int] | None = None,
    legal: Collection[Any] | None = None,
    dialect: str | None = None,
) -> ParsedAction:
    """Reads one action of ``space`` out of an assistant's text.

    Args:
        completion: the assistant's text of this turn, never the observation.
        space: the action space; ``Discrete`` so far.
        format: the declared container, ``tag`` or ``bare_word``. There is no second look at the prose.
        names: one word for each action, in order from ``space.start``.
        aliases: further texts and the actions they stand for.
        legal: the actions allowed now, as values of the space; None allows all.
        dialect: the tool-call dialect; of no use to these formats, so it must be None.

    Returns:
        The action, or the reason why there is none.

    Raises:
        ConfigError: the format, the space or the names cannot be used; never because of ``completion``.

    Example:
        >>> from gymnasium.spaces import Discrete
        >>> parse_action("I take one. <action>Hit</action>", Discrete(2), "tag", names=("stick", "hit"))
        ParsedAction(value=1, valid=True, reason=None)
        >>> parse_action("I will not hit.", Discrete(2), "bare_word", names=("stick", "hit")).reason
        'not_an_action'
    """
    reader = _READERS.get(format)
    if reader is None:
        raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")
    if not isinstance(space, Discrete):
        raise ConfigError(f"format {format!r} needs a Discrete action space, got {space}")
    if dialect is not None:
        raise ConfigError(f"dialect belongs to tool calls; format {format!r} has none, got {dialect!r}")
    own_aliases = tuple(aliases.items()) if aliases else ()
    words = _words(int(space.n), int(space.start), tuple(names) if names else (), own_aliases)
    value = words.exact[format].get(completion)
    if value is not None:
        parsed = ParsedAction(value, True)
    else:
        visible = _visible(completion)
        parsed = _invalid("unclosed_think") if visible is None else reader(visible, words)
    if legal is not None and parsed.valid and parsed.value not in legal:
        return _invalid("not_legal")
    return parsed


def format_action(word: str, format: str = "tag") -> str:
    """Writes an action's word as a policy that keeps to the format would say it.

    Example:
        >>> format_action("hit", "tag"), format_action("hit", "bare_word")
        ('<action>hit</action>', 'hit')
    """
    if format not in _READERS:
        raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")
    return f"<action>{word}</action>" if format == "tag" else word
