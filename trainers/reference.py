"""The learner as an engine's check sees it: the same ids, scored under the base or under an adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atropos_gym.engines.checks import CANARY_MOVE, TEXT
from atropos_gym.tokenizers import Tokenizer
from atropos_gym.trainers.adapters import AdapterState, load_adapter, save_adapter
from atropos_gym.trainers.scoring import Scorer, adapter_off, rows_of, score_rows

__all__ = ["LearnerReference"]

CANARY_SEED = 0xCA9A
#: How far the canary changes a layer's output, tried in this order.
SIZES = tuple(4.0**k for k in range(-3, 4))


class LearnerReference:
    """Scores ids with a learner's model; see ``engines.base.Reference``.

    The model's own adapter is put back after each call, to the bit.

    Args:
        model: made by ``add_lora``.
        tokenizer: the model's.
        adapter_dir: where its adapters are written.
        stop_ids: ids that end a turn.
        dtype: the declared precision of the base weights, in learner and engine.
        temperature: of the run's sampling.
        device: where the model is.

    Example:
        >>> from atropos_gym import load_tokenizer
        >>> from atropos_gym.trainers.adapters import Lora, add_lora
        >>> from atropos_gym.trainers.tiny import tiny_model
        >>> model = add_lora(tiny_model(), Lora(rank=2))
        >>> reference = LearnerReference(model, load_tokenizer("bytes"), adapter_dir=Path("adapters"))
        >>> reference.rank, len(reference.logprobs([1, 2, 3], 1))
        (2, 2)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        adapter_dir: Path,
        stop_ids: Sequence[int] = (),
        dtype: str = "float32",
        temperature: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.tokenizer = tokenizer
        self.adapter_dir = adapter_dir
        self.stop_ids = tuple(stop_ids)
        self.dtype = dtype
        self.temperature = temperature
        self.rows = int(model.get_input_embeddings().weight.shape[0])
        self.rank: int | None = int(model.peft_config["default"].r)
        self._model = model
        self._adapter = AdapterState(model)
        self._scorer = Scorer(model)
        self._device = device

    def logprobs(
        self, ids: Sequence[int], start: int, *, adapter: Path | None = None, temperature: float = 1.0
    ) -> list[float]:
        """Returns the logprob of each of ``ids[start:]`` given all ids before it.

        Args:
            ids: prompt and completion.
            start: of the completion; >= 1.
            adapter: a folder in PEFT's form, of the learner's own shape; None: the base alone.
            temperature: that logits are divided by.
        """
        with adapter_off(self._model) if adapter is None else self._under(adapter):
            return self._score(ids, start, temperature)

    def canary(self, folder: Path) -> Path:
        """Writes an adapter with large known weights to a new folder and returns it.

        Its size is doubled until it moves the logprobs of a fixed text by twice what the check asks for, so
        that it shows in any precision; of a model that nothing moves so far (an untrained one) it is the size
        that moves it most.
        """
        text = self.tokenizer.encode(TEXT)
        base_K = np.array(self.logprobs(text, 1))
        shapes = self._adapter.state_dict()
        moved: dict[float, float] = {}
        with self._kept():
            for size in SIZES:
                self._adapter.load_state_dict(_canary_weights(shapes, size))
                move = float(np.abs(np.array(self._score(text, 1, 1.0)) - base_K).mean())
                if math.isfinite(move):
                    moved[size] = move
                if move > 2 * CANARY_MOVE:
                    break
            self._adapter.load_state_dict(_canary_weights(shapes, max(moved, key=lambda size: moved[size])))
            return save_adapter(self._model, folder)

    def _score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        rows = rows_of([ids[:start]], [ids[start:]], temperature)
        [scored] = score_rows(self._scorer, rows, device=self._device)
        return [float(value) for value in scored]

    @contextmanager
    def _under(self, folder: Path) -> Iterator[None]:
        with self._kept():
            load_adapter(self._model, folder)
            yield

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Puts the model's own adapter back at the end."""
        own = {name: tensor.clone() for name, tensor in self._adapter.state_dict().items()}
        try:
            yield
        finally:
            self._adapter.load_state_dict(own)


def _canary_weights(shapes: dict[str, Tensor], size: float) -> dict[str, Tensor]:
    """Returns seeded weights: A keeps an input's scale, B changes an output by about ``size``."""
    generator = torch.Generator().manual_seed(CANARY_SEED)
    weights = {}
    for name, tensor in shapes.items():
        drawn = torch.randn(tensor.shape, generator=generator)
        weights[name] = drawn * (size if ".lora_B." in name else tensor.shape[-1] ** -0.5)
    return weights
