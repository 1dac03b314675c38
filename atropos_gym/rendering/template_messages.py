"""Messages of people as a chat template takes them: strangers' text marked, roles that it lacks replaced."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.rendering.chat_template import ChatTemplate
from atropos_gym.rendering.said import images_of
from atropos_gym.tokenizers.control_text import ControlText, well_formed

__all__ = ["TemplateMessages"]

#: What environments, tools and strangers wrote; system and assistant text is the author's or the policy's.
_UNTRUSTED = frozenset({"user", "tool"})
#: Where that text may hold control tokens, such as think tags; a call's name and arguments hold none.
_TRUSTED_TEXT = frozenset({"content", "reasoning", "reasoning_content", "thinking"})

_Messages = Sequence[Mapping[str, Any]]


class TemplateMessages:
    """Prepares messages for one template.

    Args:
        template: the template.
        text: marks control spellings.
        merge_system: system text goes in front of the first user message.
        tool_as_user: tool messages are written as a user's.
    """

    def __init__(
        self, template: ChatTemplate, text: ControlText, *, merge_system: bool, tool_as_user: bool
    ) -> None:
        self._template = template
        self._text = text
        self.merge_system = merge_system
        self.tool_as_user = tool_as_user
        self._warned: set[str] = set()

    def __call__(self, messages: _Messages) -> list[dict[str, Any]]:
        """Returns checked messages as the template takes them.

        Raises:
            TemplateError: images that the template cannot write, or system text with nothing to go into.
        """
        prepared = [self._prepare(message) for message in messages]
        if self.tool_as_user:
            for message in prepared:
                if message["role"] == "tool":
                    self._warn_once(
                        "has no tool role here: tool messages are written as user messages (tool_role='tool' "
                        "says why)"
                    )
                    message["role"] = "user"
        if self.merge_system and prepared and prepared[0]["role"] == "system":
            self._warn_once("takes no system message here: its text goes before the first user message")
            prepared = self._merged(prepared)
        return prepared

    def _prepare(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns one message as plain data, control spellings of strangers marked."""
        role = message["role"]
        plain = {key: _plain(value) for key, value in message.items() if value is not None}
        content = plain.get("content")
        if not isinstance(content, str) and content is not None:
            plain["content"] = self._parts(content, message)
        as_it_is = {"role"} if role in _UNTRUSTED else {"role", *_TRUSTED_TEXT}
        return {key: value if key in as_it_is else self._text.mark(value) for key, value in plain.items()}

    def _parts(self, parts: list[dict[str, Any]], message: Mapping[str, Any]) -> Any:
        """Returns content as the template takes it: parts, or their texts a line each."""
        if images_of([message]):
            if not self._template.image:
                raise TemplateError(
                    f"the chat template of {self._template.name} has no place for an image in a "
                    f"{message['role']} message: say it in words"
                )
            return parts
        other = next((part["type"] for part in parts if part["type"] != "text"), None)
        if other is not None and not self._template.takes_parts:
            raise TemplateError(
                f"the chat template of {self._template.name} takes no part of type {other!r} in a "
                f"{message['role']} message"
            )
        return parts if self._template.takes_parts else "\n".join(part["text"] for part in parts)

    def _merged(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages whose leading system text stands in front of the first user message."""
        count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        if count == len(messages) or messages[count]["role"] != "user":
            raise TemplateError(
                f"system text needs a user message behind it to go into ({self._template.name})"
            )
        system = "\n\n".join(_text_of(m["content"]) for m in messages[:count])
        said = messages[count]["content"]
        whole: Any = f"{system}\n\n{said}"
        if not isinstance(said, str):
            whole = [{"type": "text", "text": f"{system}\n\n"}, *said]
        return [{**messages[count], "content": whole}, *messages[count + 1 :]]

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"the chat template of {self._template.name} {text}", stacklevel=2)


def _text_of(content: Any) -> str:
    """Returns the text of a message's content."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _plain(value: Any) -> Any:
    """Returns plain data: templates see text, numbers, lists and dicts; whatever else is there is only there.

    An image or a model's object has no text that a template could write, and none that could be trusted.
    """
    if isinstance(value, str):
        return well_formed(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"({type(value).__name__})"
