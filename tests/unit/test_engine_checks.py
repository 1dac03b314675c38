"""The check at start: every kind of engine that must not be trained with is told by name (cases d)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_gym import load_tokenizer
from atropos_gym.engines.base import Completion, Engine, Reference, SamplingParams
from atropos_gym.engines.checks import (
    Agreement,
    agreement,
    check_engine,
    judge_adapter,
    judge_agreement,
    sampling_findings,
)
from atropos_gym.engines.hf import HFEngine
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import EngineError
from atropos_gym.findings import Finding
from atropos_gym.trainers.adapters import AdapterState, Lora, add_lora
from atropos_gym.trainers.policy import BaseState
from atropos_gym.trainers.reference import LearnerReference
from atropos_gym.trainers.tiny import tiny_model

RNG = np.random.default_rng(0)
SIZE = 512
LEARNER = RNG.uniform(-5.0, -0.5, SIZE)
EXACT = RNG.normal(0.0, 5e-6, SIZE)
COARSE = RNG.normal(0.0, 0.045, SIZE)


# -- from numbers to findings --------------------------------------------------------------------------


def test_float32_on_both_sides_agrees() -> None:
    found = judge_agreement(LEARNER + EXACT, LEARNER, LEARNER)
    assert found.status == "ok" and "agree" in found.detail


def test_raw_logprobs_name_the_flag_at_a_temperature_only() -> None:
    raw = LEARNER + RNG.normal(0.0, 0.3, SIZE)
    found = judge_agreement(raw + EXACT, LEARNER, raw, temperature=0.7)
    assert found.status == "wrong" and "--logprobs-mode processed_logprobs" in found.remedy
    assert "0.7" in found.detail
    assert judge_agreement(LEARNER + EXACT, LEARNER, LEARNER, temperature=1.0).status == "ok"
    # also where the engine rounds besides
    assert "raw" in judge_agreement(raw + COARSE, LEARNER, raw, temperature=0.7).detail


@pytest.mark.parametrize(("dtype", "status"), [("float32", "wrong"), ("bfloat16", "note")])
def test_a_lower_precision_is_an_error_unless_it_was_declared(dtype: str, status: str) -> None:
    found = judge_agreement(LEARNER + COARSE, LEARNER, LEARNER, dtype=dtype)
    assert found.status == status
    if status == "wrong":
        assert "--dtype" in found.remedy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_are_an_error_in_every_precision(dtype: str) -> None:
    found = judge_agreement(LEARNER + RNG.normal(0.0, 0.5, SIZE), LEARNER, LEARNER, dtype=dtype)
    assert found.status == "wrong" and "engine and learner disagree" in found.detail


MOVE = RNG.normal(0.0, 1.5, SIZE)


def test_an_adapter_that_does_the_same_in_both_is_fine() -> None:
    assert judge_adapter(LEARNER + MOVE + EXACT, LEARNER, LEARNER + MOVE).status == "ok"


def test_an_adapter_without_effect_is_an_error() -> None:
    found = judge_adapter(LEARNER + EXACT, LEARNER, LEARNER + MOVE)
    assert found.status == "wrong" and "adapter has no effect" in found.detail


def test_a_fresh_adapter_that_changes_nothing_passes() -> None:
    assert judge_adapter(LEARNER + EXACT, LEARNER, LEARNER).status == "ok"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_at_half_its_scale_is_an_error(dtype: str) -> None:
    found = judge_adapter(LEARNER + 0.5 * MOVE, LEARNER, LEARNER + MOVE, dtype=dtype)
    assert found.status == "wrong" and "engine and learner disagree" in found.detail
    assert "0.50 times as far" in found.detail and "lora_alpha" in found.remedy


def test_a_declared_low_precision_is_allowed_for_under_an_adapter() -> None:
    found = judge_adapter(LEARNER + MOVE + COARSE, LEARNER, LEARNER + MOVE, noise=0.036, dtype="bfloat16")
    assert found.status == "ok"
    found = judge_adapter(LEARNER + COARSE, LEARNER, LEARNER + MOVE, noise=0.036, dtype="bfloat16")
    assert "adapter has no effect" in found.detail


@pytest.mark.parametrize(("dtype", "status"), [("bfloat16", "note"), ("float32", "wrong")])
def test_rounding_that_grows_with_an_adapter_is_no_other_adapter(dtype: str, status: str) -> None:
    """Of a real server in bfloat16: 0.5 nats off where the adapter moves by 6, at 1.00 of the scale."""
    move, rounding = 4 * MOVE, np.random.default_rng(5).normal(0.0, 0.6, SIZE)
    found = judge_adapter(LEARNER + move + rounding, LEARNER, LEARNER + move, noise=0.045, dtype=dtype)
    assert found.status == status
    found = judge_adapter(LEARNER + 0.85 * move + rounding, LEARNER, LEARNER + move, noise=0.045, dtype=dtype)
    assert found.status == "wrong"


@pytest.mark.parametrize(
    ("field", "value", "right"),
    [
        ("top_p", 0.9, "top_p=1"),
        ("top_k", 50, "top_k=-1"),
        ("min_p", 0.05, "min_p=0"),
        ("repetition_penalty", 1.1, "repetition_penalty=1"),
        ("presence_penalty", 0.5, "presence_penalty=0"),
        ("frequency_penalty", -0.5, "frequency_penalty=0"),
        ("min_tokens", 3, "min_tokens=0"),
        ("temperature", 0.0, "temperature above 0"),
        ("allowed_ids", (1,), "allowed_ids"),
    ],
)
def test_sampling_that_no_softmax_describes_is_named_with_the_right_value(
    field: str, value: Any, right: str
) -> None:
    (found,) = sampling_findings(SamplingParams(max_tokens=4).with_(**{field: value}))
    assert found.status == "wrong" and field in found.detail and right in found.remedy


def test_all_that_is_wrong_with_sampling_is_said_at_once() -> None:
    assert len(sampling_findings(SamplingParams(max_tokens=4, top_p=0.9, top_k=5, min_p=0.1))) == 3
    assert sampling_findings(SamplingParams(max_tokens=4, temperature=0.7, top_k=0)) == []


# -- engines -------------------------------------------------------------------------------------------

MODEL = add_lora(tiny_model(), Lora(rank=2))
TOKENIZER = load_tokenizer("bytes", rows=MODEL.get_input_embeddings().weight.shape[0])


@pytest.fixture(scope="module")
def engine() -> Iterator[HFEngine]:
    base = {name: tensor.clone() for name, tensor in BaseState(MODEL).state_dict().items()}
    for name, tensor in base.items():  # an untrained head is flat: nothing moves its logprobs
        if "norm" not in name and tensor.is_floating_point():
            tensor *= 4
    BaseState(MODEL).load_state_dict(base)
    made = HFEngine(base=base, config=MODEL.get_base_model().config, tokenizer=TOKENIZER)
    yield made
    asyncio.run(made.close())


def learner(folder: Path, **fields: Any) -> LearnerReference:
    return LearnerReference(MODEL, TOKENIZER, adapter_dir=folder / "adapters", **fields)


def statuses(findings: Sequence[Finding]) -> dict[str, str]:
    return {found.name: found.status for found in findings}


def wrong(findings: Sequence[Finding]) -> dict[str, Finding]:
    return {found.name: found for found in findings if found.status == "wrong"}


class Changed:
    """An engine with something in the way: what comes back, or which adapter is loaded, is changed."""

    def __init__(self, engine: Engine, **changes: Any) -> None:
        self._engine = engine
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._engine, name)

    async def generate(self, prompt: Any, params: Any, n: int = 1, **more: Any) -> list[Completion]:
        params = self._changes.get("ask", lambda asked: asked)(params)
        version = self._changes.get("version", lambda number: number)(more.pop("version"))
        answers = await self._engine.generate(prompt, params, n, version=version, **more)
        return [self._changes.get("answer", lambda completion: completion)(answer) for answer in answers]


def check(engine: Any, reference: Reference | None = None) -> list[Finding]:
    return asyncio.run(check_engine(engine, reference))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_honest_engine_passes_and_is_left_as_it_was(
    engine: HFEngine, tmp_path: Path, temperature: float
) -> None:
    weights = {name: tensor.clone() for name, tensor in AdapterState(MODEL).state_dict().items()}
    reference = learner(tmp_path, temperature=temperature)
    findings = asyncio.run(engine.check(reference))
    assert set(statuses(findings).values()) == {"ok"}, findings
    assert set(statuses(findings)) == {"ids and logprobs", "stop ids", "vocabulary", "agreement", "adapter"}
    assert engine.newest == 0 and engine.live_versions == (0,)
    assert engine.counters["published"] == engine.counters["retired"] == 0
    assert list(reference.adapter_dir.iterdir()) == []
    after = AdapterState(MODEL).state_dict()
    assert all((after[name] == tensor).all() for name, tensor in weights.items())
    assert asyncio.run(agreement(engine, reference)).exact


def test_raw_logprobs_of_a_real_engine_are_told(engine: HFEngine, tmp_path: Path) -> None:
    def raw(answer: Completion) -> Completion:
        prompt = TOKENIZER.encode(checks_text())
        logprobs = reference.logprobs([*prompt, *answer.ids], len(prompt))
        return replace(answer, logprobs=tuple(logprobs))

    reference = learner(tmp_path, temperature=0.7)
    found = wrong(check(Changed(engine, answer=raw), reference))
    assert "--logprobs-mode processed_logprobs" in found["agreement"].remedy


def checks_text() -> str:
    from atropos_gym.engines.checks import TEXT

    return TEXT


def test_an_engine_that_ignores_adapters_is_told(engine: HFEngine, tmp_path: Path) -> None:
    found = wrong(check(Changed(engine, version=lambda number: 0), learner(tmp_path)))
    assert set(found) == {"adapter"} and "adapter has no effect" in found["adapter"].detail


def test_a_folder_that_cannot_be_loaded_is_a_finding_and_is_removed(engine: HFEngine, tmp_path: Path) -> None:
    def invisible(folder: Path) -> Any:
        raise EngineError(f"adapter folder {folder} is not visible to the server: set adapter_dir")

    reference = learner(tmp_path)
    found = wrong(check(Changed(engine, trial=invisible), reference))
    assert set(found) == {"adapter"} and "adapter_dir" in found["adapter"].detail
    assert list(reference.adapter_dir.iterdir()) == []


def test_an_engine_of_other_ids_is_told(engine: HFEngine, tmp_path: Path) -> None:
    class Other:
        name, rows, fingerprint = "other", TOKENIZER.rows, "sha256:other"

        def __len__(self) -> int:
            return len(TOKENIZER)

    reference = learner(tmp_path)
    reference.tokenizer = Other()  # type: ignore[assignment]
    found = check_vocabulary(engine, reference)
    assert found.status == "wrong" and "other" in found.detail


def check_vocabulary(engine: HFEngine, reference: LearnerReference) -> Finding:
    from atropos_gym.engines.checks import _Trial

    trial = _Trial(engine, reference)
    asyncio.run(trial.vocabulary(reference))
    return trial.findings[0]


def test_an_engine_whose_weights_never_change_needs_no_adapter(engine: HFEngine, tmp_path: Path) -> None:
    findings = check(Changed(engine, swap="none"), learner(tmp_path))
    assert statuses(findings)["adapter"] == "note"


def test_an_engine_of_someone_elses_is_an_engine_without_trials(engine: HFEngine, tmp_path: Path) -> None:
    class Minimal:
        """No more than the protocol."""

        tokenizer, model, max_context = engine.tokenizer, engine.model, engine.max_context
        generate, hold, publish, retire = engine.generate, engine.hold, engine.publish, engine.retire
        check, close = engine.check, engine.close

    minimal = Minimal()
    assert isinstance(minimal, Engine)
    assert statuses(check(minimal, learner(tmp_path)))["adapter"] == "note"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (Completion((), (), "length"), "no ids"),
        (Completion((1, 2), (-0.5,), "length"), "2 ids came with 1 logprobs"),
        (Completion((1, 2), None, "length"), "2 ids came with 0 logprobs"),
        (Completion((1,), (float("-inf"),), "length"), "position 0"),
        (Completion((1,), (float("nan"),), "length"), "position 0"),
        (Completion((1,), (0.5,), "length"), "position 0"),
        (Completion((9999,), (-0.5,), "length"), "9999"),
        (Completion((1,), (-0.5,), "length", trainable="text only"), "text only"),
    ],
)
def test_what_comes_back_unusable_is_told(answer: Completion, word: str) -> None:
    found = wrong(check(ScriptedEngine(lambda prompt, params, number: answer)))
    assert set(found) == {"ids and logprobs"} and word in found["ids and logprobs"].detail


def test_an_engine_that_does_not_answer_is_a_finding() -> None:
    engine = ScriptedEngine(
        lambda prompt, params, number: [1], faults=lambda number: EngineError("names --enable-lora")
    )
    assert "--enable-lora" in wrong(check(engine))["ids and logprobs"].detail


def test_a_stop_id_that_is_passed_over_is_told() -> None:
    engine = Changed(
        ScriptedEngine(lambda prompt, params, number: [1, 2, 3]),
        ask=lambda params: params.with_(stop_ids=()),
    )
    assert "stop_token_ids" in wrong(check(engine))["stop ids"].remedy


Say = Callable[[SamplingParams], Completion]


@pytest.mark.parametrize(
    ("under_stop_ids", "status"),
    [
        (lambda p: Completion((9, 1), (-0.5, -0.5), "stop"), "ok"),
        (lambda p: Completion((9,) * 15 + (1,), (-0.5,) * 16, "length"), "ok"),
        (lambda p: Completion((9, 9, 9), (-0.5,) * 3, "length"), "note"),
        (lambda p: Completion((9, 1, 9), (-0.5,) * 3, "length"), "wrong"),
        (lambda p: Completion((1, 9), (-0.5,) * 2, "stop"), "wrong"),
        (lambda p: Completion((9, 1), (-0.5,) * 2, "length"), "wrong"),
        (lambda p: Completion((9, 9), (-0.5,) * 2, "stop"), "wrong"),
    ],
)
def test_stop_ids_are_judged_by_what_was_drawn(under_stop_ids: Say, status: str) -> None:
    """The samples before drew 1 first; no seed promises that it is drawn again, or where."""
    plain = Completion((1, 2, 3), (-0.5,) * 3, "length")
    engine = ScriptedEngine(
        lambda prompt, params, number: under_stop_ids(params) if params.stop_ids else plain
    )
    assert statuses(check(engine))["stop ids"] == status


def test_without_a_learner_the_temperature_is_told_all_the_same(engine: HFEngine) -> None:
    assert statuses(check(engine))["temperature"] == "ok"
    flat = ScriptedEngine(lambda prompt, params, number: [1, 2, 3])  # its logprobs know no temperature
    assert statuses(check(flat)) == {
        "ids and logprobs": "ok",
        "stop ids": "ok",
        "temperature": "note",
        "agreement": "note",
    }


def test_an_agreement_needs_samples(tmp_path: Path) -> None:
    broken = ScriptedEngine(lambda prompt, params, number: [1], faults=lambda number: EngineError("down"))
    with pytest.raises(EngineError, match="down"):
        asyncio.run(agreement(broken, learner(tmp_path)))
    assert np.isnan(Agreement.of(np.zeros(0), np.zeros(0)).mean)


# -- trials --------------------------------------------------------------------------------------------


def test_a_trial_is_never_the_newest_and_waits_for_its_requests() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        engine = ScriptedEngine(lambda prompt, params, number: [1], delay=lambda number: gate.wait())
        params = SamplingParams(max_tokens=1)
        async with engine.trial(Path("a/canary")) as held:
            assert held.version < 0 and engine.newest == 0 and engine.live_versions == (0,)
            running = asyncio.create_task(engine.generate([1], params, version=held.version))
            await asyncio.sleep(0)
            leaving = asyncio.create_task(asyncio.sleep(0))
            await leaving
            gate.set()
        assert (await running)[0].version == held.version
        with pytest.raises(EngineError, match="no longer served"):
            await engine.generate([1], params, version=held.version)
        with pytest.raises(EngineError, match="new folder"):
            await engine.publish(1, Path("a/canary"))
        async with engine.trial(Path("a/other")) as again:
            assert again.version != held.version
        assert engine.counters["published"] == engine.counters["retired"] == 0

    asyncio.run(main())
