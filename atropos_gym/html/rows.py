"""The ids of an episode as HTML: every id with its piece, number, logprob, source, and whether it is trained.

An id is one ``<b>``: its classes say who put it there (``t`` template, ``m`` message, ``s`` sampled, ``u``
prompt of unknown source), ``y`` that it is trained, ``p0`` to ``p4`` how unlikely it was, ``c`` that it is a
control id. Its number and logprob stand in attributes, several where one character is made of several ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from itertools import groupby
from math import exp
from typing import Any

from atropos_gym.html.facts import Fact, turn_facts
from atropos_gym.html.pieces import Pieces, visible
from atropos_gym.html.records import ShownEpisode, ShownRow, Source, Stretch, stretches

__all__ = ["chips", "render_episode", "render_row"]

_SOURCE_CLASS: Mapping[Source, str] = {"template": "t", "message": "m", "sampled": "s", "prompt": "u"}

# Upper ends of the colour classes, by probability of the sampled id.
_LIKELY = (0.02, 0.1, 0.35, 0.75)


def render_episode(episode: ShownEpisode, pieces: Pieces) -> list[str]:
    """Returns all of an episode in parts: its rows, and what was said that is in no row."""
    several = len(episode.rows) > 1
    parts = []
    first_turn = 0
    for index, row in enumerate(episode.rows):
        if several:
            parts.append(f'<h4 class="segment">segment {index}<span>{_size(row)}</span></h4>')
        parts += render_row(row, pieces, first_turn=first_turn)
        first_turn += len(row.turns)
    if not pieces.known:
        parts += [_message(message, "said") for message in episode.messages]
    else:
        parts += [_message(message, "at the end, read by no policy") for message in episode.unread]
    return parts


def render_row(row: ShownRow, pieces: Pieces, *, first_turn: int = 0) -> list[str]:
    """Returns the parts of a row: its prompt, turns and bridges, each under what is known of it.

    Args:
        row: ids and what is known of them.
        pieces: how ids are shown.
        first_turn: number of the row's first turn in its episode.

    Example:
        >>> row = ShownRow([60, 104], [-100, 104], [1.0, -0.25])
        >>> prompt, turn = render_row(row, Pieces(chr, lambda id_: None))
        >>> prompt[prompt.index("<pre") :]
        '<pre data-at="0"><b class="u" data-i="60">&lt;</b></pre></div>'
        >>> '<b class="s y p0" data-i="104" data-l="-0.2500">h</b>' in turn
        True
    """
    parts = []
    turn = first_turn
    for stretch in stretches(row):
        parts.append(_stretch(row, stretch, pieces, turn))
        turn += stretch.kind == "turn"
    return parts


def _stretch(row: ShownRow, stretch: Stretch, pieces: Pieces, turn: int) -> str:
    count = stretch.end - stretch.start
    size = f'<span class="n">{count} {"id" if count == 1 else "ids"}</span>'
    if stretch.turn is not None:
        head = _name(f"turn {turn}") + chips(turn_facts(stretch.turn))
        kind = "turn bad" if stretch.turn.invalid else "turn"
    else:
        head, kind = _name(stretch.kind), "context"
    ids = "".join(_runs(row, stretch, pieces)) or '<i class="none">nothing was sampled</i>'
    return f'<div class="{kind}"><h5>{head}{size}</h5><pre data-at="{stretch.start}">{ids}</pre></div>'


def _runs(row: ShownRow, stretch: Stretch, pieces: Pieces) -> Iterable[str]:
    """Yields one element for each character or piece; runs of one kind hold characters of several ids."""

    def kind(position: int) -> tuple[Source, bool, int]:
        # A control id stands alone: it is no part of a character.
        alone = pieces.control(row.ids[position]) is not None
        return row.source(position), row.trained(position), position if alone else -1

    for (source, trained, alone), positions in groupby(range(stretch.start, stretch.end), kind):
        run = list(positions)
        if alone >= 0:
            yield _id(row, run, source, trained, "", pieces)
            continue
        at = run[0]
        for ids, text in pieces.chunks([row.ids[position] for position in run]):
            yield _id(row, range(at, at + len(ids)), source, trained, text, pieces)
            at += len(ids)


def _id(
    row: ShownRow, positions: Iterable[int], source: Source, trained: bool, text: str, pieces: Pieces
) -> str:
    positions = list(positions)
    ids = [row.ids[position] for position in positions]
    classes = [_SOURCE_CLASS[source]]
    attributes = f' data-i="{" ".join(map(str, ids))}"'
    logprobs = [row.logprob(position) for position in positions]
    known = [logprob for logprob in logprobs if logprob is not None]
    if trained:
        classes.append("y")
    if known and len(known) == len(ids):
        classes.append(_colour(min(known)))
        attributes += f' data-l="{" ".join(f"{logprob:.4f}" for logprob in known)}"'
    if row.advantages is not None and trained:
        attributes += f' data-a="{" ".join(f"{row.advantages[position]:.4g}" for position in positions)}"'
    shown = text
    if not text:
        classes.append("c")
        shown = pieces.name(ids[0])
    return f'<b class="{" ".join(classes)}"{attributes}>{escape(visible(shown))}</b>'


def _colour(logprob: float) -> str:
    probability = exp(min(logprob, 0.0))
    return f"p{4 - sum(probability > end for end in _LIKELY)}"


def _message(message: Mapping[str, Any], label: str) -> str:
    content = message.get("content")
    said = content if isinstance(content, str) else repr(content)
    role = escape(visible(str(message.get("role", "?"))))
    head = f'<h5>{_name(role)}<span class="n">{label}</span></h5>'
    return f'<div class="said">{head}<p>{escape(visible(said))}</p></div>'


def _name(name: str) -> str:
    return f'<span class="name">{name}</span>'


def _size(row: ShownRow) -> str:
    trained = sum(map(row.trained, range(len(row.ids))))
    return f"{len(row.ids):,} ids, {trained:,} trained"


def chips(facts: Iterable[Fact]) -> str:
    """Returns facts as small labels; their texts are escaped."""
    return "".join(
        f'<span class="{f"chip {tone}".strip()}">{escape(visible(text))}</span>' for text, tone in facts
    )
