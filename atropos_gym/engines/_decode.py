"""Decodes a batch of requests as a trie: each distinct prefix passes through the model once.

Samples of one prompt (a group's members, or ``n``) share its prefill, and share every further step for as
long as they have drawn the same ids. Nodes of the trie are ordered by policy version; prompts of different
lengths are padded on the left. Shapes: N nodes, R samples, T columns (padding included), V vocabulary.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from atropos_gym.engines._batching import Outcome, Request
from atropos_gym.engines._lora import AdapterPlan
from atropos_gym.engines._sampling import Sampler
from atropos_gym.engines.base import Completion
from atropos_gym.errors import EngineError

__all__ = ["TrieDecoder"]

# A prefill in one more part costs about as much as this many padding ids (measured on a CPU).
_PART_COST = 512
# Most elements of one prefill's attention mask: bounds its memory, whatever the prompts' lengths.
_MASK_CELLS = 1 << 26
# Columns that a cache grows by when it is full, so that most steps write in place.
_ROOM = 32


class _GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values ``[N, heads, T, dim]`` with room behind them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends one step (in place where there is room) and returns all of it."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self.room = (key_states, value_states)
            return key_states, value_states
        length, added = self.keys.shape[2], key_states.shape[2]
        if self.room[0].shape[2] < length + added:
            self.room = (_widened(self.keys, added + _ROOM), _widened(self.values, added + _ROOM))
        for buffer, new in zip(self.room, (key_states, value_states), strict=True):
            buffer[:, :, length : length + added] = new
        self.keys, self.values = (buffer[:, :, : length + added] for buffer in self.room)
        return self.keys, self.values

    def select(self, parents: Tensor) -> None:
        """Takes the rows ``parents`` ``[N']`` and leaves room for the step that follows."""
        length = self.keys.shape[2]
        self.room = (_gathered(self.keys, parents), _gathered(self.values, parents))
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.room)


def _gathered(x: Tensor, rows: Tensor) -> Tensor:
    buffer = x.new_empty((len(rows), x.shape[1], x.shape[2] + 1, x.shape[3]))
    torch.index_select(x, 0, rows, out=buffer[:, :, :-1])
    return buffer


def _widened(x: Tensor, columns: int) -> Tensor:
    buffer = x.new_empty((*x.shape[:2], x.shape[2] + columns, x.shape[3]))
    buffer[:, :, : x.shape[2]] = x
    return buffer


@dataclass(slots=True)
class _Trie:
    """The open nodes: their keys and values, mask and next position."""

    cache: Cache
    mask: Tensor  # bool [N, T]
    position: Tensor  # int64 [N]: position id of the node's last id
    versions: NDArray[np.int64]  # [N], equal ones together


class TrieDecoder:
    """Runs one causal language model for the engine, always on the worker thread.

    Args:
        model: a transformers causal language model in eval mode.
        plan: told each forward's versions.
        stopping: asked at each step; True ends the batch.
        in_place: where versions change in mid-flight: a lock that is held through each step, and what is the
            newest version then; keys and values of earlier ids stay as they were computed.
    """

    def __init__(
        self,
        model: Any,
        plan: AdapterPlan,
        stopping: Callable[[], bool],
        in_place: tuple[threading.Lock, Callable[[], int]] | None = None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._stopping = stopping
        self._in_place = in_place
        self._now: int | None = None  # in place: the version of the step under way
        self._device = model.get_input_embeddings().weight.device
        # transformers renames this argument during 5.x and warns about the old name.
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.forwards = 0

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Answers requests, in order."""
        prompts, of_request = _distinct_prompts(requests)
        used: list[int] = []  # in place: the version that each column of ids was drawn from
        with self._fixed_version(used):
            logits, trie = self._prefill(prompts)
        sample_of = np.repeat(np.arange(len(requests)), [r.n for r in requests])
        first = np.cumsum([0, *(r.n for r in requests)])
        asked = [request for request in requests for _ in range(request.n)]
        sampler = Sampler(
            [request.params for request in asked],
            [request.prompt for request in asked],
            [request.seed for request in asked],
            [child for request in requests for child in range(request.n)],
        )
        limit = np.array([r.max_tokens for r in requests])[sample_of]
        stops, stop_of = _stop_tables(requests, logits.shape[1])
        stop_of = stop_of[sample_of]

        ids: list[NDArray[np.int64]] = []
        logprobs: list[NDArray[np.float32]] = []
        length = np.zeros(len(sample_of), dtype=np.int64)
        stopped = np.zeros(len(sample_of), dtype=np.bool_)
        failed = np.zeros(len(sample_of), dtype=np.bool_)
        row = np.arange(len(sample_of))
        node = of_request[sample_of]
        while True:
            drawn, values = sampler.draw(logits, node, row, len(ids), ids)
            ids.append(_scattered(drawn, row, len(sample_of)))
            logprobs.append(_scattered(values, row, len(sample_of)))
            length[row] = len(ids)
            failed[row] = np.isnan(values)
            stopped[row] = stops[stop_of[row], drawn]
            goes_on = ~stopped[row] & ~failed[row] & (limit[row] > len(ids))
            if any(request.cancelled for request in requests):
                cancelled = np.array([request.cancelled for request in requests])
                goes_on &= ~cancelled[sample_of[row]]
            row, node, drawn = row[goes_on], node[goes_on], drawn[goes_on]
            if not len(row):
                break
            if self._stopping():
                raise EngineError("the engine was closed while it sampled")
            # A child is (parent, id); sorting by parent keeps equal versions together.
            child, node = np.unique(node * logits.shape[1] + drawn, return_inverse=True)
            with self._fixed_version(used):
                logits = self._step(trie, child // logits.shape[1], child % logits.shape[1])
        return _outcomes(requests, first, np.stack(ids), np.stack(logprobs), length, stopped, failed, used)

    @contextmanager
    def _fixed_version(self, used: list[int]) -> Iterator[None]:
        """Within it no weights change."""
        if self._in_place is None:
            yield
            return
        lock, newest = self._in_place
        with lock:
            self._now = newest()
            used.append(self._now)
            yield

    def _prefill(self, prompts: list[tuple[int, tuple[int, ...]]]) -> tuple[Tensor, _Trie]:
        """Passes every distinct (version, prompt) through the model; returns logits ``[N, V]`` too."""
        lengths = np.array([len(prompt) for _, prompt in prompts])
        versions = np.array([version for version, _ in prompts])
        width = int(lengths.max())
        parts = [np.sort(part) for part in _split_by_length(lengths)]  # ascending numbers: ordered by version
        done = [self._prefill_part([prompts[i][1] for i in part], versions[part]) for part in parts]
        position = torch.from_numpy(lengths - 1).to(self._device)
        columns = torch.arange(width, device=self._device)
        mask = columns >= (width - 1 - position)[:, None]
        if len(parts) == 1:
            logits, cache = done[0]
            return logits, _Trie(cache, mask, position, versions)
        where = [torch.from_numpy(part).to(self._device) for part in parts]
        logits = done[0][0].new_empty((len(prompts), done[0][0].shape[1]))
        for rows, (part_logits, _) in zip(where, done, strict=True):
            logits[rows] = part_logits
        caches = [part_cache for _, part_cache in done]
        return logits, _Trie(_joined(caches, where, len(prompts), width), mask, position, versions)

    def _prefill_part(
        self, prompts: list[tuple[int, ...]], versions: NDArray[np.int64]
    ) -> tuple[Tensor, Cache]:
        width = max(map(len, prompts))
        padded = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros((len(prompts), width), dtype=np.bool_)
        for i, prompt in enumerate(prompts):
            padded[i, width - len(prompt) :] = prompt
            mask[i, width - len(prompt) :] = True
        position = np.maximum(mask.cumsum(1) - 1, 0)
        cache = Cache(layer_class_to_replicate=_GrowingLayer)
        to = self._to_device
        return self._forward(to(padded), to(mask), to(position), cache, versions), cache

    def _step(self, trie: _Trie, parents: NDArray[np.int64], ids: NDArray[np.int64]) -> Tensor:
        """Moves the trie to its children and returns their logits ``[N', V]``."""
        if len(parents) != len(trie.position) or (parents != np.arange(len(parents))).any():
            chosen = self._to_device(parents)
            for layer in trie.cache.layers:
                if layer.is_initialized:  # layers that share another's keys hold none
                    layer.select(chosen)
            trie.mask, trie.position = trie.mask[chosen], trie.position[chosen]
            trie.versions = trie.versions[parents]
        trie.mask = torch.cat([trie.mask, trie.mask.new_ones((len(parents), 1))], dim=1)
        trie.position = trie.position + 1
        position = trie.position[:, None]
        return self._forward(self._to_device(ids)[:, None], trie.mask, position, trie.cache, trie.versions)

    def _forward(
        self, ids: Tensor, mask: Tensor, position: Tensor, cache: Cache, versions: NDArray[np.int64]
    ) -> Tensor:
        if self._now is not None:  # trials (below 0) stay what they are
            versions = np.where(versions >= 0, self._now, versions)
        self._plan.set(versions.tolist())
        self.forwards += 1
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        )
        logits: Tensor = output.logits
        return logits[:, -1]

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _distinct_prompts(
    requests: Sequence[Request],
) -> tuple[list[tuple[int, tuple[int, ...]]], NDArray[np.int64]]:
    """Returns the distinct (version, prompt) by version, and which one each request has."""
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    number = np.array([found.setdefault((r.version, r.prompt), len(found)) for r in requests])
    prompts = list(found)
    order = sorted(range(len(prompts)), key=lambda i: prompts[i][0])
    place = np.empty(len(prompts), dtype=np.int64)
    place[order] = np.arange(len(prompts))
    return [prompts[i] for i in order], place[number]


def _split_by_length(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Splits prompts into parts of similar length, where the padding saved is worth a forward.

    Example:
        >>> [part.tolist() for part in _split_by_length(np.array([900, 5, 5, 5]))]
        [[1, 2, 3], [0]]
    """
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    parts = []
    start = 0
    padding = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            grown = padding + (end - start) * int(ordered[end] - ordered[end - 1])
            cells = (end + 1 - start) * int(ordered[end]) ** 2
            if grown <= _PART_COST and cells <= _MASK_CELLS:
                padding = grown
                continue
        parts.append(order[start:end])
        start, padding = end, 0
    return parts


def _joined(caches: Sequence[Cache], rows: Sequence[Tensor], count: int, width: int) -> Cache:
    """Returns one cache of all parts, each padded on the left to ``width`` and put at its rows."""
    joined = Cache(layer_class_to_replicate=_GrowingLayer)
    for number, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        merged = []
        for name in ("keys", "values"):
            first = getattr(layers[0], name)
            whole = first.new_zeros((count, first.shape[1], width, first.shape[3]))
            for layer, where in zip(layers, rows, strict=True):
                part = getattr(layer, name)
                whole[where, :, width - part.shape[2] :] = part
            merged.append(whole)
        joined.update(merged[0], merged[1], number)
    return joined


def _stop_tables(requests: Sequence[Request], vocabulary: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Returns a table ``[S, V]`` of the distinct sets of stop ids, and which one each request has."""
    found: dict[tuple[int, ...], int] = {}
    number = np.array([found.setdefault(r.params.stop_ids, len(found)) for r in requests])
    table = np.zeros((len(found), vocabulary), dtype=np.bool_)
    for stop_ids, i in found.items():
        table[i, list(stop_ids)] = True
    return table, number


def _scattered(values: NDArray[Any], row: NDArray[np.int64], count: int) -> NDArray[Any]:
    whole = np.zeros(count, dtype=values.dtype)
    whole[row] = values
    return whole


def _outcomes(
    requests: Sequence[Request],
    first: NDArray[np.int64],
    ids: NDArray[np.int64],
    logprobs: NDArray[np.float32],
    length: NDArray[np.int64],
    stopped: NDArray[np.bool_],
    failed: NDArray[np.bool_],
    used: Sequence[int],
) -> list[Outcome]:
    """Cuts the steps ``[steps, R]`` into completions."""
    id_rows, logprob_rows = ids.T.tolist(), logprobs.T.astype(np.float64).tolist()
    lengths, ends, starts = length.tolist(), stopped.tolist(), first.tolist()
    bad = failed.tolist() if failed.any() else None
    outcomes: list[Outcome] = []
    for i, request in enumerate(requests):
        samples = range(starts[i], starts[i + 1])
        if bad and any(bad[s] for s in samples):
            outcomes.append(EngineError(_why_nothing(request)))
            continue
        greedy = request.params.temperature == 0
        moves = bool(used) and request.version >= 0
        outcomes.append(
            [
                Completion(
                    ids=tuple(id_rows[s][: lengths[s]]),
                    logprobs=None if greedy else tuple(logprob_rows[s][: lengths[s]]),
                    finish_reason="stop" if ends[s] else "length",
                    version=used[0] if moves else request.version,
                    trainable=request.trainable,
                    cut_by_context=request.cut_by_context,
                    last_version=used[lengths[s] - 1] if moves and used[lengths[s] - 1] != used[0] else None,
                )
                for s in samples
            ]
        )
    return outcomes


def _why_nothing(request: Request) -> str:
    masks = [
        f"{name}={getattr(request.params, name)!r}"
        for name in ("min_tokens", "allowed_ids")
        if getattr(request.params, name)
    ]
    if masks:
        return f"no id was left to sample under {' and '.join(masks)}; loosen one of them"
    return f"the model's logits under version {request.version} are not finite; its weights are broken"
