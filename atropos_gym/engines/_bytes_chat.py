"""A prompt of the bytes tokenizer back as messages: control ids are no text, so nothing is ambiguous."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_gym.errors import EngineError
from atropos_gym.messages import Message
from atropos_gym.tokenizers import BytesTokenizer

__all__ = ["messages_of"]

# A tool's answer is said by the user: over text alone there is no call that it could name.
_ROLES = {
    BytesTokenizer.SYSTEM: "system",
    BytesTokenizer.USER: "user",
    BytesTokenizer.ASSISTANT: "assistant",
    BytesTokenizer.TOOL: "user",
}


def messages_of(prompt: Sequence[int]) -> list[Message]:
    """Returns the conversation that a prompt of the bytes tokenizer was written from.

    Raises:
        EngineError: it is no prompt of that form, or the assistant has begun to speak.

    Example:
        >>> messages_of([257, 260, 104, 105, 261])
        [{'role': 'user', 'content': 'hi'}]
    """
    if len(prompt) < 2 or prompt[0] != BytesTokenizer.BOS or prompt[-1] != BytesTokenizer.ASSISTANT:
        raise EngineError(
            "over text alone a prompt must be a conversation in the bytes tokenizer's form, from its first "
            "id to the header of the assistant's turn"
        )
    messages: list[Message] = []
    said: list[int] = []
    role: str | None = None
    for position, value in enumerate(prompt[1:], start=1):
        if value < 256:
            said.append(value)
        elif value in _ROLES:
            _close(messages, role, said)
            role, said = _ROLES[value], []
        elif value != BytesTokenizer.END:
            raise EngineError(
                f"prompt has control id {value} at position {position}, which says nothing here"
            )
    return messages


def _close(messages: list[Message], role: str | None, said: list[int]) -> None:
    if role is not None:
        messages.append(Message(role=role, content=bytes(said).decode("utf-8", "replace")))
    elif said:
        raise EngineError("prompt has text before its first message")
