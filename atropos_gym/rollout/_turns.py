"""What a conversation is made of: prompts, and the turns that were sampled after them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from atropos_gym.messages import Message, Reply

__all__ = ["Prompt", "Said", "history_of", "line_of"]


@dataclass(slots=True, eq=False)
class Prompt:
    """Ids after which turns are sampled.

    Attributes:
        ids: what follows the turn before; the whole prompt where a segment begins.
        after: the turn that was said before; None at a start.
        fresh: a segment begins here.
        heard: the messages that the ids hold and no prompt before.
        text: everything up to here, where a program works with text itself.
        said: the turns that were sampled after it.
    """

    ids: list[int]
    after: Said | None
    fresh: bool
    heard: list[Message]
    text: str | None = None
    said: list[Said] = field(default_factory=list)

    def whole(self) -> list[int]:
        """Returns all ids of the segment up to here."""
        if self.fresh or self.after is None:
            return list(self.ids)
        line = line_of(self.after)
        return [id_ for said in line for id_ in (*said.prompt.ids, *said.ids)] + self.ids


@dataclass(slots=True, eq=False)
class Said:
    """One sampled turn.

    Attributes:
        prompt: what it was sampled after.
        ids: as the engine returned them.
        logprobs: one for each.
        version: of the policy.
        last_version: of the last id, where weights changed in mid-flight; else None.
        cut: no end id was sampled.
        trainable: True, or why its ids are not trained.
        finish_reason: ``stop``, ``length`` or ``tool_calls``.
        reply: what it says.
        message: as it was answered to the program.
        reward: where the program gave one to this turn.
        followed: the prompts that go on from it, by what was said.
    """

    prompt: Prompt
    ids: tuple[int, ...]
    logprobs: Sequence[float]
    version: int
    cut: bool
    trainable: Literal[True] | str
    finish_reason: str
    reply: Reply
    message: Message
    last_version: int | None = None
    reward: float | None = None
    followed: dict[Hashable, Prompt] = field(default_factory=dict)

    @property
    def spoken(self) -> Message:
        """All that was said, as one message: what a template renders."""
        return Message(role="assistant", content=self.reply.text)


def line_of(said: Said) -> list[Said]:
    """Returns the turns of one segment up to ``said``, in order."""
    line = [said]
    while not line[-1].prompt.fresh and (before := line[-1].prompt.after) is not None:
        line.append(before)
    return line[::-1]


def history_of(said: Said) -> list[Message]:
    """Returns the conversation up to a turn, over segments that the template began."""
    parts: list[Message] = []
    at: Said | None = said
    while at is not None:
        parts.append(at.spoken)
        parts += reversed(at.prompt.heard)
        at = at.prompt.after
    return parts[::-1]
