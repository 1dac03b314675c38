"""What a task asks of a policy's thinking, and whether a reply kept to it.

Thinking is what the renderer found in front of the content, by the model's own tags or behind an opening tag
that the generation prompt had written; a further block inside the content is thinking too, or a rule could be
passed by closing an empty block first. An empty block is no thinking: templates write one to say just that.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Reply
from atropos_gym.rendering import ChatRenderer

__all__ = ["Thinking", "thinking_fault", "thinking_mode", "thinking_renderer", "with_thinking"]

#: ``"auto"``: as the policy likes; ``"required"``, ``"forbidden"``; an int: most ids before the closing tag.
Thinking: TypeAlias = Literal["auto", "required", "forbidden"] | int

#: What chat templates call their own switch.
_SWITCHES = ("enable_thinking", "thinking")
_ANALYSIS, _END_OF_CHANNEL = "<|channel|>analysis", "<|end|>"
_THOUGHT = re.compile(r"(?:\A|(?<=\|>))[^<>]*<\|channel\|>\s*analysis[^<]*(?:<\|message\|>)?")


def thinking_mode(value: Any) -> Thinking:
    """Returns a checked mode.

    Example:
        >>> thinking_mode("required"), thinking_mode(np.int64(200))
        ('required', 200)
    """
    if isinstance(value, str) and value in ("auto", "required", "forbidden"):
        return value  # type: ignore[return-value]
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ConfigError(
        f"thinking must be 'auto', 'required', 'forbidden' or an int >= 1 (most ids before the closing tag), "
        f"got {value!r:.60}"
    )


def thinking_fault(mode: Thinking, reply: Reply, renderer: ChatRenderer) -> str | None:
    """Returns how a reply broke the mode, or None.

    Args:
        mode: what is asked.
        reply: as the renderer read it.
        renderer: knows the model's tags.

    Returns:
        ``"no_thinking"``: asked for and absent or empty; ``"thinking_forbidden"``; ``"unclosed_think"``:
        begun and not closed; ``"thinking_too_long"``: more ids before the closing tag than allowed.

    Example:
        >>> renderer = ChatRenderer("bytes")
        >>> thinking_fault("required", renderer.reply(renderer.say("4")), renderer)
        'no_thinking'
    """
    if mode == "auto":
        return None
    opening, closing = renderer.think_tags
    in_channels = _speaks_in_channels(renderer)
    in_content = not in_channels and opening in reply.content  # a tag in a channel's text is a word
    if reply.thinking is None and not in_content:
        return "no_thinking" if mode == "required" else None
    thought = (reply.thinking or "").strip()
    if mode == "forbidden" and (thought or in_content):
        return "thinking_forbidden"
    if in_channels:
        end = reply.text.find(_END_OF_CHANNEL, _last_thought(reply.text))
    else:
        end = reply.text.find(closing, max(reply.text.rfind(opening), 0))
    if end < 0:
        return "unclosed_think"
    if mode == "required":
        return None if thought else "no_thinking"
    if mode == "forbidden":
        return None
    # Ids may split the tag or join it with what stands around it: one that holds any of it is not before it.
    # So a prefix of the ids is asked whether it says all of the thought and something behind it.
    said = renderer.tokenizer.decode(reply.ids[: mode + 1])
    begun = len(said) > end and said.startswith(reply.text[:end])
    return None if begun else "thinking_too_long"


def _last_thought(text: str) -> int:
    """Returns where the last thought in channels begins; a call may go through the same channel."""
    begins = [found.end() for found in _THOUGHT.finditer(text) if "to=" not in found[0]]
    return begins[-1] if begins else len(text)


def with_thinking(mode: Thinking, content: str, renderer: ChatRenderer) -> str:
    r"""Returns what a policy that does not really think would say to say ``content``.

    Args:
        mode: what is asked.
        content: what follows thinking.
        renderer: knows the model's tags, and what the generation prompt has opened.

    Example:
        >>> with_thinking("auto", "4", ChatRenderer("bytes"))
        '4'
        >>> with_thinking("required", "4", ChatRenderer("bytes"))
        '<think>\n...\n</think>\n\n4'
    """
    opening, closing = renderer.think_tags
    if _speaks_in_channels(renderer):
        thought = f"{_ANALYSIS}<|message|>...{_END_OF_CHANNEL}<|start|>assistant"
        return f"{thought if mode == 'required' else ''}<|channel|>final<|message|>{content}"
    if mode == "required":
        return f"{'' if renderer.opener else opening}\n...\n{closing}\n\n{content}"
    return f"\n{closing}\n\n{content}" if renderer.opener else content


@cache
def _speaks_in_channels(renderer: ChatRenderer) -> bool:
    """Returns whether a turn without channels says nothing (harmony)."""
    return not renderer.opener and renderer.reply(renderer.say("x")).content == ""


_renderers: dict[tuple[int, bool], ChatRenderer] = {}


def thinking_renderer(renderer: ChatRenderer, mode: Thinking) -> ChatRenderer:
    """Returns the renderer whose template is told what is asked, one object per tokenizer and process.

    Args:
        renderer: the tokenizer's own, with default settings.
        mode: what is asked; a template has a switch for ``"required"`` and ``"forbidden"`` alone.
    """
    if mode not in ("required", "forbidden"):
        return renderer
    switches = [name for name in _SWITCHES if renderer.reads(name)]
    if not switches:
        return renderer
    key = id(renderer.tokenizer), mode == "required"
    if key not in _renderers:  # the renderer keeps its tokenizer alive, so an id is never reused
        kwargs = dict.fromkeys(switches, mode == "required")
        _renderers[key] = ChatRenderer(renderer.tokenizer, template_kwargs=kwargs)
    return _renderers[key]
