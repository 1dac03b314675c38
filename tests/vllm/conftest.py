"""A real vLLM server on a CPU, started once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atropos_gym.engines import VLLMEngine, VLLMServer

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
CONTEXT = 512


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of vLLM's own environment: $VLLM_PYTHON, else what `make test-vllm` makes."""
    if not PYTHON.exists():
        pytest.skip(f"no environment with vLLM at {PYTHON}: `make test-vllm` makes one")
    return PYTHON


@pytest.fixture(scope="session")
def server(
    vllm_python: Path, smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMServer]:
    """SmolLM2 in float32 behind vLLM's stock server; a start takes minutes."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with VLLMServer.launch(
        smollm2_folder, python=vllm_python, max_model_len=CONTEXT, log=log, startup_timeout=1200
    ) as launched:
        yield launched


@pytest.fixture
def connect(server: VLLMServer) -> Iterator[Callable[..., VLLMEngine]]:
    """Returns engines for the server; they are closed, and their adapters unloaded, after the test."""
    engines: list[VLLMEngine] = []

    def connect_(**options: object) -> VLLMEngine:
        options.setdefault("run", f"test{len(engines)}")
        engines.append(VLLMEngine(server.url, model=server.model, api_key=server.api_key, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield connect_
    for engine in engines:
        engine.shutdown()
