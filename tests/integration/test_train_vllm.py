"""``atropos-gym train`` with vLLM, whole: the trainer launches it; and four processes, each killed once.

The server is the fake one under the real one's module name, and a real (tiny) model samples behind it, so
that the learner's check, its alignment and its slope test are those of a real run.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.trainers.tiny import save_base, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
ENV = "task:Echo"
KEY = "a-key-of-the-test"
PATIENCE = 600.0

#: Pays for the first id, so that an untrained model has something to learn.
TASK = """
from atropos_gym import Feedback, TextEnv

class Echo(TextEnv):
    max_turns = 2
    max_turn_tokens = 6
    max_prompt_tokens = 8
    max_feedback_tokens = 8

    def begin(self, options):
        self.turn = 0
        return str(self.np_random.choice(["a", "b", "c"]))

    def respond(self, reply):
        self.turn += 1
        return Feedback("on", reward=reply.ids[0] % 16 / 16 if reply.ids else 0.0, terminated=self.turn == 2)
"""

#: The fake server, with a model behind it.
SERVER = """
from atropos_gym.engines.hf import HFEngine
from tests.tools import fake_vllm

class WithModel(fake_vllm.FakeVLLM):
    def __init__(self, **options):
        super().__init__(**options, backend=HFEngine(options["root"], max_live_versions=64))

fake_vllm.FakeVLLM = WithModel
fake_vllm.main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose logprobs an adapter moves."""
    network = tiny_model()
    for name, tensor in network.state_dict().items():
        if "norm" not in name:
            tensor *= 4
    return save_base(network, tmp_path_factory.mktemp("model") / "base", network.state_dict())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose vLLM is the fake one."""
    site = tmp_path_factory.mktemp("site")
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    interpreter = site / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={site}:{ROOT} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return interpreter


@pytest.fixture(autouse=True)
def task(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Two ports that nobody else gets: bound, not listened on."""
    with ExitStack() as stack:
        keepers = [stack.enter_context(socket.socket()) for _ in range(2)]
        for keeper in keepers:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("127.0.0.1", 0))
        yield [keeper.getsockname()[1] for keeper in keepers]


class Processes:
    """The processes of a test by name; each can be killed and started again."""

    def __init__(self, folder: Path, commands: dict[str, list[str]]) -> None:
        self.folder = folder
        self.commands = commands
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        variables = {
            **os.environ,
            "VLLM_API_KEY": KEY,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.commands[name], cwd=self.folder, env=variables, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Polls until something holds; a process that ends by itself meanwhile is a failure."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended: {self.said(name)}"
            assert time.monotonic() < deadline, {name: self.said(name) for name in self.commands}
            time.sleep(0.05)
        return found

    def said(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.running):
            self.kill(name)


def atropos(*words: str) -> list[str]:
    return [sys.executable, "-m", "atropos_gym", *words]


def metrics(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


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
    lines = metrics(run)
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


def test_each_of_four_processes_is_killed_once_and_the_run_ends_well(
    model: Path, python: Path, tmp_path: Path, ports: list[int]
) -> None:
    batches, vllm = (f"http://127.0.0.1:{port}" for port in ports)
    play = ["--engine", f"vllm:{vllm}", "--policy", str(model), "--group-size", "4", "--concurrency", "8"]
    learn = ["--policy", str(model), "--server", batches, "--updates", "12", "--checkpoint-every", "1"]
    commands = {
        "serve": atropos("serve", "--port", str(ports[0]), "--store", str(tmp_path / "store.sqlite")),
        "vllm": [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--port", str(ports[1]), "--enable-lora", "--max-lora-rank", "8", "--max-model-len", "512"),
            *("--logprobs-mode", "processed_logprobs"),
        ],
        "collect": atropos("collect", ENV, *play, "--to", batches, "--spool", str(tmp_path / "spool")),
        "learner": atropos("train", *LEARN, *learn),
    }
    run = tmp_path / "runs" / "x"
    with Processes(tmp_path, commands) as processes:
        for name in ("serve", "vllm"):
            processes.start(name)
        processes.until(lambda: healthy(batches) and healthy(vllm))
        for name in ("collect", "learner"):
            processes.start(name)

        def done(updates: int) -> Callable[[], bool]:
            return lambda: len(metrics(run)) >= updates

        def restarted(name: str) -> None:
            processes.kill(name)
            processes.start(name)

        processes.until(done(1))
        restarted("vllm")  # forgets its adapters: the collector loads them again
        processes.until(done(4))
        restarted("collect")  # goes on with what its spool holds
        processes.until(done(6))
        restarted("serve")
        processes.until(done(8))
        processes.kill("learner")
        before = metrics(run)
        processes.commands["learner"] = atropos("train", "--resume", str(run))
        processes.start("learner")
        for name in ("learner", "collect"):  # the run is finished: both leave by themselves
            process = processes.running.pop(name)
            assert process.wait(timeout=PATIENCE) == 0, processes.said(name)
        with BatchClient(batches) as client:
            status = client.info()
        live = [entry["id"] for entry in models_of(vllm)]
    lines = metrics(run)
    assert [line["update"] for line in lines] == list(range(1, 13)), "every update was made once"
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions)), "a version number means one set of weights"
    # What was checkpointed and acknowledged before the kill stands as it was.
    kept = min(len(before), 8)
    assert lines[: kept - 1] == before[: kept - 1]
    assert all(line["train/alignment"] < 2e-5 for line in lines)
    assert all(line["train/staleness"] == 0 for line in lines)
    assert status, "the server that was started again answers"
    assert len(live) <= 1 + 3 + 3, "adapters of two services, the base model beside them"
    folders = sorted(path.name for path in (run / "adapters").iterdir())
    assert len(folders) <= 10, f"old versions are deleted: {folders}"


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def models_of(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
    return list(answer.json()["data"])
