"""Who put each id of an episode's rows there: the template, a message, or the policy.

A row is explained by the messages that give its own prompt, id for id, and its own turns, position by
position; of a row that nothing explains, nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.html import Source
from atropos_gym.messages import Message
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.episode import UNTRAINED_MASK, Episode, Row

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
    prompt = messages[: len(opening) + len(_before_reply(row.messages))]
    if not row.turns or not messages:
        return None
    try:
        if renderer.prompt(prompt) != row.ids[: row.turns[0].start]:
            return None
        spans = renderer.spans(messages, turns=[row.ids[turn.start : turn.end] for turn in row.turns])
    except (TemplateError, NewSegment):
        return None
    sources: list[Source] = ["sampled" if source == "policy" else source for source in spans]
    sampled = [mark != UNTRAINED_MASK for mark in row.mask]
    return sources if [source == "sampled" for source in sources] == sampled else None


def _before_reply(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages before the first reply."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            return list(messages[:index])
    return list(messages)
