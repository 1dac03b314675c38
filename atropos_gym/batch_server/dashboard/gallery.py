"""The latest groups, as they were posted: found by text, paged through, and drawn when someone looks.

Only the latest are kept, by number and by bytes, in the packed form. Finding and drawing read what was kept
at the moment of the question, so that they can run in a thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from atropos_gym.batch_server.state.packed import Columns, Ints, PackedGroup
from atropos_gym.html import (
    Pieces,
    ShownEpisode,
    ShownGroup,
    ShownRow,
    episode_head,
    group_head,
    render_episode,
    wire_episodes,
)
from atropos_gym.wire import ScoredDataGroup

__all__ = ["Exhibit", "Gallery"]

MOST_GROUPS = 500
MOST_BYTES = 32 * 2**20
"""What is kept at most; the newest group always is."""

MOST_IDS = 20_000
"""Ids of an episode that are drawn; a browser takes seconds for more."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One group that was accepted.

    Attributes:
        number: its place in the order of arrival.
        packed: the group.
        env: name of its environment.
        version: lowest policy version in it; None where unknown.
        received_at: Unix seconds.
    """

    number: int
    packed: PackedGroup
    env: str
    version: int | None
    received_at: float


class Gallery:
    """The latest groups.

    Args:
        pieces: how ids are shown.
        tokenizer: its name; None where ids are shown by number.
        most_groups: kept at most.
        most_bytes: kept at most, all groups together.
    """

    def __init__(
        self,
        pieces: Pieces | None = None,
        tokenizer: str | None = None,
        *,
        most_groups: int = MOST_GROUPS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.pieces = pieces or Pieces.unknown()
        self.tokenizer = tokenizer
        self._most_groups = most_groups
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, Exhibit] = OrderedDict()
        self._bytes = 0
        self._texts: dict[int, str] = {}  # of groups that were searched

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, exhibit: Exhibit) -> None:
        """Keeps a group, and forgets the oldest ones that are too many."""
        self._kept[exhibit.number] = exhibit
        self._bytes += len(exhibit.packed.data)
        while len(self._kept) > self._most_groups or (self._bytes > self._most_bytes and len(self._kept) > 1):
            number, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest.packed.data)
            self._texts.pop(number, None)

    @property
    def newest(self) -> int | None:
        """Number of the newest group."""
        return next(reversed(self._kept), None)

    def all(self) -> list[Exhibit]:
        """What is kept now, newest first."""
        return list(reversed(self._kept.values()))

    def page(
        self, exhibits: Sequence[Exhibit], *, find: str = "", before: int | None = None, count: int = 10
    ) -> dict[str, Any]:
        """Returns some groups without their ids, newest first; safe in a thread.

        Args:
            exhibits: what :meth:`all` returned.
            find: text in ids, messages or name, or a group's name (``g-12``); without pieces, ids in a row.
            before: only groups with lower numbers.
            count: how many at most.
        """
        found = self._found(exhibits, find.strip(), before)
        shown = [one for _, one in zip(range(count), found, strict=False)]
        return {
            "groups": [self._heads(one, find.strip()) for one in shown],
            "more": next(found, None) is not None,
            "kept": len(exhibits),
        }

    def draw(self, exhibit: Exhibit, episode: int) -> str | None:
        """Returns all of an episode as HTML, None where the group has no such one; safe in a thread."""
        group = self._shown(exhibit)
        if not 0 <= episode < len(group.episodes):
            return None
        shown, left_out = _cut(group.episodes[episode])
        parts = render_episode(shown, self.pieces)
        if left_out:
            parts.append(f'<p class="dim">{left_out:,} more ids are not drawn here.</p>')
        return "".join(parts)

    def _heads(self, exhibit: Exhibit, find: str) -> dict[str, Any]:
        group = self._shown(exhibit)
        _breathe()
        return {
            "number": exhibit.number,
            "at": exhibit.received_at,
            "head": group_head(group),
            "episodes": [
                {
                    "head": episode_head(one),
                    "ids": sum(len(row.ids) for row in one.rows),
                    "found": bool(find) and self._says(one, find),
                }
                for one in group.episodes
            ],
        }

    def _shown(self, exhibit: Exhibit) -> ShownGroup:
        columns, free = exhibit.packed.columns(), exhibit.packed.free()
        settings = free.get("generation_params") or {}
        temperature = settings.get("temperature")
        return ShownGroup(
            episodes=wire_episodes(_unpacked(columns, free)),
            pieces=self.pieces,
            env=exhibit.env,
            number=exhibit.number,
            version=exhibit.version,
            temperature=temperature if isinstance(temperature, int | float) else None,
            tokenizer=self.tokenizer,
        )

    def _found(self, exhibits: Sequence[Exhibit], find: str, before: int | None) -> Iterator[Exhibit]:
        for one in exhibits:
            if (before is None or one.number < before) and (not find or self._matches(one, find)):
                yield one

    def _matches(self, exhibit: Exhibit, find: str) -> bool:
        wanted = find.lower()
        if wanted == f"g-{exhibit.number}" or wanted in exhibit.env.lower():
            return True
        text = self._texts.get(exhibit.number)
        if text is None:
            text = self._text(exhibit.packed).lower()
            if exhibit.number in self._kept:  # else it left while this thread read it
                self._texts[exhibit.number] = text
        if wanted in text:
            return True
        columns = exhibit.packed.columns()
        return not self.pieces.known and _holds(columns.rows(columns.tokens), find)

    def _says(self, episode: ShownEpisode, find: str) -> bool:
        """Whether this very episode says what a group was found by."""
        rows = [np.asarray(row.ids) for row in episode.rows]
        wanted = find.lower()
        return any(wanted in said.lower() for said in self._said(rows, episode.messages)) or (
            not self.pieces.known and _holds(rows, find)
        )

    def _text(self, packed: PackedGroup) -> str:
        """All that a group says: its messages, and its ids where their pieces are known."""
        columns, messages = packed.columns(), packed.free().get("messages") or []
        return "\n".join(self._said(columns.rows(columns.tokens), [one for row in messages for one in row]))

    def _said(self, rows: Sequence[Ints], messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        yield from (str(message.get("content", "")) for message in messages)
        for row in rows if self.pieces.known else ():
            yield self.pieces.decode(row.tolist())
            _breathe()


def _breathe() -> None:
    """Lets the server answer others: a thread that computes keeps them waiting at each of their steps."""
    time.sleep(0.0005)


def _unpacked(columns: Columns, free: Mapping[str, Any]) -> ScoredDataGroup:
    """The group as it was posted; it was checked when it came."""

    def rows(column: Any) -> list[list[Any]]:
        return [row.tolist() for row in columns.rows(column)]

    values: dict[str, Any] = {
        "tokens": rows(columns.tokens),
        "masks": rows(columns.wire_masks()),
        "scores": columns.scores.tolist(),
        **{name: rows(column) for name, column in columns.floats.items()},
        **{name: free.get(name) for name in ("messages", "overrides")},
    }
    return ScoredDataGroup.model_construct(**values)


def _holds(rows: Sequence[Ints], find: str) -> bool:
    """Whether a row holds these ids one behind the other; False where ``find`` is no list of ids."""
    words = find.replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) < 10 for word in words):
        return False
    wanted = np.array(words, np.int64)
    for row in rows:
        if len(row) >= len(wanted):
            windows = np.lib.stride_tricks.sliding_window_view(row, len(wanted))
            if bool((windows == wanted).all(axis=1).any()):
                return True
    return False


def _cut(episode: ShownEpisode) -> tuple[ShownEpisode, int]:
    """The episode without the ids that are too many to draw, and how many those are."""
    room, rows, left_out = MOST_IDS, [], 0
    for row in episode.rows:
        over = len(row.ids) - room
        if over > 0:
            left_out += over
            row = _cut_row(row, max(0, room))
        room -= len(row.ids)
        rows.append(row)
    return (replace(episode, rows=rows), left_out) if left_out else (episode, 0)


def _cut_row(row: ShownRow, end: int) -> ShownRow:
    return ShownRow(
        ids=row.ids[:end],
        mask=row.mask[:end],
        logprobs=None if row.logprobs is None else row.logprobs[:end],
        advantages=None if row.advantages is None else row.advantages[:end],
        turns=[replace(turn, end=min(turn.end, end)) for turn in row.turns if turn.start < end],
    )
