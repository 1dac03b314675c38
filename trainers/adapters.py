"""LoRA adapters by PEFT: made, saved in PEFT's form, loaded, and carried through a checkpoint to the bit.

An adapter folder is written under another name and renamed, so that whoever sees it sees all of it, and it is
never rewritten: engines cache prefixes by name and path.
"""

from __future__ import annotations

import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atropos_gym.errors import ConfigError, MissingData

__all__ = ["AdapterState", "Lora", "add_lora", "load_adapter", "save_adapter"]

#: The linear layers of a Llama block, which most current models share.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

WEIGHTS_FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Lora:
    """What a LoRA adapter looks like (arXiv:2106.09685).

    Attributes:
        rank: width of the two factors.
        alpha: the update is scaled by ``alpha / rank``.
        targets: names of the layers that get one; ``"all-linear"`` for models with other names.
        dropout: kept in the adapter's config; the learner never applies it (scores must repeat).

    Raises:
        ConfigError: rank below 1 or no target.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: Sequence[str] | str = LINEAR_LAYERS
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora rank must be >= 1, got {self.rank}")
        if not self.targets:
            raise ConfigError('lora targets must name at least one layer, or be "all-linear"')


def add_lora(model: nn.Module, lora: Lora, *, seed: int = 0, base_name: str | None = None) -> Any:
    """Returns the model with one adapter, "default": float32, seeded, changing nothing yet (B = 0).

    The base is frozen and in eval mode: dropout stays off for good.

    Args:
        model: a causal language model of transformers.
        lora: shape of the adapter.
        seed: of factor A.
        base_name: written to the adapter's config as its base.

    Raises:
        ConfigError: no layer has one of the target names.
    """
    from peft import LoraConfig, get_peft_model

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        lora_dropout=lora.dropout,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT 0.21 asks transformers 5.24 by a name that it deprecates.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(
                f'lora targets {targets} fit no layer of {type(model).__name__}: use targets="all-linear"'
            ) from error
    adapted.peft_config["default"].base_model_name_or_path = base_name
    return adapted.eval()


def save_adapter(model: Any, folder: Path) -> Path:
    """Writes the adapter in PEFT's form (``adapter_config.json``, ``adapter_model.safetensors``).

    Args:
        model: made by ``add_lora``.
        folder: a new folder; complete once it is there.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder exists: an adapter is never rewritten.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise ConfigError(f"{folder} exists: an adapter is never rewritten, use a new version or run name")
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        tensors = {
            name: tensor.contiguous().cpu() for name, tensor in AdapterState(model).state_dict().items()
        }
        save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        config = model.peft_config["default"]
        training, config.inference_mode = config.inference_mode, True
        try:
            config.save_pretrained(partial)
        finally:
            config.inference_mode = training
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_adapter(model: Any, folder: Path) -> None:
    """Overwrites the model's adapter with one on disk; the parameters stay the same objects.

    Raises:
        MissingData: no adapter there.
        ConfigError: an adapter of another shape.
    """
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS_FILE
    if not path.is_file():
        raise MissingData(f"no adapter at {folder}: expected {WEIGHTS_FILE} in PEFT's form")
    AdapterState(model).load_state_dict(load_file(path))


class AdapterState:
    """The adapter alone as something with a state: what a checkpoint holds instead of the whole model.

    Args:
        model: made by ``add_lora``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Returns name -> tensor in PEFT's names, sharing the parameters' memory."""
        from peft import get_peft_model_state_dict

        state: dict[str, Tensor] = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        return {name: tensor.detach() for name, tensor in sorted(state.items())}

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copies tensors into the adapter; names and shapes must be the same.

        Raises:
            ConfigError: another set of names, or another shape.
        """
        own = self.state_dict()
        if strict and set(own) != set(state):
            odd = sorted(set(own) ^ set(state))
            raise ConfigError(f"the adapter has other layers: {odd[0]} and {len(odd) - 1} more differ")
        for name, tensor in state.items():
            if own[name].shape != tensor.shape:
                raise ConfigError(
                    f"{name} has shape {tuple(tensor.shape)}, the adapter {tuple(own[name].shape)}: "
                    "load it with the rank it was made with"
                )
            own[name].copy_(tensor)
