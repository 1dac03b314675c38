"""The tiny model: a byte-level Llama of 0.1 M weights that learns small games on a CPU in minutes."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TINY", "save_base", "tiny_config", "tiny_model"]

#: The name that stands for it wherever a model is named.
TINY = "tiny"


def tiny_config(rows: int = 264, max_positions: int = 8192) -> Any:
    """Returns its ``LlamaConfig``: width 64, MLP 128, 2 layers, 4 heads, 1 KV head, untied head.

    Args:
        rows: embedding rows; 264 is the bytes tokenizer's.
        max_positions: longest sequence; rotary positions need no weights.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=rows,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.05,
        rope_theta=1e4,
        max_position_embeddings=max_positions,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
    )


def tiny_model(seed: int = 0, rows: int = 264) -> nn.Module:
    """Returns an untrained tiny model; the same seed gives the same weights, the global stream is left alone.

    Example:
        >>> sum(p.numel() for p in tiny_model().parameters())
        103744
    """
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = LlamaForCausalLM(tiny_config(rows))
    return model.eval()


def save_base(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Writes a base model in transformers' form, complete or not at all; replaces an older one.

    The folder says in ``tokenizer.json``'s place that ids are bytes: ``atropos_gym.json``.

    Args:
        model: a model of transformers.
        folder: where it shall stand.
        weights: what is written, where the model has adapters; its own state if None.

    Returns:
        The folder.
    """
    from safetensors.torch import save_file

    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        state = model.state_dict() if weights is None else weights
        tensors = {name: tensor.contiguous().cpu() for name, tensor in state.items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(partial)
        (partial / "atropos_gym.json").write_text(json.dumps({"tokenizer": "bytes"}) + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
