"""What is shown of groups that were played here, and what their lines in a file hold for it.

A line makes the group again; beside that it lists the piece of every id and who put it there, so that a file
can be looked at without its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from atropos_gym.html import Pieces, ShownEpisode, ShownGroup, ShownRow, ShownTurn, Source
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._pieces import tables
from atropos_gym.rollout._sources import row_sources
from atropos_gym.rollout.episode import Episode, EpisodeGroup, Row
from atropos_gym.tokenizers import Tokenizer
from atropos_gym.tokenizers.pieces import pieces_of

__all__ = ["show_group", "sources_of", "split_extras", "tokenizer_name", "with_extras"]

Sources = Sequence[Sequence[Source] | None]
"""For each row of an episode who put each id there, or None where that is not known."""

#: What the writer adds to a group for people, beside what makes the group again.
_EXTRAS = ("tokenizer", "pieces", "control")


def sources_of(group: EpisodeGroup, speaker: Tokenizer | ChatRenderer) -> list[Sources]:
    """Returns for each episode and row who put each id there; a tokenizer alone cannot tell."""
    if isinstance(speaker, ChatRenderer):
        return [row_sources(episode, speaker) for episode in group.episodes]
    return [[None] * len(episode.rows) for episode in group.episodes]


def with_extras(group: EpisodeGroup, speaker: Tokenizer | ChatRenderer) -> dict[str, Any]:
    """Returns a group's data with the piece of every id and, by a renderer, who put it there.

    ``pieces`` and ``control`` list each id once; a row's ``sources`` are runs: ``[["template", 2], ...]``.
    """
    tokenizer = speaker.tokenizer if isinstance(speaker, ChatRenderer) else speaker
    data = group.to_dict()
    ids = (id_ for episode in group.episodes for row in episode.rows for id_ in row.ids)
    texts, control = tables(pieces_of(tokenizer), ids)
    data |= {"tokenizer": tokenizer_name(tokenizer), "pieces": texts, "control": control}
    for episode, found in zip(data["episodes"], sources_of(group, speaker), strict=True):
        for row, sources in zip(episode["rows"], found, strict=True):
            if sources is not None:
                row["sources"] = [[source, len(list(run))] for source, run in groupby(sources)]
    return data


def tokenizer_name(tokenizer: Tokenizer) -> str:
    """Returns what people call a tokenizer; of a folder its last word: where it lies is nobody's business.

    Example:
        >>> from atropos_gym import load_tokenizer
        >>> tokenizer_name(load_tokenizer("bytes"))
        'bytes'
    """
    name = tokenizer.name
    return Path(name).name or name if name.startswith(("/", ".", "~")) else name


def split_extras(data: dict[str, Any]) -> dict[str, Any]:
    """Takes what ``with_extras`` added out of a group's data and returns it, sources as ``Sources``."""
    extras: dict[str, Any] = {name: data.pop(name) for name in _EXTRAS if name in data}
    extras["sources"] = [
        [_from_runs(row.pop("sources", None)) for row in episode["rows"]] for episode in data["episodes"]
    ]
    return extras


def show_group(
    group: EpisodeGroup,
    pieces: Pieces,
    *,
    tokenizer: str | None = None,
    sources: Sequence[Sources] | None = None,
) -> ShownGroup:
    """Returns what is shown of a group that was played here.

    Args:
        group: its episodes may have no score.
        pieces: how its ids are shown.
        tokenizer: name of its tokenizer.
        sources: for each episode and row who put each id there, where that is known.
    """
    scores = [episode.score for episode in group.episodes if episode.score is not None]
    mean = sum(scores) / len(scores) if scores else 0.0
    return ShownGroup(
        [
            _show_episode(episode, mean, sources[index] if sources else [None] * len(episode.rows))
            for index, episode in enumerate(group.episodes)
        ],
        pieces,
        env=group.env,
        number=group.number,
        version=group.policy_version,
        seed=group.episodes[0].seed if group.episodes else None,
        temperature=group.temperature,
        tokenizer=tokenizer,
    )


def _show_episode(episode: Episode, mean: float, sources: Sources) -> ShownEpisode:
    return ShownEpisode(
        rows=[_show_row(row, found) for row, found in zip(episode.rows, sources, strict=True)],
        number=episode.member,
        score=episode.score,
        advantage=None if episode.score is None else episode.score - mean,
        episode_return=episode.episode_return,
        end_reason=episode.end_reason,
        success=episode.success,
        truncated=episode.truncated,
        messages=[dict(message) for message in episode.messages],
    )


def _show_row(row: Row, sources: Sequence[Source] | None) -> ShownRow:
    turns = [
        ShownTurn(turn.start, turn.end, turn.reward, turn.version, turn.cut, turn.info, turn.legal_actions)
        for turn in row.turns
    ]
    return ShownRow(row.ids, row.mask, row.logprobs, sources, turns)


def _from_runs(runs: Sequence[Sequence[Any]] | None) -> list[Source] | None:
    return None if runs is None else [source for source, length in runs for _ in range(int(length))]
