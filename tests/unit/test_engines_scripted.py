"""What a fake engine owes its tests: the script's ids, honest logprobs, and faults on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atropos_gym.engines import make_engine
from atropos_gym.engines.base import Completion, Engine, SamplingParams
from atropos_gym.engines.scripted import ScriptedEngine, derived_logprob
from atropos_gym.errors import ConfigError, EngineError

END = 258
PARAMS = SamplingParams(max_tokens=5, stop_ids=(END,))


def ask(
    engine: ScriptedEngine, prompt: list[int], params: SamplingParams = PARAMS, n: int = 1
) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, params, n))


def test_a_table_answers_by_prompt() -> None:
    engine = make_engine("scripted", script={(1, 2): [3, END]}, tokenizer="bytes", model="fake")
    assert isinstance(engine, ScriptedEngine) and isinstance(engine, Engine)
    assert (engine.model, engine.tokenizer.name) == ("fake", "bytes")
    [c] = ask(engine, [1, 2])
    assert (c.ids, c.finish_reason, c.version, c.trainable) == ((3, END), "stop", 0, True)
    with pytest.raises(EngineError, match=r"no answer for the prompt \[9\] \(call 1\)"):
        ask(engine, [9])
    assert isinstance(engine.calls[1].outcome, EngineError)


def test_a_function_sees_prompt_parameters_and_number() -> None:
    seen: list[Any] = []

    def script(prompt: tuple[int, ...], params: SamplingParams, number: int) -> list[int]:
        seen.append((prompt, params.max_tokens, number))
        return [number]

    completions = ask(ScriptedEngine(script), [7, 8], n=3)
    assert [c.ids for c in completions] == [(0,), (1,), (2,)]
    assert seen == [((7, 8), 5, number) for number in range(3)]


@pytest.mark.parametrize(
    ("said", "ids", "finish"),
    [
        ([1, 2, END], (1, 2, END), "stop"),
        ([1, END, 2, END], (1, END), "stop"),
        ([1, 2, 3, 4, 5, END], (1, 2, 3, 4, 5), "length"),
        ([1, 2], (1, 2), "length"),
        ([], (), "length"),
        ([256, 259, 263], (256, 259, 263), "length"),
    ],
)
def test_ids_end_where_a_models_would(said: list[int], ids: tuple[int, ...], finish: str) -> None:
    [c] = ask(ScriptedEngine(lambda *_: said), [1])
    assert (c.ids, c.finish_reason) == (ids, finish)
    assert c.logprobs is not None and len(c.logprobs) == len(ids)


def test_a_whole_completion_is_handed_on() -> None:
    given = Completion(ids=(1, END, 2), logprobs=(-1.0, -2.0, -3.0), finish_reason="length", trainable="odd")
    assert ask(ScriptedEngine(lambda *_: given), [1]) == [given]


def test_logprobs_tell_prefix_and_version_apart() -> None:
    engine = ScriptedEngine(lambda *_: [4, 5, END])
    [a] = ask(engine, [1, 2, 3])
    assert a.logprobs == tuple(derived_logprob([1, 2, 3], a.ids, i, 0) for i in range(3))
    assert all(-4 < x < 0 for x in a.logprobs) and len(set(a.logprobs)) == 3
    [b] = ask(engine, [1, 2, 4])
    assert not set(a.logprobs) & set(b.logprobs)
    asyncio.run(engine.publish(1, "runs/a-v1"))
    [c] = ask(engine, [1, 2, 3])
    assert not set(a.logprobs) & set(c.logprobs)
    own = ScriptedEngine(lambda *_: [4, 5], logprob=lambda prompt, ids, i, version: -float(i) - 0.5)
    assert ask(own, [1])[0].logprobs == (-0.5, -1.5)


def test_greedy_and_filtered_answers_are_not_trainable() -> None:
    engine = ScriptedEngine(lambda *_: [4])
    [greedy] = ask(engine, [1], PARAMS.with_(temperature=0))
    assert (greedy.logprobs, greedy.trainable) == (None, "temperature=0")
    assert ask(engine, [1], PARAMS.with_(top_k=3))[0].trainable == "top_k=3"


def test_faults_come_when_told() -> None:
    faults = {0: ValueError("boom"), 1: "abort", 2: "cut"}
    engine = ScriptedEngine(lambda *_: [1, 2, 3, END], faults=faults)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="boom"):
        ask(engine, [1])
    outcomes = [(c.ids, len(c.logprobs or ()), c.finish_reason) for _ in range(3) for c in ask(engine, [1])]
    assert outcomes == [((1, 2), 2, "abort"), ((1, 2, 3), 3, "length"), ((1, 2, 3, END), 4, "stop")]
    assert [type(call.outcome).__name__ for call in engine.calls] == ["ValueError"] + ["Completion"] * 3
    assert engine._versions._live[0].requests == 0
    odd = ScriptedEngine(lambda *_: [1], faults=lambda number: "odd")  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match='"abort" or "cut", got \'odd\''):
        ask(odd, [1])


def test_delays_are_the_tests_own() -> None:
    async def main() -> list[int]:
        gates = [asyncio.Event() for _ in range(3)]
        order: list[int] = []
        engine = ScriptedEngine(lambda *_: [1], delay=lambda number: gates[number].wait())

        async def one(number: int) -> None:
            await engine.generate([number + 1], PARAMS)
            order.append(number)

        tasks = [asyncio.create_task(one(i)) for i in range(3)]
        await asyncio.sleep(0)
        assert [call.outcome for call in engine.calls] == [None] * 3
        for number in (2, 0, 1):
            gates[number].set()
            await tasks[number]
        return order

    assert asyncio.run(main()) == [2, 0, 1]


def test_limits_are_those_of_a_model() -> None:
    engine = ScriptedEngine(lambda *_: [1, 2, 3], max_context=6)
    [c] = ask(engine, [1, 1, 1, 1])
    assert (c.ids, c.cut_by_context) == ((1, 2), True)
    for prompt, message in [
        ([], "prompt is empty"),
        ([1, 264], "id 264 at position 1"),
        ([1] * 6, "6 ids and max_context is 6"),
    ]:
        with pytest.raises(EngineError, match=message):
            ask(engine, prompt)
    with pytest.raises(EngineError, match="n must be >= 1"):
        ask(engine, [1], n=0)
    with pytest.raises(EngineError, match="the script's answer has id 999 at position 1"):
        ask(ScriptedEngine(lambda *_: [1, 999]), [1])


@pytest.mark.parametrize("said", ["hit", b"hit", ["hit"], None, 3, [1.5]])
def test_an_answer_that_is_no_ids_is_named(said: Any) -> None:
    with pytest.raises(EngineError, match=r"a script answers with ids or a Completion, got .*say\(text\)"):
        ask(ScriptedEngine(lambda *_: said), [1])


@pytest.mark.parametrize("script", ["hit", [1, 2], None])
def test_a_script_is_a_function_or_a_table(script: Any) -> None:
    with pytest.raises(ConfigError, match="script must be a function .* or a table"):
        ScriptedEngine(script)


def test_an_engines_name_is_a_word() -> None:
    with pytest.raises(ConfigError, match='"hf:PATH", .*got int'):
        make_engine(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    [
        {"url": "http://ann:secret@gpu", "api_key": "secret"},
        {"kind": "vlm", "url": "http://ann:secret@gpu", "api_key": "secret"},
        {"kind": "vllm", "url": "http://ann:secret@gpu", "api_key": "secret", "python": "p"},
        {"kind": "sglang", "url": ["http://ann:secret@gpu", "http://x:secret@two"], "python": "p"},
        {"kind": "openai", "model": "m", "api_key": "secret", "python": "p"},
        {"kind": "scripted", "path": "http://ann:secret@gpu", "script": {}},
        "vlm:http://ann:secret@gpu",
        "http://ann:secret@gpu",
        "vllm:ann:secret@gpu",
    ],
)
def test_no_error_shows_a_key_or_a_password(spec: Any) -> None:
    options = {"python": "p"} if isinstance(spec, str) and not spec.startswith("vllm") else {}
    with pytest.raises(ConfigError, match="engine") as caught:
        make_engine(spec, **options)
    assert "secret" not in str(caught.value)
