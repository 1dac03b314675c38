"""Draws ids from logits: seeded uniforms, temperature, filters and penalties, exact logprobs.

A uniform is a hash of (seed, number of the sample, position), so that an id depends on its own request alone
and never on what shares the batch. Logprobs are float32 ``log_softmax`` of the very distribution drawn from.
Shapes: N nodes (distinct prefixes), R rows (samples), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_gym.engines._choices import following
from atropos_gym.engines.base import SamplingParams, sampling_trainable

__all__ = ["Sampler", "processed_logits", "stream_keys", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1
_CHILD = np.uint64(0xD1B54A32D192ED03)
_CHUNK = 1 << 23  # most elements of one float64 table of cumulated probabilities (64 MiB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_keys(seeds: Sequence[int], children: Sequence[int]) -> NDArray[np.uint64]:
    """Returns one key a sample: of its request's seed and its number among the request's ``n``."""
    seed = np.array([s & _MASK for s in seeds], dtype=np.uint64)
    child = np.asarray(children, dtype=np.uint64)
    return _mix(_mix(seed + _GAMMA) + (child + np.uint64(1)) * _CHILD)


def uniforms(keys: NDArray[np.uint64], position: int) -> NDArray[np.float64]:
    """Returns a uniform in [0, 1) for each key at a position of its completion (SplitMix64's stream).

    Example:
        >>> uniforms(stream_keys([7, 7], [0, 1]), 0).round(3).tolist()
        [0.898, 0.913]
    """
    offset = np.uint64((position + 1) * int(_GAMMA) & _MASK)
    return (_mix(keys + offset) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def processed_logits(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], sampled: Sequence[int]
) -> Tensor:
    """Returns one sample's logits ``[V]`` after penalties, masks, temperature and filters, in vLLM's order.

    Args:
        logits: float32 ``[V]`` of the model.
        params: the request's.
        prompt: prompt ids: they count for ``repetition_penalty`` only.
        sampled: ids sampled so far.
    """
    x = logits.clone()
    allowed = params.allowed_ids
    if params.choices is not None:
        allowed = following(params.choices)[tuple(sampled)]
    if allowed is not None:
        mask = torch.full_like(x, -torch.inf)
        mask[list(allowed)] = 0
        x += mask
    if len(sampled) < params.min_tokens and params.stop_ids:
        x[list(params.stop_ids)] = -torch.inf
    if params.repetition_penalty != 1:
        seen = sorted({*prompt, *sampled})
        value = x[seen]
        x[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    if sampled and (params.presence_penalty or params.frequency_penalty):
        count = torch.bincount(torch.tensor(sampled, device=x.device), minlength=len(x)).to(x.dtype)
        x -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return x
    return _filtered(x / params.temperature, params)


def _filtered(x: Tensor, params: SamplingParams) -> Tensor:
    """Drops ids by ``min_p``, then ``top_k``, then ``top_p``; the likeliest id always stays."""
    if params.min_p > 0:
        p = x.softmax(-1)
        x = x.masked_fill(p < params.min_p * p.max(), -torch.inf)
    if 0 < params.top_k < len(x):
        x = x.masked_fill(x < x.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        p, order = x.softmax(-1).sort(descending=True, stable=True)
        before = p.double().cumsum(-1) - p  # what likelier ids hold already
        x = x.index_fill(0, order[before >= params.top_p], -torch.inf)
    return x


@dataclass(slots=True)
class _Rows:
    """Settings of every sample of a batch, as arrays ``[R]``."""

    temperature: NDArray[np.float64]
    special: NDArray[np.bool_]  # needs processed_logits of its own
    key: NDArray[np.uint64]


class Sampler:
    """Draws the next id of many samples at once.

    Args:
        params: settings of each sample.
        prompts: prompt of each sample.
        seeds: seed of each sample's request.
        children: number of each sample among its request's ``n``.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        children: Sequence[int],
    ) -> None:
        self._params = params
        self._prompts = prompts
        self._rows = _Rows(
            temperature=np.array([p.temperature for p in params], dtype=np.float64),
            special=np.array([_needs_processing(p) for p in params], dtype=np.bool_),
            key=stream_keys(seeds, children),
        )

    def draw(
        self,
        logits: Tensor,
        node: NDArray[np.int64],
        row: NDArray[np.int64],
        position: int,
        sampled: Sequence[NDArray[np.int64]],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Draws one id for each of ``row``.

        Args:
            logits: ``[N, V]``, one row a distinct prefix.
            node: which prefix each sample stands at; same length as ``row``.
            row: numbers of the samples that still go on.
            position: how many ids they have sampled.
            sampled: per earlier position the ids of all R samples.

        Returns:
            Ids and logprobs. A logprob is NaN where no id could be drawn (nothing allowed, or logits that are
            not finite); at temperature 0 it is that of the id under temperature 1.
        """
        ids = np.zeros(len(row), dtype=np.int64)
        logprobs = np.zeros(len(row), dtype=np.float32)
        u = uniforms(self._rows.key[row], position)
        temperature = self._rows.temperature[row]
        special = self._rows.special[row]
        for t in np.unique(temperature[~special]):
            where = np.flatnonzero((temperature == t) & ~special)
            nodes, slot = np.unique(node[where], return_inverse=True)
            everything = len(nodes) == len(logits)
            chosen = logits if everything else logits[torch.from_numpy(nodes).to(logits.device)]
            scaled = chosen.float() / t if t not in (0, 1) else chosen.float()
            ids[where], logprobs[where] = _draw(scaled, slot, u[where], greedy=t == 0)
        for i in np.flatnonzero(special):
            r = int(row[i])
            so_far = [int(step[r]) for step in sampled]
            x = processed_logits(logits[int(node[i])].float(), self._params[r], self._prompts[r], so_far)
            one = slice(int(i), int(i) + 1)
            greedy = self._params[r].temperature == 0
            ids[one], logprobs[one] = _draw(x[None], np.zeros(1, np.int64), u[one], greedy=greedy)
        return ids, logprobs


def _needs_processing(params: SamplingParams) -> bool:
    """Returns whether more than the temperature shapes the distribution."""
    plain = params if params.temperature else params.with_(temperature=1.0)
    return sampling_trainable(plain) is not True


def _draw(
    logits: Tensor, slot: NDArray[np.int64], u: NDArray[np.float64], *, greedy: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draws from softmax(``logits[slot]``) by inverting the cumulated probabilities, in float64.

    Args:
        logits: float32 ``[D, V]``.
        slot: which distribution each draw uses.
        u: uniform of each draw.
        greedy: takes the likeliest id instead.
    """
    device = logits.device
    logprobs = logits.log_softmax(-1)
    slots = torch.from_numpy(slot).to(device)
    if greedy:
        picked = logits.argmax(-1)[slots]
    else:
        rows = max(1, _CHUNK // logits.shape[1])
        targets = torch.from_numpy(u).to(device)
        parts = [
            _invert(logprobs, slots[start : start + rows], targets[start : start + rows])
            for start in range(0, len(slots), rows)
        ]
        picked = torch.cat(parts)
    values = logprobs[slots, picked]
    values = torch.where(values.isfinite(), values.clamp(max=0.0), torch.nan)
    return picked.cpu().numpy(), values.cpu().numpy()


def _invert(logprobs: Tensor, slots: Tensor, u: Tensor) -> Tensor:
    """Returns for each draw the first id whose cumulated probability exceeds ``u``."""
    used, place = torch.unique(slots, return_inverse=True)
    cdf = logprobs[used].double().exp_().cumsum_(-1)
    cdf = cdf[place]
    total = cdf[:, -1:]
    # ">" skips ids without probability; the clamp keeps a rounded-up last step inside the vocabulary.
    picked = torch.searchsorted(cdf, u[:, None] * total, right=True)[:, 0]
    return picked.clamp_(max=logprobs.shape[1] - 1)
