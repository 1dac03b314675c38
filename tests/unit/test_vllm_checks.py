"""What a vLLM server is asked before a run, and what each finding tells to change (d1, d3, d15, d21)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines.hf import HFEngine
from atropos_gym.findings import Finding
from atropos_gym.tokenizers import load_tokenizer
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.tiny_llama import tiny_llama


class Learner:
    """As much of a reference as the server-facing checks look at."""

    rows = 264
    stop_ids: tuple[int, ...] = (258,)
    dtype = "float32"
    temperature = 1.0
    rank: int | None = 4

    def __init__(self, **changes: Any) -> None:
        self.tokenizer = load_tokenizer("bytes")
        for name, value in changes.items():
            setattr(self, name, value)


def server_findings(fake: FakeVLLM, reference: Any = None) -> list[Finding]:
    """Returns the findings of the server alone, without the numbers that every engine is checked for."""
    from atropos_gym.engines._vllm_checks import server_findings as findings

    with fake.engine() as engine:
        found = findings(
            engine._router.replicas, engine.model, Path("/models/m"), 1024, engine.tokenizer, reference
        )
        return engine._thread.wait(found)


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {found.name: f"{found.detail} | {found.remedy}" for found in findings if found.status == "wrong"}


def test_a_server_as_it_should_be() -> None:
    fake = FakeVLLM()
    findings = server_findings(fake, Learner())
    assert {found.name: found.status for found in findings} == {
        "context": "ok",
        "adapters": "ok",
        "tokenizer": "ok",
    }
    assert fake.adapters == {}, "nothing is left"


def test_d1_adapters_cannot_be_loaded() -> None:
    no_route = wrong(server_findings(FakeVLLM(runtime_lora=False), Learner()))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in no_route["adapters"]
    off = wrong(server_findings(FakeVLLM(lora=False), Learner()))
    assert "--enable-lora" in off["adapters"] and "VLLM_ALLOW" not in off["adapters"]
    assert wrong(server_findings(FakeVLLM(lora=False), Learner(rank=None))) == {}, (
        "a learner without adapters"
    )


def test_d15_a_tokenizer_with_other_ids() -> None:
    fake = FakeVLLM(tokenize=lambda text: [ord(c) % 250 for c in text.replace("  ", " ")])
    found = wrong(server_findings(fake, Learner()))
    assert (
        "'a  12' is [97, 32, 49, 50] for the server (/models/m) and [97, 32, 32, 49, 50]"
        in found["tokenizer"]
    )


def test_d15_a_stop_id_that_the_server_reads_as_text() -> None:
    """`<|im_end|>` is one id for the learner and three for the server."""

    class Marked:
        """The bytes tokenizer with a text for its end id."""

        def __init__(self) -> None:
            self._bytes = load_tokenizer("bytes")
            self.name, self.rows = "learner/model", 264

        def encode(self, text: str) -> list[int]:
            return self._bytes.encode(text)

        def decode(self, ids: list[int]) -> str:
            return "<|im_end|>" if ids == [258] else self._bytes.decode(ids)

    learner = Learner(tokenizer=Marked())
    texts = {"<|im_end|>": [27, 91, 318]}
    fake = FakeVLLM(tokenize=lambda text: texts.get(text, list(text.encode())))
    found = wrong(server_findings(fake, learner))
    ours, theirs = "stop id 258 for the learner (learner/model)", "[27, 91, 318] for the server (/models/m)"
    assert found["stop ids"].startswith(f"'<|im_end|>' is {ours} and {theirs}")
    texts["<|im_end|>"] = [258]
    assert wrong(server_findings(fake, learner)) == {}


def test_d15_a_larger_vocabulary() -> None:
    found = wrong(server_findings(FakeVLLM(vocabulary=300), Learner()))
    assert "the learner has ids up to 263, and http://fake takes 264" in found["vocabulary"]


def test_a_server_that_does_not_tokenize_is_no_fault() -> None:
    fake = FakeVLLM()
    fake.inject("500", times=99, path="/tokenize")
    [found] = [found for found in server_findings(fake) if found.name == "tokenizer"]
    assert found.status == "note"


def test_a_server_that_fails_is_a_finding() -> None:
    fake = FakeVLLM()
    fake.inject("503", times=99, path="/v1/load")
    assert "fails: 503" in wrong(server_findings(fake))["server"]


def test_metrics_of_the_server() -> None:
    fake = FakeVLLM()

    async def main(engine: Any) -> dict[str, float]:
        from atropos_gym.engines.base import SamplingParams

        for length in (70, 80):
            await engine.generate(list(range(length)), SamplingParams(max_tokens=4))
        values: dict[str, float] = await engine.server_metrics()
        return values

    with fake.engine() as engine:
        values = asyncio.run(main(engine))
        assert engine.metrics()["cached_tokens"] == 64 and engine.metrics()["prompt_tokens"] == 150
    assert values["prefix_cache_queries_total"] == 150 and values["prefix_cache_hits_total"] == 64
    assert values["generation_tokens_total"] == 8


@pytest.fixture(scope="module")
def backend() -> Iterator[HFEngine]:
    model = tiny_llama()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", max_live_versions=9)
    yield engine
    engine.shutdown()


def learner(folder: Path, rank: int, temperature: float) -> Any:
    from atropos_gym.trainers.adapters import Lora, add_lora
    from atropos_gym.trainers.reference import LearnerReference

    return LearnerReference(
        add_lora(tiny_llama(), Lora(rank=rank)),
        load_tokenizer("bytes"),
        adapter_dir=folder,
        temperature=temperature,
    )


def check(fake: FakeVLLM, reference: Any) -> list[Finding]:
    with fake.engine() as engine:
        findings = asyncio.run(engine.check(reference))
    assert fake.adapters == {}, "nothing is left"
    return findings


def test_d21_the_whole_check_with_a_learner(tmp_path: Path, backend: HFEngine) -> None:
    fake = FakeVLLM(backend=backend, max_model_len=96)
    findings = check(fake, learner(tmp_path, 4, 0.7))
    assert wrong(findings) == {}, findings
    assert {found.name for found in findings} >= {"adapters", "tokenizer", "agreement", "adapter"}


def test_d3_a_rank_that_the_server_does_not_take(tmp_path: Path, backend: HFEngine) -> None:
    fake = FakeVLLM(backend=backend, max_model_len=96, max_lora_rank=2)
    found = wrong(check(fake, learner(tmp_path, 4, 0.7)))
    assert "--max-lora-rank 8" in found["adapter"] and found.keys() == {"adapter"}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_d5_raw_logprobs(tmp_path: Path, backend: HFEngine, temperature: float) -> None:
    """Told from the numbers at 0.7; at 1.0 raw and processed are equal and nothing is wrong."""
    reference = learner(tmp_path, 4, temperature)
    fake = FakeVLLM(
        backend=backend,
        max_model_len=96,
        processed=temperature == 1.0,
        raw=lambda prompt, ids: list(reference.logprobs([*prompt, *ids], len(prompt))),
    )
    found = wrong(check(fake, reference))
    if temperature == 1.0:
        assert found == {}
    else:
        assert "--logprobs-mode processed_logprobs" in found["agreement"]
