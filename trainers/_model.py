"""The base model that a policy's name means, and its tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.tokenizers import Tokenizer, load_tokenizer
from atropos_gym.trainers.tiny import TINY, tiny_model

__all__ = ["base_model", "max_context_of", "tokenizer_of"]

DTYPES = ("float32", "bfloat16", "float16", "float64")


def tokenizer_of(name: str, tokenizer: Any = None) -> Tokenizer:
    """Returns the tokenizer of a policy: its own unless another is named.

    Args:
        name: ``"tiny"``, or a model's name or path.
        tokenizer: what ``load_tokenizer`` takes.
    """
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if name == TINY:
        return load_tokenizer("bytes")
    return load_tokenizer(name)


def base_model(name: str, tokenizer: Tokenizer, *, dtype: str, device: torch.device, seed: int) -> Any:
    """Returns the causal language model that ``name`` means, in eval mode.

    Raises:
        ConfigError: an unknown dtype, or fewer embedding rows than the tokenizer has ids.
        MissingData: no such model.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    wanted: torch.dtype = getattr(torch, dtype)
    if name == TINY:
        model: Any = tiny_model(seed, rows=tokenizer.rows).to(wanted)
    else:
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise MissingData(
                f"no causal language model {name!r}: {reason}; give a folder in transformers' form, "
                'a model\'s name, or "tiny"'
            ) from error
    rows = model.get_input_embeddings().num_embeddings
    if rows < len(tokenizer):
        raise ConfigError(
            f"{name} has {rows} embedding rows, but tokenizer {tokenizer.name!r} has {len(tokenizer)} ids: "
            "use the model's own tokenizer"
        )
    return model.to(device).eval()


def max_context_of(model: Any) -> int:
    """Returns the longest sequence that the model was made for."""
    return int(getattr(model.config, "max_position_embeddings", None) or 2048)
