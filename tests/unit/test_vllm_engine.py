"""VLLMEngine against a fake server: what it returns, what goes wrong and is counted, limits (d6-d14)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from atropos_gym.engines import VLLMEngine, make_engine
from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.errors import (
    AnswerRefused,
    ConfigError,
    ContextFull,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
)
from atropos_gym.rollout.collector import GroupCollector
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.text_tasks import Guess
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, seed=7)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def ask(engine: VLLMEngine, params: SamplingParams = PARAMS, n: int = 1, **options: Any) -> Any:
    return run(engine.generate(PROMPT, params, n, **options))


def test_it_is_an_engine() -> None:
    fake = FakeVLLM(model="smollm2", max_model_len=100)
    with fake.engine() as engine:
        assert isinstance(engine, Engine)
        assert (engine.model, engine.max_context, engine.newest) == ("smollm2", 100, 0)
        first, second = ask(engine, n=2)
        assert first.ids != second.ids and len(first.ids) == len(first.logprobs) == 8
        assert first.trainable is True and ask(engine, n=2) == [first, second], "seeds repeat"
        assert ask(engine, PARAMS.with_(seed=8))[0].ids == second.ids, "sample i is drawn with seed + i"
        metrics = engine.metrics()
        assert (metrics["requests"], metrics["tokens"], metrics["running"], metrics["lost"]) == (3, 40, 0, 0)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    """A server's own seed is 0: after a restart the same samples would come again."""
    fake = FakeVLLM()
    with fake.engine() as engine:
        for _ in range(2):
            ask(engine, PARAMS.with_(seed=None))
    first, second = (body["seed"] for body in fake.asked())
    assert first != second and fake.counts["unseeded"] == 0


def test_greedy_samples_are_equal_and_asked_for_once() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        same = ask(engine, PARAMS.with_(temperature=0.0), n=3)
    assert len(same) == 3 and len(set(same)) == 1 and same[0].logprobs is None
    assert fake.asked()[0]["n"] == 1, "vLLM refuses n > 1 at temperature 0"


def test_only_the_ids_asked_for_end_a_sample() -> None:
    """The server's own end ids are ignored, ours stop and are kept."""
    fake = FakeVLLM(eos=(2,), script=lambda prompt, seed, request: [9, 2, 9, 3, 9])
    with fake.engine() as engine:
        [completion] = ask(engine, PARAMS.with_(stop_ids=(3,)))
        assert (completion.ids, completion.finish_reason) == ((9, 2, 9, 3), "stop")
        assert ask(engine)[0].finish_reason == "length"


def test_d6_defaults_of_the_model_change_nothing() -> None:
    plain, biased = (
        FakeVLLM(),
        FakeVLLM(defaults={"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.3}),
    )
    with plain.engine() as one, biased.engine() as other:
        assert ask(one, n=2) == ask(other, n=2)
    [request] = biased.sampled
    assert (request["temperature"], request["top_p"], request["repetition_penalty"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "setting",
    [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"repetition_penalty": 1.1}, {"min_tokens": 2}],
)
def test_d6_a_training_collector_refuses_before_any_request(setting: dict[str, Any]) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        with pytest.raises(ConfigError, match=f"{next(iter(setting))}=.* set {next(iter(setting))}="):
            GroupCollector(Guess, engine, sampling=PARAMS.with_(seed=None, **setting))
        assert fake.asked() == []
        [completion] = ask(engine, PARAMS.with_(**setting), lane="eval")
        assert str(completion.trainable).startswith(next(iter(setting)))


# -- faults that pass ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset", "refused"])
def test_a_fault_that_passes_is_tried_again_under_a_fresh_seed(fault: str) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject(fault, times=2)
        [completion] = ask(engine)
        assert len(completion.ids) == 8
        seeds = [body["seed"] for body in fake.asked()]
        assert len(set(seeds)) == len(seeds) == 3
        assert engine.metrics()["retries"] == 2 and engine.metrics()["lost"] == 0


@pytest.mark.parametrize(
    ("fault", "reason"), [("500", "500"), ("503", "503"), ("429", "429"), ("refused", "connection")]
)
def test_a_fault_that_stays_ends_the_request(fault: str, reason: str) -> None:
    fake = FakeVLLM()
    with fake.engine(retries=2, restart_timeout=0.0) as engine:
        fake.inject(fault, times=10**6)
        fake.inject(fault, times=10**6, path="/health")
        with pytest.raises(EngineUnreachable):
            ask(engine)
        assert len(fake.asked()) == 3
        assert engine.counters[f"retry/{reason}"] == 2 == engine.metrics()["retries"]
        assert engine.counters["lost/EngineUnreachable"] == 1 == engine.metrics()["lost"]


def test_requests_wait_for_a_server_that_restarts() -> None:
    """More failures than tries, and the same request is answered when the server is back."""
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.down = True
        asked = [asyncio.ensure_future(engine.generate(PROMPT, PARAMS.with_(seed=i))) for i in range(20)]
        while engine.counters["retry/connection"] < 20 or fake.refused < 60:
            await asyncio.sleep(0.001)
        fake.restart()
        answers = await asyncio.gather(*asked)
        assert all(len(completion.ids) == 8 for [completion] in answers)

    with fake.engine(retries=1) as engine:
        run(main(engine))


def test_a_dying_engine_core() -> None:
    """500 EngineCore, then refused connections, then a new server."""
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.inject("dead")
        asked = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        while fake.refused < 3:
            await asyncio.sleep(0.001)
        fake.restart()
        assert len((await asked)[0].ids) == 8
        assert engine.counters["retry/500"] == 1

    with fake.engine(retries=1) as engine:
        run(main(engine))


def test_no_answer_ends_at_the_deadline() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        engine._requests._timeout = 0.05  # of the request alone: a slow machine may take longer to connect
        fake.inject("no answer")
        with pytest.raises(EngineTimeout, match=r"request_timeout=0.05 s .*1 tries, prompt of 3 ids"):
            ask(engine)
        assert engine.counters["lost/EngineTimeout"] == 1


def test_a_slow_answer_is_an_answer() -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.inject("slow", times=2)
        slow = [asyncio.ensure_future(engine.generate(PROMPT, PARAMS, lane="train")) for _ in range(2)]
        while engine.metrics()["running"] < 2:
            await asyncio.sleep(0.001)
        assert len(await engine.generate(PROMPT, PARAMS)) == 1, "others pass it"
        engine._thread.loop.call_soon_threadsafe(fake.gate.set)
        assert len(await asyncio.gather(*slow)) == 2

    with fake.engine() as engine:
        run(main(engine))


# -- answers that stay wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("no ids", "return_token_ids", id="d7-null"),
        pytest.param("no ids key", "return_token_ids", id="d7-missing"),
        pytest.param("short logprobs", "8 token_ids and 7 token_logprobs", id="d8-logprobs"),
        pytest.param("usage", "8 token_ids and usage.completion_tokens says 9", id="d8-usage"),
        pytest.param("null logprob", "no finite logprob at position 3", id="d9-null"),
        pytest.param("clamped logprob", "no finite logprob at position 3", id="d9-clamped"),
        pytest.param("-inf logprob", "no finite logprob at position 3: got -inf", id="d9-inf"),
        pytest.param("nan logprob", "no finite logprob at position 3: got nan", id="d9-nan"),
        pytest.param("positive logprob", "above 0", id="d9-positive"),
        pytest.param("text logprob", "no finite logprob at position 3", id="d9-text"),
        pytest.param("no logprobs", "no logprobs", id="logprobs"),
        pytest.param("changed prompt", "engine changed the prompt.*position 1", id="d16"),
        pytest.param("odd finish", "finish_reason 'repetition'", id="finish"),
        pytest.param("no choices", "has no choices", id="choices"),
        pytest.param("garbage", "has no choices: '<html>proxy</html>'", id="garbage"),
    ],
)
def test_an_answer_that_cannot_be_trusted(fault: str, message: str) -> None:
    """Refused at once: the same server gives the same answer again."""
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject(fault)
        with pytest.raises(AnswerRefused, match=message):
            ask(engine)
        assert len(fake.asked()) == 1 and engine.counters["lost/AnswerRefused"] == 1
        assert len(ask(engine)[0].ids) == 8


def test_d9_rounding_is_no_fault() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject("rounded logprob")
        assert ask(engine)[0].logprobs[3] == 0.0


def test_d12_choices_in_another_order() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        right = ask(engine, n=3)
        fake.inject("order")
        assert ask(engine, n=3) == right
        fake.inject("index")
        with pytest.raises(AnswerRefused, match=r"index \[0, 1, 0\], wanted each of 0..2 once"):
            ask(engine, n=3)


def test_d10_nothing_to_sample() -> None:
    fake = FakeVLLM()
    params = PARAMS.with_(min_tokens=3, allowed_ids=(2,), stop_ids=(2,))
    with fake.engine() as engine:
        with pytest.raises(EngineError, match=r"min_tokens=3 .*allowed_ids=\(2,\)"):
            ask(engine, params)
        assert fake.asked() == [], "known before it is sent"
        fake.inject("float")
        with pytest.raises(EngineError, match=r"min_tokens=3 with allowed_ids=\(2, 3\).*not JSON compliant"):
            ask(engine, params.with_(allowed_ids=(2, 3)))
        assert len(fake.asked()) == 1, "not tried again"


def test_d10_raw_mode_samples_outside_the_mask() -> None:
    fake = FakeVLLM(script=lambda prompt, seed, request: [0, 0, 2])
    with (
        fake.engine() as engine,
        pytest.raises(AnswerRefused, match="id 0 at position 0 was sampled outside"),
    ):
        ask(engine, PARAMS.with_(allowed_ids=(2,)))


# -- d11 -----------------------------------------------------------------------------------------------


def test_d11_an_aborted_sample_is_asked_for_again_alone() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject("abort")
        completions = ask(engine, n=3)
        assert [completion.finish_reason for completion in completions] == ["length"] * 3
        assert [len(completion.ids) for completion in completions] == [8, 8, 8]
        assert [body["n"] for body in fake.asked()] == [3, 1]
        assert engine.counters["aborted"] == 1
        first, second = (body["seed"] for body in fake.asked())
        assert not first <= second < first + 3, "a fresh seed"


def test_d11_a_sample_that_is_aborted_again_and_again_is_no_sample() -> None:
    fake = FakeVLLM()
    with fake.engine(retries=2) as engine:
        fake.inject("abort all", times=10**6)
        [completion] = ask(engine)
        assert (completion.finish_reason, completion.trainable) == ("abort", "aborted")
        assert len(fake.asked()) == 3 == engine.counters["aborted"]


def test_d11_a_paused_engine_is_waited_for() -> None:
    """All aborted by a pause: no request until it resumes."""
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.inject("abort all")
        paused = fake._complete

        async def pausing(body: dict[str, Any]) -> Any:
            reply = await paused(body)
            if len(fake.asked()) == 1:
                fake._pause("mode=wait")
            return reply

        fake._complete = pausing  # type: ignore[method-assign]
        asked = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        while len(fake.asked("/is_paused")) < 3:
            await asyncio.sleep(0.001)
        assert len(fake.asked()) == 1
        engine._thread.loop.call_soon_threadsafe(fake._resume)
        assert (await asked)[0].finish_reason == "length"
        assert len(fake.asked()) == 2

    with fake.engine() as engine:
        run(main(engine))


def test_d11_a_server_without_that_route_is_asked_again() -> None:
    fake = FakeVLLM(dev_mode=False)
    with fake.engine() as engine:
        fake.inject("abort all")
        assert ask(engine)[0].finish_reason == "length"


# -- d14 -----------------------------------------------------------------------------------------------


def test_d14_max_tokens_is_lowered_to_the_room_left() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        [completion] = run(engine.generate([1] * 1000, PARAMS.with_(max_tokens=100)))
        assert len(completion.ids) == 24 and completion.cut_by_context
        assert fake.asked()[0]["max_tokens"] == 24
        [whole] = run(engine.generate([1] * 1000, PARAMS.with_(max_tokens=24)))
        assert not whole.cut_by_context
        assert engine.counters["cut_by_context"] == 1


@pytest.mark.parametrize("length", [1024, 1025, 5000])
def test_d14_a_full_context_is_never_sent(length: int) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        with pytest.raises(ContextFull, match=f"has {length} ids and max_context is 1024"):
            run(engine.generate([1] * length, PARAMS))
        assert fake.asked() == [] and engine.counters["lost/ContextFull"] == 1


def test_d14_the_least_room_is_a_setting() -> None:
    fake = FakeVLLM()
    with fake.engine(min_room=30) as engine:
        with pytest.raises(ContextFull, match="no room for a reply of 30"):
            run(engine.generate([1] * 1000, PARAMS.with_(max_tokens=100)))
        assert len(run(engine.generate([1] * 994, PARAMS.with_(max_tokens=100)))[0].ids) == 30


def test_d14_a_server_that_refuses_the_length_is_the_same() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject("too long")
        with pytest.raises(ContextFull, match="maximum context length"):
            ask(engine)
        assert len(fake.asked()) == 1
        fake.max_model_len = 3
        with pytest.raises(ContextFull, match="max_tokens must be at least 1, got 0"):
            ask(engine)


# -- requests that are not possible --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ([], PARAMS, {}, "the prompt is empty"),
        ([1, 264], PARAMS, {}, "prompt has id 264 at position 1"),
        ([1, -1], PARAMS, {}, "prompt has id -1 at position 1"),
        ([1, 1.5], PARAMS, {}, "prompt has 1.5 at position 1"),
        ("12", PARAMS, {}, "prompt has '1' at position 0"),
        ([1], PARAMS.with_(stop_ids=(999,)), {}, "stop_ids has id 999"),
        ([1], PARAMS.with_(allowed_ids=(999,)), {}, "allowed_ids has id 999"),
        ([1], PARAMS, {"n": 0}, "n must be >= 1"),
        ([1], PARAMS, {"lane": "other"}, "lane must be"),
        ([1], PARAMS, {"version": 3}, "version 3 was never published"),
    ],
)
def test_a_request_that_is_not_possible_is_not_sent(
    prompt: Any, params: SamplingParams, options: dict[str, Any], message: str
) -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        with pytest.raises(EngineError, match=message):
            run(engine.generate(prompt, params, **options))
        assert fake.asked() == []


def test_a_wrong_api_key() -> None:
    fake = FakeVLLM(api_key="right")
    with (
        pytest.raises(EngineError, match=r"refuses the api key \(Unauthorized\): give api_key="),
        fake.engine(),
    ):
        pass
    with fake.engine(api_key="right") as engine:
        assert ask(engine)
        fake.api_key = "new"
        with pytest.raises(EngineError, match="refuses the api key"):
            ask(engine)
        assert len(fake.asked()) == 2, "not tried again"


# -- lanes, loops, threads -----------------------------------------------------------------------------


def test_lanes_are_limited_apart() -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.inject("slow", times=3)
        train = [asyncio.ensure_future(engine.generate(PROMPT, PARAMS)) for _ in range(9)]
        while engine.metrics()["running"] < 3 or engine.metrics()["queued"] < 6:
            await asyncio.sleep(0.001)
        assert len(fake.asked()) == 3
        assert len(await engine.generate(PROMPT, PARAMS, lane="eval")) == 1, (
            "evaluation does not queue behind"
        )
        engine._thread.loop.call_soon_threadsafe(fake.gate.set)
        await asyncio.gather(*train)
        assert engine.metrics()["queued"] == 0 == engine.metrics()["running"]

    with fake.engine(train_concurrency=3, eval_concurrency=1) as engine:
        run(main(engine))


def test_a_cancelled_request_leaves_the_server_and_the_queue() -> None:
    fake = FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        fake.inject("slow", times=1)
        first = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        while fake.asked() == []:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
        while engine.metrics()["queued"] == 0:
            await asyncio.sleep(0.001)
        second.cancel()
        first.cancel()
        results = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert len(await engine.generate(PROMPT, PARAMS)) == 1, "its place is free"
        assert len(fake.asked()) == 2 and engine.metrics()["lost"] == 0

    with fake.engine(train_concurrency=1) as engine:
        run(main(engine))


def test_threads_with_loops_of_their_own() -> None:
    fake = FakeVLLM()

    async def many(engine: VLLMEngine, start: int) -> list[tuple[int, ...]]:
        asks = [engine.generate([1, start, i], PARAMS.with_(seed=i)) for i in range(30)]
        return [completion.ids for [completion] in await asyncio.gather(*asks)]

    with fake.engine() as engine, ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(lambda start=start: run(many(engine, start))) for start in range(4)]
        answers = [future.result(timeout=60) for future in futures]
        assert answers[0] == answers[1] == answers[2] == answers[3], "scripted ids follow the seed"
        assert engine.metrics()["requests"] == 120


def test_closing_ends_what_runs() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:

        async def main() -> None:
            fake.inject("no answer")
            asked = asyncio.ensure_future(engine.generate(PROMPT, PARAMS))
            while fake.asked() == []:
                await asyncio.sleep(0.001)
            await engine.close()
            with pytest.raises(EngineError, match="the engine is closed"):
                await asked

        run(main())
    assert not any("vllm-" in thread.name for thread in threading.enumerate())


# -- over a collector -----------------------------------------------------------------------------------


def test_every_loss_is_counted_by_reason() -> None:
    """A collector over a server on which everything goes wrong: no hang, and the counts add up."""
    fake = FakeVLLM(script=lambda prompt, seed, request: [*f"{seed % 10}".encode(), 258])
    faults = ["500", "reset", "no ids", "null logprob", "short logprobs", "changed prompt", "abort", "429"]
    sampling = SamplingParams(max_tokens=16)
    with fake.engine() as engine:
        collector = GroupCollector(Guess, engine, group_size=2, sampling=sampling, concurrency=8, seed=3)
        for fault in faults * 2:
            fake.inject(fault)
        groups = collector.collect(24)
        collector.close()
        report = collector.report
        counters, metrics = engine.counters, engine.metrics()
    assert all(fault.times == 0 for fault in fake.faults), "everything went wrong once"
    assert report["started"] == len(groups) + sum(report["failed"].values())
    failed = report["episodes"]["failed"]
    assert failed.keys() == report["failed"].keys() == {"engine: AnswerRefused"}
    # A group is lost with its first member; the other one's request may go wrong or be cancelled meanwhile.
    assert 4 <= failed["engine: AnswerRefused"] <= counters["lost/AnswerRefused"] == metrics["lost"] <= 8
    assert counters["aborted"] <= 2 and metrics["retries"] <= 6
    sampled = {tuple(body["prompt"]) for body in fake.asked()}
    for episode in (episode for group in groups for episode in group.episodes):
        for row in episode.rows:
            for turn in row.turns:
                assert tuple(row.ids[: turn.start]) in sampled, "rows are what was sent and sampled"


# -- making one ----------------------------------------------------------------------------------------


def test_make_engine() -> None:
    fake = FakeVLLM()
    options: dict[str, Any] = {"tokenizer": "bytes", "transport": fake.transport()}
    for spec in (
        "vllm:http://fake",
        {"kind": "vllm", "url": "http://fake"},
        {"kind": "vllm", "url": ["http://fake"]},
    ):
        engine = make_engine(spec, model="m", **options)
        assert isinstance(engine, VLLMEngine) and engine.model == "m"
        engine.shutdown()
    both = make_engine("vllm:http://fake, http://fake:81/v1/", **options)
    assert [replica.url for replica in both._router.replicas] == ["http://fake", "http://fake:81"]
    both.shutdown()


@pytest.mark.parametrize(
    ("fake", "options", "message"),
    [
        (FakeVLLM(), {"model": "other"}, "serves m; not 'other': give another model="),
        (
            FakeVLLM(root="/models/m"),
            {"tokenizer": None},
            "is at /models/m, which is no folder here: give tokenizer=",
        ),
        (FakeVLLM(), {"run": ""}, "run names adapters"),
        (FakeVLLM(), {"train_concurrency": 0}, "train_concurrency must be >= 1"),
        (FakeVLLM(), {"retries": -1}, "retries must be >= 0"),
        (FakeVLLM(), {"min_room": 0}, "min_room must be >= 1"),
        (FakeVLLM(), {"max_live_versions": 0}, "max_live_versions must be >= 1"),
    ],
)
def test_arguments_that_do_not_fit(fake: FakeVLLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), fake.engine(**options):
        pass


def test_the_tokenizer_is_that_of_the_models_folder(tmp_path: Path) -> None:
    (tmp_path / "atropos_gym.json").write_text('{"tokenizer": "bytes"}')
    for fake, options in (
        (FakeVLLM(root=str(tmp_path)), {}),  # the server's folder is here too
        (FakeVLLM(root="/models/m"), {"model": tmp_path}),  # the server has it under another path
    ):
        with fake.engine(tokenizer=None, **options) as engine:
            assert (engine.model, engine.tokenizer.name) == ("m", "bytes")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"id": "a", "max_model_len": 9}, {"id": "b", "max_model_len": 9}], "serves a, b; give model="),
        ([], "serves no model; give model="),
        ([{"id": "a", "max_model_len": None}], "does not say max_model_len of a"),
    ],
)
def test_a_server_that_does_not_say_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]], message: str
) -> None:
    fake = FakeVLLM()
    monkeypatch.setattr(fake, "_models", lambda: entries)
    with pytest.raises(ConfigError, match=message), fake.engine():
        pass


@pytest.mark.parametrize("fault", ["garbage", "float"])
def test_what_is_no_vllm_server(fault: str) -> None:
    fake = FakeVLLM()
    fake.inject(fault, path="/v1/models")
    with pytest.raises(EngineError, match="v1/models answers .*is it a vLLM server"), fake.engine():
        pass


def test_a_server_that_says_nothing() -> None:
    fake = FakeVLLM()
    fake.inject("no answer", path="/v1/models")
    with pytest.raises(EngineTimeout, match="no answer from http://fake/v1/models within 0.05 s"):
        with fake.engine(request_timeout=0.05):
            pass


def test_no_server_there() -> None:
    fake = FakeVLLM()
    fake.down = True
    with (
        pytest.raises(EngineUnreachable, match="no answer from http://fake.*is the server running"),
        fake.engine(),
    ):
        pass


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_adapter_dir_that_cannot_be_written_to(below: str, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    adapter = write_adapter(tmp_path / "v1", adapter_tensors(tiny_llama()))
    fake = FakeVLLM()
    with fake.engine(adapter_dir=tmp_path / "taken" / below) as engine:
        with pytest.raises(EngineError, match="v1 cannot be copied to adapter_dir: .*taken"):
            run(engine.publish(1, adapter))
        assert engine.newest == 0 and len(ask(engine)[0].ids) == 8, "what was served is served on"
