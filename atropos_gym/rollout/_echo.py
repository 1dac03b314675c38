"""Whether a message that a program sends back is one that we know.

Programs send the whole conversation with every request, and not always as it was: white space is trimmed,
thoughts are left out, a call's arguments are written anew. A reply is known by what it was: the ids of its
calls and the letters of its text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atropos_gym.messages import Message, Reply

__all__ = ["Key", "echo_of", "key_of", "text_of"]

Key = tuple[str, ...]
"""What a message says: equal for two that say the same."""


def key_of(message: Mapping[str, Any]) -> Key:
    """Returns what two messages that say the same have in common.

    White space in the assistant's does not count.

    Example:
        >>> part = {"type": "text", "text": "hi"}
        >>> key_of({"role": "user", "content": "hi"}) == key_of({"role": "user", "content": [part]})
        True
        >>> key_of({"role": "user", "content": "hi"}) == key_of({"role": "user", "content": "hi "})
        False
    """
    role = "system" if message["role"] == "developer" else message["role"]
    said = text_of(message.get("content"))
    if role == "assistant":
        said = _letters(said)
    calls = _calls(message)
    called = json.dumps(calls, sort_keys=True, default=repr) if calls else ""
    return role, said, text_of(message.get("name")), text_of(message.get("tool_call_id")), called


def echo_of(said: Message, reply: Reply, message: Mapping[str, Any]) -> int:
    """Returns how surely a message is a reply sent back: 0 not at all, 1 by its letters, 2 exactly, 3 itself.

    Args:
        said: the reply as it was answered.
        reply: the reply.
        message: what came back.
    """
    if message is said:
        return 3
    if message["role"] != "assistant":
        return 0
    calls = _calls(said)
    if _calls(message) != calls:
        return 0
    text = text_of(message.get("content"))
    if text == text_of(said.get("content")):
        return 2
    if calls and not text:  # the calls say who it is; programs often leave out the words around them
        return 1
    told = {_letters(text_of(said.get("content"))), _letters(reply.content), _letters(reply.text)}
    return int(_letters(text) in told)


def text_of(content: Any) -> str:
    """Returns content as text: parts a line each, what is no text as JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "\n".join(
            part["text"]
            if isinstance(part, Mapping) and part.get("type") == "text" and "text" in part
            else json.dumps(part, sort_keys=True, default=repr)
            for part in content
        )
    return json.dumps(content, sort_keys=True, default=repr)


def _letters(text: str) -> str:
    return "".join(text.split())


def _calls(message: Mapping[str, Any]) -> list[list[Any]]:
    """Returns id, name and arguments of each call; arguments as data, whatever their JSON looks like."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = arguments.split()
        found.append([call.get("id"), function.get("name"), arguments])
    return found
