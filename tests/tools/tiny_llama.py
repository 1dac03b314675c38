"""Tiny random models and adapters in PEFT's form, for tests of engines and learners."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Returns a random model over the bytes tokenizer's 264 ids; large weights, so that prefixes matter."""
    settings = {
        "vocab_size": 264,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "max_position_embeddings": 96,
        "initializer_range": 0.25,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def adapter_tensors(
    model: nn.Module, *, rank: int = 4, std: float = 0.1, seed: int = 1, targets: Sequence[str] = LINEARS
) -> dict[str, torch.Tensor]:
    """Returns random LoRA tensors under PEFT's keys."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(tuple(targets)):
            for side, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                key = f"base_model.model.{name}.lora_{side}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * std
    return tensors


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], *, rank: int = 4, alpha: float = 8, **config: Any
) -> Path:
    """Writes an adapter folder and returns it."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    settings |= {"target_modules": list(LINEARS), **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def with_adapter(weights: Mapping[str, torch.Tensor], folder: Path, scale: float) -> dict[str, torch.Tensor]:
    """Returns a model's weights with a LoRA adapter added, by its definition; ``scale`` is alpha / rank."""
    tensors, changed = load_file(folder / "adapter_model.safetensors"), dict(weights)
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            changed[name] = weights[name] + scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
    return changed


@torch.no_grad()
def full_logits(model: nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Returns float32 logits ``[len(ids), V]`` at each of ``ids``: one row, no padding, no cache."""
    logits = model(torch.tensor([[*prompt, *ids]]), use_cache=False).logits
    return logits[0, len(prompt) - 1 : -1].float()


def full_logprobs(
    model: nn.Module, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """Returns what a plain forward says of each sampled id."""
    logprobs = (full_logits(model, prompt, ids) / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(ids)), list(ids)].numpy()


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Returns random prompts of the given lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]
