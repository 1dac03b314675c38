"""Whole conversations as ids, piece by piece, and who put each id there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.rendering.dialect import Dialect

__all__ = ["Piece", "Source", "row_pieces", "said_pieces", "sources_of"]

#: Who put an id there: the template, a message's text, or the policy.
Source = Literal["template", "message", "policy"]

_Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a conversation: what the policy reads, or what it said.

    Attributes:
        ids: the ids.
        messages: what is rendered in it; for a piece that is the tail of a whole prompt, all of that.
        sampled: the policy said it.
        first: it is (the tail of) a prompt, not a bridge.
        speak: it ends where the assistant is to speak.
    """

    ids: list[int]
    messages: _Messages
    sampled: bool = False
    first: bool = False
    speak: bool = True


def said_pieces(dialect: Dialect, messages: _Messages, tools: Any) -> list[Piece]:
    """Returns a conversation in which every assistant message is what a policy would have sampled."""
    pieces: list[Piece] = []
    waiting: list[Mapping[str, Any]] = []
    last: int | None = None
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            waiting.append(message)
            continue
        if not waiting:
            raise TemplateError("every assistant message of a transcript must answer another message")
        if not isinstance(message.get("content"), str):
            raise TemplateError("an assistant message of a transcript must be text: say its calls as text")
        pieces.append(_context(dialect, waiting, last, bool(pieces), tools, speak=True))
        said = dialect.say(message["content"], messages[place + 1]["role"] if messages[place + 1 :] else None)
        pieces.append(Piece(said, [message], sampled=True))
        last = said[-1]
        waiting = []
    if waiting:
        pieces.append(_context(dialect, waiting, last, bool(pieces), tools, speak=False))
    return pieces


def _context(
    dialect: Dialect, messages: _Messages, last: int | None, later: bool, tools: Any, *, speak: bool
) -> Piece:
    """Returns a piece that the policy reads: a bridge (``later``) or the first prompt."""
    if later:
        ids = dialect.bridge(last, messages, tools, speak=speak)
    else:
        ids = dialect.prompt(messages, tools, speak=speak)
    return Piece(ids, messages, first=not later, speak=speak)


def row_pieces(
    dialect: Dialect, messages: _Messages, turns: Sequence[tuple[int, ...]], tools: Any, *, append: bool
) -> list[Piece]:
    """Returns the row of an episode's segment: prompt, turn, bridge, turn, ... to the last sampled id.

    Args:
        dialect: writes the ids.
        messages: the segment's conversation; the last ``len(turns)`` assistant messages are the turns.
        turns: the sampled ids of each.
        tools: schemas of the tools.
        append: sampled ids stay as they are; else the whole conversation is rendered at every turn.

    Raises:
        TemplateError: fewer assistant messages than turns.
        NewSegment: what follows a turn opened another segment.
    """
    spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if len(turns) > len(spoken):
        raise TemplateError(f"turns holds {len(turns)} turns, but there are {len(spoken)} assistant messages")
    pieces: list[Piece] = []
    ids: list[int] = []
    begin = 0
    for place, turn in zip(spoken[len(spoken) - len(turns) :], turns, strict=True):
        heard = messages[begin:place]
        if not heard:
            raise TemplateError("every turn must answer another message")
        if begin and append:
            last = pieces[-1].ids[-1] if pieces[-1].ids else None
            piece = Piece(dialect.bridge(last, heard, tools), heard)
        else:
            prompt = dialect.prompt(messages[:place], tools)
            if prompt[: len(ids)] != ids:
                raise NewSegment(f"message {place} opened a new segment: give that segment's messages alone")
            piece = Piece(prompt[len(ids) :], messages[:place], first=True)
        pieces += [piece, Piece(list(turn), [messages[place]], sampled=True)]
        ids += [*piece.ids, *turn]
        begin = place + 1
    return pieces


def sources_of(dialect: Dialect, pieces: Sequence[Piece], tools: Any) -> list[Source]:
    """Returns who put each id of the pieces there.

    An id that holds text of both template and message is the message's.
    """
    sources: list[Source] = []
    for piece in pieces:
        if piece.sampled:
            sources += ["policy"] * len(piece.ids)
            continue
        said = dialect.said(piece.messages, tools, first=piece.first, speak=piece.speak, size=len(piece.ids))
        sources += ["message" if one else "template" for one in said]
    return sources
