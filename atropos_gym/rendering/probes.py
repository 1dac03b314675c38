"""Short words and messages that are rendered to see what a chat template does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate

__all__ = [
    "ANSWERED",
    "ASKED",
    "ASSISTANT_PROBE",
    "EXCHANGE",
    "OTHER_PROBE",
    "SCHEMA",
    "SYSTEM_PROBE",
    "THOUGHT_ANSWERED",
    "THOUGHT_PROBE",
    "TOOL_PROBE",
    "USER_PROBE",
    "Encode",
    "answered_by",
    "behind",
    "call_messages",
    "message",
    "short",
    "tail_ids",
    "try_answered_by",
]

# Short words that occur nowhere else and have no white space at their ends.
USER_PROBE, ASSISTANT_PROBE, OTHER_PROBE, SYSTEM_PROBE = "Uq7x", "Aq7x", "Oq7x", "Sq7x"
THOUGHT_PROBE, TOOL_PROBE = "Tq7x", "Fq7x"

Encode = Callable[[str], list[int]]


def message(role: str, content: Any) -> dict[str, Any]:
    """Returns one message."""
    return {"role": role, "content": content}


def call_messages(names: Sequence[str], arguments: Any = None) -> list[dict[str, Any]]:
    """Returns a user's message and an assistant's turn that calls the named tools."""
    calls = [
        {
            "id": f"call{i:05d}",
            "type": "function",
            "function": {"name": name, "arguments": {} if arguments is None else arguments},
        }
        for i, name in enumerate(names)
    ]
    return [message("user", USER_PROBE), {**message("assistant", ""), "tool_calls": calls}]


ASKED = [message("user", USER_PROBE)]
ANSWERED = [*ASKED, message("assistant", ASSISTANT_PROBE)]
THOUGHT_ANSWERED = [
    *ASKED,
    {**ANSWERED[1], "reasoning_content": THOUGHT_PROBE, "thinking": THOUGHT_PROBE},
]
EXCHANGE = [message("user", "Vq7x"), message("assistant", "Bq7x")]
SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL_PROBE,
        "description": TOOL_PROBE,
        "parameters": {"type": "object", "properties": {}},
    },
}


def answered_by(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> str:
    """Renders a history, an answer and a message of ``role``, ending where the assistant is to speak."""
    turn = message("assistant", ASSISTANT_PROBE)
    return template.render([*history, turn, message(role, OTHER_PROBE)], True, tools)


def try_answered_by(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> str | None:
    """Returns ``answered_by``, or None where the template refuses."""
    try:
        return answered_by(template, history, role, tools)
    except TemplateError:
        return None


def behind(text: str, word: str, template: ChatTemplate, role: str) -> str:
    """Returns the text behind a probe that must occur exactly once."""
    if text.count(word) != 1:
        remedy = "; set tool_role='user'" if role == "tool" else "; give another template="
        raise TemplateError(
            f"the chat template of {template.name} drops or repeats the text of role {role!r}: "
            f"{word!r} stands {text.count(word)} times in {short(text)}{remedy}"
        )
    return text.partition(word)[2]


def short(text: str) -> str:
    """Returns the end of a rendered text for an error: preambles are long."""
    return repr(text) if len(text) < 160 else "..." + repr(text[-160:])


def tail_ids(encode: Encode, text: str) -> list[int]:
    """Returns the ids of a text behind an answer; empty where they melt into the answer's."""
    answer, ids = encode(ASSISTANT_PROBE), encode(ASSISTANT_PROBE + text)
    return ids[len(answer) :] if ids[: len(answer)] == answer else []
