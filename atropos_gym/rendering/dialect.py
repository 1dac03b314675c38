"""What a ChatRenderer asks of a tokenizer: the protocol of ``BytesDialect`` and ``TemplateDialect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atropos_gym.rendering.reply_text import ThinkTags

__all__ = ["Dialect"]


class Dialect(Protocol):
    """How one tokenizer's template writes a conversation; made once, used for every turn.

    Attributes:
        stop_ids: ids that end a turn when sampled.
        opener: what the generation prompt opens, such as ``<think>``; else "".
        min_bridge: length of the bridge of an empty user message after an empty turn.
        rewrites_history: the bridge changes with the history, so every turn is a segment.
        controls: ids that only the template writes, with their spellings.
        channels: a turn is made of channels (harmony): the reply's content is the last final one.
        tags: what the family writes around thoughts.
        tool_dialect: the form of its tool calls, as ``parse_tool_calls`` names it; None where unknown.
    """

    stop_ids: tuple[int, ...]
    opener: str
    min_bridge: int
    rewrites_history: bool
    controls: Mapping[int, str]
    channels: bool
    tags: ThinkTags
    tool_dialect: str | None

    @property
    def identity(self) -> Mapping[str, Any]:
        """What decides the ids beside the tokenizer; part of the fingerprint."""
        ...

    @property
    def image_ids(self) -> tuple[int, ...]:
        """What is written for one image."""
        ...

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the template does to a conversation, ready for JSON (``template_facts``)."""
        ...

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, speak: bool = True
    ) -> list[int]:
        """Ids of a whole conversation, ending where the assistant is to speak (if ``speak``)."""
        ...

    def bridge(
        self,
        last: int | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        speak: bool = True,
    ) -> list[int]:
        """Ids between a turn whose last id is ``last`` (None: an empty turn) and the next turn."""
        ...

    def say(self, text: str, before: str | None = None) -> list[int]:
        """Ids that a policy would have sampled for ``text``, the end id included.

        ``before`` is the role of the next message, where that is known: some families end a turn by it.
        """
        ...

    def said(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        first: bool,
        speak: bool,
        size: int,
    ) -> list[bool]:
        """For each id of a prompt (``first``) or bridge: whether a message's text put it there.

        A bridge of ``size`` ids may stand without the end of the turn before it.
        """
        ...
