"""Finds out how any chat template continues a conversation, by rendering a few probes.

Nothing is known about families and no template is recognised by its text: two that differ in one character
may behave alike, or not. What is derived here is which id closes a turn, what stands between a turn and the
next message, and whether any of that changes with the history.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate

__all__ = [
    "ANSWERED",
    "ASKED",
    "ASSISTANT_PROBE",
    "OTHER_PROBE",
    "SYSTEM_PROBE",
    "THOUGHT_ANSWERED",
    "THOUGHT_PROBE",
    "USER_PROBE",
    "CloseKind",
    "Encode",
    "Probed",
    "RoleForm",
    "answered_by",
    "call_messages",
    "message",
    "probe",
    "stop_ids_of",
    "tail_ids",
]

CloseKind = Literal["normal", "header", "history_close_differs", "tool_call"]

# Short words that occur nowhere else and have no white space at their ends.
USER_PROBE, ASSISTANT_PROBE, OTHER_PROBE, SYSTEM_PROBE = "Uq7x", "Aq7x", "Oq7x", "Sq7x"
THOUGHT_PROBE, TOOL_PROBE = "Tq7x", "Fq7x"

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class RoleForm:
    """How a message of one role follows an assistant's turn.

    Attributes:
        kind: how the turn is closed in front of it.
        close: the id that closes the turn there (for ``header``: that opens the message).
        head_kept: history shows the same text before a turn as its prompt had.
        independent: what follows a turn does not change with the history before it.
        independent_of_system: nor with a system message.
        takes_tools: bridges are rendered with the schemas of tools: nothing there repeats them.
        skips: for each stop id in front of the message how many ids stand up to and with it.
        anchored: no token begins where a turn ends, so that text is encoded with the turn's last word.
    """

    kind: CloseKind
    close: int
    head_kept: bool
    independent: bool
    independent_of_system: bool
    takes_tools: bool = True
    skips: Mapping[int, int] = field(default_factory=dict)
    anchored: bool = False


@dataclass(frozen=True, slots=True)
class Probed:
    """What a template does.

    Attributes:
        head: the render of one user message with a generation prompt.
        generation_prompt: text of the assistant's header; None where it is no suffix of the prompt.
        opening: what stands between the last message and what the assistant says.
        ending: what ``say`` puts behind a text: ids, the last one a stop id.
        forms: by role; a refused role has the reason in ``refused``.
        takes_system: the template writes a system message.
    """

    head: str
    generation_prompt: str | None
    opening: str
    ending: list[int]
    forms: dict[str, RoleForm]
    refused: dict[str, str]
    takes_system: bool


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
_EXCHANGE = [message("user", "Vq7x"), message("assistant", "Bq7x")]
_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL_PROBE,
        "description": TOOL_PROBE,
        "parameters": {"type": "object", "properties": {}},
    },
}


def stop_ids_of(
    template: ChatTemplate, encode: Encode, controls: frozenset[int], eos_ids: Sequence[int]
) -> tuple[int, ...]:
    """Returns the ids that end a turn: those known, and the first control id behind an answer.

    Ids that the template writes inside one turn of the assistant are no end of it.
    """
    last = _behind(template.render(ANSWERED, False), ASSISTANT_PROBE, template, "assistant")
    closing = [i for i in encode(last) if i in controls][:1]
    inside: set[int] = set()
    try:
        text = template.render(THOUGHT_ANSWERED, False)
    except TemplateError:
        text = ""
    start, end = text.find(THOUGHT_PROBE), text.find(ASSISTANT_PROBE)
    if -1 < start < end:
        inside = set(encode(text[start + len(THOUGHT_PROBE) : end]))
    return tuple(dict.fromkeys(i for i in [*closing, *eos_ids] if i in closing or i not in inside))


def probe(
    template: ChatTemplate, encode: Encode, controls: frozenset[int], stop_ids: Sequence[int]
) -> Probed:
    """Derives how ``template`` continues a conversation.

    Args:
        template: the template.
        encode: rendered text to ids, control tokens included.
        controls: ids of control tokens.
        stop_ids: ids that end a turn when sampled.

    Raises:
        TemplateError: no end of turn, a generation prompt that is ignored, or a user message that does not
            survive.
    """
    stops = frozenset(stop_ids)
    head, base = template.render(ASKED, True), template.render(ASKED, False)
    _behind(head, USER_PROBE, template, "user")
    generation_prompt = head[len(base) :] if head.startswith(base) else None
    forms: dict[str, RoleForm] = {}
    refused: dict[str, str] = {}
    for role in ("user", "tool"):
        try:
            forms[role] = _form(template, encode, controls, stops, role, head)
        except TemplateError as error:
            if role == "user":
                raise
            refused[role] = str(error)
    if generation_prompt == "":
        _check_generation_prompt(template, encode, controls, head)
    last = template.render(ANSWERED, False)
    return Probed(
        head=head,
        generation_prompt=generation_prompt,
        opening=head[head.rindex(USER_PROBE) + len(USER_PROBE) :],
        ending=_ending(encode(last.partition(ASSISTANT_PROBE)[2]), controls, stops, forms["user"]),
        forms=forms,
        refused=refused,
        takes_system=_takes_system(template),
    )


def _check_generation_prompt(
    template: ChatTemplate, encode: Encode, controls: frozenset[int], head: str
) -> None:
    """Raises where a prompt ends without the header that an answer has."""
    full = answered_by(template, ASKED, "user")
    left = full[: full.index(ASSISTANT_PROBE)]
    extra = left[len(head) :] if left.startswith(head) else ""
    if not controls.intersection(encode(extra) if extra else ()):
        return
    # Some templates write the header unasked: then another user message has it not behind it.
    tail = head[head.rindex(USER_PROBE) + len(USER_PROBE) :]
    try:
        two = template.render([*ASKED, message("user", OTHER_PROBE)], False)
    except TemplateError:
        two = USER_PROBE + tail + OTHER_PROBE
    if two.partition(USER_PROBE)[2].startswith(tail):
        raise TemplateError(
            f"the chat template of {template.name} ignores add_generation_prompt: it writes {extra!r} before "
            "an answer of role assistant but not at the end of a prompt; give template= with a generation "
            "prompt"
        )


def _ending(ids: list[int], controls: frozenset[int], stops: frozenset[int], user: RoleForm) -> list[int]:
    """Returns what closes a turn that a policy would have sampled: control ids, no blank before them."""
    for position, token in enumerate(ids):
        if token in stops:
            return [*(i for i in ids[:position] if i in controls), token]
    return [user.close]


def answered_by(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> str:
    """Renders a history, an answer and a message of ``role``, ending where the assistant is to speak."""
    turn = message("assistant", ASSISTANT_PROBE)
    return template.render([*history, turn, message(role, OTHER_PROBE)], True, tools)


def _behind(text: str, word: str, template: ChatTemplate, role: str) -> str:
    """Returns the text behind a probe that must occur exactly once."""
    if text.count(word) != 1:
        remedy = "; set tool_role='user'" if role == "tool" else "; give another template="
        raise TemplateError(
            f"the chat template of {template.name} drops or repeats the text of role {role!r}: "
            f"{word!r} stands {text.count(word)} times in {_short(text)}{remedy}"
        )
    return text.partition(word)[2]


def _short(text: str) -> str:
    """Returns the end of a rendered text for an error: preambles are long."""
    return repr(text) if len(text) < 160 else "..." + repr(text[-160:])


def _form(
    template: ChatTemplate,
    encode: Encode,
    controls: frozenset[int],
    stops: frozenset[int],
    role: str,
    head: str,
) -> RoleForm:
    """Derives how a message of ``role`` follows a turn (rendering rules: sep, after, close)."""
    try:
        full = answered_by(template, ASKED, role)
    except TemplateError:
        if role == "user":
            raise
        return _call_form(template, encode, stops, role)
    rest = _behind(full, ASSISTANT_PROBE, template, "assistant")
    _behind(full, OTHER_PROBE, template, role)
    sep, _, after = rest.partition(OTHER_PROBE)
    if role != "user" and full == _try_answered_by(template, ASKED, "assistant"):
        raise TemplateError(
            f"the chat template of {template.name} writes role {role!r} as an assistant's turn: "
            "set tool_role='user'"
        )
    kind, close = _close(template, encode, controls, stops, role, sep, after)
    anchored = _anchored(template, encode, full, rest, role)
    between = tail_ids(encode, sep) if anchored else encode(sep)
    skips: dict[int, int] = {}
    for position, token in enumerate(between):
        if token in stops or token == close:
            skips.setdefault(token, position + 1)
    system = [message("system", SYSTEM_PROBE), *ASKED]
    longer = [[*_EXCHANGE, *ASKED], [*_EXCHANGE, *_EXCHANGE, *ASKED]]
    return RoleForm(
        kind=kind,
        close=close,
        head_kept=full[: full.index(ASSISTANT_PROBE)] == head,
        independent=all(_follows(template, history, role) in (None, (sep, after)) for history in longer),
        independent_of_system=_follows(template, system, role) in (None, (sep, after)),
        takes_tools=TOOL_PROBE not in "".join(_follows(template, ASKED, role, [_SCHEMA]) or ()),
        skips=skips,
        anchored=anchored,
    )


def _anchored(template: ChatTemplate, encode: Encode, full: str, rest: str, role: str) -> bool:
    """Returns whether the text behind an answer has ids of its own only next to the answer's last word.

    Raises:
        TemplateError: it has none there either: the answer's last id changes with what follows.
    """
    ids, tail = encode(full), encode(rest)
    if ids[len(ids) - len(tail) :] == tail:
        return False
    tail = tail_ids(encode, rest)
    if tail and ids[len(ids) - len(tail) :] == tail:
        return True
    raise TemplateError(
        f"the chat template of {template.name} ends a turn without a token boundary before {_short(rest)} "
        f"(role {role}): give template= that closes a turn with a control token"
    )


def tail_ids(encode: Encode, text: str) -> list[int]:
    """Returns the ids of a text behind an answer; empty where they melt into the answer's."""
    answer, ids = encode(ASSISTANT_PROBE), encode(ASSISTANT_PROBE + text)
    return ids[len(answer) :] if ids[: len(answer)] == answer else []


def _follows(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> tuple[str, str] | None:
    """Returns what stands before and behind a message after a turn, or None where the template refuses."""
    full = _try_answered_by(template, history, role, tools)
    if full is None:
        return None
    sep, _, after = full.partition(ASSISTANT_PROBE)[2].partition(OTHER_PROBE)
    return sep, after


def _try_answered_by(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> str | None:
    """Returns ``answered_by``, or None where the template refuses."""
    try:
        return answered_by(template, history, role, tools)
    except TemplateError:
        return None


def _close(
    template: ChatTemplate,
    encode: Encode,
    controls: frozenset[int],
    stops: frozenset[int],
    role: str,
    sep: str,
    after: str,
) -> tuple[CloseKind, int]:
    """Returns how and with which id a turn is closed in front of a message."""
    last = template.render(ANSWERED, False).partition(ASSISTANT_PROBE)[2]
    at_end = next((i for i in encode(last) if i in stops), None)
    between = encode(sep)
    inside = next((i for i in between if i in stops), None)
    if at_end is not None and at_end == inside:
        return "normal", at_end
    if at_end is None and between and between[0] in stops:
        return "header", between[0]
    control = next((i for i in between if i in controls), None)
    if at_end is not None and control is not None and not _is_header(template, encode, sep, after, control):
        return "history_close_differs", control
    if inside is not None:  # the template closes a turn only when something follows it
        return "normal", inside
    raise TemplateError(
        f"the chat template of {template.name} writes no end of turn: {sep!r} stands between an answer and a "
        f"{role} message and holds none of the stop ids {sorted(stops)}; give stop_ids= or another template="
    )


def _is_header(template: ChatTemplate, encode: Encode, sep: str, after: str, control: int) -> bool:
    """Returns whether a control id between turns opens the next message and closes nothing.

    It stands in front of a first message too, and messages of others are not closed by it.
    """
    before = template.render(ASKED, True).partition(USER_PROBE)[0]
    return before.endswith(sep) and control not in encode(after)


def _call_form(template: ChatTemplate, encode: Encode, stops: frozenset[int], role: str) -> RoleForm:
    """Derives the form of a tool message that needs a tool call before it."""
    history = call_messages(["probe"])
    result = {**message(role, OTHER_PROBE), "name": "probe", "tool_call_id": "call00000"}
    before = template.render(history, False)
    full = template.render([*history, result], True)
    _behind(full, OTHER_PROBE, template, role)
    if not full.startswith(before):
        raise TemplateError(
            f"the chat template of {template.name} rewrites a tool call before its result (role {role}): "
            "set tool_role='user'"
        )
    close = next((i for i in reversed(encode(before)) if i in stops), None)
    if close is None:
        raise TemplateError(
            f"the chat template of {template.name} ends a tool call (role {role}) with none of the stop ids "
            f"{sorted(stops)}: give stop_ids= that hold its end, or set tool_role='user'"
        )
    rest = full[len(before) :]
    ids, tail = encode(full), encode(rest)
    if ids[len(ids) - len(tail) :] != tail:
        raise TemplateError(
            f"the chat template of {template.name} ends a tool call without a token boundary before "
            f"{_short(rest)} (role {role}): set tool_role='user'"
        )

    def follows(earlier: list[dict[str, Any]]) -> str | None:
        try:
            text = template.render([*earlier, *history], False)
            return template.render([*earlier, *history, result], True).removeprefix(text)
        except TemplateError:
            return None

    return RoleForm(
        "tool_call",
        close,
        head_kept=False,
        independent=follows(_EXCHANGE) in (None, rest),
        independent_of_system=follows([message("system", SYSTEM_PROBE)]) in (None, rest),
    )


def _takes_system(template: ChatTemplate) -> bool:
    """Returns whether a system message is written."""
    try:
        text = template.render([message("system", SYSTEM_PROBE), *ASKED], True)
    except TemplateError:
        return False
    return SYSTEM_PROBE in text
