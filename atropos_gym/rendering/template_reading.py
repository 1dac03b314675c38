"""How a family of models writes a turn: found from what its template can write."""

from __future__ import annotations

import re
from collections.abc import Iterable

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.probes import (
    ASKED,
    ASSISTANT_PROBE,
    THOUGHT_ANSWERED,
    THOUGHT_PROBE,
    message,
)
from atropos_gym.rendering.reply_text import THINK, ThinkTags

__all__ = ["opened_tag", "speaks_in_channels", "think_tags", "tool_dialect"]

# What stands next to a thought: a tag, in one family with a word behind it.
_BEFORE = re.compile(r"(<[^<>\s]+>(?:thought)?|\[[A-Z_]+\])\s*\Z")
_BEHIND = re.compile(r"\s*(<[^<>\s]+>|\[/[A-Z_]+\])")
_NAMED = re.compile(r"<[^<>\s/]*(?:think|thought)[^<>\s]*>|\[THINK\]", re.IGNORECASE)

#: A spelling that only one family's calls have, the most telling first.
_DIALECTS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", None),
    ("<tool_call>", "hermes"),
    ("<｜tool▁call▁begin｜>", None),
    ("<|python_tag|>", "llama3_json"),
    ('{"name": function name, "parameters"', "llama3_json"),
)


def think_tags(template: ChatTemplate, head: str, spellings: Iterable[str]) -> ThinkTags:
    """Returns what stands around this family's thoughts.

    Args:
        template: the template.
        head: its render of one user message with a generation prompt.
        spellings: contents of the tokenizer's added tokens.

    Returns:
        The tags next to a thought in a rendered answer; else those that template or tokenizer can write and
        whose names tell it; else ``<think>``.
    """
    return _shown_tags(template, head) or _named_tags(template.literals, spellings) or THINK


def _shown_tags(template: ChatTemplate, head: str) -> ThinkTags | None:
    """Returns the tags around the reasoning of an answer, where the template writes it."""
    in_parts = [{"type": "thinking", "thinking": THOUGHT_PROBE}, {"type": "text", "text": ASSISTANT_PROBE}]
    for talk in (THOUGHT_ANSWERED, [*ASKED, message("assistant", in_parts)]):
        try:
            text = template.render(talk, False)
            without = template.render([*ASKED, message("assistant", ASSISTANT_PROBE), *ASKED], True)
        except TemplateError:
            continue
        before, found, behind = text.partition(THOUGHT_PROBE)
        opening, closing = _BEFORE.search(before), _BEHIND.match(behind)
        if not found or opening is None or closing is None or ASSISTANT_PROBE not in behind:
            continue
        header = opening[1] in without and "think" not in opening[1].lower()
        if not header:
            return ThinkTags(opening[1], closing[1])
    return None


def _named_tags(literals: str, spellings: Iterable[str]) -> ThinkTags | None:
    """Returns a pair of tags with a telling name among all that can be written."""
    writable = "\0".join([literals, *spellings])
    for opening in dict.fromkeys(_NAMED.findall(writable)):
        for closing in (
            f"</{opening[1:]}",
            f"[/{opening[1:]}",
            opening.replace("START", "END"),
            opening.replace("begin", "end"),
            opening.replace("start", "end"),
        ):
            if closing != opening and closing in writable:
                return ThinkTags(opening, closing)
    return None


def opened_tag(opening: str, tags: ThinkTags) -> str:
    r"""Returns the opening tag that a generation prompt leaves open, or "".

    Example:
        >>> opened_tag("<|im_start|>assistant\n<think>\n", THINK)
        '<think>'
        >>> opened_tag("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
        ''
    """
    _, found, behind = opening.rpartition(tags.opening)
    return tags.opening if found and tags.closing not in behind else ""


def speaks_in_channels(literals: str) -> bool:
    """Returns whether a turn is made of channels (harmony)."""
    return "<|channel|>" in literals and "<|message|>" in literals


def tool_dialect(literals: str) -> str | None:
    """Returns the form of tool calls that the template writes or asks for, or None.

    Example:
        >>> tool_dialect("return a json object within <tool_call></tool_call>")
        'hermes'
    """
    return next((dialect for spelling, dialect in _DIALECTS if spelling in literals), None)
