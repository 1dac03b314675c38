"""``atropos-gym train`` with vLLM, whole: the trainer launches it, is killed, and leaves nothing behind.

The server is the fake one under the real one's module name, and a real (tiny) model samples behind it, so
that the learner's check, its alignment and its slope test are those of a real run.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.tools.processes import ECHO, PATIENCE, Processes, atropos, fake_vllm_python, lines_of, sharp_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ENV = "task:Echo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose vLLM is the fake one."""
    return fake_vllm_python(tmp_path_factory.mktemp("site"))


@pytest.fixture(autouse=True)
def task(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(ECHO)


LEARN = [
    *("--env", ENV, "--group-size", "4", "--groups-per-update", "2", "--episodes", "8"),
    *("--lora-rank", "2", "--learning-rate", "1e-2", "--no-drop-equal", "--name", "x", "--runs", "runs"),
]


def test_the_trainer_launches_vllm_and_leaves_nothing_behind(
    model: Path, python: Path, tmp_path: Path
) -> None:
    words = ["--policy", str(model), "--engine", "vllm", "--vllm-python", str(python), "--own-server"]
    words += ["--engine-arg", "max_model_len=512", "--updates", "4"]
    done = subprocess.run(
        atropos("train", *LEARN, *words), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "x"
    lines = lines_of(run / "metrics.jsonl")
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert all(line["train/alignment"] < 2e-5 for line in lines)
    assert [line["train/slope"] for line in lines[1:]] == pytest.approx([1.0] * 3, abs=0.05)
    assert "train/dropped/slope" not in {key for line in lines for key in line}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["swaps"] >= 4
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "vllm.log").is_file()
    assert not list((run / "adapters").glob("canary-*"))
    assert servers_of(model) == []


def servers_of(model: Path) -> list[str]:
    """Command lines of the fake servers of a model that still run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if "vllm.entrypoints" in command and str(model) in command:
            found.append(command)
    return found


def test_an_engine_that_cannot_be_trained_with_is_one_line(model: Path, python: Path, tmp_path: Path) -> None:
    words = ["--policy", str(model), "--engine", "vllm", "--vllm-python", str(python), "--lora-rank", "32"]
    words += ["--engine-arg", "max_lora_rank=8"]
    done = subprocess.run(
        atropos("train", *LEARN, *words), cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 2
    assert "--max-lora-rank" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "x").exists()
    assert servers_of(model) == []


def test_a_trainer_that_is_killed_leaves_no_process_and_can_be_gone_on_with(
    model: Path, python: Path, tmp_path: Path
) -> None:
    """Its vLLM and its batch server end with it; the next one starts others, at its checkpoint."""
    words = ["--policy", str(model), "--engine", "vllm", "--vllm-python", str(python), "--own-server"]
    words += ["--engine-arg", "max_model_len=512", "--updates", "16", "--checkpoint-every", "1"]
    run = tmp_path / "runs" / "x"
    with Processes(tmp_path, {"train": atropos("train", *LEARN, *words)}) as processes:
        processes.start("train")
        processes.until(lambda: len(lines_of(run / "metrics.jsonl")) >= 2)
        assert len(servers_of(model)) >= 1 and len(processes.alive()) >= 4
        processes.kill("train")
        processes.until(lambda: not processes.alive())
        before = max(int(path.stem) for path in (run / "checkpoints").iterdir())
        processes.commands["train"] = atropos("train", "--resume", str(run))
        processes.start("train")
        assert processes.ended("train") == 0, processes.said("train")
        assert processes.alive() == []
        assert "Traceback" not in (tmp_path / "train.log").read_text()
    lines = lines_of(run / "metrics.jsonl")
    assert 2 <= before <= 16 and [line["update"] for line in lines] == list(range(1, 17))
    assert all(line["train/alignment"] < 2e-5 for line in lines)
