"""The format ``tag``: ``<action>hit</action>``."""

from __future__ import annotations

import re

from atropos_gym.parsing._text import BLANK, TURN_MARKER
from atropos_gym.parsing._words import Words
from atropos_gym.parsing.parsed import ParsedAction, invalid

__all__ = ["read_tag"]

_TAG = re.compile(r"<(/?)action>", re.I | re.A)


def read_tag(text: str, words: Words) -> ParsedAction:
    """Reads the last container; neighbours with only blanks or commas between them are a list."""
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
            if len(containers) == 1 and (marker := TURN_MARKER.search(text, tag.end())):
                limit = marker.start()
    if opener is not None:
        return invalid("cut_off")
    if not containers:
        return invalid("no_container")
    result = words.read(text[containers[-1][1] : containers[-1][2]])
    for k in range(len(containers) - 1, 0, -1):
        if text[containers[k - 1][3] : containers[k][0]].strip(BLANK + ","):
            break
        if words.read(text[containers[k - 1][1] : containers[k - 1][2]]) != result:
            return invalid("several_actions")
    return result
