"""An adapter's ``adapter_config.json``: which settings engines apply, and which layers it means. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_gym.errors import EngineError

__all__ = ["check_adapter_config", "read_adapter_config", "target_matcher"]

# Settings of peft that make an adapter compute something else than x @ A.T @ B.T * scale. Any other value is
# refused by name: applying the adapter in part would sample from another policy without an error.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None, {}),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "fan_in_fan_out": (False, None),
    "velora_config": (None, {}),
    "monteclora_config": (None, {}),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
}


def check_adapter_config(config: dict[str, Any], folder: Path) -> tuple[int, float]:
    """Returns rank and scale of an adapter's configuration.

    Raises:
        EngineError: not LoRA, or a setting that the engine does not apply, named.

    Example:
        >>> check_adapter_config({"peft_type": "LORA", "r": 8, "lora_alpha": 16}, Path("a"))
        (8, 2.0)
    """
    if config.get("peft_type") != "LORA":
        raise EngineError(f"adapter {folder} has peft_type {config.get('peft_type')!r}; only LORA is served")
    for name, neutral in _NEUTRAL.items():
        if name in config and config[name] not in neutral:
            raise EngineError(
                f"adapter {folder} sets {name}={config[name]!r}, which is not supported here: change {name} "
                "in the learner's LoRA settings"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise EngineError(f"adapter {folder} has r={rank!r}; wanted an integer >= 1")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise EngineError(f"adapter {folder} has lora_alpha={alpha!r}; wanted a number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Returns what ``adapter_config.json`` says.

    Raises:
        EngineError: it is not there, or no JSON object.
    """
    file = folder / "adapter_config.json"
    if not file.is_file():
        raise EngineError(f"adapter folder {folder} has no adapter_config.json; save it with save_pretrained")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"{file} holds no JSON object")
    return config


def target_matcher(config: dict[str, Any], folder: Path) -> Callable[[str], bool] | None:
    """Returns which layer names an adapter's ``target_modules`` means; None where that cannot be told.

    Raises:
        EngineError: they are no names and no pattern.

    Example:
        >>> means = target_matcher({"target_modules": ["q_proj"]}, Path("a"))
        >>> [means(name) for name in ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj")]
        [True, False]
    """
    targets = config.get("target_modules")
    if targets is None or targets == "all-linear":
        return None
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return None
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise EngineError(
                f"adapter {folder}: target_modules {targets!r} is no pattern: {error}"
            ) from error
        return lambda name: pattern.fullmatch(name) is not None
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        names = tuple(targets)
        suffixes = tuple(f".{name}" for name in names)
        return lambda name: name in names or name.endswith(suffixes)
    raise EngineError(f"adapter {folder}: target_modules must be names or a pattern, got {targets!r}")
