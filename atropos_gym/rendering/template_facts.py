"""What a chat template does to a conversation, as facts: found by rendering, never by its text."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.reply_text import ThinkTags
from atropos_gym.rendering.template_probe import (
    ANSWERED,
    ASKED,
    ASSISTANT_PROBE,
    OTHER_PROBE,
    SYSTEM_PROBE,
    THOUGHT_PROBE,
    USER_PROBE,
    Encode,
    Probed,
    answered_by,
    message,
)
from atropos_gym.rendering.template_reading import opened_tag

__all__ = ["template_facts"]

_ANSWERS = {
    "plain": "Hi there",
    "whitespace": " Hi \n",
    "thinking": "<think>\nrr\n</think>\n\nHi",
    "empty": "",
}
#: Variables that every template gets, or that transformers itself provides.
_GIVEN = frozenset(
    "messages tools documents add_generation_prompt bos_token eos_token pad_token unk_token "
    "raise_exception strftime_now".split()
)


def template_facts(
    template: ChatTemplate, probed: Probed, encode: Encode, controls: Container[int], tags: ThinkTags
) -> dict[str, Any]:
    """Returns what a template does, ready for JSON.

    Keys: ``generation_prompt`` (None: not a suffix), ``head`` (text of one user message with it),
    ``history_keeps`` (by kind of answer), ``last_turn_is_prefix``, ``user_text_kept``, ``system_role``,
    ``roles_alternate``, ``preamble`` (what stands before the first message unasked, but for BOS),
    ``preamble_stays`` (also where a system message is given), ``takes_tools``, ``variables`` (that
    ``template_kwargs`` can set), ``clock`` (the date that was pinned, or None), ``end_of_turn`` (the id that
    the template writes behind a last answer, or None), ``header_ids`` (control ids of the generation prompt),
    ``writes_thoughts`` (the template knows think tags) and ``thoughts_kept`` (history shows thoughts);
    by role (``user``, ``tool``) either ``refused`` or ``close``, ``close_kind``,
    ``history_head_equals_prompt`` and ``bridge_independent_of_history``.

    Args:
        template: the template.
        probed: what it does.
        encode: rendered text to ids.
        controls: ids that only the template writes.
        tags: what stands around thoughts.
    """
    full = answered_by(template, ASKED, "user")
    sep = full.partition(ASSISTANT_PROBE)[2].partition(OTHER_PROBE)[0]
    last = template.render(ANSWERED, False)
    ending = encode(last.partition(ASSISTANT_PROBE)[2])
    before = probed.head.partition(USER_PROBE)[0].removeprefix(template.bos)
    preamble = _preamble(before, sep)
    found: dict[str, Any] = {
        "generation_prompt": probed.generation_prompt,
        "head": probed.head,
        "history_keeps": _history_keeps(template, probed.head, sep),
        "last_turn_is_prefix": full.startswith(last),
        "user_text_kept": "  " + OTHER_PROBE in template.render([message("user", "  " + OTHER_PROBE)], True),
        "system_role": probed.takes_system,
        "roles_alternate": not _renders(template, [*ASKED, message("user", OTHER_PROBE)]),
        "preamble": preamble,
        "preamble_stays": bool(preamble) and probed.takes_system and preamble in _with_system(template),
        "takes_tools": _takes_tools(template, probed.head),
        "variables": sorted(_variables(template.tree) - _GIVEN),
        "clock": template.today.isoformat() if template.today else None,
        "end_of_turn": next((token for token in ending if token in controls), None),
        "writes_thoughts": tags.opening in template.literals,
        "thoughts_kept": _thoughts_kept(template, probed, tags),
        "header_ids": [i for i in encode(probed.generation_prompt or "") if i in controls],
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


def _history_keeps(template: ChatTemplate, head: str, sep: str) -> dict[str, bool]:
    """Returns for each kind of answer whether history shows it as it was said."""
    kept: dict[str, bool] = {}
    for name, content in _ANSWERS.items():
        turn = [message("assistant", content), message("user", OTHER_PROBE)]
        try:
            kept[name] = template.render([*ASKED, *turn], True).startswith(head + content + sep)
        except TemplateError:
            kept[name] = False
    return kept


def _thoughts_kept(template: ChatTemplate, probed: Probed, tags: ThinkTags) -> bool:
    """Returns whether an earlier answer is shown with the thoughts that were said before it."""
    opened = "" if opened_tag(probed.opening, tags) else tags.opening
    said = f"{opened}\n{THOUGHT_PROBE}\n{tags.closing}\n\n{ASSISTANT_PROBE}"
    turn = [message("assistant", said), message("user", OTHER_PROBE)]
    try:
        return THOUGHT_PROBE in template.render([*ASKED, *turn], True)
    except TemplateError:
        return False


def _preamble(before: str, sep: str) -> str:
    """Returns what stands before the first message and not before later ones."""
    header = 0
    while header < min(len(before), len(sep)) and before[-1 - header] == sep[-1 - header]:
        header += 1
    return before[: len(before) - header]


def _with_system(template: ChatTemplate) -> str:
    """Returns a prompt with a system message of the user's own."""
    return template.render([message("system", SYSTEM_PROBE), *ASKED], True)


def _renders(template: ChatTemplate, messages: list[dict[str, Any]]) -> bool:
    """Returns whether the template takes these messages."""
    try:
        template.render(messages, True)
    except TemplateError:
        return False
    return True


def _takes_tools(template: ChatTemplate, head: str) -> bool:
    """Returns whether schemas of tools are written into the prompt."""
    schema = {"name": OTHER_PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        text = template.render(ASKED, True, [{"type": "function", "function": schema}])
    except TemplateError:
        return False
    return OTHER_PROBE in text


def _variables(tree: Any) -> set[str]:
    """Returns the names that a parsed template reads and does not set itself."""
    import jinja2.meta
    import jinja2.nodes

    # Names that some branch sets are the template's own, unless it asks whether they were given.
    own = {name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "store"}
    tests = [test for test in tree.find_all(jinja2.nodes.Test) if test.name in ("defined", "undefined")]
    asked = {test.node.name for test in tests if isinstance(test.node, jinja2.nodes.Name)}
    return jinja2.meta.find_undeclared_variables(tree) - (own - asked)
