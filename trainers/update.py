"""One optimizer step's gradient: micro-batches in, accumulated gradient and statistics out.

Pure in the sense that it knows no server, no engine and no logger: a function that scores a micro-batch, rows
and settings. Totals are known before the first micro-batch, so that the split changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atropos_gym.trainers import losses
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.entropy import AnswerTrie, branch_entropy
from atropos_gym.trainers.losses import Reduction, Totals
from atropos_gym.trainers.packing import MicroBatch, collate, micro_batches

__all__ = ["Accumulated", "LossSettings", "ScoreFunction", "accumulate", "alignment_of", "totals_of"]

#: Logits at the trained ids of a micro-batch, ``[M, V]``, temperature applied.
ScoreFunction = Callable[[MicroBatch], Tensor]

EntropyKind = Literal["ids", "answers"]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the loss is made of.

    Attributes:
        reduction: see ``losses.token_weights``.
        eps_low: lower side of the clip.
        eps_high: upper side.
        dual_clip: cap of the ratio where the advantage is negative; None is off.
        kl_coef: weight of k3 against the base.
        entropy_kind: over all ids, or over the answers that can be legal.
        trie: the answers, for ``"answers"``.
        tis_cap: cap of the weight that corrects engine against learner.
        sub_batches: micro-batches to cut at least.
        max_ids: most ids of a micro-batch, padding included.
    """

    reduction: Reduction = "token_mean"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    entropy_kind: EntropyKind = "ids"
    trie: AnswerTrie | None = None
    tis_cap: float = 2.0
    sub_batches: int = 1
    max_ids: int = 8192


@dataclass(slots=True)
class Accumulated:
    """What the micro-batches of one step added up to; means are over trained ids, merged rows counted.

    Attributes:
        tokens: trained ids; 0 means that there is no step to take.
        loss: the whole loss, bonus and KL included.
        entropy: mean entropy in nats of the kind in use; NaN where no position has one.
        ratio_max: largest importance ratio.
        clip_fraction: share of ids whose gradient the clip removed.
        approx_kl: mean of r - 1 - log r.
        kl_base: mean k3 against the base; NaN where it is not computed.
        logprobs: the learner's logprobs before the step, float64 ``[K]`` a row.
    """

    tokens: float = 0.0
    loss: float = 0.0
    entropy: float = math.nan
    ratio_max: float = math.nan
    clip_fraction: float = math.nan
    approx_kl: float = math.nan
    kl_base: float = math.nan
    logprobs: list[np.ndarray] = field(default_factory=list)


def totals_of(rows: Sequence[Row], episodes: int, max_length: int = 1) -> Totals:
    """Returns the denominators of a step over (merged) rows.

    Args:
        rows: all rows of the step.
        episodes: episodes of the update, those of dead groups too.
        max_length: most trained ids of a row, for ``constant``.
    """
    trained = [row for row in rows if len(row.positions)]
    return Totals(
        tokens=sum(row.count * len(row.positions) for row in trained),
        rows=sum(row.count for row in trained),
        episodes=episodes,
        max_length=max_length,
    )


def accumulate(
    score: ScoreFunction,
    rows: Sequence[Row],
    totals: Totals,
    settings: LossSettings,
    *,
    entropy_coef: float = 0.0,
    old: Sequence[np.ndarray] | None = None,
    score_base: ScoreFunction | None = None,
    split: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Accumulated:
    """Adds the gradient of the whole step to the parameters behind ``score``.

    Args:
        score: scores a micro-batch, with gradient.
        rows: rows of the step, merged or not.
        totals: denominators of the whole step.
        settings: what the loss is made of.
        entropy_coef: weight of the entropy bonus now.
        old: the learner's logprobs before the update, a row each; then engine and learner are two policies
            and each id is weighted by ``min(old / engine, tis_cap)``. None: the engine's are the old ones.
        score_base: scores under the base, for the KL term.
        split: row numbers of each micro-batch; cut by length if None.
        dtype: of logprobs and advantages.
        device: where micro-batches live.

    Returns:
        Sums and means over the step; no optimizer is touched.
    """
    result = Accumulated(tokens=totals.tokens, logprobs=[np.zeros(0)] * len(rows))
    if totals.tokens == 0:
        return result
    split = split or micro_batches(rows, at_least=settings.sub_batches, max_ids=settings.max_ids)
    sums = torch.zeros(len(_SUMS), dtype=torch.float64)
    ratio_max = -math.inf
    trie = settings.trie if settings.entropy_kind == "answers" else None
    for index in split:
        batch = collate(rows, index, trie=trie, dtype=dtype, device=device)
        if not len(batch.target_M):
            continue  # nothing trained here: adds nothing, changes no denominator
        old_M = (
            None
            if old is None
            else torch.as_tensor(np.concatenate([old[k] for k in index])).to(batch.engine_M)
        )
        loss, piece, logp_M, ratio_M = _micro_step(
            batch, score, score_base, settings, totals, entropy_coef, old_M
        )
        loss.backward()  # type: ignore[no-untyped-call]
        sums += piece
        ratio_max = max(ratio_max, float(ratio_M.max()))
        sizes = [len(rows[k].positions) for k in index]
        pieces = np.split(logp_M.double().cpu().numpy(), np.cumsum(sizes)[:-1])
        for k, own in zip(index, pieces, strict=True):
            result.logprobs[k] = own
    values = dict(zip(_SUMS, sums.tolist(), strict=True))
    result.loss = values["loss"]
    result.ratio_max = ratio_max
    result.clip_fraction = values["clipped"] / totals.tokens
    result.approx_kl = values["approx_kl"] / totals.tokens
    result.kl_base = math.nan if score_base is None else values["kl_base"] / totals.tokens
    result.entropy = values["entropy"] / values["choices"] if values["choices"] else math.nan
    return result


_SUMS = ("loss", "entropy", "choices", "clipped", "approx_kl", "kl_base")


def _micro_step(
    batch: MicroBatch,
    score: ScoreFunction,
    score_base: ScoreFunction | None,
    settings: LossSettings,
    totals: Totals,
    entropy_coef: float,
    old_M: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss of a micro-batch, its sums (``_SUMS``), the learner's logprobs and the ratios."""
    logits_MV = score(batch)
    logp_M = logits_MV.log_softmax(-1).gather(1, batch.target_M[:, None])[:, 0]
    before_M = batch.engine_M if old_M is None else old_M
    weight_M = losses.token_weights(batch.row_M, totals, settings.reduction).to(logp_M.dtype)
    policy_M = losses.clipped_loss(
        logp_M,
        before_M,
        batch.advantage_M,
        eps_low=settings.eps_low,
        eps_high=settings.eps_high,
        dual_clip=settings.dual_clip,
    )
    if old_M is not None:
        policy_M = policy_M * losses.truncated_weights(old_M, batch.engine_M, settings.tis_cap)
    loss = (weight_M * policy_M).sum()

    # What does not depend on the advantage counts merged rows as often as they occurred.
    each_M = weight_M * batch.count_M
    entropy_Q, place_Q = _entropies(logits_MV, batch, settings, with_gradient=entropy_coef != 0.0)
    if entropy_coef:
        loss = loss - entropy_coef * (each_M[place_Q] * entropy_Q).sum()
    kl_sum = torch.zeros((), dtype=logp_M.dtype, device=logp_M.device)
    if score_base is not None:
        base_MV = score_base(batch).detach()
        base_M = base_MV.log_softmax(-1).gather(1, batch.target_M[:, None])[:, 0]
        kl_M = losses.k3(logp_M, base_M)
        loss = loss + settings.kl_coef * (each_M * kl_M).sum()
        kl_sum = (batch.count_M * kl_M).sum()

    with torch.no_grad():
        ratio_M = losses.importance_ratio(logp_M, before_M)
        clipped_M = losses.clip_fraction(ratio_M, batch.advantage_M, settings.eps_low, settings.eps_high)
        count_Q = batch.count_M[place_Q]
        sums = torch.stack(
            [
                loss,
                (count_Q * entropy_Q).sum(),
                count_Q.sum(),
                (batch.count_M * clipped_M).sum(),
                (batch.count_M * losses.approx_kl(logp_M, before_M)).sum(),
                kl_sum,
            ]
        )
    return loss, sums.double().cpu(), logp_M.detach(), ratio_M


def _entropies(
    logits_MV: Tensor, batch: MicroBatch, settings: LossSettings, *, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Returns entropies of the kind in use and which trained id each belongs to."""
    logits_MV = logits_MV if with_gradient else logits_MV.detach()
    if settings.entropy_kind == "ids":
        return losses.entropy(logits_MV), torch.arange(len(logits_MV), device=logits_MV.device)
    if batch.branches is None:
        nothing = torch.zeros(0, dtype=torch.int64, device=logits_MV.device)
        return logits_MV.new_zeros(0), nothing
    place_Q = batch.branches.index_Q
    return branch_entropy(logits_MV[place_Q], batch.branches.children_QK), place_Q


def alignment_of(
    rows: Sequence[Row], became: Sequence[int], logprobs: Sequence[np.ndarray], version: int | None = None
) -> tuple[float, float]:
    """Returns mean and largest ``|learner - engine|`` over the trained ids of the rows as they came.

    Args:
        rows: rows before merging.
        became: which merged row each is.
        logprobs: the learner's logprobs of the merged rows, before the step.
        version: count rows of this version only (others are off by policy updates); None counts all.

    Returns:
        NaN twice where no id counts.
    """
    gaps = [
        np.abs(logprobs[number] - row.logprobs)
        for row, number in zip(rows, became, strict=True)
        if version is None or row.version is None or row.version == version
    ]
    flat = np.concatenate(gaps) if gaps else np.zeros(0)
    return (float(flat.mean()), float(flat.max())) if len(flat) else (math.nan, math.nan)
