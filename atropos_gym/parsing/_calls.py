"""The format ``tool_call``: one call of the tool ``act``, whose argument ``action`` is the action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atropos_gym.messages import ToolCall
from atropos_gym.parsing._json import read_json
from atropos_gym.parsing._objects import KEY
from atropos_gym.parsing._scan import scan
from atropos_gym.parsing.parsed import ParsedAction, Reason, invalid
from atropos_gym.parsing.tool_calls import check_call

__all__ = ["TOOL", "read_call"]

TOOL = "act"

_REASONS: dict[str, Reason] = {"bad_json": "bad_json", "unclosed_call": "cut_off"}


def read_call(
    text: str, dialect: str, is_word: bool, read_value: Callable[[Any], ParsedAction]
) -> ParsedAction:
    """Reads the one call of the turn; a second one, even the same, makes it no choice.

    Args:
        text: what is visible of the reply.
        dialect: how calls are written.
        is_word: the action is a word or a number; else text that a dialect carries is read as JSON.
        read_value: reads what stands under ``action``.
    """
    calls, _, _ = scan(text, dialect)
    if not calls:
        return invalid("no_container")
    if len(calls) > 1:
        return invalid("several_actions")
    call = check_call(calls[0])
    if not isinstance(call, ToolCall):
        return invalid(_REASONS.get(call.kind, "no_container"))
    if call.name != TOOL or KEY not in call.arguments:
        return invalid("no_container")
    value = call.arguments[KEY]
    if calls[0].is_text and not is_word:
        read = read_json(value)
        if read.flaw is not None or value[read.end :].strip():
            return invalid(read.flaw or "bad_json")
        value = read.value
    return read_value(value)
