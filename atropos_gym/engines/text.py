"""Engines as text: messages in, replies out, for judges, data and evaluation.

A provider that takes nothing but text is a ``TextEngine`` by itself; an engine over ids becomes one with the
``ChatRenderer`` of its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from atropos_gym.engines.base import Engine, Lane, SamplingParams
from atropos_gym.messages import Message, Reply
from atropos_gym.rendering import ChatRenderer, chat_renderer

__all__ = ["TextEngine", "as_text_engine"]


@runtime_checkable
class TextEngine(Protocol):
    """Says what follows a conversation."""

    model: str

    async def chat(self, messages: Sequence[Message], params: SamplingParams, n: int = 1) -> list[Reply]:
        """Returns ``n`` replies to a conversation; those without an end have ``complete=False``."""
        ...


class _Rendered:
    """An engine over ids as a ``TextEngine``."""

    def __init__(self, engine: Engine, renderer: ChatRenderer, version: int | None, lane: Lane) -> None:
        self.model = engine.model
        self._engine = engine
        self._renderer = renderer
        self._version = version
        self._lane: Lane = lane

    async def chat(self, messages: Sequence[Message], params: SamplingParams, n: int = 1) -> list[Reply]:
        stop_ids = tuple(dict.fromkeys([*params.stop_ids, *self._renderer.stop_ids]))
        completions = await self._engine.generate(
            self._renderer.prompt(messages),
            params.with_(stop_ids=stop_ids),
            n,
            version=self._version,
            lane=self._lane,
        )
        return [self._renderer.reply(completion.ids) for completion in completions]


def as_text_engine(
    engine: Engine | TextEngine,
    renderer: ChatRenderer | None = None,
    *,
    version: int | None = None,
    lane: Lane = "eval",
) -> TextEngine:
    """Returns an engine seen as a ``TextEngine``; one that is one already is returned as it is.

    Args:
        engine: any engine.
        renderer: writes and reads conversations; that of the engine's tokenizer if None.
        version: of the policy that speaks; None is the newest.
        lane: which of the engine's limits counts.

    Example:
        >>> import asyncio
        >>> from atropos_gym.engines.scripted import ScriptedEngine
        >>> engine = as_text_engine(ScriptedEngine(lambda *asked: [111, 107, 258]))
        >>> hi = [Message(role="user", content="hi")]
        >>> [reply] = asyncio.run(engine.chat(hi, SamplingParams(max_tokens=8)))
        >>> reply.content, reply.complete
        ('ok', True)
    """
    if isinstance(engine, TextEngine):
        return engine
    return _Rendered(engine, renderer or chat_renderer(engine.tokenizer), version, lane)
