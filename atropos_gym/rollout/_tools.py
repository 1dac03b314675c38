"""Tools in conversations: how a model is told of them, and which calls its replies hold.

Where the chat template knows tools it writes them itself. Where it does not (SmolLM2, the bytes tokenizer), a
system text says what they are and calls are read in the form that it asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from atropos_gym.errors import TemplateError
from atropos_gym.messages import Message, Reply, ToolCall
from atropos_gym.parsing import parse_tool_calls
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._echo import text_of
from atropos_gym.tokenizers.control_text import well_formed

__all__ = [
    "ReadCalls",
    "ToolForm",
    "answer_of",
    "call_id",
    "call_text",
    "check_calls",
    "joined",
    "told_by_user",
    "with_plain_arguments",
]

_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9
"""Mistral's templates take no other length."""

_FALLBACK = "hermes"
_TOLD = """You can call tools. Each line is the JSON schema of one:
{schemas}
To call one, write
<tool_call>
{{"name": "its name", "arguments": {{"its": "arguments"}}}}
</tool_call>
and stop there; several such blocks are several calls. What they gave is told to you next."""


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """What a reply asked for.

    Attributes:
        content: the text around the calls; all of it where no call could be read.
        calls: the calls, each with an id.
        broken: how many calls could not be read.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    broken: int = 0


class ToolForm:
    """How one renderer's family is told of tools and writes calls.

    Args:
        renderer: of the conversation.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._channels = renderer.channels
        #: Whether the template itself writes tools and calls.
        self.native: bool = renderer.reads("tools") and (self._channels or renderer.tool_dialect is not None)
        self.dialect: str = renderer.tool_dialect if self.native and renderer.tool_dialect else _FALLBACK

    def opening(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Returns the messages of a prompt, the tools told in the first one where the template cannot."""
        if not tools or self.native:
            return messages
        told = _TOLD.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages and messages[0]["role"] == "system":
            first = messages[0]
            return [{**first, "content": f"{text_of(first['content'])}\n\n{told}"}, *messages[1:]]
        return [Message(role="system", content=told), *messages]

    def shown(self, tools: list[Any] | None) -> list[Any] | None:
        """Returns the tools that the template is to write."""
        return tools if self.native else None

    def written(self, message: Message) -> Message:
        """Returns an assistant's message as the template takes it: where it knows no calls, they are text."""
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.native:
            return {**message, "tool_calls": list(map(with_plain_arguments, calls))}
        return self.in_words(message)

    def in_words(self, message: Message) -> Message:
        """Returns an assistant's message in which calls are text, in the form that models are asked for."""
        calls = message.get("tool_calls") or ()
        texts = [text_of(message.get("content")), *map(call_text, calls)]
        return Message(role="assistant", content="\n".join(filter(None, texts)))

    def raw_content(self, reply: Reply) -> str | None:
        """Returns content by which the template writes a reply's calls as they were said, or None."""
        return None if self._channels else reply.content

    def read(self, reply: Reply, tools: list[Any] | None, place: Sequence[int]) -> ReadCalls:
        """Reads the calls in a reply; names and arguments stay as they were said, wrong ones too.

        Args:
            reply: of the policy.
            tools: what could be called; None reads nothing.
            place: where the reply stands; ids of its calls are made of it.
        """
        if not tools:
            return ReadCalls(reply.content)
        if self._channels:
            found, content, broken = list(reply.tool_calls), reply.content, 0
        else:
            typed = parse_tool_calls(reply.content, self.dialect, tools)
            untyped = parse_tool_calls(reply.content, self.dialect)
            # A call that the schema refuses is the program's to answer: it says so to the model.
            either = [
                one if isinstance(one, ToolCall) else other
                for one, other in zip(typed.turn, untyped.turn, strict=True)
            ]
            found = [entry for entry in either if isinstance(entry, ToolCall)]
            content = typed.text if found else reply.content
            broken = len(either) - len(found)
        calls = tuple(
            ToolCall(call.name, call.arguments, _own_id(call, reply.text) or call_id(*place, number))
            for number, call in enumerate(found)
        )
        return ReadCalls(content, calls, broken)


def answer_of(reply: Reply, read: ReadCalls, cut: str | None = None, *, plain: bool = False) -> Message:
    """Returns the message that a program gets for a reply: text, thoughts and calls apart.

    Args:
        reply: of the policy.
        read: what was read in it.
        cut: the stop string that ended it; the program does not see it.
        plain: all that was said as one text, where it holds no call.
    """
    plain = plain and not read.calls
    content = reply.text if plain else read.content
    answer: dict[str, Any] = {"role": "assistant", "content": content.partition(cut)[0] if cut else content}
    if read.calls:
        answer["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": well_formed(call.name),
                    "arguments": well_formed(json.dumps(call.arguments, ensure_ascii=False, default=repr)),
                },
            }
            for call in read.calls
        ]
    if reply.thinking is not None and not plain:
        answer["reasoning_content"] = reply.thinking
    return cast(Message, answer)


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """Looks whether calls in messages are what OpenAI's API has as such.

    Raises:
        TemplateError: one is not; the message names it.
    """
    for place, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is None:
            continue
        if not isinstance(calls, list | tuple):
            raise TemplateError(f"tool_calls of message {place} must be a list, got {calls!r:.60}")
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if (
                not isinstance(call, Mapping)
                or not isinstance(call.get("id"), str | None)
                or not isinstance(function, Mapping)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("arguments"), str | Mapping | None)
            ):
                raise TemplateError(
                    f"a tool call of message {place} must have an id and a function with name and arguments, "
                    f"got {call!r:.60}"
                )


def joined(messages: Sequence[Message]) -> list[Message]:
    r"""Returns messages in which all that the policy hears between two replies is one message of the user.

    Some templates take nothing else: no second result of a tool, and nobody after one.

    Example:
        >>> joined([{"role": "tool", "content": "4"}, {"role": "user", "content": "go on"}])
        [{'role': 'user', 'content': '4\n\ngo on'}]
    """
    together: list[Message] = []
    for message in messages:
        last = together[-1] if together else None
        if last is None or not {last["role"], message["role"]} <= {"user", "tool"}:
            together.append(message)
        else:
            told = f"{text_of(last['content'])}\n\n{text_of(message['content'])}"
            together[-1] = Message(role="user", content=told)
    return together


def told_by_user(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which the user says what the system and tools do.

    Some templates know a system at the beginning only, and a tool's result only after its call.

    Example:
        >>> told_by_user([{"role": "tool", "content": "4"}, {"role": "system", "content": "be brief"}])
        [{'role': 'user', 'content': '4'}, {'role': 'user', 'content': 'be brief'}]
    """
    return [
        message if message["role"] == "assistant" else Message(role="user", content=message["content"])
        for message in messages
    ]


def call_id(*place: int) -> str:
    """Returns nine letters and digits for a place: the same for the same one, others for others.

    Example:
        >>> len(call_id(1, 2)), call_id(1, 2) == call_id(1, 2), call_id(1, 2) == call_id(1, 3)
        (9, True, False)
    """
    number = int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big")
    letters = []
    for _ in range(_ID_LENGTH):
        number, digit = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[digit])
    return "".join(letters)


def with_plain_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call of the wire whose arguments are data, as templates want them, where they can be read."""
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def call_text(call: Mapping[str, Any]) -> str:
    """Returns a call of the wire in the form that models are asked for where their template has none."""
    function = with_plain_arguments(call).get("function", {})
    said = {"name": function.get("name", ""), "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _own_id(call: ToolCall, text: str) -> str | None:
    """Returns the id that the model itself gave a call."""
    return call.id if call.id and call.id in text else None
