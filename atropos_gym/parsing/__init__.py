"""From an assistant's text to one action of a Gymnasium space, and to calls of tools.

``parse_action`` reads one action in the declared format, ``parse_tool_calls`` the calls of a model family's
dialect; ``format_action`` and ``describe_format`` are the way back: what a policy says, and how it is asked.

The rooms: ``actions`` (which format reads what), ``parsed`` (the result and its reasons), ``saying`` (the
way back), ``tool_calls`` (calls, checked). Below them: ``_text`` (what of a reply counts), ``_words`` (the
words of a discrete space), ``_values`` (JSON to members of a space), ``_json`` (strict JSON), ``_tag``,
``_objects``, ``_phrases``, ``_calls`` (one file a container), ``_dialects``, ``_scan``,
``_schema`` and ``_schema_values`` (of calls).
"""

from __future__ import annotations

from atropos_gym.parsing.actions import ActionFormat, parse_action
from atropos_gym.parsing.parsed import REASONS, ParsedAction, Reason
from atropos_gym.parsing.saying import (
    ACTION_FORMATS,
    action_tool,
    describe_format,
    format_action,
    format_call,
)
from atropos_gym.parsing.tool_calls import (
    TOOL_DIALECTS,
    ToolCallError,
    ToolCalls,
    check_tools,
    parse_tool_calls,
)

__all__ = [
    "ACTION_FORMATS",
    "REASONS",
    "TOOL_DIALECTS",
    "ActionFormat",
    "ParsedAction",
    "Reason",
    "ToolCallError",
    "ToolCalls",
    "action_tool",
    "check_tools",
    "describe_format",
    "format_action",
    "format_call",
    "parse_action",
    "parse_tool_calls",
]
