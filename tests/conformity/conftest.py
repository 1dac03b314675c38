"""Where the Python with `atroposlib` is; its environments and our server as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("ATROPOS_PYTHON", HERE.parents[1] / ".venv-atropos" / "bin" / "python"))
PROGRAM = HERE / "atropos_envs.py"
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "NO_PROXY": "127.0.0.1"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "atropos: needs the Python that `make test-atropos` makes")


@dataclass
class Environment:
    """One environment of the original, running."""

    kind: str
    items: int
    journal: Path
    process: subprocess.Popen[bytes]
    log: Path

    def lines(self, what: str) -> list[dict[str, Any]]:
        """Its journal: samples that were ``begun``, or whose post was ``answered``."""
        entries = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [entry for entry in entries if entry["what"] == what]

    def running(self) -> bool:
        """Whether it still runs; a failure is raised with what it said."""
        if self.process.poll() is None:
            return True
        assert self.process.returncode == 0, self.log.read_text()[-4000:]
        return False


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip(f"no environment with atroposlib at {PYTHON}: `make test-atropos` makes one")
    folder = tmp_path_factory.mktemp("tokenizer")
    subprocess.run([PYTHON, PROGRAM, "tokenizer", folder], check=True, capture_output=True, env=OFFLINE)
    return folder


@pytest.fixture
def launch(tokenizer_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Environment]]:
    """Starts an environment of a kind; what still runs at the end of the test is stopped."""
    with ExitStack() as stack:

        def start(kind: str, url: str, items: int, *options: str) -> Environment:
            journal, log = tmp_path / f"{kind}.jsonl", tmp_path / f"{kind}.log"
            journal.touch()
            command = [PYTHON, PROGRAM, kind, "--url", url, "--items", str(items)]
            command += ["--journal", journal, "--tokenizer", tokenizer_folder, *options]
            with log.open("wb") as errors:
                process = subprocess.Popen(command, stderr=errors, env=OFFLINE)
            stack.callback(stop, process)
            return Environment(kind, items, journal, process, log)

        yield start


@contextmanager
def serving(*options: object) -> Iterator[str]:
    """``atropos-gym serve`` as people start it, on a free port; yields its URL."""
    command = [sys.executable, "-m", "atropos_gym", "serve", "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
