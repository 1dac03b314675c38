"""Finds out how any chat template continues a conversation, by rendering a few probes.

Nothing is known about families and no template is recognised by its text: two that differ in one character
may behave alike, or not. What is derived here is which id closes a turn, what stands between a turn and the
next message, and whether any of that changes with the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.probes import (
    ANSWERED,
    ASKED,
    ASSISTANT_PROBE,
    OTHER_PROBE,
    SYSTEM_PROBE,
    THOUGHT_ANSWERED,
    THOUGHT_PROBE,
    USER_PROBE,
    Encode,
    answered_by,
    behind,
    message,
)
from atropos_gym.rendering.role_form import RoleForm, role_form

__all__ = [
    "ANSWERED",
    "ASKED",
    "ASSISTANT_PROBE",
    "OTHER_PROBE",
    "SYSTEM_PROBE",
    "THOUGHT_PROBE",
    "USER_PROBE",
    "Encode",
    "Probed",
    "answered_by",
    "message",
    "probe",
    "stop_ids_of",
]


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


def stop_ids_of(
    template: ChatTemplate, encode: Encode, controls: frozenset[int], eos_ids: Sequence[int]
) -> tuple[int, ...]:
    """Returns the ids that end a turn: those known, and the first control id behind an answer.

    Ids that the template writes inside one turn of the assistant are no end of it.
    """
    last = behind(template.render(ANSWERED, False), ASSISTANT_PROBE, template, "assistant")
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
    behind(head, USER_PROBE, template, "user")
    generation_prompt = head[len(base) :] if head.startswith(base) else None
    forms: dict[str, RoleForm] = {}
    refused: dict[str, str] = {}
    for role in ("user", "tool"):
        try:
            forms[role] = role_form(template, encode, controls, stops, role, head)
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


def _takes_system(template: ChatTemplate) -> bool:
    """Returns whether a system message is written."""
    try:
        text = template.render([message("system", SYSTEM_PROBE), *ASKED], True)
    except TemplateError:
        return False
    return SYSTEM_PROBE in text
