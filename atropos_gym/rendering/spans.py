"""Where messages' own text stands in a rendered conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atropos_gym.errors import TemplateError

__all__ = ["message_places", "overlaps"]


def message_places(
    text: str, messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> list[tuple[int, int]]:
    """Returns where messages' texts stand in ``text``, in order: pairs of begin and end.

    The template's own text is what it writes around other words, so a message that says "user" is not found
    in a header. Where a template writes something else around other words, the texts are searched for.

    Args:
        text: the rendered conversation.
        messages: its messages, as the template got them.
        render: renders messages in the same way.
    """
    said: list[str] = []
    words: list[str] = []

    def stand_in(content: str) -> str:
        said.append(content)
        words.append(f"Wq{len(words)}x")
        return words[-1]

    replaced = [{**message, "content": _replace(message.get("content"), stand_in)} for message in messages]
    try:
        around = _around(render(replaced), words)
    except TemplateError:
        around = None
    return (None if around is None else _between(text, around)) or _searched(text, said)


def _replace(content: Any, stand_in: Callable[[str], str]) -> Any:
    """Returns content with every text in it replaced."""
    if isinstance(content, str):
        return stand_in(content)
    if isinstance(content, list):
        return [
            {**part, "text": stand_in(part["text"])} if isinstance(part.get("text"), str) else part
            for part in content
        ]
    return content


def _around(text: str, words: Sequence[str]) -> list[str] | None:
    """Returns what a template writes before, between and behind stand-in words, or None if one is missing."""
    pieces: list[str] = []
    for word in words:
        piece, found, text = text.partition(word)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _between(text: str, around: Sequence[str]) -> list[tuple[int, int]] | None:
    """Returns the places between the template's pieces, or None where they do not fit."""
    if not text.startswith(around[0]):
        return None
    places: list[tuple[int, int]] = []
    at = len(around[0])
    for place, piece in enumerate(around[1:], 1):
        if place == len(around) - 1:
            end = len(text) - len(piece)
            if end < at or text[end:] != piece:
                return None
        else:
            end = text.find(piece, at)
            if end < 0 or not piece:
                return None
        places.append((at, end))
        at = end + len(piece)
    return places


def _searched(text: str, said: Sequence[str]) -> list[tuple[int, int]]:
    """Returns where texts are found in order, as they are or trimmed."""
    places: list[tuple[int, int]] = []
    at = 0
    for content in said:
        for form in (content, content.strip()):
            found = text.find(form, at) if form else -1
            if found >= 0:
                at = found + len(form)
                places.append((found, at))
                break
    return places


def overlaps(ends: Sequence[int], places: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns for each piece of a text whether any of it stands in one of the places.

    Args:
        ends: where each piece ends; several pieces of one character or word end at one place.
        places: pairs of begin and end, in order.

    Example:
        >>> overlaps([2, 4, 4, 6], [(3, 4)])
        [False, True, True, False]
    """
    labels: list[bool] = []
    begin = last = place = 0
    for end in ends:
        if end > last:
            begin, last = last, end
        while place < len(places) and places[place][1] <= begin:
            place += 1
        labels.append(place < len(places) and begin < places[place][1] and end > places[place][0])
    return labels
