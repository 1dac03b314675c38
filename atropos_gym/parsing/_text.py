"""What of a reply counts, and the characters that carry no meaning at the ends of an answer."""

from __future__ import annotations

import re

__all__ = [
    "BLANK",
    "MAX_ACTION_CHARS",
    "TRAILING",
    "TURN_MARKER",
    "WRAPPING",
    "ZERO_WIDTH",
    "fold",
    "strip_fence",
    "visible",
]

MAX_ACTION_CHARS = 1000
"""A container with more text than this is no action of a discrete space."""

ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"
BLANK = " \t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
BLANK += ZERO_WIDTH
WRAPPING = BLANK + "*`\"'\u201c\u201d\u2018\u2019"
"""Dropped at both ends of an answer."""
TRAILING = WRAPPING + ".,!;:"
"""Dropped at the end of an answer."""

TURN_MARKER = re.compile(
    r"^[ \t]*(?:observation|user|human):|<observation>|<tool_response>"
    r"|<\|im_start\|>|<\|im_end\|>|<\|eot_id\|>|</s>",
    re.I | re.A | re.M,
)
"""Where the model goes on to play the other side."""

_FENCE = re.compile(r"\s*(`{3,}|~{3,})[ \t]*[\w+.-]*[ \t]*\r?\n", re.A)


def fold(text: str) -> str:
    """Returns ``text`` in lower case, where that is reversible: the Kelvin sign is not the letter k."""
    if text.isascii():
        return text.lower()
    return "".join(low if (low := char.lower()).upper() == char else char for char in text)


def visible(text: str) -> str | None:
    """Returns what follows the last closing think tag; None where a think block is still open.

    Example:
        >>> visible("hit?</think>stick"), visible("<think>hit")
        ('stick', None)
    """
    end = text.rfind("</think>")
    if end >= 0:
        text = text[end + len("</think>") :]
    return None if "<think>" in text else text


def strip_fence(text: str) -> str:
    r"""Returns what stands in a code fence that is around the whole text, closed or not; else the text.

    Example:
        >>> strip_fence("```json\n[1, 2]\n```"), strip_fence("[1, 2]")
        ('[1, 2]\n', '[1, 2]')
    """
    opener = _FENCE.match(text)
    if opener is None:
        return text
    return text[opener.end() :].rstrip().removesuffix(opener[1])
