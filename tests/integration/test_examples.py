"""Each file of examples/ does what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def example(name: str, *arguments: str | Path, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_a_first_environment_is_learned(tmp_path: Path) -> None:
    before, after, _ = numbers(example("first_environment.py", folder=tmp_path))
    assert before < 0.7
    assert after > 0.9


def test_a_wrapped_simulator_is_learned(tmp_path: Path) -> None:
    random, trained = numbers(example("wrap_a_simulator.py", folder=tmp_path))
    assert trained > random + 0.3
    assert trained > 0.8


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny model that knows the form of an answer: what a format lesson leaves behind."""
    code = (
        "from atropos_gym import GRPO\n"
        "model = GRPO('tiny', 'atropos/Identity-v0', folder='run', seed=0)\n"
        "model.warm_up(120, batch_size=32)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, check=True)
    return tmp_path / "run" / "base"


@pytest.fixture
def server(base: Path, tmp_path: Path) -> Iterator[str]:
    """A batch server and an environment service, each a process of its own."""
    from atropos_gym.batch_server.serve import ServerProcess

    with ServerProcess() as running:
        command = [sys.executable, "-m", "atropos_gym", "collect", "--to", running.url]
        command += ["--env", "atropos/Identity-v0", "--policy", str(base)]
        service = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT)
        try:
            yield running.url
            assert service.wait(timeout=120) == 0, "the service leaves when the trainer's run is finished"
        finally:
            service.kill()
            service.wait()


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_external_trainer_learns_from_the_server_in_plain_torch(base: Path, server: str) -> None:
    history = load("external_trainer").main(str(base), server, updates=30)
    assert sum(history[:3]) / 3 < 0.5
    assert sum(history[-3:]) / 3 > 0.8


def test_gsm8k_trains_on_a_real_model(smollm2_folder: Path, tmp_path: Path) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(
        '{"question": "Tom has 3 apples, buys 4 more. How many has he?", "answer": "3+4=7\\n#### 7"}\n'
        '{"question": "A box holds 6 eggs. How many eggs do 2 boxes hold?", "answer": "#### 12"}\n'
    )
    sizes = ["--updates", "1", "--groups", "1", "--group-size", "2", "--episodes", "2"]
    out = example(
        "gsm8k.py", smollm2_folder, "--data", problems, *sizes, "--max-turn-tokens", "48", folder=tmp_path
    )
    before, _, after, _ = numbers(out)
    assert 0 <= before <= 1
    assert 0 <= after <= 1
