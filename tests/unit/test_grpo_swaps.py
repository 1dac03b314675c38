"""GRPO with a vLLM server (a fake one, behind whose HTTP a real model samples): checked, swapped, watched.

Case d17 and its kinds: an honest engine passes; one that serves old weights, or mixes them, loses a batch and
then stops the run; a change too small to tell is counted and kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines.hf import HFEngine
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import ConfigError, EngineError, EngineUnfit
from atropos_gym.messages import Feedback, Reply
from atropos_gym.text_env import TextEnv
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.tiny import save_base, tiny_model
from tests.tools.fake_vllm import FakeVLLM


class Echo(TextEnv):
    """Two turns; pays for the first id, so that every group has something to learn."""

    max_turns = 2
    max_turn_tokens = 6
    max_prompt_tokens = 8
    max_feedback_tokens = 8

    def begin(self, options: dict[str, Any]) -> str:
        self.turn = 0
        return str(self.np_random.choice(["a", "b", "c"]))

    def respond(self, reply: Reply) -> Feedback:
        self.turn += 1
        reward = reply.ids[0] % 16 / 16 if reply.ids else 0.0
        return Feedback("on", reward=reward, terminated=self.turn == 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "base"
    model = tiny_model()
    for name, tensor in model.state_dict().items():  # an untrained head is flat: nothing moves its logprobs
        if "norm" not in name:
            tensor *= 4
    return save_base(model, path, model.state_dict())


Change = Callable[[int, list[int]], int]
"""``f(version, prompt) -> version`` that the broken server samples with."""


class Server(HFEngine):
    """What samples behind the server; ``change`` breaks it."""

    change: Change | None = None

    async def generate(self, prompt_ids: Any, params: Any, n: int = 1, **more: Any) -> Any:
        if self.change is not None:
            more["version"] = self.change(more["version"], list(prompt_ids))
        return await super().generate(prompt_ids, params, n, **more)


@contextmanager
def learner(folder: Path, tmp_path: Path, **fields: Any) -> Iterator[tuple[GRPO, Server, FakeVLLM]]:
    """A learner whose engine is a vLLM server with this model."""
    backend = Server(folder, max_live_versions=64)
    fake = FakeVLLM(root=str(folder), backend=backend, vocabulary=264)
    settings: dict[str, Any] = {
        "seed": 0,
        "lora": Lora(rank=2),
        "group_size": 4,
        "groups_per_update": 2,
        "drop_equal": False,
        "learning_rate": 1e-2,
        "deterministic": True,
        "folder": tmp_path,
    }
    with fake.engine(run="a") as engine:
        with GRPO(str(folder), Echo, engine=engine, **{**settings, **fields}) as model:
            yield model, backend, fake
    backend.shutdown()


def metrics_of(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_an_honest_server_is_checked_learned_with_and_swapped(folder: Path, tmp_path: Path) -> None:
    with learner(folder, tmp_path) as (model, _, fake):
        model.learn(updates=4)
        engine: VLLMEngine = model.engine
        assert engine.counters["published"] == 4 and engine.newest == 4
        assert not [name for name in engine.counters if name.startswith(("lost", "retry"))]
        names = [body["lora_name"] for body in fake.asked("/v1/load_lora_adapter")]
        assert [name for name in names if name.startswith("a-v")] == [f"a-v{k}" for k in (1, 2, 3, 4)]
        assert any(name.startswith("a-trial-") for name in names) and len(set(names)) == len(names)
        assert len({body["lora_path"] for body in fake.asked("/v1/load_lora_adapter")}) == len(names)
        assert set(fake.adapters) == {"a-v2", "a-v3", "a-v4"}
        assert model._parts.noise is not None and model._parts.noise < 1e-4
    lines = metrics_of(tmp_path)
    assert all(line["train/alignment"] < 2e-5 for line in lines)
    assert all(line["train/alignment_max"] < 2e-4 for line in lines)
    slopes = [line["train/slope"] for line in lines if "train/slope" in line]
    assert len(slopes) == 3 and slopes == pytest.approx([1.0] * 3, abs=0.05)
    assert all(line["time/publish"] > 0 for line in lines)


def test_an_engine_that_ignores_adapters_is_refused_before_anything_is_learned(
    folder: Path, tmp_path: Path
) -> None:
    with learner(folder, tmp_path) as (model, backend, _):
        backend.change = lambda version, prompt: 0
        with pytest.raises(EngineUnfit, match="adapter has no effect"):
            model.learn(updates=1)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_every_fault_is_said_at_once(folder: Path, tmp_path: Path) -> None:
    with learner(folder, tmp_path, temperature=0.7) as (model, backend, fake):
        fake.runtime_lora = False

        class Raw(type(backend)):  # type: ignore[misc]
            async def generate(self, prompt_ids: Any, params: Any, n: int = 1, **more: Any) -> Any:
                return await HFEngine.generate(self, prompt_ids, params.with_(temperature=1.0), n, **more)

        backend.__class__ = Raw
        with pytest.raises(EngineUnfit) as caught:
            model.learn(updates=1)
    assert "processed_logprobs" in str(caught.value)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(caught.value)


@pytest.mark.filterwarnings("ignore:engine and learner disagree")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda version, prompt: min(version, 2), r"engine serves old weights \(slope 0.00 ±"),
        (lambda version, prompt: version - 1 if version > 2 else version, r"engine "),
        (lambda version, prompt: 2 if version > 2 and sum(prompt) % 2 else version, "engine mixes versions"),
    ],
    ids=["stays at one", "is one behind", "mixes two"],
)
def test_a_swap_that_did_not_happen_loses_a_batch_and_then_stops_the_run(
    folder: Path, tmp_path: Path, change: Change, says: str
) -> None:
    with learner(folder, tmp_path) as (model, backend, _):
        model.engine_check = False
        # The backend's own numbers are the versions' here: nothing was loaded for a check.
        backend.change = change
        with (
            pytest.warns(UserWarning, match=f"version 3: {says}.*its batch is refused"),
            pytest.raises(EngineError, match="the second time in a row"),
        ):
            model.learn(updates=8)
    refused = [line for line in metrics_of(tmp_path) if "train/dropped/slope" in line]
    assert len(refused) == 1 and refused[0]["train/dropped/slope"] > 0
    assert refused[0]["train/slope"] != pytest.approx(1.0, abs=0.1)


@pytest.mark.filterwarnings("ignore:engine and learner disagree")
def test_one_failure_alone_is_forgiven(folder: Path, tmp_path: Path) -> None:
    with learner(folder, tmp_path) as (model, backend, _):
        model.engine_check = False
        backend.change = lambda version, prompt: 2 if version == 3 else version
        with pytest.warns(UserWarning, match="its batch is refused"):
            model.learn(updates=6)
    lines = metrics_of(tmp_path)
    assert [("train/dropped/slope" in line) for line in lines] == [False, False, False, True, False, False]


def test_a_change_too_small_to_tell_is_counted_kept_and_added_up(folder: Path, tmp_path: Path) -> None:
    with learner(folder, tmp_path, learning_rate=3e-8) as (model, _, _):
        with pytest.warns(UserWarning, match="unmeasurable: update too small"):
            model.learn(updates=3)
        assert model._parts.watch is not None
        before = model._parts.watch._previous
        assert before is not None
    lines = metrics_of(tmp_path)
    assert [line.get("train/slope_unmeasurable") for line in lines] == [None, 1.0, 1.0]
    assert lines[2]["train/slope_rms"] > lines[1]["train/slope_rms"] > 0  # both compare with the first
    assert all("train/loss" in line for line in lines)


def test_an_engine_that_never_changes_feeds_a_learner_that_allows_for_it(
    folder: Path, tmp_path: Path
) -> None:
    backend = HFEngine(folder, swap="none")
    fields: dict[str, Any] = {"lora": Lora(rank=2), "group_size": 4, "groups_per_update": 2, "seed": 0}
    with GRPO(str(folder), Echo, engine=backend, engine_check=True, **fields) as model:
        with pytest.raises(ConfigError, match="max_staleness to at least 2"):
            model.learn(updates=3)
        model.max_staleness = 10
        with pytest.warns(UserWarning, match="never change"):
            model.learn(updates=3)
        assert model.version == 3 and backend.newest == 0 and backend.counters["announced"] >= 3
        observation, _ = model._parts.tasks[0].env.reset(seed=1)
        action, _ = model.predict(observation)  # by the learner's own weights
        assert len(action) and model.player is not backend and model.player.newest == 3
    backend.shutdown()
