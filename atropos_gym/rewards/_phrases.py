"""Answers in prose: the words that announce one, the value that stands first after them, taking it back."""

from __future__ import annotations

import re
from collections.abc import Callable

from atropos_gym.rewards._commitment import Commitment

__all__ = ["ANNOUNCED", "NEGATED", "SKIPPED", "last_phrase", "settled"]

ANNOUNCED = (
    r"(?<![A-Za-z0-9])(?:answer|choice|option)(?![A-Za-z0-9])[*_`\"'})]{0,4}\s{0,4}(?:is\b\s{0,4}:?|[:=])"
)
"""A pattern of the words before a value: "answer is", "answer:", "choice is" and their like."""

NEGATED = (
    r"[\s*_]{0,6}(?:(?:definitely|certainly|clearly|surely|obviously|probably|simply|actually)\s{1,4})?"
    r"(?:not|never)\b"
)
"""A pattern of what makes a phrase commit to nothing."""

# Blanks, markdown, quotes, emoji and a closing brace of \text{} between a phrase and its value.
SKIPPED = "[\\s*_`\"':>}\u2018\u2019\u201c\u201d\u2192\u21d2\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]*"
"""A pattern of what may stand between a phrase and its value."""

Reader = Callable[[str, int], tuple[str, int] | None]
"""Returns the value that stands at a position and where it ends, or None where none does."""

_INTERJECTION = r"(?:(?:oh|but|or|and|so|hmm+|well|ah|oops|okay|ok|uh|um)\b[\s,]{1,4}){0,3}+"
_CLAUSE = r"(?:[.!?;:,\n(\u2026\u2013\u2014-])[\s*_\"]{0,8}+" + _INTERJECTION
_MARKERS = (
    r"(?:(?:wait|sorry|correction|i\s+mean|scratch\s+that|that(?:'s|\s+is)\s+(?:wrong|incorrect)|incorrect)\b"
    r"|(?P<weak>(?:no|rather|actually)\b))"
)
_TAKEN_BACK = re.compile(_CLAUSE + _MARKERS, re.I | re.A)
_TAKEN_BACK_AT_ONCE = re.compile(r"[\s*_\"]{0,8}+" + _INTERJECTION + _MARKERS, re.I | re.A)
_AFTER_WEAK = re.compile(
    r"[*_\"]{0,3}\s{0,4}(?:[,.:;!?\u2026\u2013\u2014-]|wait\b|it\s+is\b|it's|that\b|$)", re.I
)
_FILLERS = re.compile(
    r"(?:[\s,.:;!*_\"\u2026\u2013\u2014]++|-\s|\b(?:wait|no|actually|rather|sorry|i\s+meant?|make\s+that|it\s+is"
    r"|it's|that\s+is|that's|that|(?:it\s+)?should\s+be|wrong|incorrect|to)\b){0,12}+",
    re.I | re.A,
)


def settled(text: str, value: str, end: int, again: Reader) -> Commitment:
    """Returns the value that stands once all that takes it back is read.

    Args:
        text: the visible text.
        value: what the phrase committed to.
        end: where the value ends.
        again: reads a value that directly follows a marker such as "no" or "wait".
    """
    standing: str | None = value
    marker = _TAKEN_BACK_AT_ONCE.match(text, end)
    while marker is not None or (marker := _TAKEN_BACK.search(text, end)) is not None:
        fillers = _FILLERS.match(text, marker.end())
        replaced = again(text, marker.end() if fillers is None else fillers.end())
        if replaced is not None:
            standing, end = replaced
        else:
            end = marker.end()
            if not marker["weak"] or _AFTER_WEAK.match(text, end):  # else prose: "no other way"
                standing = None
        marker = None
    return Commitment((), "taken_back") if standing is None else Commitment((standing,))


def last_phrase(text: str, phrase: re.Pattern[str]) -> re.Match[str] | None:
    """Returns the last match of a phrase."""
    last: re.Match[str] | None = None
    for match in phrase.finditer(text):
        last = match
    return last
