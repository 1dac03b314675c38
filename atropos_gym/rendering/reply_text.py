"""Reads a turn's text: what was thought, what was said, which tools were called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from atropos_gym.messages import ToolCall

__all__ = ["THINK", "ThinkTags", "split_channels", "split_thinking"]


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """What a family of models writes around its thoughts."""

    opening: str
    closing: str


THINK = ThinkTags("<think>", "</think>")

_CONTROL = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_ADDRESSEE = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def split_thinking(text: str, opened: bool, tags: ThinkTags = THINK) -> tuple[str | None, str]:
    r"""Returns ``(thinking or None, content)`` of a turn's text.

    Args:
        text: all that was said.
        opened: the generation prompt had opened a think block.
        tags: what stands around thoughts.

    Example:
        >>> split_thinking("<think>\neasy\n</think>\n\n4", opened=False)
        ('easy', '4')
        >>> split_thinking("still thinking", opened=True)
        ('still thinking', '')
        >>> split_thinking("[THINK]hm[/THINK]4", False, ThinkTags("[THINK]", "[/THINK]"))
        ('hm', '4')
        >>> split_thinking("4", opened=False)
        (None, '4')
    """
    body = text
    if not opened:
        start = text.lstrip()
        if not start.startswith(tags.opening):
            return None, text
        body = start[len(tags.opening) :]
    thinking, closed, content = body.partition(tags.closing)
    return thinking.strip("\n"), content.lstrip("\n") if closed else ""


def split_channels(text: str) -> tuple[str | None, str, tuple[ToolCall, ...]]:
    """Returns ``(thinking or None, content, calls)`` of a turn made of channels (harmony).

    Content is the last ``final`` message, thinking the ``analysis`` ones; a message addressed with ``to=``
    is a tool call. A call whose body is no JSON object carries it under the key ``""``.

    Example:
        >>> split_channels("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>4")
        ('hm', '4', ())
    """
    thoughts: list[str] = []
    content = ""
    calls: list[ToolCall] = []
    for header, channel, body in _channel_messages(text):
        addressee = _ADDRESSEE.search(f"{header} {channel}")
        if addressee is not None:
            calls.append(ToolCall(addressee[1], _arguments(body)))
        elif channel.startswith("analysis"):
            thoughts.append(body)
        elif channel.startswith("final"):
            content = body
    return ("\n".join(thoughts) if thoughts else None), content, tuple(calls)


def _channel_messages(text: str) -> list[tuple[str, str, str]]:
    """Returns ``(header, channel, body)`` of each message of a turn; a cut one counts."""
    found: list[tuple[str, str, str]] = []
    part, parts = "header", {"header": "", "channel": "", "constrain": "", "message": ""}
    at = 0
    for control in [*_CONTROL.finditer(text), None]:
        end = len(text) if control is None else control.start()
        parts[part] += text[at:end]
        name = None if control is None else control[1]
        if name in ("channel", "constrain", "message") and part != "message":
            part = name
        else:
            if part == "message":
                found.append((parts["header"], parts["channel"].strip(), parts["message"]))
            part, parts = ("channel" if name == "channel" else "header"), dict.fromkeys(parts, "")
        at = end if control is None else control.end()
    return found


def _arguments(body: str) -> dict[str, object]:
    """Returns a call's arguments, or the body as it stands under the key ``""``."""
    try:
        arguments = json.loads(body)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"": body}
