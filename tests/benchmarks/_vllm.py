"""What the vLLM benchmarks share: a server (launched, or one that runs), and adapters after a step."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from atropos_gym.engines import VLLMEngine, VLLMServer
from atropos_gym.trainers.adapters import AdapterState, Lora, add_lora

CACHE = Path(os.environ.get("ATROPOS_GYM_CACHE") or Path.home() / ".cache" / "atropos_gym")


def arguments(description: str) -> argparse.ArgumentParser:
    """Options that all of them have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CACHE / "smollm2", help="folder of a model")
    parser.add_argument("--dtype", default="float32")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--python", type=Path, help="interpreter of vLLM's own environment: launch a server")
    where.add_argument("--url", help="of a server that runs; its key in VLLM_API_KEY")
    return parser


@contextmanager
def engine_of(options: argparse.Namespace, **settings: Any) -> Iterator[VLLMEngine]:
    """Yields an engine for the server that the options name; a launched one ends with it."""
    key, server = os.environ.get("VLLM_API_KEY"), None
    if options.python is not None:
        server = VLLMServer.launch(
            options.model, python=options.python, dtype=options.dtype, max_model_len=512
        )
        key = server.api_key
    settings.setdefault("run", f"bench-{secrets.token_hex(3)}")  # a killed one may have left its adapters
    engine = VLLMEngine(
        options.url or server.url, model=str(options.model), api_key=key, server=server, **settings
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def learner(folder: Path, rank: int = 8) -> Any:
    """A model with an adapter that does something: what a learner has after some updates."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = add_lora(model, Lora(rank=rank, alpha=2 * rank))
    step(adapted, size=1e-2)
    return adapted


@torch.no_grad()
def step(model: Any, size: float = 1e-3) -> None:
    """Changes the adapter as an optimizer's step would."""
    for name, tensor in AdapterState(model).state_dict().items():
        if ".lora_B." in name:
            tensor += size * torch.randn_like(tensor)
