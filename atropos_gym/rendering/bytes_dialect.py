"""How the bytes tokenizer writes a conversation: a role id and UTF-8 bytes; only assistant turns are closed.

Nothing here imports transformers: it is the path of the tiny model and of every unit test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.reply_text import THINK
from atropos_gym.rendering.said import heard_messages, opening_messages
from atropos_gym.tokenizers import BytesTokenizer

__all__ = ["BytesDialect"]

_ROLES = {
    "system": BytesTokenizer.SYSTEM,
    "user": BytesTokenizer.USER,
    "assistant": BytesTokenizer.ASSISTANT,
    "tool": BytesTokenizer.TOOL,
}
_END = BytesTokenizer.END
_HEARD = {role: token for role, token in _ROLES.items() if role != "assistant"}


class BytesDialect:
    """Writes and continues conversations for ``BytesTokenizer``; see ``dialect.Dialect``."""

    stop_ids: tuple[int, ...] = (_END,)
    opener = ""
    min_bridge = 3
    rewrites_history = False
    channels = False
    tags = THINK
    tool_dialect: str | None = None
    image_ids: tuple[int, ...] = ()
    identity: Mapping[str, Any] = {"kind": "bytes"}
    controls: Mapping[int, str] = {
        256: "<pad>",
        257: "<bos>",
        258: "<end>",
        259: "<system>",
        260: "<user>",
        261: "<assistant>",
        262: "<tool>",
        263: "<spare>",
    }

    def facts(self) -> dict[str, Any]:
        """Returns what this form does to a conversation: nothing is added, trimmed or rewritten."""
        form = {
            "close": _END,
            "close_kind": "normal",
            "history_head_equals_prompt": True,
            "bridge_independent_of_history": True,
        }
        return {
            "generation_prompt": "",
            "head": "",
            "history_keeps": {"plain": True, "whitespace": True, "thinking": True, "empty": True},
            "last_turn_is_prefix": True,
            "user_text_kept": True,
            "system_role": True,
            "roles_alternate": False,
            "preamble": "",
            "preamble_stays": False,
            "takes_tools": False,
            "variables": [],
            "clock": None,
            "end_of_turn": _END,
            "writes_thoughts": False,
            "thoughts_kept": True,
            "header_ids": [BytesTokenizer.ASSISTANT],
            "user": form,
            "tool": dict(form),
        }

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, speak: bool = True
    ) -> list[int]:
        """Returns BOS, the messages and, if the assistant is to speak, its id."""
        if speak and not tools and (said := _one_message(messages)) is not None:
            role, text = said
            return [BytesTokenizer.BOS, role, *text, BytesTokenizer.ASSISTANT]
        ids = [BytesTokenizer.BOS]
        for message in opening_messages(messages):
            _write(ids, message)
        if tools:
            raise _no_tools()
        if speak:
            ids.append(BytesTokenizer.ASSISTANT)
        return ids

    def bridge(
        self,
        last: int | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        speak: bool = True,
    ) -> list[int]:
        """Returns the end id if ``last`` was another, the messages and the assistant's id."""
        if speak and not tools and (said := _one_message(messages)) is not None:
            role, text = said
            if last == _END:
                return [role, *text, BytesTokenizer.ASSISTANT]
            return [_END, role, *text, BytesTokenizer.ASSISTANT]
        ids: list[int] = [] if last == _END else [_END]
        for message in heard_messages(messages):
            _write(ids, message)
        if tools:
            raise _no_tools()
        if speak:
            ids.append(BytesTokenizer.ASSISTANT)
        return ids

    def say(self, text: str, before: str | None = None) -> list[int]:
        """Returns the bytes of ``text`` and the end id."""
        return [*text.encode("utf-8", "surrogatepass"), _END]  # half a character has bytes too

    def said(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        first: bool,
        speak: bool,
        size: int,
    ) -> list[bool]:
        """Returns for each id of a prompt (``first``) or bridge whether a message's text put it there."""
        if first:
            ids = self.prompt(messages, tools, speak=speak)
        else:
            ids = self.bridge(None, messages, tools, speak=speak)
        return [i < 256 for i in ids[len(ids) - size :]]

    def reads(self, name: str) -> bool:
        """Returns False: there is no template."""
        return False


def _one_message(messages: Any) -> tuple[int, bytes] | None:
    """Returns role id and bytes of the one message that most turns are, or None for anything else.

    A turn takes a microsecond: what is no message is looked into only where this does not work.
    """
    try:
        (message,) = messages
        return _HEARD[message["role"]], message["content"].encode()
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _write(ids: list[int], message: Mapping[str, Any]) -> None:
    """Appends a checked message to ``ids``."""
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise TemplateError(f"role must be one of {', '.join(_ROLES)}, got {role!r} (bytes)")
    if message.get("tool_calls"):
        raise TemplateError("the bytes tokenizer writes no tool_calls: say the call in the content")
    ids.append(_ROLES[role])
    ids += (content if isinstance(content, str) else _text_of(content)).encode("utf-8", "surrogatepass")
    if role == "assistant":
        ids.append(_END)


def _no_tools() -> TemplateError:
    return TemplateError("the bytes tokenizer writes no tool schemas: describe the tools in a message")


def _text_of(parts: Any) -> str:
    """Returns the texts of a message's parts, a line each."""
    for part in parts:
        if part["type"] != "text":
            raise TemplateError(f"the bytes tokenizer writes text alone, got a part of type {part['type']!r}")
    return "\n".join(part["text"] for part in parts)
