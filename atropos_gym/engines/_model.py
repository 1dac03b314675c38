"""Builds the engine's own module tree: from a folder, or around tensors that a learner shares."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from atropos_gym.errors import ConfigError, MissingData

__all__ = ["build_model", "check_layers", "context_limit", "load_model"]

_REMEDY = "give the folder of a transformers model, or, with a network, its name on the hub"
_LAYERS = {"full_attention", "sliding_attention"}


def load_model(model: str | Path, dtype: torch.dtype) -> Any:
    """Returns the causal language model of a folder or hub name.

    Raises:
        MissingData: it cannot be loaded; the message says why.
    """
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.exists() or str(model).startswith((".", "/", "~")):
        if not (path / "config.json").is_file():
            raise MissingData(f"model {model}: no config.json there; give the folder of a transformers model")
        model = path
    try:
        return AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingData(f"model {model} cannot be loaded: {reason.rstrip('.')}; {_REMEDY}") from error


def build_model(base: Mapping[str, Tensor], config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a fresh module tree around the given tensors; no tensor is copied.

    Raises:
        ConfigError: ``config`` is missing, or tensors do not fit it, ``dtype`` or ``device``.
    """
    if config is None:
        raise ConfigError("base= needs config=, the transformers configuration of the same model")
    for name, tensor in base.items():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise ConfigError(
                f"base tensor {name} is {tensor.dtype}, dtype is {dtype}: tensors are shared as they are, "
                f"so give dtype={str(tensor.dtype).removeprefix('torch.')!r}"
            )
        if tensor.device.type != device.type:
            raise ConfigError(
                f"base tensor {name} is on {tensor.device}, device is {device}; give device= the same"
            )
    config = copy.deepcopy(config)  # transformers writes into it
    if isinstance(config, str | Path):
        config = AutoConfig.from_pretrained(config)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to(device)  # buffers; the parameters are replaced below
    try:
        # Detached: a Parameter would be taken over itself, and frozen for the learner too.
        tensors = {name: tensor.detach() for name, tensor in base.items()}
        result = model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise ConfigError(f"base does not fit config: {' '.join(str(error).split())}") from error
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", {}) or {})
    missing = [name for name in result.missing_keys if name not in tied]
    if missing or result.unexpected_keys:
        wrong = f"lacks {missing[0]}" if missing else f"has {result.unexpected_keys[0]}"
        raise ConfigError(f"base does not fit config: it {wrong}; pass the model's own state_dict()")
    return model


def check_layers(config: Any) -> None:
    """Refuses models with layers whose state cannot be gathered by prefix, such as linear attention."""
    kinds = set(getattr(config, "layer_types", None) or _LAYERS)
    if kinds - _LAYERS:
        raise ConfigError(
            f"model has {', '.join(sorted(kinds - _LAYERS))} layers, which cannot be batched by prefix here; "
            "only attention layers (full or sliding) can"
        )


def context_limit(config: Any, wanted: int | None) -> int:
    """Returns the most ids of prompt and completion: what is wanted, within what the model can do."""
    limit = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ConfigError("the model's config names no max_position_embeddings; give max_context=")
        return int(limit)
    if wanted < 2 or (limit is not None and wanted > limit):
        raise ConfigError(f"max_context must be from 2 to the model's {limit}, got {wanted}")
    return wanted
