"""What a task asks of a policy's thinking, and whether a reply kept to it.

Thinking is what the renderer found in front of the content, by the model's own tags or behind an opening tag
that the generation prompt had written; a further block inside the content is thinking too, or a rule could be
passed by closing an empty block first. An empty block is no thinking: templates write one to say just that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_OPEN, _CLOSE = "<think>", "</think>"
_ANALYSIS, _END_OF_CHANNEL = "<|channel|>analysis", "<|end|>"


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


def thinking_fault(mode: Thinking, reply: Reply, decode: Callable[[Sequence[int]], str]) -> str | None:
    """Returns how a reply broke the mode, or None.

    Args:
        mode: what is asked.
        reply: as the renderer read it.
        decode: ids to text, of the tokenizer that sampled them.

    Returns:
        ``"no_thinking"``: asked for and absent or empty; ``"unclosed_think"``: begun and not closed;
        ``"thinking_forbidden"``; ``"thinking_too_long"``: more ids before the closing tag than allowed.

    Example:
        >>> thinking_fault("required", Reply("4", "4"), lambda ids: "4")
        'no_thinking'
    """
    if mode == "auto":
        return None
    if reply.thinking is None and _OPEN not in reply.content:
        return "no_thinking" if mode == "required" else None
    end = _end_of_thinking(reply.text)
    if end < 0:
        return "unclosed_think"
    thought = (reply.thinking or "").strip()
    if mode == "required":
        return None if thought else "no_thinking"
    if mode == "forbidden":
        return "thinking_forbidden" if thought or _OPEN in reply.content else None
    # Ids may split the tag or join it with what stands around it; one that holds any of it is not before it.
    # No further id changes a text that ends in a whole "<", so one prefix of the ids decides.
    begun = decode(reply.ids[: mode + 1]).startswith(reply.text[: end + 1])
    return None if begun else "thinking_too_long"


def _end_of_thinking(text: str) -> int:
    """Returns where the tag that closes the last thought begins; -1 where that thought is open."""
    if _ANALYSIS in text:
        return text.find(_END_OF_CHANNEL, text.rfind(_ANALYSIS))
    return text.find(_CLOSE, max(text.rfind(_OPEN), 0))


def with_thinking(mode: Thinking, content: str, opened: str) -> str:
    r"""Returns what a policy that does not really think would say to say ``content``.

    Args:
        mode: what is asked.
        content: what follows thinking.
        opened: what the generation prompt has opened, or "".

    Example:
        >>> with_thinking("auto", "4", opened=""), with_thinking("auto", "4", opened="<think>")
        ('4', '\n</think>\n\n4')
        >>> with_thinking("required", "4", opened="")
        '<think>\n...\n</think>\n\n4'
    """
    if mode == "required":
        return f"{'' if opened else _OPEN}\n...\n{_CLOSE}\n\n{content}"
    return f"\n{_CLOSE}\n\n{content}" if opened else content


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
