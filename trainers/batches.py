"""From bodies of the wire to training rows: checked, aligned, with advantages, nothing dropped in silence.

Each row that goes in is trained, dropped with a reason, or refused by name; the counts add up. Checks run
over all ids of the batch at once (numpy), so that a thousand short rows take milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_gym.trainers.advantages import Baseline, Scale, group_advantages
from atropos_gym.wire import ScoredDataGroup

__all__ = ["LOGPROB_ROUNDING", "Batch", "PlayedEpisode", "Refusal", "Row", "RowRules", "read_batch"]

#: A positive logprob up to here is rounding and becomes 0; above, it is none (often the placeholder 1.0).
LOGPROB_ROUNDING = 1e-3

#: Value of ``masks`` where an id is not trained.
UNTRAINED = -100

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RowRules:
    """What a row must satisfy, and how advantages are made.

    Attributes:
        vocab_size: ids must be below it.
        fingerprint: the learner's tokenizer; None accepts any.
        version: version of the weights that will be updated; None checks no staleness.
        max_staleness: oldest version that is kept, counted back from ``version``.
        drop_equal: drop groups of equal scores.
        baseline: see ``group_advantages``.
        scale: see ``group_advantages``.
        eps: added to a std.
        mask_truncated: leave truncated episodes out of the loss (their score stays in the baseline).
    """

    vocab_size: int
    fingerprint: str | None = None
    version: int | None = None
    max_staleness: int = 0
    drop_equal: bool = True
    baseline: Baseline = "mean"
    scale: Scale = "none"
    eps: float = 0.0
    mask_truncated: bool = False


@dataclass(slots=True)
class Row:
    """One training sequence; ``K`` trained ids of ``T``.

    Attributes:
        ids: int32 ``[T]``, unpadded.
        positions: int32 ``[K]``, where the trained ids stand, ascending; never 0.
        logprobs: float64 ``[K]``, the engine's.
        advantages: float64 ``[K]``.
        temperature: the ids were sampled at it.
        version: of the policy that sampled; None if unknown.
        turns: ``(start, end)`` of each turn of the policy in row positions.
        count: how many equal rows this one stands for; ``advantages`` are their sum.
    """

    ids: IntArray
    positions: IntArray
    logprobs: FloatArray
    advantages: FloatArray
    temperature: float = 1.0
    version: int | None = None
    turns: tuple[tuple[int, int], ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that cannot be trained on: where it stood and why."""

    group: int
    row: int
    reason: str
    detail: str = ""


@dataclass(slots=True)
class PlayedEpisode:
    """What the logger and the callbacks are told of an episode."""

    score: float
    turn_rewards: list[float] = field(default_factory=list)
    success: bool | None = None


@dataclass(slots=True)
class Batch:
    """What one update learns from.

    Attributes:
        rows: trained rows.
        rows_in: rows that came in; ``len(rows) + sum(dropped.values())``.
        dropped: rows left out, by reason.
        dropped_groups: groups left out, by reason.
        refusals: refused rows in order, with the first wrong place.
        episodes: trained episodes and those of dropped equal groups: they were played, their gradient is 0.
        played: every episode that came in, in order.
        staleness: mean over trained rows with a known version, in versions; NaN if none is known.
        unknown_version: trained rows that name no version.
    """

    rows: list[Row] = field(default_factory=list)
    rows_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: Counter[str] = field(default_factory=Counter)
    refusals: list[Refusal] = field(default_factory=list)
    episodes: int = 0
    played: list[PlayedEpisode] = field(default_factory=list)
    staleness: float = math.nan
    unknown_version: int = 0

    @property
    def turns(self) -> int:
        """Turns of all episodes that came in: the timesteps of this batch."""
        return sum(max(1, len(episode.turn_rewards)) for episode in self.played)


@dataclass(slots=True)
class _Source:
    """A row as it came, with what was found out about it."""

    group: int
    row: int
    body: ScoredDataGroup
    score: float
    override: Mapping[str, Any]
    episode: Hashable
    temperature: float
    version: int | None
    reason: str | None = None
    detail: str = ""


def read_batch(groups: Sequence[ScoredDataGroup], rules: RowRules) -> Batch:
    """Returns the rows of a batch of groups, with advantages by group.

    Per-token ``advantages`` of the wire win over scores and are used as they are, except where
    ``group_overrides.segments`` says that an episode has several rows: then ours are computed from
    ``overrides[i].episode``, each episode once.

    Args:
        groups: bodies of the wire; each is a group of its own, whatever its position.
        rules: what is refused or dropped, and how advantages are made.

    Returns:
        Rows and counts that add up.
    """
    sources = [source for number, body in enumerate(groups) for source in _sources(number, body, rules)]
    batch = Batch(rows_in=len(sources))
    rows = _checked_rows(sources, rules)
    advantages = _assign_advantages(sources, rules, batch)
    trained_episodes: set[tuple[int, Hashable]] = set()
    staleness: list[int] = []
    for source, row, advantage in zip(sources, rows, advantages, strict=True):
        if source.reason in (None, "equal_scores"):
            trained_episodes.add((source.group, source.episode))
        if row is None or source.reason is not None:
            assert source.reason is not None
            batch.dropped[source.reason] += 1
            if row is None:
                batch.refusals.append(Refusal(source.group, source.row, source.reason, source.detail))
            continue
        row.advantages = (
            advantage if isinstance(advantage, np.ndarray) else np.full(len(row.positions), advantage)
        )
        batch.rows.append(row)
        if row.version is None:
            batch.unknown_version += 1
        elif rules.version is not None:
            staleness.append(rules.version - row.version)
    batch.episodes = len(trained_episodes)
    batch.staleness = sum(staleness) / len(staleness) if staleness else math.nan
    batch.played = _played(sources)
    assert batch.rows_in == len(batch.rows) + sum(batch.dropped.values())
    return batch


def _sources(number: int, body: ScoredDataGroup, rules: RowRules) -> list[_Source]:
    """Reads what is said about each row of a group, and the reasons that need no look at its ids."""
    shared = body.group_overrides or {}
    params = body.generation_params or {}
    overrides = body.overrides or []
    reason, detail = None, ""
    fingerprint = shared.get("tokenizer_fingerprint")
    if rules.fingerprint is not None and fingerprint not in (None, rules.fingerprint):
        reason, detail = "tokenizer_mismatch", f"{fingerprint}, the learner has {rules.fingerprint}"
    elif body.images:
        reason = "images"
    found = []
    for row in range(len(body.tokens)):
        override = (overrides[row] if row < len(overrides) else None) or {}
        temperature = next(
            (
                said["temperature"]
                for said in (override, params, shared)
                if said.get("temperature") is not None
            ),
            1.0,
        )
        score = body.scores[row] if row < len(body.scores) else math.nan
        episode, own_reason, own_detail = override.get("episode"), reason, detail
        if episode is None:
            episode = ("row", row)
        elif not isinstance(episode, (int, str)):
            own_reason, own_detail = reason or "episode_no_name", detail or f"episode {episode!r:.60}"
            episode = ("row", row)
        found.append(
            _Source(
                number,
                row,
                body,
                score,
                override,
                episode,
                _number(temperature),
                _version(override, shared),
                own_reason,
                own_detail,
            )
        )
    return found


def _number(value: Any) -> float:
    """A number that somebody sent as a float, NaN for what is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _numbers(values: Any) -> list[float] | None:
    """A list of finite numbers; None for what is none."""
    if not isinstance(values, (list, tuple)):
        return None
    numbers = [_number(value) for value in values]
    return numbers if all(map(math.isfinite, numbers)) else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _version(override: Mapping[str, Any], shared: Mapping[str, Any]) -> int | None:
    """The oldest version that sampled in a row; what is no integer says nothing."""
    turns = override.get("turn_versions")
    if isinstance(turns, (list, tuple)) and turns:
        versions = [version for version in map(_integer, turns) if version is not None]
        if len(versions) == len(turns):
            return min(versions)
    own = _integer(override.get("policy_version"))
    return _integer(shared.get("policy_version")) if own is None else own


def _checked_rows(sources: Sequence[_Source], rules: RowRules) -> list[Row | None]:
    """Checks ids, masks and logprobs of all rows at once; a refused row is None and its source says why."""
    for source in sources:
        if source.reason is None:
            _check_lengths(source)
    open_ = [source for source in sources if source.reason is None]
    lengths = np.array([len(source.body.tokens[source.row]) for source in open_], dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if len(ends) else 0

    def flat(key: str, dtype: type[np.generic]) -> NDArray[Any]:
        values = (getattr(source.body, key)[source.row] for source in open_)
        return np.fromiter(chain.from_iterable(values), dtype=dtype, count=total)

    ids, masks = flat("tokens", np.int64), flat("masks", np.int64)
    logprobs = flat("inference_logprobs", np.float64)
    trained = masks != UNTRAINED
    first = np.zeros(total, dtype=bool)
    first[starts[lengths > 0]] = True
    checks = {
        "token_out_of_range": (ids < 0) | (ids >= rules.vocab_size),
        "mask_not_token": trained & (masks != ids),
        "first_id_trained": trained & first,  # nothing predicts a row's first id
        "logprob_not_finite": trained & ~np.isfinite(logprobs),
        "logprob_positive": trained & (logprobs > LOGPROB_ROUNDING),
    }
    for reason, bad in checks.items():
        for position in np.flatnonzero(bad).tolist():
            k = int(np.searchsorted(ends, position, side="right"))
            if open_[k].reason is None:
                place = position - int(starts[k])
                open_[k].reason = reason
                open_[k].detail = (
                    f"position {place}: id {ids[position]}, mask {masks[position]}, "
                    f"logprob {logprobs[position]:g}, vocabulary {rules.vocab_size}"
                )
    np.minimum(logprobs, 0.0, out=logprobs)
    where = np.flatnonzero(trained)
    bounds = np.searchsorted(where, np.append(starts, total)).tolist()
    ids32 = ids.astype(np.int32)

    rows: dict[int, Row] = {}
    for k, source in enumerate(open_):
        if source.reason is not None:
            continue
        start, end = int(starts[k]), int(ends[k])
        own = where[bounds[k] : bounds[k + 1]]
        positions = (own - start).astype(np.int32)
        turns = _turns(source, positions, end - start)
        if turns is None:
            source.reason, source.detail = "turns_mismatch", f"turns {source.override.get('turns')}"
            continue
        rows[id(source)] = Row(
            ids=ids32[start:end],
            positions=positions,
            logprobs=logprobs[own],
            advantages=np.zeros(len(own)),
            temperature=float(source.temperature),
            version=source.version,
            turns=turns,
        )
    return [rows.get(id(source)) for source in sources]


def _check_lengths(source: _Source) -> None:
    """Refuses a row whose lists are missing or of different lengths, or that was sampled greedily."""
    body, row = source.body, source.row
    length = len(body.tokens[row])
    logprobs = body.inference_logprobs
    columns: list[tuple[str, Sequence[Sequence[Any]] | None]] = [
        ("masks", body.masks),
        ("inference_logprobs", logprobs),
        ("advantages", body.advantages),
    ]
    if not logprobs or row >= len(logprobs) or not logprobs[row]:
        source.reason = "no_logprobs"
        return
    if row >= len(body.scores):
        source.reason, source.detail = "length_mismatch", f"{len(body.scores)} scores"
        return
    for name, column in columns:
        if column is not None and (row >= len(column) or len(column[row]) != length):
            has = len(column[row]) if row < len(column) else 0
            source.reason, source.detail = "length_mismatch", f"{name} has {has} entries, tokens {length}"
            return
    if not 0 < source.temperature < math.inf:
        source.reason, source.detail = "temperature", f"temperature {source.temperature}"


def _turns(source: _Source, positions: IntArray, length: int) -> tuple[tuple[int, int], ...] | None:
    """The turns that the sender names, else each run of trained ids; None where they do not fit the row."""
    named = source.override.get("turns")
    if named is None:
        breaks = np.flatnonzero(np.diff(positions) > 1) + 1
        return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(positions, breaks) if len(run))
    if not isinstance(named, (list, tuple)):
        return None
    turns: list[tuple[int, int]] = []
    for span in named:
        if not isinstance(span, (list, tuple)) or len(span) != 2:
            return None
        start, end = map(_integer, span)
        if start is None or end is None or not 0 < start <= end <= length:
            return None
        turns.append((start, end))
    return tuple(turns)


def _assign_advantages(sources: Sequence[_Source], rules: RowRules, batch: Batch) -> list[FloatArray | float]:
    """Returns each row's advantage, one number or one per trained id; names stale and dead rows.

    A refused or stale row's score stays in its group's baseline: the episode was played.
    """
    by_score = [k for k, source in enumerate(sources) if not _has_own_advantages(source.body)]
    result = group_advantages(
        [sources[k].score for k in by_score],
        [sources[k].group for k in by_score],
        [sources[k].episode for k in by_score],
        baseline=rules.baseline,
        scale=rules.scale,
        eps=rules.eps,
        drop_equal=rules.drop_equal,
        zero=[bool(sources[k].override.get("set_advantage_to_zero")) for k in by_score],
    )
    batch.dropped_groups.update(result.dropped_groups.values())
    advantages: list[FloatArray | float] = [0.0] * len(sources)
    for index, k in enumerate(by_score):
        source = sources[k]
        advantages[k] = float(result.values[index])
        late = _late(source, rules)
        source.reason = (
            source.reason
            or late
            or result.dropped_rows.get(index)
            or result.dropped_groups.get(source.group)
            or _cut_off(source, rules)
        )
    for k, source in enumerate(sources):
        if _has_own_advantages(source.body):
            source.reason = source.reason or _late(source, rules) or _cut_off(source, rules)
            if source.reason is None:
                advantages[k] = _wire_advantages(source)
    return advantages


def _has_own_advantages(body: ScoredDataGroup) -> bool:
    return body.advantages is not None and not (body.group_overrides or {}).get("segments")


def _wire_advantages(source: _Source) -> FloatArray:
    """The sender's per-token advantages at the trained ids, zeroed where it asks for that."""
    assert source.body.advantages is not None
    mask = np.asarray(source.body.masks[source.row])
    values = np.asarray(source.body.advantages[source.row], dtype=np.float64)[mask != UNTRAINED]
    return np.zeros_like(values) if source.override.get("set_advantage_to_zero") else values


def _late(source: _Source, rules: RowRules) -> str | None:
    """Staleness: version of the weights that will be updated minus the version that sampled."""
    if source.version is None or rules.version is None:
        return None
    staleness = rules.version - source.version
    if staleness < 0:
        return "version_from_the_future"
    return "stale" if staleness > rules.max_staleness else None


def _cut_off(source: _Source, rules: RowRules) -> str | None:
    return "truncated" if rules.mask_truncated and source.override.get("truncated") else None


def _played(sources: Sequence[_Source]) -> list[PlayedEpisode]:
    """Sums up the episodes that came in; rows of one episode are its segments, in order."""
    episodes: dict[tuple[int, Hashable], PlayedEpisode] = {}
    for source in sources:
        episode = episodes.setdefault((source.group, source.episode), PlayedEpisode(source.score))
        episode.turn_rewards.extend(_numbers(source.override.get("turn_rewards")) or ())
        success = source.override.get("success")
        if success is not None:
            episode.success = bool(success)
    return list(episodes.values())
