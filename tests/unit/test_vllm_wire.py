"""What is sent to vLLM, and how its answers become completions or are refused (cases d6 to d13, d16)."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_gym.engines._vllm_wire import cached_ids, completion_body, fresh_seed, read_completions
from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.errors import AnswerRefused
from atropos_gym.rollout.seeds import sampling_seed

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8)


def choice(index: int = 0, ids: Any = (1, 2, 3, 4), logprobs: Any = None, **changes: Any) -> dict[str, Any]:
    """Returns a choice as vLLM gives it."""
    values = [-0.25 * (i + 1) for i in range(len(ids or ()))] if logprobs is None else logprobs
    return {
        "index": index,
        "text": "never read",
        "token_ids": ids if ids is None else list(ids),
        "prompt_token_ids": PROMPT,
        "logprobs": {"token_logprobs": values, "tokens": [], "text_offset": [], "top_logprobs": None},
        "finish_reason": "length",
        "stop_reason": None,
        **changes,
    }


def answer(*choices: dict[str, Any], **usage: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": list(choices), "usage": {"prompt_tokens": 3, **usage}}


def read(data: Any, params: SamplingParams = PARAMS, n: int = 1, **options: Any) -> list[Completion]:
    [completions] = read_completions(data, [PROMPT], params, n, **options)
    return completions


def test_a_good_answer() -> None:
    [completion] = read(answer(choice(), completion_tokens=4), version=3)
    assert completion == Completion((1, 2, 3, 4), (-0.25, -0.5, -0.75, -1.0), "length", version=3)
    [stopped] = read(answer(choice(finish_reason="stop", stop_reason=4)))
    assert stopped.finish_reason == "stop" and stopped.ids[-1] == 4


# -- requests --------------------------------------------------------------------------------------------


def test_d6_every_field_is_sent() -> None:
    """No default of a server or of a model's generation_config.json can apply."""
    params = SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=2,
        seed=1,
        stop_ids=(2,),
        allowed_ids=(2, 3),
    )
    body = completion_body("m", PROMPT, params, 2, seed=11, max_tokens=5)
    renamed = {"stop_ids": "stop_token_ids", "allowed_ids": "allowed_token_ids"}
    for field in dataclasses.fields(SamplingParams):
        if field.name == "choices":  # excludes allowed_ids; test_choices.py has it
            continue
        name = renamed.get(field.name, field.name)
        wanted = {"max_tokens": 5, "seed": 11}.get(name, getattr(params, field.name))
        assert body[name] == (list(wanted) if isinstance(wanted, tuple) else wanted), name
    assert (body["n"], body["logprobs"], body["return_token_ids"], body["prompt"]) == (2, 0, True, PROMPT)
    neutral = completion_body("m", PROMPT, PARAMS, 1, seed=0, max_tokens=8)
    assert neutral.keys() == body.keys() - {"allowed_token_ids"}
    assert (neutral["top_p"], neutral["top_k"], neutral["min_p"], neutral["temperature"]) == (1, -1, 0, 1)
    assert "stop" not in neutral, "ids only: a stop string cuts the text but not the ids"


def test_the_last_seed_of_a_group_fits_in_63_bits() -> None:
    body = completion_body("m", PROMPT, PARAMS, 8, seed=2**63 - 1, max_tokens=8)
    assert body["seed"] + 7 < 2**63


def test_d13_seeds_of_groups_are_far_apart() -> None:
    """Sample i of a request is drawn with seed + i, so neighbouring seeds would share samples."""
    n = 16
    seeds = sorted(sampling_seed(0, group, 0, 0) for group in range(10_000))
    assert min(b - a for a, b in itertools.pairwise(seeds)) >= n
    turns = {sampling_seed(0, 1, m, t, a) for m in range(8) for t in range(4) for a in range(3)}
    assert len(turns) == 8 * 4 * 3 and all(0 <= seed < 2**63 for seed in turns)


@given(seed=st.integers(0, 2**63 - 1), attempt=st.integers(1, 50))
def test_d13_another_try_has_a_fresh_seed(seed: int, attempt: int) -> None:
    assert fresh_seed(seed, 0) == seed
    assert 0 <= fresh_seed(seed, attempt) < 2**63
    assert abs(fresh_seed(seed, attempt) - seed) >= 4096
    assert abs(fresh_seed(seed, attempt) - fresh_seed(seed, attempt - 1)) >= 4096


# -- ids -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed", [choice(ids=None, logprobs=[-1.0]), {"drop": True}], ids=["null", "missing"]
)
def test_d7_no_ids_names_return_token_ids(changed: dict[str, Any]) -> None:
    if changed.pop("drop", False):
        changed = choice()
        del changed["token_ids"]
    with pytest.raises(AnswerRefused, match="return_token_ids.*never tokenised again"):
        read(answer(changed))


@pytest.mark.parametrize("ids", [[1, 2.0], [1, True], ["1"], "12", {"0": 1}, [1, None]])
def test_d7_ids_are_ints(ids: Any) -> None:
    bad = choice()
    bad["token_ids"] = ids
    with pytest.raises(AnswerRefused, match="wanted a list of ints"):
        read(answer(bad))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(AnswerRefused, match="id 264 at position 1, outside the vocabulary of 264"):
        read(answer(choice(ids=[1, 264])), rows=264)
    with pytest.raises(AnswerRefused, match="id -1 at position 0"):
        read(answer(choice(ids=[-1])))


def test_more_ids_than_asked_for_are_refused() -> None:
    with pytest.raises(AnswerRefused, match="4 ids where at most 3"):
        read(answer(choice()), max_tokens=3)


def test_no_ids_at_all_are_refused() -> None:
    with pytest.raises(AnswerRefused, match="no ids and finish_reason 'stop'"):
        read(answer(choice(ids=[], finish_reason="stop")))


@pytest.mark.parametrize("finish", ["repetition", None, "error", 3])
def test_an_unknown_end_is_refused(finish: Any) -> None:
    with pytest.raises(AnswerRefused, match="finish_reason .*wanted stop, length or abort"):
        read(answer(choice(finish_reason=finish)))


# -- counts and logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [[-1.0] * 4, [-1.0] * 6, []])
def test_d8_counts_of_ids_and_logprobs(logprobs: list[float]) -> None:
    with pytest.raises(AnswerRefused, match=f"5 token_ids and {len(logprobs)} token_logprobs"):
        read(answer(choice(ids=[1, 2, 3, 4, 5], logprobs=logprobs)))


def test_d8_usage_counts_too() -> None:
    with pytest.raises(AnswerRefused, match="5 token_ids and usage.completion_tokens says 6"):
        read(answer(choice(ids=[1, 2, 3, 4, 5]), completion_tokens=6))
    both = answer(choice(0), choice(1), completion_tokens=8)
    assert len(read(both, n=2)) == 2, "it counts the ids of all choices"


@pytest.mark.parametrize(
    "value", [None, -9999.0, -10_000.0, float("nan"), float("-inf"), float("inf"), "-1", True]
)
def test_d9_a_logprob_that_is_none(value: Any) -> None:
    lax = json.loads(json.dumps(answer(choice(logprobs=[-1.0, -1.0, -1.0, value]))))
    with pytest.raises(AnswerRefused, match="no finite logprob at position 3"):
        read(lax)


def test_d9_a_first_null_is_no_prompt_position() -> None:
    with pytest.raises(AnswerRefused, match="no finite logprob at position 0"):
        read(answer(choice(logprobs=[None, -1.0, -1.0, -1.0])))


@pytest.mark.parametrize("value", [0.0011, 0.01, 3.0])
def test_d9_positive_logprobs_are_refused(value: float) -> None:
    """Rounding reaches 1e-3 here, in the server and in the learner: one limit holds everywhere."""
    with pytest.raises(AnswerRefused, match="at position 1 is above 0"):
        read(answer(choice(logprobs=[-1.0, value, -1.0, -1.0])))


@pytest.mark.parametrize("value", [0, 0.0, 1e-7, 1e-4, 1e-3])
def test_d9_rounding_becomes_0(value: float) -> None:
    [completion] = read(answer(choice(logprobs=[-1.0, value, -1.0, -1])))
    assert completion.logprobs == (-1.0, 0.0, -1.0, -1.0)
    assert all(type(logprob) is float for logprob in completion.logprobs)


def test_no_logprobs_at_all() -> None:
    with pytest.raises(AnswerRefused, match="no logprobs: the server or a proxy drops"):
        read(answer(choice() | {"logprobs": None}))


def test_d10_an_id_outside_the_mask_is_refused() -> None:
    params = SamplingParams(max_tokens=3, min_tokens=2, allowed_ids=(2,))
    with pytest.raises(AnswerRefused, match=r"id 0 at position 0 was sampled outside allowed_ids \[2\]"):
        read(answer(choice(ids=[0, 0, 2])), params)
    assert read(answer(choice(ids=[2, 2])), params)[0].trainable == "min_tokens=2"


# -- ends, order, prompt -----------------------------------------------------------------------------------


def test_d11_an_aborted_choice_is_no_sample() -> None:
    [completion] = read(answer(choice(finish_reason="abort"), completion_tokens=4))
    assert (completion.finish_reason, completion.trainable) == ("abort", "aborted")
    [empty] = read(answer(choice(ids=[], finish_reason="abort") | {"logprobs": None}))
    assert empty.ids == () and empty.logprobs == ()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_d12_choices_are_sorted_by_index(order: tuple[int, ...]) -> None:
    completions = read(answer(*(choice(i, ids=[10 + i]) for i in order)), n=3)
    assert [completion.ids for completion in completions] == [(10,), (11,), (12,)]


def test_d12_several_prompts() -> None:
    prompts = [[5, 6, 7], [8]]
    choices = [choice(i, ids=[10 + i], prompt_token_ids=prompts[i // 2]) for i in (3, 0, 2, 1)]
    groups = read_completions(answer(*choices), prompts, PARAMS, 2)
    assert [[c.ids[0] for c in group] for group in groups] == [[10, 11], [12, 13]]


@pytest.mark.parametrize(
    "indexes", [[0, 1, 1], [0, 1], [0, 1, 2, 3], [1, 2, 3], [0, 1, None], [0, True, 2], []]
)
def test_d12_indexes_that_do_not_fit(indexes: list[Any]) -> None:
    with pytest.raises(AnswerRefused, match="wanted each of 0..2 once"):
        read(answer(*(choice() | {"index": index} for index in indexes)), n=3)


@pytest.mark.parametrize(
    "data", [None, [], "<html>", {}, {"choices": None}, {"choices": ["x"]}, {"error": "no"}]
)
def test_an_answer_without_choices(data: Any) -> None:
    with pytest.raises(AnswerRefused, match="has no choices"):
        read(data)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([1, 5, 6, 7], r"position 0 \(sent 5, used 1"),
        ([5, 6], r"position 2 \(sent 7, used nothing"),
        ([5, 6, 7, 7], r"position 3 \(sent nothing, used 7"),
        ([5, 9, 7], r"position 1 \(sent 6, used 9"),
        ("567", "wanted the ids sent"),
    ],
)
def test_d16_the_prompt_must_be_the_one_sent(said: Any, message: str) -> None:
    with pytest.raises(AnswerRefused, match=message):
        read(answer(choice(prompt_token_ids=said)))


def test_greedy_completions_have_no_logprobs() -> None:
    [completion] = read(answer(choice()), SamplingParams(max_tokens=8, temperature=0.0))
    assert completion.logprobs is None and completion.trainable == "temperature=0"


def test_a_completion_cut_by_the_context_says_so() -> None:
    assert read(answer(choice()), max_tokens=4)[0].cut_by_context
    assert not read(answer(choice()))[0].cut_by_context


@pytest.mark.parametrize("data", [None, {}, {"usage": None}, {"usage": {"prompt_tokens_details": {}}}])
def test_a_server_need_not_say_what_was_cached(data: Any) -> None:
    assert cached_ids(data) == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    field=st.sampled_from(["index", "token_ids", "prompt_token_ids", "logprobs", "finish_reason"]), value=JSON
)
def test_whatever_a_field_holds_a_choice_is_whole_or_refused(field: str, value: Any) -> None:
    try:
        [completion] = read(answer(choice() | {field: value}))
    except AnswerRefused:
        return
    assert completion.logprobs is not None and len(completion.ids) == len(completion.logprobs)
    assert all(logprob <= 0 for logprob in completion.logprobs)


@given(JSON)
def test_whatever_an_answer_is_it_is_refused_by_name(data: Any) -> None:
    with pytest.raises(AnswerRefused):
        read(data)
