"""Policy losses, KL estimators, importance weights and reductions: one function a formula.

Everything is flat. ``_M`` runs over the trained ids of a micro-batch, chosen by index beforehand: what stands
outside the mask (1.0, -inf, NaN) never enters, so it can poison neither a value nor a gradient. ``row_M`` is
the row of each id. Old, reference and engine logprobs are constants; no function lets a gradient into them.

A per-token loss becomes a number by ``(token_weights(...) * per_token).sum()``. The weights come from
``Totals`` of the *whole* optimizer step, so any split into micro-batches gives the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from atropos_gym.errors import ConfigError

__all__ = [
    "LOG_RATIO_CLAMP",
    "Reduction",
    "Totals",
    "alignment",
    "approx_kl",
    "cispo_loss",
    "clip_fraction",
    "clipped_loss",
    "entropy",
    "geometric_weights",
    "gspo_loss",
    "importance_ratio",
    "k1",
    "k2",
    "k3",
    "masked_weights",
    "reinforce_loss",
    "token_weights",
    "truncated_weights",
    "weighted_k3",
]

#: exp() of a larger log-ratio overflows float32 long before it means anything.
LOG_RATIO_CLAMP = 20.0

Reduction = Literal["token_mean", "seq_mean", "constant", "episode_sum"]


@dataclass(frozen=True, slots=True)
class Totals:
    """What a whole optimizer step is divided by; known before its first micro-batch.

    With several ranks whose gradients are averaged, ``tokens`` is the sum over ranks divided by their number.

    Attributes:
        tokens: trained ids of the step, merged rows counted as often as they occurred.
        rows: rows with at least one trained id, counted likewise.
        episodes: episodes of the update, those without a gradient too.
        max_length: the constant of ``constant``: most trained ids that a row can have.
    """

    tokens: float
    rows: int = 1
    episodes: int = 1
    max_length: int = 1


def token_weights(row_M: Tensor, totals: Totals, reduction: Reduction = "token_mean") -> Tensor:
    """Returns the weight of each trained id, so that the loss is a plain weighted sum.

    ``token_mean``: 1/N (DAPO, arXiv:2503.14476). ``seq_mean``: 1/(rows * ids of the row) (GRPO as published,
    arXiv:2402.03300). ``constant``: 1/(rows * max_length) (Dr. GRPO, arXiv:2503.20783). ``episode_sum``:
    1/episodes, that is the sum over an episode's ids, averaged over episodes.

    Args:
        row_M: int64 ``[M]``; a row must not be split between micro-batches for ``seq_mean``.
        totals: sums over the whole step.
        reduction: one of the four.

    Raises:
        ConfigError: an unknown reduction.

    Example:
        >>> token_weights(torch.tensor([0, 1, 1]), Totals(tokens=3, rows=2), "seq_mean")
        tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    ones_M = torch.ones(row_M.shape, dtype=torch.float64, device=row_M.device)
    if reduction == "token_mean":
        return ones_M / totals.tokens
    if reduction == "seq_mean":
        return ones_M / (torch.bincount(row_M)[row_M] * totals.rows)
    if reduction == "constant":
        return ones_M / (totals.rows * totals.max_length)
    if reduction == "episode_sum":
        return ones_M / totals.episodes
    raise ConfigError(f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}")


def importance_ratio(logp_M: Tensor, logp_old_M: Tensor) -> Tensor:
    """Returns ``r = exp(logp - logp_old)``; the log-ratio is clamped to +-20, or 0 * inf makes a NaN."""
    return (logp_M - logp_old_M.detach()).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def clipped_loss(
    logp_M: Tensor,
    logp_old_M: Tensor,
    advantage_M: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Returns ``-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`` per id, for either sign of A.

    PPO, arXiv:1707.06347 eq. 7; ``eps_high > eps_low`` is clip-higher (arXiv:2503.14476). The minimum holds
    for A < 0 too: there a large ratio keeps its gradient, which pushes it down, unless ``dual_clip`` caps it
    (arXiv:1912.09729).

    Args:
        logp_M: the learner now, ``[M]``.
        logp_old_M: the learner before the update, ``[M]``.
        advantage_M: ``[M]``.
        eps_low: lower side of the band.
        eps_high: upper side.
        dual_clip: cap of r in the first term, > 1; None is off.

    Example:
        >>> clipped_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([-1.2000])
    """
    r_M = importance_ratio(logp_M, logp_old_M)
    clipped_M = r_M.clamp(1.0 - eps_low, 1.0 + eps_high)
    if dual_clip is not None:
        r_M = r_M.clamp(max=dual_clip)
    return -torch.minimum(r_M * advantage_M, clipped_M * advantage_M)


def gspo_loss(
    logp_M: Tensor,
    logp_old_M: Tensor,
    advantage_M: Tensor,
    row_M: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
) -> Tensor:
    """Returns the clipped loss with one ratio a row, ``s = exp(mean of the row's log-ratios)``.

    GSPO, arXiv:2507.18071; reduce it by ``seq_mean``.
    """
    log_ratio_M = logp_M - logp_old_M.detach()
    mean_M = _row_mean(log_ratio_M, row_M)[row_M]
    return clipped_loss(mean_M, torch.zeros_like(mean_M), advantage_M, eps_low=eps_low, eps_high=eps_high)


def cispo_loss(logp_M: Tensor, logp_old_M: Tensor, advantage_M: Tensor, *, ratio_max: float) -> Tensor:
    """Returns ``-sg(min(r, ratio_max)) A logp``: the weight is capped, the gradient never cut.

    CISPO, arXiv:2506.13585; ``ratio_max`` is absolute (1 + eps_high in the paper's notation).
    """
    return -importance_ratio(logp_M, logp_old_M).clamp(max=ratio_max).detach() * advantage_M * logp_M


def reinforce_loss(logp_M: Tensor, advantage_M: Tensor) -> Tensor:
    """Returns ``-A logp``: no ratio, no clip (Williams 1992)."""
    return -advantage_M * logp_M


def k1(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """Returns ``d = logp - logp_ref``: unbiased for the reverse KL, high variance (Schulman 2020)."""
    return logp_M - logp_ref_M.detach()


def k2(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """Returns ``d^2 / 2`` (Schulman 2020); its gradient ``d`` is that of the reverse KL on policy."""
    return k1(logp_M, logp_ref_M).square() / 2


def k3(logp_M: Tensor, logp_ref_M: Tensor) -> Tensor:
    """Returns ``exp(-d) - 1 + d``, never negative (Schulman 2020; GRPO's KL term, arXiv:2402.03300)."""
    d_M = k1(logp_M, logp_ref_M)
    return torch.expm1((-d_M).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)) + d_M


def weighted_k3(logp_M: Tensor, logp_ref_M: Tensor, logp_old_M: Tensor) -> Tensor:
    """Returns ``r * k3`` with the gradient through both: unbiased for the reverse KL (arXiv:2512.02556)."""
    return importance_ratio(logp_M, logp_old_M) * k3(logp_M, logp_ref_M)


def truncated_weights(logp_old_M: Tensor, logp_engine_M: Tensor, cap: float = 2.0) -> Tensor:
    """Returns ``sg(min(pi_old / mu, cap))``: corrects engine against learner, per id.

    Truncated importance sampling (Yao et al. 2025). It is another ratio than the clip's, which sets the
    learner against the learner.
    """
    return importance_ratio(logp_old_M, logp_engine_M).clamp(max=cap).detach()


def masked_weights(
    logp_old_M: Tensor, logp_engine_M: Tensor, band: tuple[float, float] = (0.5, 2.0)
) -> Tensor:
    """Returns ``sg(pi_old / mu)`` inside the band and 0 outside (IcePop, arXiv:2510.18855).

    The denominator stays all trained ids of the update.
    """
    ratio_M = importance_ratio(logp_old_M, logp_engine_M).detach()
    return torch.where((ratio_M >= band[0]) & (ratio_M <= band[1]), ratio_M, torch.zeros_like(ratio_M))


def geometric_weights(logp_old_M: Tensor, logp_engine_M: Tensor, row_M: Tensor) -> Tensor:
    """Returns one weight a row, ``[rows]``: the geometric mean of ``pi_old / mu`` over its trained ids.

    The plain product grows with length and, once capped, starves long rows (huggingface/trl#5814).
    """
    return _row_mean((logp_old_M - logp_engine_M).detach(), row_M).exp()


def entropy(logits_MV: Tensor) -> Tensor:
    """Returns ``H(softmax(z))`` per id in nats; ``z`` has the sampling temperature applied already."""
    logp_MV = logits_MV.log_softmax(-1)
    # An id that cannot be sampled has p = 0 and log p = -inf, and their product is NaN: select first.
    return -(logp_MV.exp() * logp_MV.masked_fill(logp_MV.isinf(), 0.0)).sum(-1)


def clip_fraction(
    ratio_M: Tensor, advantage_M: Tensor, eps_low: float = 0.2, eps_high: float = 0.2
) -> Tensor:
    """Returns 1.0 where the clip removed the gradient: A > 0 above the band, A < 0 below it.

    Not all ids outside the band (huggingface/trl#3032). The share is its mean over trained ids.
    """
    above_M = (advantage_M > 0) & (ratio_M > 1.0 + eps_high)
    below_M = (advantage_M < 0) & (ratio_M < 1.0 - eps_low)
    return (above_M | below_M).to(ratio_M.dtype)


def approx_kl(logp_M: Tensor, logp_old_M: Tensor) -> Tensor:
    """Returns ``r - 1 - log r`` per id, an estimate of KL(old, new), never negative (Schulman 2020)."""
    log_ratio_M = (logp_M - logp_old_M).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return torch.expm1(log_ratio_M) - log_ratio_M


def alignment(logp_M: Tensor, logp_engine_M: Tensor) -> Tensor:
    """Returns ``|learner - engine|`` per id, before the step; its mean is ``train/alignment``."""
    return (logp_M - logp_engine_M).abs()


def _row_mean(value_M: Tensor, row_M: Tensor) -> Tensor:
    """Mean of ``value_M`` over the ids of each row, ``[rows]``."""
    rows = int(row_M.max()) + 1 if len(row_M) else 0
    sums = torch.zeros(rows, dtype=value_M.dtype, device=value_M.device).index_add(0, row_M, value_M)
    return sums / torch.bincount(row_M, minlength=rows).clamp(min=1)
