"""The formats without a container: ``bare_word`` and ``number``, and ``box`` for lists of numbers.

Each is first the whole text, then what stands after the last phrase, such as "I choose".
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

from atropos_gym.parsing._json import JsonRead, read_json
from atropos_gym.parsing._text import (
    BLANK,
    MAX_ACTION_CHARS,
    TRAILING,
    TURN_MARKER,
    WRAPPING,
    fold,
    strip_fence,
)
from atropos_gym.parsing._words import Words
from atropos_gym.parsing.parsed import ParsedAction, invalid

__all__ = ["read_bare_word", "read_list", "read_number"]

_PHRASE = re.compile(
    r"\b(?:action|move|answer|choice)[*_`\"]{0,4}\s{0,8}(?:is\b\s{0,8}:?|[:=])"
    r"|\bI(?:\s{1,8}will|['\u2019]ll)?\s{1,8}(?:choose|pick|select|go\s{1,8}with|play)\b(?:\s{0,8}:)?"
    r"|\bchoosing\b(?:\s{0,8}:)?",
    re.I | re.A,
)
_NEGATED = re.compile(
    r"\b(?:not|never|no|avoid|cannot|instead\s+of|rather\s+than|\w+n['\u2019]t)\s+[*_`\"]*$", re.I | re.A
)
_NEGATION_WINDOW = 32
_JOINED = re.compile(r"[\s*`\"',/]*(?:or|and|,|/)\s*[*`\"']*", re.I | re.A)
_NO_MORE = re.compile(rf"[{re.escape(TRAILING.replace(chr(10), ''))}]*+(?:\n|\Z)")
_IS_A_CHOICE = (None, "out_of_range", "conflict")
"""Reasons of a text that is an action's name or number, if not a usable one."""


def _last_phrase(text: str) -> re.Match[str] | None:
    found = deque(_PHRASE.finditer(text), maxlen=1)
    return found[0] if found else None


def _line(text: str, begin: int) -> str:
    """The rest of a line."""
    end = text.find("\n", begin)
    return text[begin:] if end < 0 else text[begin:end]


def _line_before_marker(text: str, begin: int) -> str:
    """The rest of a line up to a turn marker, and no more of it than an action may have: for many phrases."""
    rest = text[begin : begin + 2 * MAX_ACTION_CHARS].partition("\n")[0]
    marker = TURN_MARKER.search(rest)
    return rest if marker is None else rest[: marker.start()]


def _cut_next_turn(
    text: str, whole: Callable[[str], ParsedAction], end_of_first: Callable[[], int | None]
) -> str:
    """Drops what follows a turn marker that stands after an action."""
    marker = TURN_MARKER.search(text)
    if marker is not None and whole(text[: marker.start()]).reason not in _IS_A_CHOICE:
        end = end_of_first()
        marker = None if end is None else TURN_MARKER.search(text, end)
    return text if marker is None else text[: marker.start()]


# --- a number, or a word -----------------------------------------------------------------------------------
def read_number(text: str, words: Words) -> ParsedAction:
    """Reads the whole text, or what follows the last phrase to the end of its line."""

    def end_of_first() -> int | None:
        for phrase in _PHRASE.finditer(text):
            line = _line_before_marker(text, phrase.end())
            if words.read(line).reason in _IS_A_CHOICE:
                return phrase.end() + len(line)
        return None

    text = _cut_next_turn(strip_fence(text), words.read, end_of_first)
    whole = words.read(text)
    phrase = None if whole.valid else _last_phrase(text)
    return whole if phrase is None else words.read(_line(text, phrase.end()))


def read_bare_word(text: str, words: Words) -> ParsedAction:
    """Reads the whole text, or what stands after the last phrase, or the one name that occurs."""

    def end_of_first() -> int | None:
        folded = _folded(text)
        free = (end for start, end, _ in words.named_in(folded) if not _negated(folded, start))
        return next(free, None)

    text = _cut_next_turn(strip_fence(text), words.read, end_of_first)
    whole = words.read(text)
    if whole.valid:
        return whole
    folded = _folded(text)
    if phrase := _last_phrase(text):
        exact = words.read(_line(text, phrase.end()))
        return exact if exact.valid else _first_name(_line(folded, phrase.end()), words)
    if whole.reason in _IS_A_CHOICE:
        return whole
    free = {v for start, _, v in words.named_in(folded) if not _negated(folded, start)}
    if len(free) == 1:
        return ParsedAction(free.pop(), True)
    return invalid("several_actions" if free else "not_an_action")


def _folded(text: str) -> str:
    folded = fold(text)
    # A letter whose lower case has another length: positions would not agree.
    return folded if len(folded) == len(text) else text


def _negated(text: str, start: int) -> bool:
    return _NEGATED.search(text[max(0, start - _NEGATION_WINDOW) : start]) is not None


def _first_name(rest: str, words: Words) -> ParsedAction:
    """The name that stands first, unless another is joined to it."""
    rest = rest.lstrip(WRAPPING)
    named = words.named_in(rest)
    if not named or named[0][0] != 0:
        return invalid("not_an_action")
    for before, after in zip(named, named[1:], strict=False):
        if not _JOINED.fullmatch(rest, before[1], after[0]):
            break
        if after[2] != before[2]:
            return invalid("several_actions")
    return ParsedAction(named[0][2], True)


# --- a list of numbers --------------------------------------------------------------------------------------
def read_list(text: str, read_value: Callable[[Any], ParsedAction]) -> ParsedAction:
    """Reads one JSON list, alone or after the last phrase; the same list again is no other action."""

    def end_of_first() -> int | None:
        starts = [0, *(phrase.end() for phrase in _PHRASE.finditer(text))]
        read_up_to = -1
        for start in starts:
            if start > read_up_to and (read := _begin_list(text, start)):
                if read.complete:
                    return read.end
                read_up_to = read.end
        return None

    text = strip_fence(text)
    text = _cut_next_turn(text, lambda before: _read_lists(before, 0, read_value), end_of_first)
    whole = _read_lists(text, 0, read_value)
    phrase = None if whole.valid else _last_phrase(text)
    return whole if phrase is None else _read_lists(text, phrase.end(), read_value, to_end_of_line=True)


def _begin_list(text: str, start: int) -> JsonRead | None:
    """The list, or the bare number, that stands at ``start`` behind blanks and marks."""
    while start < len(text) and text[start] in WRAPPING:
        start += 1
    begins = text[start : start + 1]
    return read_json(text, start) if begins and begins in "[-0123456789" else None


def _read_lists(
    text: str, start: int, read_value: Callable[[Any], ParsedAction], *, to_end_of_line: bool = False
) -> ParsedAction:
    """The list that begins at ``start``, with nothing behind it but marks and the same list again."""
    seen: dict[str, ParsedAction] = {}  # the same text is the same action
    last = len(text.rstrip(TRAILING))
    while read := _begin_list(text, start):
        if read.flaw is not None:
            return invalid(read.flaw)
        written = text[start : read.end].lstrip(WRAPPING)
        if seen and not written.startswith("["):  # bare numbers are no list of containers
            return invalid("several_actions")
        action = seen.get(written)
        if action is None:
            action = read_value(read.value)
            if not action.valid:
                return action
            if seen and action != next(iter(seen.values())):
                return invalid("several_actions")
            seen[written] = action
        if read.end >= last or (to_end_of_line and _NO_MORE.match(text, read.end)):
            return action
        start = read.end
        while text[start] in BLANK + ",":
            start += 1
    return invalid("not_an_action" if seen else "no_container")
