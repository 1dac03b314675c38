"""Stock vLLM as a server: cancelled requests are dropped, refusals say what to change, it may be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from atropos_gym.engines import Completion, SamplingParams, VLLMEngine, VLLMServer
from atropos_gym.errors import EngineError
from tests.tools.tiny_llama import adapter_tensors, write_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

#: Seconds that anything may take on a machine however loaded.
PATIENCE = 600.0
PROMPT = "Tell me something about the sea."


@pytest.fixture(scope="module")
def adapter(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns a function that writes random adapters of a seed and a rank."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("adapters")

    def write(seed: int, rank: int = 8) -> Path:
        tensors = adapter_tensors(model, rank=rank, std=0.02, seed=seed)
        return write_adapter(folder / f"{seed}-{rank}", tensors, rank=rank, alpha=16)

    return write


def test_a_cancelled_request_is_dropped_by_the_server(connect: Callable[..., VLLMEngine]) -> None:
    engine = connect(cancel_grace=0.1)
    long = 400

    async def cancel() -> float:
        before = await engine.server_metrics()
        request = asyncio.create_task(
            engine.generate(engine.tokenizer.encode(PROMPT), SamplingParams(max_tokens=long))
        )
        await _until(engine, lambda now: now["num_requests_running"] > 0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        after = await _until(engine, lambda now: now["num_requests_running"] == 0)
        return after["generation_tokens_total"] - before["generation_tokens_total"]

    assert asyncio.run(cancel()) < long
    assert engine.metrics()["running"] == 0


async def _until(engine: VLLMEngine, true: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline = time.monotonic() + PATIENCE
    while not true(now := await engine.server_metrics()):
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.05)
    return now


def test_an_adapter_of_a_larger_rank_is_refused_with_the_flag_to_set(
    connect: Callable[..., VLLMEngine], adapter: Callable[..., Path]
) -> None:
    engine = connect(retries=0)
    with pytest.raises(EngineError, match="--max-lora-rank 32"):
        asyncio.run(engine.publish(1, adapter(seed=1, rank=32)))
    assert engine.newest == 0
    assert _first_ids(engine, 0)  # it goes on serving


def test_a_killed_server_gets_its_versions_again(
    server: VLLMServer, connect: Callable[..., VLLMEngine], adapter: Callable[..., Path]
) -> None:
    engine = connect(restart_timeout=PATIENCE * 2, request_timeout=PATIENCE * 2)
    assert "wrong" not in {found.status for found in asyncio.run(engine.check())}
    for version in (1, 2):
        asyncio.run(engine.publish(version, adapter(seed=version)))
    before = {version: _first_ids(engine, version) for version in (0, 1, 2)}

    os.kill(server.pid, signal.SIGKILL)
    with ThreadPoolExecutor() as threads:
        waiting = {version: threads.submit(_first_ids, engine, version) for version in (2, 0, 1)}
        server.restart(startup_timeout=PATIENCE * 2)
        after = {version: request.result() for version, request in waiting.items()}

    assert engine.counters["restored"] == 2
    assert not [name for name in engine.counters if name.startswith("lost/")]
    assert engine.live_versions == (0, 1, 2)
    for version, then in before.items():
        assert _difference(then, after[version]) < 2e-4
        for other in {0, 1, 2} - {version}:
            assert _difference(then, after[other]) > 1e-2


def _first_ids(engine: VLLMEngine, version: int) -> dict[int, float]:
    """What a version says first, with logprobs: samples of one id, from the middle of the distribution."""
    params = SamplingParams(max_tokens=1, temperature=0.5, seed=1)
    prompt = engine.tokenizer.encode(PROMPT)
    samples: list[Completion] = asyncio.run(engine.generate(prompt, params, 16, version=version))
    assert {sample.version for sample in samples} == {version}
    return {sample.ids[0]: sample.logprobs[0] for sample in samples if sample.logprobs}


def _difference(some: dict[int, float], others: dict[int, float]) -> float:
    """Largest difference of the ids that both have; infinite where they have none."""
    common = set(some) & set(others)
    return max((abs(some[i] - others[i]) for i in common), default=float("inf"))
