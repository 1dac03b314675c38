"""A folder becomes a version only if all of it is right; a refused one changes nothing (d3, d4, d21)."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.hf import HFEngine
from atropos_gym.errors import EngineError
from tests.tools.tiny_llama import LINEARS, adapter_tensors, tiny_llama, write_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"
PARAMS = SamplingParams(max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def engine(model: LlamaForCausalLM) -> HFEngine:
    return HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")


def swap(key: str, tensor: torch.Tensor | None) -> Any:
    """Returns a change of one tensor; None takes it out."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor

    return change


def drop_layer(tensors: dict[str, torch.Tensor]) -> None:
    for side in "AB":
        del tensors[f"{Q}.lora_{side}.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            swap(f"{Q}.lora_A.weight", torch.zeros(4, 100)),
            r"q_proj.lora_A has shape \(4, 100\), wanted \(4, 32\)",
        ),
        (swap(f"{Q}.lora_A.weight", torch.zeros(8, 32)), r"has shape \(8, 32\), wanted \(4, 32\) \(r=4"),
        (swap(f"{Q}.lora_B.weight", torch.zeros(32, 8)), r"q_proj.lora_B has shape \(32, 8\)"),
        (
            swap(f"{Q}.lora_B.weight", torch.full((32, 4), torch.inf)),
            "q_proj.lora_B holds a value that is not",
        ),
        (
            swap(f"{Q}.lora_A.weight", torch.full((4, 32), torch.nan)),
            "q_proj.lora_A holds a value that is not",
        ),
        (swap(f"{Q}.lora_B.weight", None), "q_proj has no lora_B"),
        (
            swap("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", torch.zeros(4, 32)),
            "layers.7.*fits no",
        ),
        (swap(f"{Q}.lora_magnitude_vector.weight", torch.zeros(32)), "lora_magnitude_vector.*fits no"),
        (drop_layer, "targets model.layers.0.self_attn.q_proj but has no tensors"),
        (dict.clear, "holds no tensors"),
    ],
)
def test_tensors_must_fit(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path, change: Any, message: str
) -> None:
    before = engine.generate_sync([1, 2, 3], PARAMS)
    tensors = adapter_tensors(model)
    change(tensors)
    with pytest.raises(EngineError, match=message):
        engine.publish_sync(1, write_adapter(tmp_path / "v1", tensors))
    assert (engine.newest, engine.live_versions) == (0, (0,))
    assert engine.generate_sync([1, 2, 3], PARAMS) == before
    # The number is still free, and a good folder takes it.
    engine.publish_sync(1, write_adapter(tmp_path / "good", adapter_tensors(model)))
    assert engine.newest == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA"),
        ({"use_dora": True}, "sets use_dora=True"),
        ({"bias": "all"}, "sets bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save="),
        ({"rank_pattern": {"q_proj": 2}}, "sets rank_pattern="),
        ({"alpha_pattern": {"q_proj": 2}}, "sets alpha_pattern="),
        ({"r": 0}, "r=0; wanted"),
        ({"r": 8}, r"lora_A has shape \(4, \d+\), wanted \(8, \d+\) \(r=8"),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"target_modules": "("}, "is no pattern"),
        ({"target_modules": 3}, "must be names or a pattern"),
    ],
)
def test_settings_that_are_not_applied_are_refused(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    settings = {"rank": config.pop("r")} if "r" in config else {}
    settings |= {"alpha": config.pop("lora_alpha")} if "lora_alpha" in config else {}
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(model), **settings, **config)
    with pytest.raises(EngineError, match=message):
        engine.publish_sync(1, adapter)
    assert engine.newest == 0


def test_broken_folders_are_named(engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"nowhere has no adapter_config.json"):
        engine.publish_sync(1, tmp_path / "nowhere")
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(model))
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(EngineError, match="cannot be read.*complete when published"):
        engine.publish_sync(1, adapter)
    weights.unlink()
    with pytest.raises(EngineError, match=r"no adapter_model.safetensors"):
        engine.publish_sync(1, adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(EngineError, match="is not JSON"):
        engine.publish_sync(1, adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(EngineError, match="holds no JSON object"):
        engine.publish_sync(1, adapter)


def test_a_fresh_adapter_equals_the_base(engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    tensors = {k: t * ("lora_A" in k) for k, t in adapter_tensors(model).items()}  # B = 0, as learners start
    engine.publish_sync(1, write_adapter(tmp_path / "v1", tensors))
    [base], [fresh] = (engine.generate_sync([1, 2, 3], PARAMS, version=v) for v in (0, 1))
    assert fresh.ids == base.ids and fresh.version == 1
    np.testing.assert_allclose(fresh.logprobs, base.logprobs, atol=1e-6)


def test_a_version_outlives_its_folder(engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(model))
    engine.publish_sync(1, adapter)
    before = engine.generate_sync([1, 2, 3], PARAMS)
    weights = adapter / "adapter_model.safetensors"
    with weights.open("r+b") as file:  # a careless writer, in place
        file.seek(weights.stat().st_size - 4000)
        file.write(b"\xff" * 4000)
    shutil.rmtree(adapter)
    assert engine.generate_sync([1, 2, 3], PARAMS) == before


@pytest.mark.parametrize("targets", ["all-linear", r".*\.q_proj", ["q_proj"]])
def test_target_modules_are_names_or_a_pattern(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path, targets: str | list[str]
) -> None:
    names = LINEARS if targets == "all-linear" else ("q_proj",)
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(model, targets=names), target_modules=targets)
    engine.publish_sync(1, adapter)
    assert engine.newest == 1


def test_retired_weights_are_gone(engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path) -> None:
    for version in (1, 2):
        engine.publish_sync(version, write_adapter(tmp_path / f"v{version}", adapter_tensors(model)))
    asyncio.run(engine.retire(1))
    assert {v for layer in engine._adapters._layers.values() for v in layer.adapters} == {2}


def test_publishing_works_inside_a_running_loop(
    engine: HFEngine, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(model))

    async def main() -> None:
        engine.publish_sync(1, adapter)
        with pytest.raises(EngineError, match="must be an integer >= 1"):
            engine.publish_sync(0, adapter)

    asyncio.run(main())
    assert engine.newest == 1
