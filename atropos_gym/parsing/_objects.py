"""The format ``json``: the last top-level object of the text, prose around it allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from atropos_gym.parsing._json import JsonRead, balanced_end, read_json
from atropos_gym.parsing._text import BLANK, TURN_MARKER
from atropos_gym.parsing.parsed import ParsedAction, invalid

__all__ = ["KEY", "read_object"]

KEY = "action"

# A brace in prose, such as {6} or \boxed{hit}, begins no object; {"a", {'a', {action: and {} do, and so do
# a brace before another one, as in {{ and {key: {, and one with nothing behind it.
_OBJECT_OR_MARKER = re.compile(
    r"(?P<object>\{(?=\s*(?:[\"'{}\u201c\u2018]|action\s{0,8}:|[A-Za-z_]\w{0,40}\s{0,8}:\s{0,8}\{|/[/*]|\Z)))"
    rf"|(?P<marker>(?:{TURN_MARKER.pattern}))",
    TURN_MARKER.flags,
)


def read_object(text: str, read_value: Callable[[Any], ParsedAction]) -> ParsedAction:
    """Reads the last object; neighbours with only blanks or commas between them are a list."""
    run: list[JsonRead] = []
    has_action = False
    position = 0
    while token := _OBJECT_OR_MARKER.search(text, position):
        if token["marker"] is not None:
            if has_action:
                break
            position = token.end()
            continue
        start = token.start()
        read = read_json(text, start)
        end = read.end if read.complete else balanced_end(text, start)
        if text[position:start].strip(BLANK + ","):
            run = []
        run.append(read)
        has_action = has_action or (read.complete and KEY in read.value)
        if end is None or read.flaw == "cut_off":
            break
        position = end
    if not run:
        return invalid("no_container")
    result = _read_member(run[-1], read_value)
    # What is no object, or none with an action, is no choice beside the last one.
    others = (read for read in run[:-1] if read.complete and KEY in read.value)
    if result.valid and any(_read_member(read, read_value) != result for read in others):
        return invalid("several_actions")
    return result


def _read_member(read: JsonRead, read_value: Callable[[Any], ParsedAction]) -> ParsedAction:
    """Reads the value under the key ``action`` of one object."""
    if read.flaw is not None:
        return invalid(read.flaw)
    if not isinstance(read.value, dict) or KEY not in read.value:
        return invalid("no_container")
    return read_value(read.value[KEY])
