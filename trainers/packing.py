"""Rows of ragged length as padded tensors: length-sorted micro-batches and what is trained in them.

Nothing is packed across rows: each row is a sequence of its own, padded on the right, so that under causal
attention no real id ever sees a pad and no attention mask is needed. What is trained is known by index, never
by comparing ids with a pad id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.entropy import AnswerTrie

__all__ = ["Branches", "MicroBatch", "collate", "micro_batches"]


@dataclass(slots=True)
class Branches:
    """Choices between answers in a micro-batch; ``Q`` of them.

    Attributes:
        index_Q: which trained id of the micro-batch.
        children_QK: the ids between which the policy chose, padded with -1.
    """

    index_Q: Tensor
    children_QK: Tensor


@dataclass(slots=True)
class MicroBatch:
    """``B`` rows padded to ``L`` ids, ``M`` trained ids among them.

    Attributes:
        index_B: number of each row within the update.
        ids_BL: int64, padded on the right.
        length_B: real length of each row.
        row_M: row (0..B-1) of each trained id.
        column_M: column whose logits predict it: one before its own.
        target_M: the id itself.
        temperature_M: what its logits are divided by.
        engine_M: the engine's logprob.
        advantage_M: its advantage, summed over merged rows.
        count_M: how many merged rows it stands for.
        branches: choices between answers, where asked for.
    """

    index_B: list[int]
    ids_BL: Tensor
    length_B: Tensor
    row_M: Tensor
    column_M: Tensor
    target_M: Tensor
    temperature_M: Tensor
    engine_M: Tensor
    advantage_M: Tensor
    count_M: Tensor
    branches: Branches | None = None


def micro_batches(rows: Sequence[Row], *, at_least: int = 1, max_ids: int = 8192) -> list[list[int]]:
    """Returns row numbers in micro-batches of similar length, shortest first.

    Args:
        rows: rows of one optimizer step.
        at_least: how many micro-batches to cut where there are as many rows.
        max_ids: most ids of a micro-batch, padding included; a longer row gets one of its own.

    Example:
        >>> rows = [Row(np.zeros(n, np.int32), np.array([1]), np.zeros(1), np.zeros(1)) for n in (9, 2, 8, 3)]
        >>> micro_batches(rows, at_least=2)
        [[1, 3], [2, 0]]
    """
    order = sorted(range(len(rows)), key=lambda k: len(rows[k].ids))
    size, larger = divmod(len(order), max(1, at_least))
    batches: list[list[int]] = []
    cut = 0  # where the next micro-batch begins at the latest
    for place, k in enumerate(order):
        # Sorted by length, so this row is the longest of the micro-batch it joins.
        if place == cut or (len(batches[-1]) + 1) * len(rows[k].ids) > max_ids:
            batches.append([])
        if place == cut:
            cut += size + (larger > 0)
            larger -= 1
        batches[-1].append(k)
    return batches


def collate(
    rows: Sequence[Row],
    index: Sequence[int],
    *,
    trie: AnswerTrie | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    pad_id: int = 0,
) -> MicroBatch:
    """Returns rows ``index`` as tensors; pads are right of every real id and are never trained.

    Args:
        rows: rows of one optimizer step.
        index: which of them.
        trie: answers whose choices are looked up; None looks for none.
        dtype: of logprobs, advantages and temperatures.
        device: where the tensors live.
        pad_id: any id of the vocabulary; its value has no effect.
    """
    chosen = [rows[k] for k in index]
    lengths = np.array([len(row.ids) for row in chosen], dtype=np.int64)
    trained = np.array([len(row.positions) for row in chosen], dtype=np.int64)
    ids_BL = np.full((len(chosen), int(lengths.max())), pad_id, dtype=np.int64)
    for k, row in enumerate(chosen):
        ids_BL[k, : len(row.ids)] = row.ids
    row_M = np.repeat(np.arange(len(chosen)), trained)
    position_M = np.concatenate([row.positions for row in chosen]).astype(np.int64)

    def floats(values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    def ints(values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return MicroBatch(
        index_B=list(index),
        ids_BL=ints(ids_BL),
        length_B=ints(lengths),
        row_M=ints(row_M),
        column_M=ints(position_M - 1),
        target_M=ints(ids_BL[row_M, position_M]),
        temperature_M=floats(np.repeat([row.temperature for row in chosen], trained)),
        engine_M=floats(np.concatenate([row.logprobs for row in chosen])),
        advantage_M=floats(np.concatenate([row.advantages for row in chosen])),
        count_M=floats(np.repeat([float(row.count) for row in chosen], trained)),
        branches=None if trie is None else _branches(chosen, trained, trie, device),
    )


def _branches(
    chosen: Sequence[Row], trained: np.ndarray, trie: AnswerTrie, device: torch.device | str
) -> Branches | None:
    """Looks up the choices of every row; None where there are none."""
    index: list[int] = []
    children: list[tuple[int, ...]] = []
    first = 0
    for row, count in zip(chosen, trained.tolist(), strict=True):
        found = trie.branches(row)
        places = np.searchsorted(row.positions, [position for position, _ in found]).tolist()
        for place, (position, ids) in zip(places, found, strict=True):
            # A sender may name a turn whose ids are not all trained.
            if place < count and row.positions[place] == position:
                index.append(first + place)
                children.append(ids)
        first += count
    if not index:
        return None
    width = max(map(len, children))
    padded = [[*ids, *[-1] * (width - len(ids))] for ids in children]
    return Branches(torch.tensor(index, device=device), torch.tensor(padded, device=device))
