"""Adapters: changing nothing at first, saved whole in PEFT's form, loaded to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.trainers.adapters import AdapterState, Lora, add_lora, load_adapter, save_adapter
from atropos_gym.trainers.policy import BaseState, RandomState
from atropos_gym.trainers.tiny import save_base, tiny_model

IDS = torch.tensor([[257, 104, 105, 261]])


def adapted(seed: int = 0, spread: float = 0.02, **fields: Any) -> Any:
    model = add_lora(tiny_model(), Lora(**{"rank": 4, **fields}), seed=seed, base_name="base-of-it")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, spread, generator=generator)
    return model


def test_a_new_adapter_changes_nothing() -> None:
    assert torch.equal(adapted(spread=0.0)(IDS).logits, tiny_model()(IDS).logits)


def test_the_main_jobs_adapter_has_31744_weights_and_nothing_else_is_trained() -> None:
    model = add_lora(tiny_model(), Lora())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == 31_744
    assert not model.training


def test_the_same_seed_makes_the_same_adapter_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = adapted(seed=3), adapted(seed=3)
    assert torch.equal(torch.rand(1), expected)
    a, b = AdapterState(first).state_dict(), AdapterState(second).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_is_saved_is_peft_form(tmp_path: Path) -> None:
    model = adapted()
    folder = save_adapter(model, tmp_path / "run-v1")
    assert {p.name for p in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32.0, "base-of-it")
    assert config["inference_mode"] is True and set(config["target_modules"]) >= {"q_proj", "down_proj"}
    names = load_file(folder / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    fresh = PeftModel.from_pretrained(tiny_model(), folder)
    assert torch.equal(fresh(IDS).logits, model(IDS).logits)


def test_nothing_but_the_finished_folder_is_left(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path / "run-v1")
    assert [p.name for p in tmp_path.iterdir()] == ["run-v1"]


def test_an_adapter_is_never_rewritten(tmp_path: Path) -> None:
    save_adapter(adapted(), tmp_path / "run-v1")
    with pytest.raises(ConfigError, match="never rewritten"):
        save_adapter(adapted(seed=1), tmp_path / "run-v1")


def test_loading_keeps_the_parameters_that_an_optimizer_knows(tmp_path: Path) -> None:
    source, target = adapted(seed=1), adapted(seed=2)
    before = list(map(id, target.parameters()))
    load_adapter(target, save_adapter(source, tmp_path / "run-v1"))
    assert list(map(id, target.parameters())) == before
    assert torch.equal(target(IDS).logits, source(IDS).logits)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = save_adapter(adapted(rank=8), tmp_path / "run-v1")
    with pytest.raises(ConfigError, match=r"shape \(8, 128\), the adapter \(4, 128\): load it with the rank"):
        load_adapter(adapted(), folder)
    with pytest.raises(ConfigError, match="other layers"):
        load_adapter(adapted(targets=("q_proj",)), folder)
    with pytest.raises(MissingData, match="no adapter at"):
        load_adapter(adapted(), tmp_path / "nothing")


def test_targets_that_fit_no_layer_are_named() -> None:
    with pytest.raises(ConfigError, match=r"\['c_attn'\] fit no layer of LlamaForCausalLM"):
        add_lora(tiny_model(), Lora(targets=("c_attn",)))


def test_the_bases_state_has_the_models_own_names_and_shares_its_memory() -> None:
    plain = tiny_model()
    model = adapted()
    state = BaseState(model).state_dict()
    assert set(state) == set(plain.state_dict())
    with torch.no_grad():
        state["lm_head.weight"].zero_()
    assert model(IDS).logits.abs().max() == 0.0


def test_a_saved_base_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = adapted()
    folder = save_base(model.get_base_model(), tmp_path / "base", BaseState(model).state_dict())
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(IDS).logits, tiny_model()(IDS).logits)
    assert json.loads((folder / "atropos_gym.json").read_text()) == {"tokenizer": "bytes"}


def test_random_streams_go_on_where_they_stood() -> None:
    import random

    import numpy as np

    kept = RandomState().state_dict()
    first = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())  # noqa: NPY002
    RandomState().load_state_dict(kept)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == first  # noqa: NPY002
