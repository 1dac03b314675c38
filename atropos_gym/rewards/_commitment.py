"""Where a text commits itself to an answer.

The strongest kind present decides, and within it the last one: a box, an ``<answer>`` tag, ``####``, a phrase
such as "the answer is". A number that is merely mentioned is none. Everything is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MAX_ANSWER_CHARS", "Commitment", "find_commitment"]

MAX_ANSWER_CHARS = 1000
"""A committed place with more text than this commits to nothing."""


@dataclass(frozen=True, slots=True)
class Commitment:
    """Values that a text commits to, or why it does not.

    Attributes:
        values: the committed texts; more than one where they were given as a list.
        reason: "" where there are values, else why there are none.
    """

    values: tuple[str, ...]
    reason: str = ""


def find_commitment(text: str, is_value: Callable[[str], bool]) -> Commitment:
    r"""Finds what ``text`` commits to.

    Args:
        text: the visible text.
        is_value: whether a whole text is one value by itself.

    Example:
        >>> find_commitment(r"So \boxed{3}, no: \boxed{4}.", str.isdigit).values
        ('4',)
        >>> find_commitment("She has 4 clips.", str.isdigit)
        Commitment(values=(), reason='no_commitment')
    """
    text = _cut_next_turn(text, is_value)
    for find in (_boxed, _tagged, _hashed, _phrased):
        found = find(text)
        if found is not None:
            return _checked(found)
    if is_value(text.strip()):
        return Commitment((text.strip(),))
    return Commitment((), "no_commitment")


def _checked(found: Commitment) -> Commitment:
    if any(not value.strip() for value in found.values):
        return Commitment((), "empty")
    if sum(map(len, found.values)) > MAX_ANSWER_CHARS:
        return Commitment((), "too_long")
    return found


# --- the next turn --------------------------------------------------------------------------------------
_TURN_MARKER = re.compile(
    r"^[ \t]*(?:question|q|user|human):|<\|im_start\|>|<\|im_end\|>|<\|eot_id\|>|</s>", re.I | re.A | re.M
)


def _cut_next_turn(text: str, is_value: Callable[[str], bool]) -> str:
    """Drops what follows a marker of a new turn that stands after a commitment."""
    marker = _TURN_MARKER.search(text)
    if marker is None:
        return text
    if is_value(text[: marker.start()].strip()):
        return text[: marker.start()]
    ends = [box.end for box in _boxes(text) if box.end >= 0][:1]
    ends += [tag.end() for tag in _CLOSING_TAG.finditer(text)][:1]
    ends += [match.end() for pattern in (_HASHES, _PHRASE) if (match := pattern.search(text))]
    marker = _TURN_MARKER.search(text, min(ends)) if ends else None
    return text if marker is None else text[: marker.start()]


# --- boxes ----------------------------------------------------------------------------------------------
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.S)
_BETWEEN_BOXES = re.compile(r"(?:[\s,$]|\band\b|\bor\b)*", re.I | re.A)


@dataclass(slots=True)
class _Box:
    start: int
    inside: int
    end: int = -1  # of the content; -1 while the box is open


def _boxes(text: str) -> list[_Box]:
    """All boxes that are in no other complete box, in order; braces are matched in one pass."""
    boxes: list[_Box] = []
    open_braces: list[_Box | None] = []
    for match in _BOX_OR_BRACE.finditer(text):
        found = match.group()
        if found == "{":
            open_braces.append(None)
        elif found == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                box.end = match.start()
        elif len(found) > 2:
            boxes.append(_Box(match.start(), match.end()))
            open_braces.append(boxes[-1])
    outer: list[_Box] = []
    for box in boxes:
        if not outer or outer[-1].end < box.start:
            outer.append(box)
    return outer


def _boxed(text: str) -> Commitment | None:
    """The last box, with those joined to it by nothing but blanks, commas, dollars, "and", "or"."""
    boxes = _boxes(text)
    if not boxes:
        return None
    if boxes[-1].end < 0:
        return Commitment((), "truncated")
    values = [text[boxes[-1].inside : boxes[-1].end]]
    for before, after in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if before.end < 0 or not _BETWEEN_BOXES.fullmatch(text, before.end + 1, after.start):
            break
        values.append(text[before.inside : before.end])
    return Commitment(tuple(dict.fromkeys(value.strip() for value in reversed(values))))


# --- tags and hashes ------------------------------------------------------------------------------------
_TAG = re.compile(r"<(/?)answer>", re.I | re.A)
_CLOSING_TAG = re.compile(r"</answer>", re.I | re.A)
_HASHES = re.compile(r"####+[^\n]*")


def _tagged(text: str) -> Commitment | None:
    opener: re.Match[str] | None = None
    value: str | None = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opener = tag
        elif opener is not None:
            value, opener = text[opener.end() : tag.start()], None
    if opener is not None:
        return Commitment((), "truncated")
    return None if value is None else Commitment((value,))


def _hashed(text: str) -> Commitment | None:
    begin = text.rfind("####")
    if begin < 0:
        return None
    return Commitment((text[begin:].split("\n", 1)[0].lstrip("#"),))


# --- phrases --------------------------------------------------------------------------------------------
_PHRASE = re.compile(
    r"\b(?:answer|choice|option)\b[*_`\"]{0,3}\s{0,4}(?:is\b\s{0,4}:?|[:=])(?!\s{0,4}not\b)", re.I | re.A
)
# Blanks, markdown, quotes and emoji between a phrase and its value.
_SKIPPED = re.compile("[\\s*_`\"':>\u2018\u2019\u201c\u201d\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]*")
_VALUE_ENDS = re.compile(
    r"\n|[.!?;](?=[\s*_`\"')]|$)|,\s*(?=[A-Za-z]{2})|\s(?:because|since|so|as|which)\b", re.I | re.A
)
_DELIMITERS = (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"))
_MARKUP = " \t\r\n*_`\"'\u2018\u2019\u201c\u201d"

_CLAUSE = r"(?:^|[.!?;:,\n(\u2013\u2014-])[\s*_\"]{0,8}"
_TAKEN_BACK = re.compile(
    _CLAUSE + r"(?:(?:wait|sorry|correction|i\s+mean|scratch\s+that|incorrect)\b"
    r"|that(?:'s|\s+is)\s+(?:wrong|incorrect)\b"
    r"|(?:no|rather|actually)\b(?=\s{0,4}(?:[,.:;!?\u2013\u2014-]|[\d$\\(]|wait\b|it\s+is\b|it's|that\b|$)))",
    re.I | re.A,
)
_NEW_VALUE = re.compile(
    r"(?:[\s,.:;!*_\"\u2013\u2014]++|-\s|\b(?:wait|no|actually|rather|sorry|i\s+mean|make\s+that|it\s+is|it's"
    r"|that\s+is|that's|that|(?:it\s+)?should\s+be)\b){0,12}+(?=[+-]?\s?[\d.$\\(\[{])",
    re.I | re.A,
)


def _phrased(text: str) -> Commitment | None:
    """The value after the last phrase, unless it is taken back."""
    last: re.Match[str] | None = None
    for match in _PHRASE.finditer(text):
        last = match
    if last is None:
        return None
    value, end = _value_after(text, last.end())
    while marker := _TAKEN_BACK.search(text, end):
        again = _NEW_VALUE.match(text, marker.end())
        value, end = ("", marker.end()) if again is None else _value_after(text, again.end())
        if again is None and _TAKEN_BACK.search(text, end) is None:
            return Commitment((), "taken_back")
    return Commitment((value,))


def _value_after(text: str, begin: int) -> tuple[str, int]:
    """Returns the expression that stands first from ``begin``, and where it ends."""
    skipped = _SKIPPED.match(text, begin)
    begin = begin if skipped is None else skipped.end()
    for opener, closer in _DELIMITERS:
        if text.startswith(opener, begin):
            end = text.find(closer, begin + len(opener))
            if end >= 0:
                return text[begin + len(opener) : end], end + len(closer)
    if text.startswith("$", begin):
        end = text.find("$", begin + 1, begin + MAX_ANSWER_CHARS + 2)
        # A second dollar before a number is a price, not the end of a formula.
        if end > begin + 1 and "\n" not in text[begin:end] and not text[end + 1 : end + 2].isdigit():
            return text[begin + 1 : end], end + 1
    stop = _VALUE_ENDS.search(text, begin)
    end = len(text) if stop is None else stop.start()
    return text[begin:end].strip(_MARKUP), end
