"""What is said, as text: messages, replies, tool calls and an environment's feedback.

Plain data. Nothing here knows ids' meaning, a template, torch or a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

__all__ = ["Feedback", "Message", "Reply", "ToolCall", "as_messages"]


class Message(TypedDict):
    """One message of a conversation: a plain dict, as chat templates and the wire want it.

    Example:
        >>> Message(role="user", content="hi")
        {'role': 'user', 'content': 'hi'}
    """

    role: str
    content: Any
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as parsed from a reply."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


# Not frozen: one is made in every turn, and a frozen one takes several times as long to make.
@dataclass(slots=True)
class Reply:
    """What the policy said in one turn.

    Attributes:
        text: everything before the first stop id, decoded once.
        thinking: the thinking part without its tags, or None.
        content: what follows thinking (all of ``text`` where there was none).
        tool_calls: calls parsed from the content.
        complete: an end id was sampled.
        malformed: ids stand after the end id.
        opened: what the generation prompt had opened, such as ``<think>``; else "".
        ids: the sampled ids, the end id included.
        fault: how it broke the environment's ``thinking``, and then ``content`` is empty; else None.
    """

    text: str
    content: str
    ids: tuple[int, ...] = ()
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = True
    malformed: bool = False
    opened: str = ""
    fault: str | None = None


@dataclass(slots=True)
class Feedback:
    """What an environment answers to a reply.

    Attributes:
        content: a user message as a string, or messages. After a terminal feedback it goes to
            ``messages`` only: the policy never reads it.
        reward: reward of this turn.
        terminated: the episode is over by the task's own rules.
        truncated: the episode is cut off.
        success: whether the task was solved; None where unknown.
        invalid: the reply held no usable action.
        reward_terms: named parts of the reward.
        restart: messages that open a new segment in place of the conversation so far.
        info: further entries for ``info``: ints, floats, strings, bools, lists.

    Raises:
        ValueError: the episode goes on but nothing is said.

    Example:
        >>> Feedback(reward=1.0, terminated=True).reward
        1.0
    """

    content: str | Sequence[Message] | None = None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    invalid: bool = False
    reward_terms: Mapping[str, float] | None = None
    restart: Sequence[Message] | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        silent = not self.content and not self.restart
        if silent and not (self.terminated or self.truncated):
            raise ValueError(
                "Feedback that does not end the episode must say something: give content= or restart=, "
                "or set terminated=True"
            )


def as_messages(content: str | Sequence[Message] | None, role: str = "user") -> list[Message]:
    """Returns ``content`` as a fresh list of messages; a string becomes one message of ``role``.

    Example:
        >>> as_messages("hit or stick?")
        [{'role': 'user', 'content': 'hit or stick?'}]
    """
    if content is None:
        return []
    if isinstance(content, str):
        return [Message(role=role, content=content)]
    return [Message(**message) for message in content]
