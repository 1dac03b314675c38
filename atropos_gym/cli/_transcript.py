"""Episodes in a terminal: what was read and said, id by id, and what is known of it.

The same facts as on the page. Colours only where they are wanted; without them, trained text stands behind
``>``, and a turn's line names its least likely id.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp
from typing import IO, Any

from atropos_gym.html import (
    Fact,
    Pieces,
    ShownEpisode,
    ShownGroup,
    ShownRow,
    Stretch,
    episode_facts,
    group_facts,
    number,
    score_fact,
    stretches,
    turn_facts,
    visible,
)

__all__ = ["Transcript", "wants_colour"]

_TONES = {"good": "32", "bad": "31", "": ""}
_SOURCES = {"template": "33", "message": "", "prompt": "2", "sampled": ""}
# Of sampled ids, from likely to unlikely, as the page has them.
_LIKELY = ((0.75, "34"), (0.35, "36"), (0.1, "32"), (0.02, "35"), (-1.0, "1;31"))

_COLUMNS = "  {:>8} {:>7}  {:8}  {:7}  {:>8}  {:>6}  {}"


def wants_colour(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that shows colours; ``NO_COLOR`` and ``TERM=dumb`` say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Transcript:
    r"""Draws groups, episodes, rows and stretches as lines of text.

    Args:
        colour: use ANSI colours.
        ids: a table of ids in place of running text.

    Example:
        >>> row = ShownRow([60, 104], [-100, 104], [1.0, -0.25])
        >>> print("\n".join(Transcript().row(row, Pieces(chr, lambda id_: None))))
        prompt, 1 id
          | <
        turn 0, 1 id · least likely 'h', p 0.779, at 1
          > h
    """

    def __init__(self, *, colour: bool = False, ids: bool = False) -> None:
        self._colour = colour
        self._ids = ids

    def group(self, group: ShownGroup) -> Iterator[str]:
        """Yields the lines of a group and of the episodes of it that are shown."""
        yield self._paint(visible(group.title), "1")
        facts = group_facts(group)
        if len(group.episodes) > 1:
            facts.append((f"scores {' '.join(score_fact(score)[0] for score in group.scores)}", ""))
        if facts:
            yield self.facts(facts)
        for index, episode in group.shown:
            yield ""
            yield from self.episode(episode, group.pieces, index)
        yield ""

    def episode(self, episode: ShownEpisode, pieces: Pieces, index: int) -> Iterator[str]:
        """Yields the lines of an episode; ``index`` is its number in the file."""
        yield self._paint(f"#{index} episode {episode.number}", "1") + self._tail(episode_facts(episode))
        first_turn = 0
        for segment, row in enumerate(episode.rows):
            if len(episode.rows) > 1:
                yield self.border(segment, row)
            yield from self.row(row, pieces, first_turn)
            first_turn += len(row.turns)
        messages = episode.unread if pieces.known else episode.messages
        for message in messages:
            yield from self.message(message, "at the end, read by no policy" if pieces.known else "said")

    def message(self, message: Mapping[str, Any], label: str) -> Iterator[str]:
        """Yields the lines of a message as text."""
        yield self._paint(f"{visible(str(message.get('role', '?')))}, {label}", "1")
        yield from self._lines([(visible(str(message.get("content"))), "")], "  | ")

    def border(self, segment: int, row: ShownRow) -> str:
        """Returns the line that stands between segments."""
        trained = sum(map(row.trained, range(len(row.ids))))
        return self._paint(f"---- segment {segment}: {len(row.ids)} ids, {trained} trained ", "1").ljust(
            60, "-"
        )

    def row(self, row: ShownRow, pieces: Pieces, first_turn: int = 0) -> Iterator[str]:
        """Yields the lines of a row."""
        turn = first_turn
        for stretch in stretches(row):
            yield self.head(row, stretch, pieces, turn)
            yield from self.ids(row, stretch, pieces)
            turn += stretch.kind == "turn"

    def head(self, row: ShownRow, stretch: Stretch, pieces: Pieces, turn: int) -> str:
        """Returns the line over a stretch: which it is, and what is known of a turn."""
        count = stretch.end - stretch.start
        name = f"turn {turn}" if stretch.kind == "turn" else stretch.kind
        facts = turn_facts(stretch.turn) if stretch.turn is not None else []
        facts += _least_likely(row, stretch, pieces)
        size = f"{name}, {count} {'id' if count == 1 else 'ids'}"
        return self._paint(size, "1" if stretch.turn else "2") + self._tail(facts)

    def ids(self, row: ShownRow, stretch: Stretch, pieces: Pieces) -> Iterator[str]:
        """Yields the ids of a stretch: a table, or their text."""
        if self._ids:
            yield from self._table(row, stretch, pieces)
            return
        parts = []
        at = stretch.start
        while at < stretch.end:
            end = self._run_end(row, at, stretch.end, pieces)
            run = row.ids[at:end]
            named = pieces.control(run[0]) is not None
            text = pieces.name(run[0]) if named else pieces.decode(run)
            if not text:
                text = "".join(map(pieces.name, run))
            parts.append((visible(text), self._style(row, at, named)))
            at = end
        mark = "> " if stretch.kind == "turn" else "| "
        yield from self._lines(parts or [("(nothing was sampled)", "2")], f"  {mark}")

    def facts(self, facts: Iterable[Fact]) -> str:
        """Returns facts on one line."""
        return " · ".join(
            self._paint(visible(text).replace("⏎\n", "⏎"), _TONES[tone]) for text, tone in facts
        )

    def _tail(self, facts: Sequence[Fact]) -> str:
        return f" · {self.facts(facts)}" if facts else ""

    def _run_end(self, row: ShownRow, start: int, end: int, pieces: Pieces) -> int:
        """Returns where a run of ids with one look ends; characters of several ids stay whole."""
        if pieces.control(row.ids[start]) is not None:
            return start + 1
        if self._colour and row.source(start) == "sampled":
            # One colour an id, but never within a character.
            return start + len(pieces.chunks(row.ids[start : min(end, start + 4)])[0][0])
        look = row.source(start), row.trained(start)
        at = start + 1
        while (
            at < end
            and (row.source(at), row.trained(at)) == look
            and pieces.control(row.ids[at]) is None
            and bool(pieces.text(row.ids[at])) == bool(pieces.text(row.ids[start]))
        ):
            at += 1
        return at

    def _style(self, row: ShownRow, position: int, control: bool) -> str:
        logprob = row.logprob(position)
        style = _SOURCES[row.source(position)]
        if logprob is not None:
            probability = exp(logprob)
            style = next(style for least, style in _LIKELY if probability > least)
        if row.trained(position):
            style = f"4;{style}".rstrip(";")
        return f"2;{style}".rstrip(";") if control and not row.trained(position) else style

    def _table(self, row: ShownRow, stretch: Stretch, pieces: Pieces) -> Iterator[str]:
        """Yields one line for each id; the piece comes last, since its width is anybody's guess."""
        yield self._paint(_COLUMNS.format("position", "id", "from", "trained", "logprob", "p", "piece"), "2")
        for position in range(stretch.start, stretch.end):
            logprob = row.logprob(position)
            known = ("", "") if logprob is None else (number(round(logprob, 4)), f"{exp(logprob):.3f}")
            id_ = row.ids[position]
            piece = _one_line(pieces.name(id_)).replace(" ", "␣")
            painted = self._paint(piece, self._style(row, position, pieces.control(id_) is not None))
            trained = "trained" if row.trained(position) else "no"
            yield _COLUMNS.format(position, id_, row.source(position), trained, *known, painted)

    def _lines(self, parts: Iterable[tuple[str, str]], margin: str) -> Iterator[str]:
        """Yields painted parts, each line of text behind a margin."""
        line = ""
        for text, style in parts:
            *whole, last = text.split("\n")
            for piece in whole:
                yield margin + line + self._paint(piece, style)
                line = ""
            line += self._paint(last, style)
        if line:
            yield margin + line

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self._colour and style and text else text


def _one_line(text: str) -> str:
    return visible(text).replace("⏎\n", "⏎")


def _least_likely(row: ShownRow, stretch: Stretch, pieces: Pieces) -> list[Fact]:
    known = [(row.logprob(at), at) for at in range(stretch.start, stretch.end)]
    least = min(((logprob, at) for logprob, at in known if logprob is not None), default=None)
    if least is None:
        return []
    return [(f"least likely {pieces.name(row.ids[least[1]])!r}, p {exp(least[0]):.3g}, at {least[1]}", "")]
