"""How a message follows an assistant's turn: which id closes the turn, and whether history changes that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.probes import (
    ANSWERED,
    ASKED,
    ASSISTANT_PROBE,
    EXCHANGE,
    OTHER_PROBE,
    SCHEMA,
    SYSTEM_PROBE,
    TOOL_PROBE,
    USER_PROBE,
    Encode,
    answered_by,
    behind,
    call_messages,
    message,
    short,
    tail_ids,
    try_answered_by,
)

__all__ = ["CloseKind", "RoleForm", "role_form"]

CloseKind = Literal["normal", "header", "history_close_differs", "tool_call"]


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


def role_form(
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
    rest = behind(full, ASSISTANT_PROBE, template, "assistant")
    behind(full, OTHER_PROBE, template, role)
    sep, _, after = rest.partition(OTHER_PROBE)
    if role != "user" and full == try_answered_by(template, ASKED, "assistant"):
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
    longer = [[*EXCHANGE, *ASKED], [*EXCHANGE, *EXCHANGE, *ASKED]]
    return RoleForm(
        kind=kind,
        close=close,
        head_kept=full[: full.index(ASSISTANT_PROBE)] == head,
        independent=all(_follows(template, history, role) in (None, (sep, after)) for history in longer),
        independent_of_system=_follows(template, system, role) in (None, (sep, after)),
        takes_tools=TOOL_PROBE not in "".join(_follows(template, ASKED, role, [SCHEMA]) or ()),
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
        f"the chat template of {template.name} ends a turn without a token boundary before {short(rest)} "
        f"(role {role}): give template= that closes a turn with a control token"
    )


def _follows(
    template: ChatTemplate, history: Sequence[dict[str, Any]], role: str, tools: Any = None
) -> tuple[str, str] | None:
    """Returns what stands before and behind a message after a turn, or None where the template refuses."""
    full = try_answered_by(template, history, role, tools)
    if full is None:
        return None
    sep, _, after = full.partition(ASSISTANT_PROBE)[2].partition(OTHER_PROBE)
    return sep, after


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
    behind(full, OTHER_PROBE, template, role)
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
            f"{short(rest)} (role {role}): set tool_role='user'"
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
        independent=follows(EXCHANGE) in (None, rest),
        independent_of_system=follows([message("system", SYSTEM_PROBE)]) in (None, rest),
    )
