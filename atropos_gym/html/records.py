"""What is shown of groups of episodes, wherever they come from: a collector's file, the wire, a foreign file.

Plain data that says "unknown" with None; the HTML of this folder and the command line's terminal form both
draw it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from atropos_gym.html.pieces import Pieces
from atropos_gym.wire import ScoredDataGroup

__all__ = [
    "ShownEpisode",
    "ShownGroup",
    "ShownRow",
    "ShownTurn",
    "Source",
    "Stretch",
    "numbered",
    "stretches",
    "wire_episodes",
]

#: Who put an id there. ``prompt``: template or message, unknown which.
Source = Literal["template", "message", "sampled", "prompt"]


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """One action of the policy; positions are those of its row."""

    start: int
    end: int
    reward: float | None = None
    version: int | None = None
    cut: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    legal_actions: Sequence[str] | None = None

    @property
    def invalid(self) -> bool:
        """Whether the reply held no usable action."""
        return bool(self.info.get("invalid"))


@dataclass(frozen=True, slots=True)
class ShownRow:
    """One training sequence.

    Attributes:
        ids: prompt, sampled ids, bridge, sampled ids, ...
        mask: -100 where not trained; as long as ``ids``.
        logprobs: as long as ``ids``, meant where trained; None where unknown.
        sources: who put each id there; None where unknown.
        turns: in order; empty where unknown.
        advantages: per id, where the sender gives them.

    Raises:
        ValueError: lists differ in length, or turns do not lie in the row one behind the other.
    """

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float] | None = None
    sources: Sequence[Source] | None = None
    turns: Sequence[ShownTurn] = ()
    advantages: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("mask", "logprobs", "sources", "advantages"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise ValueError(f"a row's lists differ in length: {len(self.ids)} ids, {len(values)} {name}")
        end = 0
        for turn in self.turns:
            if not end <= turn.start <= turn.end <= len(self.ids):
                raise ValueError(f"a turn [{turn.start}, {turn.end}) does not fit into {len(self.ids)} ids")
            end = turn.end

    def trained(self, position: int) -> bool:
        """Whether the id at a position is trained on."""
        return self.mask[position] != -100

    def source(self, position: int) -> Source:
        """Who put the id at a position there; without ``sources`` the mask tells."""
        if self.sources is not None:
            return self.sources[position]
        return "sampled" if self.trained(position) else "prompt"

    def logprob(self, position: int) -> float | None:
        """The logprob of a sampled id; None where it is unknown or has no meaning."""
        if self.logprobs is None or self.source(position) != "sampled":
            return None
        value = self.logprobs[position]
        return value if value <= 0.0 else None


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """One episode: its rows and what became of it; None where unknown."""

    rows: Sequence[ShownRow]
    number: int
    score: float | None = None
    advantage: float | None = None
    episode_return: float | None = None
    end_reason: str | None = None
    success: bool | None = None
    truncated: bool = False
    #: A turn ended without an end id.
    cut: bool = False
    #: The conversation as text.
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def turns(self) -> list[ShownTurn]:
        """All turns in order."""
        return [turn for row in self.rows for turn in row.turns]

    @property
    def invalid_turns(self) -> int:
        """Replies without a usable action."""
        return sum(turn.invalid for turn in self.turns)

    @property
    def unread(self) -> list[Mapping[str, Any]]:
        """Messages behind the last reply: the policy never reads them."""
        last = max((i for i, m in enumerate(self.messages) if m.get("role") == "assistant"), default=-1)
        return list(self.messages[last + 1 :]) if last >= 0 else []


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """Episodes from one start, and how their ids are shown; None where unknown.

    Attributes:
        episodes: all members.
        pieces: how ids are shown.
        env: id or name of the environment.
        number: of the group in its run.
        version: lowest policy version in it.
        seed: of the start.
        temperature: of sampling.
        tokenizer: its name.
        first: number of its first episode among all that are shown.
        only: number of the one episode to show; None shows all.
    """

    episodes: Sequence[ShownEpisode]
    pieces: Pieces
    env: str | None = None
    number: int | None = None
    version: int | None = None
    seed: int | None = None
    temperature: float | None = None
    tokenizer: str | None = None
    first: int = 0
    only: int | None = None

    @property
    def scores(self) -> list[float]:
        """The known scores, one an episode."""
        return [episode.score for episode in self.episodes if episode.score is not None]

    @property
    def title(self) -> str:
        """What it is called."""
        words = [self.env or "group without a name"]
        words += [f"group {self.number}"] if self.number is not None else []
        words += [f"version {self.version}"] if self.version is not None else []
        return " · ".join(words)

    @property
    def shown(self) -> list[tuple[int, ShownEpisode]]:
        """The episodes that are shown, each with its number in the file."""
        numbered = list(enumerate(self.episodes, start=self.first))
        return numbered if self.only is None else [pair for pair in numbered if pair[0] == self.only]


def numbered(groups: Iterable[ShownGroup]) -> Iterator[ShownGroup]:
    """Numbers the episodes of groups through, from 0."""
    first = 0
    for group in groups:
        yield replace(group, first=first)
        first += len(group.episodes)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of a row's ids of one kind: a prompt, a bridge, a turn, or what follows the last turn."""

    kind: Literal["prompt", "bridge", "turn", "rest"]
    start: int
    end: int
    turn: ShownTurn | None = None


def stretches(row: ShownRow) -> Iterator[Stretch]:
    """Yields a row's stretches in order; where turns are unknown, runs of trained ids stand for them.

    Example:
        >>> [s.kind for s in stretches(ShownRow([1, 2, 3, 4], [-100, 2, -100, 4]))]
        ['prompt', 'turn', 'bridge', 'turn']
    """
    position = 0
    for turn in row.turns or _runs(row):
        if turn.start > position:
            yield Stretch("bridge" if position else "prompt", position, turn.start)
        yield Stretch("turn", turn.start, turn.end, turn)
        position = turn.end
    if position < len(row.ids):
        yield Stretch("rest" if position else "prompt", position, len(row.ids))


def _runs(row: ShownRow) -> list[ShownTurn]:
    runs = []
    for trained, positions in groupby(range(len(row.ids)), row.trained):
        run = list(positions)
        if trained:
            runs.append(ShownTurn(run[0], run[-1] + 1))
    return runs


def wire_episodes(group: ScoredDataGroup) -> list[ShownEpisode]:
    """Returns a group of the wire as episodes: sequences that name the same ``episode`` are its rows.

    Advantages are the sender's where it gives them, else score minus the mean over episodes.
    """
    members: dict[Any, list[int]] = {}
    for index in range(group.size):
        about = group.overrides[index] if group.overrides else {}
        key = about.get("episode")
        members.setdefault(index if not isinstance(key, int) else ("episode", key), []).append(index)
    scores = [group.scores[indices[0]] for indices in members.values()]
    mean = sum(scores) / len(scores)
    return [
        _wire_episode(group, number, indices, score - mean)
        for number, (indices, score) in enumerate(zip(members.values(), scores, strict=True))
    ]


def _wire_episode(
    group: ScoredDataGroup, number: int, indices: Sequence[int], advantage: float
) -> ShownEpisode:
    rows = [_wire_row(group, index) for index in indices]
    about = group.overrides[indices[-1]] if group.overrides else {}
    end_reason = about.get("end_reason")
    rewards = [turn.reward for row in rows for turn in row.turns]
    known = [reward for reward in rewards if reward is not None]
    sent = {a for row in rows for i, a in enumerate(row.advantages or ()) if row.trained(i)}
    return ShownEpisode(
        rows=rows,
        number=number,
        score=group.scores[indices[0]],
        # Advantages that differ from id to id are shown there; one number would not say them.
        advantage=advantage if not sent else sent.pop() if len(sent) == 1 else None,
        episode_return=sum(known) if known and len(known) == len(rewards) else None,
        end_reason=None if end_reason is None else str(end_reason),
        success=about.get("success") if isinstance(about.get("success"), bool) else None,
        truncated=bool(about.get("truncated")),
        cut=any((group.overrides[index] if group.overrides else {}).get("cut") for index in indices),
        messages=[message for index in indices if group.messages for message in group.messages[index]],
    )


def _wire_row(group: ScoredDataGroup, index: int) -> ShownRow:
    about = group.overrides[index] if group.overrides else {}
    parts: dict[str, Any] = {
        "ids": group.tokens[index],
        "mask": group.masks[index],
        "logprobs": group.inference_logprobs[index] if group.inference_logprobs else None,
        "advantages": group.advantages[index] if group.advantages else None,
    }
    try:
        return ShownRow(**parts, turns=_wire_turns(about))
    except (TypeError, ValueError):  # overrides are free: a foreign sender means something else by these keys
        return ShownRow(**parts)


def _wire_turns(about: Mapping[str, Any]) -> list[ShownTurn]:
    spans = about.get("turns") or []
    rewards = about.get("turn_rewards") or [None] * len(spans)
    versions = about.get("turn_versions") or [None] * len(spans)
    return [
        ShownTurn(int(start), int(end), reward, version)
        for (start, end), reward, version in zip(spans, rewards, versions, strict=True)
    ]
