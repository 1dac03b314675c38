"""Logits and logprobs of a model at chosen positions only.

The head is applied where an id is trained, nowhere else: logits of every position of a batch would take
gigabytes on a real vocabulary. They are cast to float32 and divided by the temperature the id was sampled at
before log_softmax: in bfloat16 a logprob is off by more than a policy update changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.packing import MicroBatch, collate, micro_batches

__all__ = ["Scorer", "adapter_off", "logprobs_of", "rows_of", "score_rows"]


def logprobs_of(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """Returns ``log_softmax(logits)[target]`` per id, ``[M]``; cast to float32 unless it is float64.

    Example:
        >>> logprobs_of(torch.zeros(1, 4), torch.tensor([2])).exp()
        tensor([0.2500])
    """
    logits_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    return logits_MV.log_softmax(-1).gather(1, target_M[:, None])[:, 0]


class Scorer:
    """Turns a micro-batch into logits at its trained ids, ``[M, V]``, temperature applied.

    The trunk runs over whole rows, the head over the trained ids. Some models do more between head and logits
    (a soft cap, a scale): a self-check at first use compares, and then asks the model for its own logits.

    Args:
        model: a causal language model of transformers, with or without adapters by PEFT.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        wrapped: Any = model
        base = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
        self._trunk = base.base_model
        self._head = base.get_output_embeddings()
        if self._head is None or self._trunk is base:
            raise ConfigError(f"{type(base).__name__} is no causal language model: it has no head over ids")
        self._plain_head: bool | None = None

    def __call__(self, batch: MicroBatch) -> Tensor:
        """Returns ``[M, V]`` logits in float32 (float64 for a float64 model), divided by temperature."""
        if self._plain_head is None:
            self._plain_head = self._head_is_plain(batch.ids_BL[:1])
        if self._plain_head:
            hidden_BLH = self._trunk(input_ids=batch.ids_BL, use_cache=False).last_hidden_state
            logits_MV = self._head(hidden_BLH[batch.row_M, batch.column_M])
        else:
            columns, place_M = torch.unique(batch.column_M, return_inverse=True)
            logits_BPV = self.model(input_ids=batch.ids_BL, use_cache=False, logits_to_keep=columns).logits
            logits_MV = logits_BPV[batch.row_M, place_M]
        wide_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
        scaled: Tensor = wide_MV / batch.temperature_M[:, None]
        return scaled

    @torch.no_grad()
    def _head_is_plain(self, ids_BL: Tensor) -> bool:
        """Whether head(trunk(ids)) are the model's own logits."""
        ids_BL = ids_BL[:, :16]
        hidden_BLH = self._trunk(input_ids=ids_BL, use_cache=False).last_hidden_state
        own_BLV = self.model(input_ids=ids_BL, use_cache=False).logits
        return bool(torch.allclose(self._head(hidden_BLH).float(), own_BLV.float(), rtol=1e-4, atol=1e-4))


def rows_of(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], temperature: float = 1.0
) -> list[Row]:
    """Returns prompt and completion as rows whose completion ids are to be scored.

    Raises:
        ConfigError: different numbers of prompts and completions, an empty prompt, temperature <= 0.
    """
    if len(prompts) != len(completions):
        raise ConfigError(f"{len(prompts)} prompts but {len(completions)} completions: give one for one")
    if not temperature > 0:
        raise ConfigError(f"temperature must be > 0 to have a distribution, got {temperature}")
    rows = []
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {number} is empty: nothing predicts the first id of a sequence")
        ids = np.array([*prompt, *completion], dtype=np.int32)
        positions = np.arange(len(prompt), len(ids), dtype=np.int32)
        zeros = np.zeros(len(positions))
        rows.append(Row(ids, positions, zeros, zeros, temperature=temperature))
    return rows


@torch.no_grad()
def score_rows(
    scorer: Scorer,
    rows: Sequence[Row],
    *,
    max_ids: int = 8192,
    device: torch.device | str = "cpu",
) -> list[np.ndarray]:
    """Returns the model's logprobs of each row's trained ids, float64 ``[K]`` a row, without gradient."""
    scored: list[np.ndarray] = [np.zeros(0)] * len(rows)
    for index in micro_batches(rows, max_ids=max_ids):
        batch = collate(rows, index, device=device)
        if not len(batch.target_M):
            continue
        logp_M = logprobs_of(scorer(batch), batch.target_M).double().cpu().numpy()
        sizes = [len(rows[k].positions) for k in index]
        for k, piece in zip(index, np.split(logp_M, np.cumsum(sizes)[:-1]), strict=True):
            scored[k] = piece
    return scored


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Within it the model is its base: adapters off and no gradient; active again afterwards, also on error.

    PEFT switches ``requires_grad`` of the active adapter on when it leaves, even where it was frozen: what
    was frozen before stays frozen.
    """
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        with torch.no_grad(), model.disable_adapter():
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
