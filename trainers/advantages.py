"""Advantages: pure functions from scores to numbers, in float64 on the host.

Groups are told apart by id, never by position; an episode of several rows counts once in its group's
baseline. What cannot teach anything is dropped and named: a score that is not finite takes out its own row
only, a group of one or of equal scores goes as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from atropos_gym.errors import ConfigError

__all__ = [
    "EQUAL_RTOL",
    "Advantages",
    "Baseline",
    "Scale",
    "group_advantages",
    "kl_shaped_scores",
    "mixed_advantages",
    "overlong_penalty",
    "process_supervision",
    "spread_over_turns",
    "turn_returns",
    "whitened",
]

#: Scores that differ by less than this, relative to max(1, largest), are equal: float noise is no signal.
EQUAL_RTOL = 1e-6

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["none", "group", "atropos", "batch", "whiten_centred"]

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class Advantages:
    """One advantage a row, and what was dropped.

    Attributes:
        values: float64 ``[rows]``; 0 where dropped.
        dropped_rows: row -> reason (``score_not_finite``).
        dropped_groups: group id -> reason (``single``, ``equal_scores``).
    """

    values: FloatArray
    dropped_rows: dict[int, str]
    dropped_groups: dict[Hashable, str]


def group_advantages(
    scores: Sequence[float],
    groups: Sequence[Hashable],
    episodes: Sequence[Hashable] | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "none",
    ddof: int = 1,
    eps: float = 0.0,
    drop_equal: bool = True,
    zero: Sequence[bool] | None = None,
) -> Advantages:
    """Returns ``A_i = s_i - b_g``, then scaled; ``b_g`` is a mean over the group's episodes.

    ``baseline``: ``mean`` of the group (Dr. GRPO, arXiv:2503.20783), or of its other members
    (``leave_one_out``, arXiv:2402.14740). ``scale``: ``group`` divides by ``std + eps`` of the group (GRPO,
    arXiv:2402.03300), ``atropos`` by ``max(population std, 1e-8)``, ``batch`` by ``std + eps`` of all scores
    of the update (arXiv:2508.08221), ``whiten_centred`` whitens the centred values of the update
    (REINFORCE++-baseline, arXiv:2501.03262).

    Args:
        scores: one a row; rows of one episode carry the same.
        groups: group id of each row.
        episodes: episode id of each row within its group; each row its own episode if None.
        baseline: what is subtracted.
        scale: what is divided by.
        ddof: 1 for the sample std, 0 for the population's.
        eps: added to the std.
        drop_equal: drop groups whose scores are equal (False keeps their rows, with advantage 0).
        zero: rows whose advantage becomes 0 after the baseline (``set_advantage_to_zero``).

    Raises:
        ConfigError: an unknown baseline or scale.

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 1.0], ["a", "a", "b", "b"]).values.tolist()
        [0.5, -0.5, -0.5, 0.5]
    """
    _known("baseline", baseline, get_args(Baseline))
    _known("scale", scale, get_args(Scale))
    result = Advantages(np.zeros(len(scores)), {}, {})
    members: dict[Hashable, dict[Hashable, list[int]]] = {}  # group -> episode -> rows
    for row, (score, group) in enumerate(zip(scores, groups, strict=True)):
        if not math.isfinite(score):
            result.dropped_rows[row] = "score_not_finite"
            continue
        episode = row if episodes is None else episodes[row]
        members.setdefault(group, {}).setdefault(episode, []).append(row)

    centred: list[tuple[list[int], float]] = []  # one entry an episode: its rows, its centred score
    for group, by_episode in members.items():
        values = np.array([scores[rows[0]] for rows in by_episode.values()], dtype=np.float64)
        if len(values) == 1:
            result.dropped_groups[group] = "single"
            continue
        if _equal(values):
            if drop_equal:
                result.dropped_groups[group] = "equal_scores"
            centred.extend((rows, 0.0) for rows in by_episode.values() if not drop_equal)
            continue
        deltas = (values - values.mean()) / _group_divisor(values, scale, ddof, eps)
        if baseline == "leave_one_out":
            deltas *= len(values) / (len(values) - 1)
        centred.extend(zip(by_episode.values(), deltas.tolist(), strict=True))

    divisor, shift = 1.0, 0.0
    if scale == "batch":
        all_scores = [scores[rows[0]] for by in members.values() for rows in by.values()]
        divisor = _std(np.array(all_scores), ddof) + eps
    elif scale == "whiten_centred" and centred:
        deltas = np.array([delta for _, delta in centred])
        divisor, shift = _std(deltas, ddof) + eps, float(deltas.mean())
    for rows, delta in centred:
        # The divisor is 0 only where every group is dead, and then so is the numerator.
        result.values[rows] = (delta - shift) / (divisor or 1.0)
    if zero is not None:
        result.values[np.asarray(zero, dtype=bool)] = 0.0
    return result


def whitened(scores: Sequence[float], *, ddof: int = 1, eps: float = 0.0) -> FloatArray:
    """Returns ``(s - mean) / (std + eps)`` over the whole update, no groups (REINFORCE++, arXiv:2501.03262).

    Example:
        >>> whitened([0.0, 2.0], ddof=0).tolist()
        [-1.0, 1.0]
    """
    values = np.asarray(scores, dtype=np.float64)
    if _equal(values):
        return np.zeros_like(values)
    deltas: FloatArray = (values - values.mean()) / (_std(values, ddof) + eps)
    return deltas


def turn_returns(rewards: Sequence[float], gamma: float = 1.0) -> FloatArray:
    """Returns ``G_k = r_k + gamma G_{k+1}`` over turns, float64 (arXiv:2507.11948).

    Discounted by turn, not by id; ids between turns do not cut the chain.

    Example:
        >>> turn_returns([0.0, 0.0, 1.0], gamma=0.5).tolist()
        [0.25, 0.5, 1.0]
    """
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        following = float(rewards[turn]) + gamma * following
        returns[turn] = following
    return returns


def spread_over_turns(values: Sequence[float], turns: Sequence[tuple[int, int]], length: int) -> FloatArray:
    """Returns ``[length]``: each turn's value on every id sampled in that turn, 0 elsewhere.

    Example:
        >>> spread_over_turns([0.5, 1.0], [(1, 2), (3, 5)], 5).tolist()
        [0.0, 0.5, 0.0, 1.0, 1.0]
    """
    per_token = np.zeros(length)
    for value, (start, end) in zip(values, turns, strict=True):
        per_token[start:end] = value
    return per_token


def process_supervision(
    step_rewards: Sequence[Sequence[float]], *, gamma: float = 1.0, ddof: int = 0
) -> list[FloatArray]:
    """Returns ``A_k``: the group's step rewards normalised together, then summed from k to the end.

    arXiv:2402.03300 section 4.1.3. Equal step rewards give zeros.
    """
    flat = np.array([reward for member in step_rewards for reward in member], dtype=np.float64)
    if len(flat) == 0 or _equal(flat):
        return [np.zeros(len(member)) for member in step_rewards]
    mean, std = float(flat.mean()), _std(flat, ddof)
    return [turn_returns([(reward - mean) / std for reward in member], gamma) for member in step_rewards]


def mixed_advantages(
    scores: Sequence[float],
    turn_rewards: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    outcome_weight: float = 1.0,
    turn_weight: float = 1.0,
) -> list[FloatArray]:
    """Returns per-turn advantages of one group that mix its outcomes with its turn rewards.

    ``outcome_weight (s_i - mean s) + turn_weight (G_ik - mean over all turns of the group)``.
    """
    returns = [turn_returns(rewards, gamma) for rewards in turn_rewards]
    flat = np.concatenate(returns) if returns else np.zeros(0)
    turn_mean = float(flat.mean()) if len(flat) else 0.0
    outcome_mean = float(np.mean(scores))
    return [
        outcome_weight * (score - outcome_mean) + turn_weight * (own - turn_mean)
        for score, own in zip(scores, returns, strict=True)
    ]


def kl_shaped_scores(scores: Sequence[float], k1_rows: Sequence[Sequence[float]], beta: float) -> FloatArray:
    """Returns ``s_i - beta * sum k1`` of each row's trained ids: KL as a reward, before the baseline.

    No gradient; ``k1`` is of the old policy (arXiv:2512.21852).
    """
    return np.array([s - beta * math.fsum(row) for s, row in zip(scores, k1_rows, strict=True)])


def overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """Returns DAPO's soft overlong punishment, in [-1, 0] (arXiv:2503.14476 eq. 13).

    0 up to ``max_length - cache``, falling to -1 at ``max_length``, which contains the cache.

    Example:
        >>> overlong_penalty(18, max_length=20, cache=4)
        -0.5
    """
    if not 0 < cache <= max_length:
        raise ConfigError(f"cache must be in [1, max_length], got {cache} with max_length {max_length}")
    return -min(1.0, max(0.0, (length - (max_length - cache)) / cache))


def _known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _equal(values: FloatArray) -> bool:
    """Whether the values differ by no more than float noise."""
    return bool(np.ptp(values) <= EQUAL_RTOL * max(1.0, float(np.abs(values).max())))


def _std(values: FloatArray, ddof: int) -> float:
    """Standard deviation from centred sums (E[x^2] - E[x]^2 can go negative)."""
    return float(values.std(ddof=ddof)) if len(values) > ddof else 0.0


def _group_divisor(values: FloatArray, scale: Scale, ddof: int, eps: float) -> float:
    if scale == "group":
        return _std(values, ddof) + eps
    if scale == "atropos":
        return max(_std(values, 0), 1e-8)
    return 1.0
