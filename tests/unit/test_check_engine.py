"""``atropos-gym check-engine``: the table, the JSON and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import check_engine, main
from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.trainers.tiny import save_base, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder that needs no download."""
    path = tmp_path_factory.mktemp("model") / "base"
    model = tiny_model()
    for name, tensor in model.state_dict().items():  # an untrained head is flat: nothing moves its logprobs
        if "norm" not in name:
            tensor *= 4
    save_base(model, path, model.state_dict())
    return path


def test_an_engine_that_is_fit_is_told_line_by_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-engine", f"hf:{folder}", "--temperature", "0.7", "--lora-rank", "2"]) == 0
    out = capsys.readouterr().out
    assert "Fit to train with." in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("ok")] == ["ok"] * 5
    assert "it moves logprobs by" in out


def test_json_is_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-engine", "hf", "--model", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True and data["engine"] == "hf"
    assert {found["name"] for found in data["findings"]} >= {"agreement", "adapter"}
    assert all(set(found) == {"name", "status", "detail", "remedy"} for found in data["findings"])


def test_an_engine_that_is_not_fit_ends_with_1_and_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_logprobs(prompt: Any, params: SamplingParams, number: int) -> Completion:
        return Completion((1, 2), None, "length")

    asked: dict[str, Any] = {}

    def make(spec: str, **options: Any) -> ScriptedEngine:
        asked.update(options, spec=spec)
        return ScriptedEngine(without_logprobs)

    monkeypatch.setattr(check_engine, "make_engine", make)
    words = [
        "vllm:http://ann:secret@127.0.0.1:9",
        "--model",
        str(folder),
        "--api-key",
        "k",
        "--adapter-dir",
        "a",
    ]
    assert main(["check-engine", *words]) == 1
    out = capsys.readouterr().out
    assert "2 ids came with 0 logprobs" in out and "Training with this would be wrong" in out
    assert "vllm:http://127.0.0.1:9\n" in out and "secret" not in out
    assert asked["spec"] == "vllm:http://ann:secret@127.0.0.1:9" and asked["api_key"] == "k"
    assert asked["model"] == str(folder) and asked["adapter_dir"] == Path("a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf"], "needs a model"),
        (["hf:/nowhere/model"], "no model"),
        (["hf:x", "--temperature", "0"], "--temperature must be > 0"),
        (["hf:x", "--lora-rank", "0"], "--lora-rank must be >= 1"),
        (["quantum:x"], "unknown"),
        ([], "SPEC"),
    ],
)
def test_a_mistake_is_one_line_and_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-engine", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
