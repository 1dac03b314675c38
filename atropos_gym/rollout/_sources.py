"""Who put each id of an episode's rows there: the template, a message, or the policy.

A row is rendered again from its messages, and only what gives the row's own ids, position by position, is
believed; of a row that cannot be explained so, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from atropos_gym.errors import TemplateError
from atropos_gym.html import Source
from atropos_gym.messages import Message
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.episode import Episode, Row

__all__ = ["row_sources"]


def row_sources(episode: Episode, renderer: ChatRenderer) -> list[list[Source] | None]:
    """Returns for each row who put each of its ids there, or None where that is not known.

    Args:
        episode: as it was played.
        renderer: the environment's.
    """
    found: list[list[Source] | None] = []
    # Where each turn is a segment of its own, the first messages of the last fresh start stand before it.
    start: list[Message] = []
    earlier: list[Message] = []
    for row in episode.rows:
        standing = [start[:length] for length in range(len(start) - 1, 0, -1)]
        for opening in ([], *standing, earlier):
            sources = _explain(row, opening, renderer)
            if sources is not None:
                break
        if not opening:
            start = _before_reply(row.messages)
        found.append(sources)
        earlier += row.messages
    return found


def _explain(row: Row, opening: Sequence[Message], renderer: ChatRenderer) -> list[Source] | None:
    """Returns the sources of a row whose conversation is ``opening`` and the row's messages, if it is."""
    messages = [*opening, *row.messages]
    while messages and messages[-1]["role"] != "assistant":  # said at the end: the policy never read it
        messages.pop()
    first = len(opening) + len(_before_reply(row.messages))
    if not row.turns or not messages or any(message["role"] == "assistant" for message in messages[:first]):
        return None
    try:
        if renderer.prompt(messages[:first]) != row.ids[: row.turns[0].start]:
            return None
        spans = renderer.spans(messages)
    except TemplateError:
        return None
    contexts = [
        list(run) for sampled, run in groupby(spans, lambda source: source == "policy") if not sampled
    ]
    return _fit(row, contexts)


def _fit(row: Row, contexts: Sequence[Sequence[str]]) -> list[Source] | None:
    """Puts the sources of prompt and bridges around the turns that were sampled."""
    if len(contexts) != len(row.turns):
        return None
    sources: list[Source] = []
    for turn, context in zip(row.turns, contexts, strict=True):
        # A turn without an end id is closed by the bridge, with ids of the template.
        closing = turn.start - len(sources) - len(context)
        if closing < 0:
            return None
        sources += ["template"] * closing
        sources += ["message" if source == "message" else "template" for source in context]
        sources += ["sampled"] * (turn.end - turn.start)
    return sources if len(sources) == len(row.ids) else None


def _before_reply(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages before the first reply."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            return list(messages[:index])
    return list(messages)
