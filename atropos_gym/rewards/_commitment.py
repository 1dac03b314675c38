"""Where a text commits itself to an answer.

The strongest kind present decides, and within it the last one: a box, an ``<answer>`` tag, ``####``, a phrase
such as "the answer is", the whole text. A value that is merely mentioned is none. How a phrase and its value
look depends on the kind of answer, which a ``Grammar`` knows. Everything is linear in the text's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from atropos_gym.rewards._text import plain_characters, visible

__all__ = ["MAX_ANSWER_CHARS", "Commitment", "Grammar", "boxed", "boxes", "find_commitment", "hashed"]

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


class Grammar(Protocol):
    """How answers of one kind are said in prose."""

    @property
    def phrase(self) -> re.Pattern[str]:
        """Matches the words that announce an answer."""

    def phrased(self, text: str) -> Commitment | None:
        """Returns what the last phrase commits to; None where none commits."""

    def whole(self, text: str) -> str | None:
        """Returns the value that the text as a whole is, without any announcement."""


def find_commitment(completion: str, grammar: Grammar, *, opened: bool) -> Commitment:
    """Finds what a completion commits to.

    Args:
        completion: the assistant's text.
        grammar: of the kind of answer that is wanted.
        opened: the prompt itself opened a think block.
    """
    seen = visible(plain_characters(completion), opened)
    if seen is None:
        return Commitment((), "unclosed_think")
    text = _cut_next_turn(seen, grammar)
    for find in (boxed, _tagged, hashed, grammar.phrased):
        found = find(text)
        if found is not None:
            return _checked(found)
    value = grammar.whole(text)
    return Commitment((), "no_commitment") if value is None else Commitment((value,))


def _checked(found: Commitment) -> Commitment:
    if any(not value.strip() for value in found.values):
        return Commitment((), "empty")
    if sum(map(len, found.values)) > MAX_ANSWER_CHARS:
        return Commitment((), "too_long")
    return found


# --- the next turn --------------------------------------------------------------------------------------
_TURN_MARKER = re.compile(
    r"^[ \t>#*_]*(?:question|q|user|human)[*_]*:"
    r"|<\|[^|<>\s]{1,40}\|>|</?s>|<(?:end|start)_of_turn>|<(?:eos|bos)>|\[/?INST\]",
    re.I | re.A | re.M,
)


def _cut_next_turn(text: str, grammar: Grammar) -> str:
    """Drops what follows a marker of a new turn that stands after a commitment."""
    marker = _TURN_MARKER.search(text)
    if marker is None:
        return text
    if grammar.whole(text[: marker.start()]) is not None:
        return text[: marker.start()]
    ends = [box.end for box in boxes(text) if box.end >= 0][:1]
    ends += [tag.end() for tag in _CLOSING_TAG.finditer(text)][:1]
    ends += [match.end() for pattern in (_HASHES, grammar.phrase) if (match := pattern.search(text))]
    marker = _TURN_MARKER.search(text, min(ends)) if ends else None
    return text if marker is None else text[: marker.start()]


# --- boxes ----------------------------------------------------------------------------------------------
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.S)
_BETWEEN_BOXES = re.compile(
    r"(?:[\s,$]|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\}|\\(?:[()\[\],; ]|quad\b|qquad\b))*", re.I | re.A
)


@dataclass(slots=True)
class Box:
    """Where a box starts, and its content."""

    start: int
    inside: int
    end: int = -1  # of the content; -1 while the box is open


def boxes(text: str) -> list[Box]:
    """All boxes that are in no other complete box, in order; braces are matched in one pass."""
    found: list[Box] = []
    open_braces: list[Box | None] = []
    for match in _BOX_OR_BRACE.finditer(text):
        brace = match.group()
        if brace == "{":
            open_braces.append(None)
        elif brace == "}":
            box = open_braces.pop() if open_braces else None
            if box is not None:
                box.end = match.start()
        elif len(brace) > 2:
            found.append(Box(match.start(), match.end()))
            open_braces.append(found[-1])
    outer: list[Box] = []
    for box in found:
        if not outer or outer[-1].end < box.start:
            outer.append(box)
    return outer


def boxed(text: str) -> Commitment | None:
    r"""The last box, with those joined to it by nothing but blanks, commas, dollars, "and", "or".

    Example:
        >>> boxed(r"\boxed{1}. No: \boxed{3} or \boxed{4}").values, boxed(r"\boxed{4}, \boxed{5").reason
        (('3', '4'), 'truncated')
    """
    found = boxes(text)
    if not found:
        return None
    if found[-1].end < 0:
        return Commitment((), "truncated")
    values = [text[found[-1].inside : found[-1].end]]
    for before, after in zip(found[-2::-1], found[:0:-1], strict=True):
        if before.end < 0 or not _BETWEEN_BOXES.fullmatch(text, before.end + 1, after.start):
            break
        values.append(text[before.inside : before.end])
    return Commitment(tuple(dict.fromkeys(value.strip() for value in reversed(values))))


# --- tags and hashes ------------------------------------------------------------------------------------
_TAG = re.compile(r"<(/?)answer>", re.I | re.A)
_CLOSING_TAG = re.compile(r"</answer>", re.I | re.A)
_HASHES = re.compile(r"####+")


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


def hashed(text: str) -> Commitment | None:
    """The rest of the line after the last ``####``."""
    begin = text.rfind("####")
    if begin < 0:
        return None
    return Commitment((text[begin:].split("\n", 1)[0].strip("# \t\r"),))
