"""What a person may want to know about a chat template before training on it."""

from __future__ import annotations

from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.template_probe import (
    ANSWERED,
    ASKED,
    ASSISTANT_PROBE,
    OTHER_PROBE,
    Probed,
    answered_by,
    message,
)

__all__ = ["report"]

_ANSWERS = {
    "plain": "Hi there",
    "whitespace": " Hi \n",
    "thinking": "<think>\nrr\n</think>\n\nHi",
    "empty": "",
}


def report(template: ChatTemplate, probed: Probed) -> dict[str, Any]:
    """Returns what a person may want to know: flags, and a one-line note for each that fails.

    Keys: ``generation_prompt``, ``history_keeps`` (by kind of answer), ``last_turn_is_prefix``,
    ``user_text_kept``, ``system_role``, ``roles_alternate``, ``notes``; by role (``user``, ``tool``) either
    ``refused`` or ``close``, ``close_kind``, ``history_head_equals_prompt`` and
    ``bridge_independent_of_history``.
    """
    head = probed.head
    notes: list[str] = []
    full = answered_by(template, ASKED, "user")
    left, _, rest = full.partition(ASSISTANT_PROBE)
    sep = rest.partition(OTHER_PROBE)[0]
    if left != head:
        notes.append(f"history shows {left!r:.120} before a turn whose prompt was {head!r:.120}")
    kept: dict[str, bool] = {}
    for name, content in _ANSWERS.items():
        turn = [message("assistant", content), message("user", OTHER_PROBE)]
        try:
            kept[name] = template.render([*ASKED, *turn], True).startswith(head + content + sep)
        except TemplateError:
            kept[name] = False
        if not kept[name]:
            notes.append(f"history does not keep an answer as said: {content!r}")
    is_prefix = full.startswith(template.render(ANSWERED, False))
    if not is_prefix:
        notes.append("the last turn is written differently once something follows it")
    found: dict[str, Any] = {
        "generation_prompt": probed.generation_prompt,
        "history_keeps": kept,
        "last_turn_is_prefix": is_prefix,
        "user_text_kept": "  " + OTHER_PROBE in template.render([message("user", "  " + OTHER_PROBE)], True),
        "system_role": probed.takes_system,
        "roles_alternate": _refuses_two_in_a_row(template),
        "notes": notes,
    }
    for role in ("user", "tool"):
        form = probed.forms.get(role)
        found[role] = (
            {"refused": probed.refused[role]}
            if form is None
            else {
                "close": form.close,
                "close_kind": form.kind,
                "history_head_equals_prompt": form.head_kept,
                "bridge_independent_of_history": form.independent and form.independent_of_system,
            }
        )
    return found


def _refuses_two_in_a_row(template: ChatTemplate) -> bool:
    """Returns whether two user messages in a row are refused."""
    try:
        template.render([*ASKED, message("user", OTHER_PROBE)], True)
    except TemplateError:
        return True
    return False
