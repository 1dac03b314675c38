"""One walk through a text for tool calls: code fences are text, and the other side's turn ends the walk."""

from __future__ import annotations

import re

from atropos_gym.parsing._dialects import DIALECTS, RawCall
from atropos_gym.parsing._text import TURN_MARKER

__all__ = ["scan"]

_FENCE = r"(?:^[ \t>]*(?:[-*+][ \t]+|[0-9]{1,9}[.)][ \t]+)?)?(?:`{3,}|~{3,})"
_FENCE_LINE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*$", re.M)
_TO_FENCE = {mark: re.compile(rf"(?:(?!{mark * 3})[^\n])*+{mark}{{3,}}") for mark in "`~"}
# Besides the markers that end an action's text: those of other families' templates.
_ROLE = (
    r"^[ \t]*assistant:|\[TOOL_RESULTS\]|\[INST\]|<(?:start|end)_of_turn>"
    r"|<\|(?:start_header_id|eom_id|endoftext|end_of_text|user|assistant|observation|start|end)\|>"
)
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "</s>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_TOKENS = {
    name: re.compile(
        rf"(?P<fence>{_FENCE})|(?P<opener>(?-i:{dialect.opener}))|(?P<marker>{TURN_MARKER.pattern}|{_ROLE})",
        TURN_MARKER.flags,
    )
    for name, dialect in DIALECTS.items()
}


def scan(text: str, dialect: str) -> tuple[list[RawCall], str, bool]:
    """Returns the calls in order, the text without them, and whether the model went on for the other side."""
    text = text[: _end_of_turn(text)]
    token, read = _TOKENS[dialect], DIALECTS[dialect].read
    calls: list[RawCall] = []
    pieces: list[str] = []
    kept = position = 0  # up to where the text is in pieces or in calls; where the walk stands
    while found := token.search(text, position):
        if found["fence"] is not None:
            position = _behind_fence(text, found)
        elif found["marker"] is not None:
            if calls:
                return calls, "".join([*pieces, text[kept : found.start()]]).strip(), True
            position = found.end()
        else:
            here, position = read(text, found)
            if here:
                calls += here
                pieces.append(text[kept : found.start()])
                kept = position
    return calls, "".join([*pieces, text[kept:]]).strip(), False


def _end_of_turn(text: str) -> int:
    """The length without the end tokens that close the turn itself, and blanks."""
    end = len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        closing = next((token for token in _ENDS if text.endswith(token, 0, end)), None)
        if closing is None:
            return end
        end -= len(closing)


def _behind_fence(text: str, opener: re.Match[str]) -> int:
    """The position behind a code fence: closed on its own line, else by a line of marks, else by the end."""
    mark = text[opener.end() - 1]
    if inline := _TO_FENCE[mark].match(text, opener.end()):
        return inline.end()
    if opener.start() and text[opener.start() - 1] != "\n":
        return opener.end()  # three marks within a line, never closed: no fence
    length = len(opener[0]) - len(opener[0].rstrip(mark))
    for line in _FENCE_LINE.finditer(text, opener.end()):
        if line[1][0] == mark and len(line[1]) >= length:
            return line.end()
    return len(text)
