"""Whole replies as choices: what is sampled is one of them, and its logprobs are those of an exact count.

Each promise holds for the hf engine, the scripted one and vLLM (its fake behind the real wire).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import exp, fsum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.engines import Completion, SamplingParams
from atropos_gym.engines._choices import following
from atropos_gym.engines._vllm_wire import choices_grammar, completion_body
from atropos_gym.engines.base import Engine
from atropos_gym.engines.checks import sampling_findings
from atropos_gym.engines.hf import HFEngine
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import AnswerRefused, ConfigError, ContextFull, EngineError
from tests.tools.fake_sglang import FakeSGLang
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.tiny_llama import full_logits, tiny_llama

END = 258
PROMPT = [1, 2, 3]
MODEL = tiny_llama()

bodies = st.lists(st.integers(0, 5), max_size=4).map(tuple)
some_choices = st.lists(bodies, min_size=1, max_size=8).map(lambda found: tuple((*b, END) for b in found))
KINDS = ("hf", "scripted", "vllm", "vllm+hf")


def params(choices: Any, **changes: Any) -> SamplingParams:
    settings_ = {"max_tokens": 8, "seed": 7, "stop_ids": (END,), "choices": choices}
    return SamplingParams(**{**settings_, **changes})


@contextmanager
def opened(kind: str) -> Iterator[Engine]:
    with ExitStack() as parts:
        if kind == "scripted":
            yield ScriptedEngine(lambda prompt, asked, number: [number % 3, 4, 5])
            return
        if kind == "vllm":
            yield parts.enter_context(FakeVLLM(eos=(258, 259)).engine())
            return
        model = HFEngine(base=MODEL.state_dict(), config=MODEL.config, tokenizer="bytes", seed=0)
        parts.callback(model.shutdown)
        if kind == "vllm+hf":
            fake = FakeVLLM(backend=model, eos=(258, 259), max_model_len=96)
            yield parts.enter_context(fake.engine())
            return
        yield model


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    with ExitStack() as parts:
        yield {kind: parts.enter_context(opened(kind)) for kind in KINDS}


def generate(
    engine: Engine, asked: SamplingParams, n: int = 1, prompt: list[int] = PROMPT
) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, asked, n))


def exact(choice: tuple[int, ...], choices: tuple[tuple[int, ...], ...], temperature: float) -> list[float]:
    """The logprob of each id of a choice: the model's softmax over what may follow, counted out."""
    logits = full_logits(MODEL, PROMPT, choice).double() / temperature
    found = []
    for k, value in enumerate(choice):
        allowed = sorted({other[k] for other in choices if other[:k] == choice[:k]})
        found.append(float(logits[k, allowed].log_softmax(-1)[allowed.index(value)]))
    return found


@pytest.mark.parametrize("kind", ["hf", "vllm+hf"])
@given(choices=some_choices, seed=st.integers(0, 2**63 - 1), temperature=st.sampled_from([0.7, 1.0, 2.0]))
@settings(deadline=None, max_examples=15)
def test_logprobs_are_those_of_an_exact_count(
    engines: dict[str, Engine], kind: str, choices: Any, seed: int, temperature: float
) -> None:
    for sample in generate(engines[kind], params(choices, seed=seed, temperature=temperature), 3):
        assert sample.ids in choices and sample.finish_reason == "stop"
        assert sample.trainable == "choices"
        assert sample.logprobs == pytest.approx(exact(sample.ids, choices, temperature), abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(choices=some_choices, seed=st.integers(0, 2**62), greedy=st.booleans())
@settings(deadline=None, max_examples=15)
def test_whatever_the_choices_one_of_them_is_sampled(
    engines: dict[str, Engine], kind: str, choices: Any, seed: int, greedy: bool
) -> None:
    [sample] = generate(engines[kind], params(choices, seed=seed, temperature=0.0 if greedy else 1.0))
    assert sample.ids in choices and sample.finish_reason == "stop"
    if greedy:
        assert sample.logprobs is None
        return
    assert sample.logprobs is not None and len(sample.logprobs) == len(sample.ids)
    for k, value in enumerate(sample.logprobs):
        forced = len({choice[k] for choice in choices if choice[:k] == sample.ids[:k]}) == 1
        assert value == 0.0 if forced else value < 0.0


@given(choices=some_choices)
@settings(deadline=None, max_examples=30)
def test_probabilities_of_all_choices_sum_to_one(choices: Any) -> None:
    engine = ScriptedEngine(lambda prompt, asked, number: distinct[number])
    distinct = list(dict.fromkeys(choices))
    samples = [generate(engine, params(choices))[0] for _ in distinct]
    assert [sample.ids for sample in samples] == distinct
    assert fsum(exp(fsum(sample.logprobs or ())) for sample in samples) == pytest.approx(1.0)
    assert fsum(exp(fsum(exact(choice, choices, 1.0))) for choice in distinct) == pytest.approx(1.0)


def test_samples_follow_the_masked_distribution(engines: dict[str, Engine]) -> None:
    choices = ((1, END), (1, 2, END), (1, 2, 3, END), (4, END))
    n = 1000
    samples = generate(engines["hf"], params(choices, temperature=3.0), n)
    for choice in choices:
        p = exp(fsum(exact(choice, choices, 3.0)))
        seen = sum(sample.ids == choice for sample in samples) / n
        assert abs(seen - p) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-9, (choice, p, seen)


def test_a_batch_of_masked_and_free_requests_keeps_them_apart(engines: dict[str, Engine]) -> None:
    engine: Any = engines["hf"]
    choices = ((1, 2, END), (3, END))
    each = [params(None, seed=5), params(choices, seed=5), params(choices, seed=5, top_k=1)]
    alone = [engine.generate_sync(PROMPT, one)[0] for one in each]
    for one, together in zip(alone, engine.generate_batch([PROMPT] * 3, each), strict=True):
        assert together.ids == one.ids and together.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert alone[0].trainable is True and alone[1].ids in choices
    likeliest = max(choices, key=lambda choice: full_logits(MODEL, PROMPT, choice)[0, choice[0]])
    assert alone[2].ids == likeliest and alone[2].logprobs == pytest.approx([0.0] * len(likeliest))


def test_choices_that_begin_others_are_told_apart_by_their_end(engines: dict[str, Engine]) -> None:
    choices = ((1, END), (1, 1, END), (END,))
    seen = {sample.ids for sample in generate(engines["hf"], params(choices, temperature=5.0), 200)}
    assert seen == set(choices)


def test_choices_said_twice_count_once() -> None:
    assert params([[1, END], [2, END], [1, END]]).choices == ((1, END), (2, END))
    assert params(((1, END), (1, END))) == params(((1, END),))


def test_choices_may_be_rows_of_an_array() -> None:
    assert params(np.array([[1, END], [2, END]])).choices == ((1, END), (2, END))
    assert params([np.array([1, END]), [2, END]]).choices == ((1, END), (2, END))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"choices": ()}, "choices must hold at least one reply"),
        ({"choices": ((1, END), ())}, "choices must hold at least one reply"),
        ({"choices": ("hit", "stick")}, "choices are replies, each as its ids, got .*ChatRenderer.say"),
        ({"choices": (1, END)}, r"each as its ids, got \(1, 258\)"),
        ({"choices": 1}, "each as its ids, got 1"),
        ({"choices": ((1.5, END),)}, "each as its ids, got .*1.5"),
        ({"choices": ((END,),), "allowed_ids": (END,)}, "allowed_ids=.* and choices exclude each other"),
        ({"choices": ((END,),), "min_tokens": 1}, "min_tokens=1 and choices exclude each other"),
    ],
    ids=["none", "empty", "texts", "one reply", "an id", "fractions", "allowed_ids", "min_tokens"],
)
def test_parameters_that_cannot_work(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        params(**changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"choices": ((1, 2),)}, r"choice \[1, 2\] does not end with one of stop_ids=\(258,\).*say"),
        ({"choices": ((1, END, 2, END),)}, r"choice \[1, 258, 2, 258\] goes on behind one of stop_ids"),
        ({"choices": ((1, 999, END),)}, r"choice \[1, 999, 258\] has id 999 at position 1, outside"),
        ({"choices": ((1, END), (2, 259)), "stop_ids": (END, 259)}, "end with different ids"),
        ({"choices": ((1, END), (1, 2, 3, END)), "max_tokens": 3}, "a choice has 4 ids and max_tokens is 3"),
        ({"choices": ((*range(20), END),), "max_tokens": 20}, "a choice has 21 ids and max_tokens is 20"),
        ({"choices": ((*[1] * 30, 2),), "max_tokens": 99}, r"choice \[1, 1, .*, … 31 ids\] does not end"),
    ],
    ids=["no end", "end inside", "unknown id", "two ends", "too long", "much too long", "shown short"],
)
def test_choices_that_cannot_be_sampled(
    engines: dict[str, Engine], kind: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(EngineError, match=told):
        generate(engines[kind], params(**changes))


@pytest.mark.parametrize("kind", ["hf", "vllm+hf"])
def test_a_choice_longer_than_the_room_left_is_a_full_context(engines: dict[str, Engine], kind: str) -> None:
    prompt = [1] * 93
    [sample] = generate(engines[kind], params(((1, 2, END),)), prompt=prompt)
    assert sample.ids == (1, 2, END)
    with pytest.raises(ContextFull, match="a choice has 4 ids, and the context has 3 left"):
        generate(engines[kind], params(((1, 2, END), (1, 2, 3, END))), prompt=prompt)


def test_choices_are_found_before_training() -> None:
    [found] = sampling_findings(params(((END,),)))
    assert found.status == "wrong" and found.remedy == "leave choices out"


def test_the_trie_knows_what_follows() -> None:
    assert following(((1, 2, END), (1, END), (3, END))) == {
        (): (1, 3),
        (1,): (2, END),
        (1, 2): (END,),
        (3,): (END,),
    }


# -- servers -----------------------------------------------------------------------------------------------


def test_vllm_is_sent_a_grammar_of_ids_and_the_only_end() -> None:
    choices = ((5, 6, END), (5, END), (END,))
    body = completion_body("m", PROMPT, params(choices), 1, seed=7, max_tokens=8)
    assert body["structured_outputs"] == {"grammar": 'root ::= Token(5) Token(6) | Token(5) | ""'}
    assert body["allowed_token_ids"] == [5, 6, END] and body["stop_token_ids"] == [END]
    assert choices_grammar(((7, END),)) == "root ::= Token(7)"
    assert "structured_outputs" not in completion_body("m", PROMPT, params(None), 1, seed=7, max_tokens=8)


def test_a_model_with_several_ends_says_only_that_of_the_choices(engines: dict[str, Engine]) -> None:
    # The fake ends a grammar by every end id that it knows, as the real server does.
    for seed in range(20):
        [sample] = generate(engines["vllm"], params(((1, END), (2, END)), seed=seed))
        assert sample.ids in ((1, END), (2, END))


def test_a_server_that_ignores_structured_outputs_is_refused() -> None:
    with FakeVLLM(grammars=False).engine() as engine, pytest.raises(AnswerRefused) as refused:
        generate(engine, params(((1, 2, 3, END), (2, 5, 4, END))))
    assert "none of 2 choices: the server does not know structured_outputs" in str(refused.value)


def test_a_server_that_cannot_read_the_grammar_says_what_to_use() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject("grammar")
        with pytest.raises(EngineError, match=r"Invalid grammar.*use vLLM >= 0\.32, with .*xgrammar"):
            generate(engine, params(((1, END),)))
        assert generate(engine, params(((1, END),)))[0].ids == (1, END)


def test_an_aborted_choice_is_asked_for_again() -> None:
    fake = FakeVLLM()
    with fake.engine() as engine:
        fake.inject("abort")
        [sample] = generate(engine, params(((1, 2, 3, END),)))
        assert sample.ids == (1, 2, 3, END) and engine.counters["aborted"] == 1


def test_sglang_refuses_choices_in_plain_words() -> None:
    with (
        FakeSGLang().engine() as engine,
        pytest.raises(EngineError, match="SGLang cannot choose among replies"),
    ):
        generate(engine, params(((1, END),)))


def test_chat_completions_refuse_choices_in_plain_words() -> None:
    from atropos_gym.engines._openai_wire import chat_body
    from atropos_gym.messages import Message

    with pytest.raises(EngineError, match="know no ids, so choices cannot be asked for"):
        chat_body(
            "m",
            [Message(role="user", content="hi")],
            params(((1, END),)),
            1,
            limit_field="max_tokens",
            seed=None,
            extra={},
        )


def test_masks_leave_the_logits_alone() -> None:
    from atropos_gym.engines._sampling import processed_logits

    x = torch.arange(6.0)
    asked = params(((1, 2, 5), (1, 3, 5)), stop_ids=(5,), temperature=0.5)
    masked = processed_logits(x, asked, PROMPT, [1])
    assert masked.tolist() == [-torch.inf, -torch.inf, 4.0, 6.0, -torch.inf, -torch.inf]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
