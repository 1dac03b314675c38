"""SGLangEngine against a fake server in SGLang's shapes: what is sent, what is believed, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from atropos_gym.engines import Engine, SGLangEngine, make_engine
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import AnswerRefused, ConfigError, ContextFull, EngineError, VersionExpired
from atropos_gym.findings import fit
from tests.tools.fake_sglang import FakeSGLang
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, seed=7)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def ask(engine: Engine, params: SamplingParams = PARAMS, n: int = 1, **options: Any) -> Any:
    return run(engine.generate(PROMPT, params, n, **options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model, root = tiny_llama(), tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"v{k}", adapter_tensors(model, seed=k)) for k in (1, 2)]


def test_ids_and_logprobs_of_each_sample_with_a_seed_of_its_own() -> None:
    fake = FakeSGLang()
    with fake.engine() as engine:
        assert isinstance(engine, Engine) and (engine.model, engine.max_context) == ("m", 200)
        first, second = ask(engine, n=2)
        assert first.ids != second.ids and len(first.ids) == len(first.logprobs) == 8
        assert first.trainable is True and ask(engine, n=2) == [first, second], "seeds repeat"
        assert ask(engine, PARAMS.with_(seed=8))[0].ids == second.ids
        assert engine.metrics()["cached_tokens"] == 6
        assert run(engine.server_metrics()) == {"num_running_reqs": 2.0}
    body = fake.asked[[path for path, _ in fake.asked].index("/generate")][1]
    assert body["input_ids"] == [PROMPT, PROMPT] and "lora_path" not in body
    assert [one["sampling_seed"] for one in body["sampling_params"]] == [7, 8]
    assert all(one["ignore_eos"] and one["no_stop_trim"] for one in body["sampling_params"])
    assert body["return_logprob"] is True and body["stream"] is False


def test_stop_ids_end_a_sample_and_greedy_ones_have_no_logprobs() -> None:
    with FakeSGLang().engine() as engine:
        [whole] = ask(engine)
        [stopped] = ask(engine, PARAMS.with_(stop_ids=(whole.ids[3],)))
        assert (stopped.ids, stopped.finish_reason) == (whole.ids[:4], "stop")
        assert [one.logprobs for one in ask(engine, PARAMS.with_(temperature=0.0), n=2)] == [None, None]


def test_answers_in_any_order_are_matched_by_their_request() -> None:
    with FakeSGLang().engine() as engine, FakeSGLang(mangle=lambda answers: answers[::-1]).engine() as mixed:
        assert ask(engine, n=4) == ask(mixed, n=4)


def _changed(answers: list[dict[str, Any]], **meta: Any) -> list[dict[str, Any]]:
    for answer in answers:
        answer["meta_info"] |= meta
    return answers


def _logprob(answers: list[dict[str, Any]], value: Any) -> list[dict[str, Any]]:
    answers[0]["meta_info"]["output_token_logprobs"][2][0] = value
    return answers


def _without(answers: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    for answer in answers:
        answer.pop(key, None)
        answer.get("meta_info", {}).pop(key, None)
    return answers


def _swapped(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers[0]["meta_info"]["output_token_logprobs"][3][1] += 1
    return answers


def _short(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    answers[0]["meta_info"]["output_token_logprobs"].pop()
    return answers


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (_swapped, r"in output_token_logprobs at position 3: which one was sampled"),
        (_short, "8 token_ids and 7 token_logprobs"),
        (lambda a: _without(a, "output_token_logprobs"), "has no logprobs"),
        (lambda a: _without(a, "output_ids"), "has no output_ids"),
        (lambda a: _without(a, "meta_info"), "has no meta_info"),
        (lambda a: _logprob(a, None), "no finite logprob at position 2"),
        (lambda a: _logprob(a, 0.5), "above 0"),
        (lambda a: _changed(a, output_token_logprobs=[0.5]), r"wanted \[logprob, id, text\] each"),
        (lambda a: _changed(a, id="another"), "samples cannot be told apart"),
        (lambda a: a[:1], "samples cannot be told apart"),
        (lambda a: a[0], "samples cannot be told apart"),
        (lambda a: "busy", "has no meta_info"),
        (lambda a: _changed(a, prompt_tokens=4), "engine changed the prompt: 3 ids sent, 4 used"),
        (lambda a: _changed(a, completion_tokens=9), "completion_tokens says 18"),
        (lambda a: _changed(a, finish_reason="stop"), "wanted an object with type"),
        (lambda a: _changed(a, finish_reason={"type": "stop", "matched": 300}), "not the last of its ids"),
        (lambda a: _changed(a, finish_reason={"type": "odd"}), "finish_reason 'odd'"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_refused(mangle: Any, message: str) -> None:
    with FakeSGLang(mangle=mangle).engine(retries=0) as engine:
        with pytest.raises(AnswerRefused, match=message) as caught:
            ask(engine, n=2)
        assert "\n" not in str(caught.value) and engine.counters["lost/AnswerRefused"] == 1


def test_aborted_samples_are_asked_for_again_under_a_fresh_seed() -> None:
    aborted = {"type": "abort", "message": "Abort in waiting queue"}
    fake = FakeSGLang(mangle=lambda answers: _changed(answers, finish_reason=aborted))
    with fake.engine(retries=2) as engine:
        [completion] = ask(engine)
        assert completion.finish_reason == "abort" and completion.trainable == "aborted"
        assert engine.counters["aborted"] == 3
    seeds = [body["sampling_params"][0]["sampling_seed"] for path, body in fake.asked if path == "/generate"]
    assert len(set(seeds)) == 3


def test_failures_that_may_pass_are_tried_again_and_others_not() -> None:
    fake = FakeSGLang()
    with fake.engine() as engine:
        fake.failures = [httpx.ConnectError("reset"), httpx.Response(503), httpx.Response(429)]
        assert len(ask(engine)[0].ids) == 8
        retried = {name: count for name, count in engine.counters.items() if name.startswith("retry/")}
        assert retried == {"retry/connection": 1, "retry/503": 1, "retry/429": 1}
        for failure, error, message in [
            (httpx.Response(401, json={"error": "Unauthorized"}), EngineError, "--api-key"),
            (httpx.Response(404, json={"detail": "Not Found"}), EngineError, "is it an SGLang server"),
            (httpx.Response(400, json={"error": {"message": "bad field"}}), EngineError, "400 bad field"),
            (
                httpx.Response(
                    400, json={"error": {"message": "longer than the model's context length (2)"}}
                ),
                ContextFull,
                "does not fit",
            ),
        ]:
            before = len(fake.asked)
            fake.failures = [failure]
            with pytest.raises(error, match=message):
                ask(engine)
            assert len(fake.asked) == before + 1


def test_only_what_sglang_can_is_asked() -> None:
    with FakeSGLang().engine() as engine:
        with pytest.raises(EngineError, match="cannot limit sampling to allowed_ids"):
            ask(engine, PARAMS.with_(allowed_ids=(3, 4)))
        with pytest.raises(ContextFull):
            run(engine.generate([1] * 200, PARAMS))


def test_versions_are_loaded_named_and_unloaded(folders: list[Path]) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        with fake.engine(run="r9") as engine:
            await engine.publish(1, folders[0])
            async with engine.hold() as held:
                await engine.publish(2, folders[1])
                retiring = asyncio.create_task(engine.retire(1))
                [old] = await engine.generate(PROMPT, PARAMS, version=held.version)
                [new] = await engine.generate(PROMPT, PARAMS)
                assert (old.version, new.version) == (1, 2) and old.ids != new.ids
                assert fake.adapters == {"r9-v1": str(folders[0]), "r9-v2": str(folders[1])}
            await retiring
            assert list(fake.adapters) == ["r9-v2"]
            with pytest.raises(VersionExpired):
                await engine.generate(PROMPT, PARAMS, version=1)
            [base] = await engine.generate(PROMPT, PARAMS, version=0)
            assert base.version == 0
        named = [body.get("lora_path") for path, body in fake.asked if path == "/generate"]
        assert named == [["r9-v1"], ["r9-v2"], None]
        assert not fake.adapters, "what was loaded is unloaded at the end"

    run(main())


def test_adapters_that_a_server_forgot_are_loaded_again(folders: list[Path]) -> None:
    fake = FakeSGLang()
    with fake.engine() as engine:
        run(engine.publish(1, folders[0]))
        [before] = ask(engine)
        fake.adapters.clear()
        assert ask(engine) == [before] and engine.counters["restored"] == 1


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"lora": False}, "serves no adapters: start SGLang with --enable-lora"),
        ({"max_rank": 2}, "--max-lora-rank R"),
    ],
)
def test_a_refused_adapter_names_the_flag(server: dict[str, Any], message: str, folders: list[Path]) -> None:
    with FakeSGLang(**server).engine() as engine:
        with pytest.raises(EngineError, match=message):
            run(engine.publish(1, folders[0]))
        assert engine.newest == 0 and ask(engine)[0].version == 0


def test_a_folder_that_the_server_cannot_see_is_named() -> None:
    fake = FakeSGLang()
    with fake.engine() as engine:
        elsewhere = {"lora_name": "r0-v1", "lora_path": "/home/frank/already"}
        answer = run(engine._router.replicas[0].endpoint.ask("POST", "/v1/load_lora_adapter", elsewhere))
        assert (answer.status, "No adapter found" in answer.message) == (404, True)


def test_a_name_from_another_folder_is_not_taken_for_ours(folders: list[Path]) -> None:
    fake = FakeSGLang()
    with fake.engine() as engine:
        fake.adapters["r0-v1"] = "elsewhere"
        with pytest.raises(EngineError, match="has an adapter r0-v1 from elsewhere already"):
            run(engine.publish(1, folders[0]))
    assert fake.adapters == {"r0-v1": "elsewhere"}


def test_check_finds_what_is_missing() -> None:
    with FakeSGLang().engine() as engine:
        findings = run(engine.check())
        assert fit(findings), findings
        assert {found.name for found in findings} >= {"context", "adapters", "tokenizer", "ids and logprobs"}
    with FakeSGLang(lora=False).engine() as engine:
        [wrong] = [found for found in run(engine.check()) if found.status == "wrong"]
        assert "start SGLang with --enable-lora" in wrong.detail


@pytest.mark.parametrize("size", [4, 16, 256])
def test_a_server_that_ignores_seeds_is_fit(size: int) -> None:
    with FakeSGLang(seeded=False, ids=range(size)).engine() as engine:
        findings = run(engine.check())
    assert fit(findings), findings


def test_a_restarted_server_is_known_by_the_ids_that_it_draws_again() -> None:
    fake = FakeSGLang(seeded=False, ids=range(4))
    with fake.engine() as engine:
        engine._thread.wait(engine._router.replicas[0].remember("m"))
        fake.failures.append(httpx.ReadError("gone"))
        ask(engine)
        assert engine.counters["not_recognised"] == 0
        fake.failures.append(httpx.ReadError("gone"))
        fake.ids = range(100, 104)  # no seed promises that any of them is drawn again
        ask(engine)
        assert engine.counters["not_recognised"] == 1
        fake.failures.append(httpx.ReadError("gone"))
        fake.ids, fake.settings = range(4), "raw"
        with pytest.raises(EngineError, match="was restarted with other settings"):
            ask(engine)


def test_specs() -> None:
    transport = httpx.MockTransport(FakeSGLang().answer)
    for spec in ("sglang:http://a, http://b", {"kind": "sglang", "url": ["http://a", "http://b"]}):
        engine = make_engine(spec, tokenizer="bytes", transport=transport)
        assert isinstance(engine, SGLangEngine) and "SGLangEngine(http://a, http://b" in repr(engine)
        engine.shutdown()
    with pytest.raises(ConfigError, match="takes no python="):
        make_engine("sglang:http://a", python="python3")
