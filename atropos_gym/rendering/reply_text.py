"""Reads a turn's text: what was thought, what was said, which tools were called."""

from __future__ import annotations

import json
import re

from atropos_gym.messages import ToolCall

__all__ = ["split_channels", "split_thinking"]

_CHANNEL = re.compile(
    r"(?P<header>[^<]*)<\|channel\|>(?P<channel>[^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>(?P<body>.*?)"
    r"(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_ADDRESSEE = re.compile(r"\bto=(?:functions\.)?(\S+)")


def split_thinking(text: str, opened: bool) -> tuple[str | None, str]:
    r"""Returns ``(thinking or None, content)`` of a turn's text.

    Args:
        text: all that was said.
        opened: the generation prompt had opened a think block.

    Example:
        >>> split_thinking("<think>\neasy\n</think>\n\n4", opened=False)
        ('easy', '4')
        >>> split_thinking("still thinking", opened=True)
        ('still thinking', '')
        >>> split_thinking("4", opened=False)
        (None, '4')
    """
    body = text
    if not opened:
        start = text.lstrip()
        if not start.startswith("<think>"):
            return None, text
        body = start[len("<think>") :]
    thinking, closed, content = body.partition("</think>")
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
    for part in _CHANNEL.finditer(text):
        header, channel, body = part["header"], part["channel"].strip(), part["body"]
        addressee = _ADDRESSEE.search(f"{header} {channel}")
        if addressee is not None:
            try:
                arguments = json.loads(body)
            except ValueError:
                arguments = None
            calls.append(ToolCall(addressee[1], arguments if isinstance(arguments, dict) else {"": body}))
        elif channel == "analysis":
            thoughts.append(body)
        elif channel == "final":
            content = body
    return ("\n".join(thoughts) if thoughts else None), content, tuple(calls)
