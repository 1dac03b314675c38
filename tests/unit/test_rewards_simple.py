"""Rewards beside answers: the same text, the right form, length, repetition, weighted sums."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_gym import rewards
from atropos_gym.errors import ConfigError, UnusableGold
from atropos_gym.rewards import (
    REWARDS,
    combine,
    exact_match,
    format_reward,
    json_valid,
    length_penalty,
    overlong_penalty,
    regex_match,
    repetition_penalty,
    tag_count,
)


def test_exact_match_says_why() -> None:
    assert exact_match(" red \n", "red")
    assert exact_match("Red", "red").reason == "not_equal"
    assert exact_match("Red", "red", ignore_case=True)
    assert exact_match("  ", "red").value == "unparsed"
    with pytest.raises(UnusableGold):
        exact_match("red", " ")


@pytest.mark.parametrize(
    ("completion", "keywords", "expected"),
    [
        ("so <answer>4</answer>", {}, 1.0),
        ("so <answer> </answer>", {}, 0.0),
        ("<answer>4</answer><answer>4</answer>", {}, 0.0),
        ("<think><answer>4</answer></think><answer>4</answer>", {}, 1.0),
        ("<think><answer>4</answer>", {}, 0.0),
        ("<answer>4</answer>", {"think": True}, 0.0),
        ("hm</think><answer>4</answer>", {"think": True}, 1.0),
        ("<ACTION>hit</ACTION>", {"format": "tag"}, 1.0),
        (r"\boxed {4}", {"format": "boxed"}, 1.0),
        (r"\boxed{4", {"format": "boxed"}, 0.0),
        ("done\n#### 4", {"format": "hash"}, 1.0),
        ("done #### 4", {"format": "hash"}, 0.0),
    ],
)
def test_format_reward(completion: str, keywords: dict[str, Any], expected: float) -> None:
    assert format_reward(completion, **keywords) == expected


def test_length_penalty_is_a_straight_line_between_its_bounds() -> None:
    assert [length_penalty("a" * n, limit=10, slack=10) for n in (0, 10, 15, 20, 99)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ConfigError, match="slack >= 1, got limit=1, slack=0"):
        length_penalty("a", limit=1, slack=0)


def test_combine_weights_and_returns_its_terms() -> None:
    reward = combine({"verify_number": 1.0, "format_reward": 0.5, "length_penalty": 2.0})
    total, terms = reward("#### 4", gold="4", format="hash", limit=3, slack=6)
    assert terms == {"verify_number": 1.0, "format_reward": 0.5, "length_penalty": -1.0}
    assert total == 0.5


def test_combine_refuses_unknown_names() -> None:
    with pytest.raises(ConfigError, match="verify_numbers"):
        combine({"verify_numbers": 1.0})
    with pytest.raises(ConfigError, match="none"):
        combine({})
    with pytest.raises(ConfigError, match="format must be one of"):
        format_reward("x", format="xml")
    with pytest.raises(TypeError, match="takes golds"):
        combine({"verify_number": 1.0})("4", golds="4")


def test_the_registry_has_every_reward_under_its_own_name() -> None:
    assert set(REWARDS) <= set(rewards.__all__)
    assert all(REWARDS[name] is getattr(rewards, name) for name in REWARDS)


def test_combine_takes_a_reward_that_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REWARDS, "shouting", lambda completion, *, factor: factor * completion.isupper())
    assert combine({"shouting": 2.0})("AB", factor=0.5) == (1.0, {"shouting": 1.0})


@pytest.mark.parametrize(
    ("completion", "keywords", "expected"),
    [
        (r"\boxed{\frac{1}{2}", {"format": "boxed"}, 0.0),
        (r"\boxed{\frac{1}{2}}", {"format": "boxed"}, 1.0),
        (r"\boxed{1} \boxed{2}", {"format": "boxed"}, 0.0),
        (r"\boxed{1} \boxed{2", {"format": "boxed"}, 0.0),
        (r"\boxed{}", {"format": "boxed"}, 0.0),
        ("<answer>4</answer>", {"opened": True}, 0.0),
        ("hm</think><answer>4</answer>", {"opened": True, "think": True}, 1.0),
    ],
)
def test_format_reward_of_boxes_and_opened_thinking(
    completion: str, keywords: dict[str, Any], expected: float
) -> None:
    assert format_reward(completion, **keywords) == expected


def test_regex_match() -> None:
    assert regex_match("a\nb", "a.b") == 1.0
    assert regex_match("a b c", "a.b") == 0.0
    assert regex_match("x</think> ab ", "ab", opened=True) == 1.0
    assert regex_match("ab", "ab", opened=True) == 0.0
    with pytest.raises(ConfigError, match="pattern must be a regular expression"):
        regex_match("a", "(")


def test_tag_count() -> None:
    assert tag_count("") == 0.0
    assert tag_count("<a></a><b>", tags=("a", "b")) == 0.75
    assert tag_count("<a><a></a>", tags=("a",)) == 0.5
    assert tag_count("<think>x</think><answer>1</answer>", opened=True) == 0.75
    for tags in ((), "think"):
        with pytest.raises(ConfigError, match="tags must be names"):
            tag_count("x", tags=tags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", 1.0),
        ("3", 1.0),
        ("9" * 5000, 1.0),
        ("", 0.0),
        ("{'a': 1}", 0.0),
        ("NaN", 0.0),
        ("[1] and", 0.0),
        ("<think>", 0.0),
        ("<think>x</think>[1]", 1.0),
        ("```\n{}\n```", 1.0),
        ("```json\n{}", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_valid(text: str, expected: float) -> None:
    assert json_valid(text) == expected


def test_json_valid_wants_the_keys() -> None:
    assert json_valid('{"a": 1, "b": 2}', keys=["a"]) == 1.0
    assert json_valid('{"b": 2}', keys=["a"]) == 0.0
    assert json_valid('["a"]', keys=["a"]) == 0.0


def test_overlong_penalty_is_daposs_equation_13() -> None:
    penalties = [overlong_penalty("", length=n, max_length=20, buffer=4) for n in (0, 16, 17, 18, 19, 20, 99)]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    for bad in ({"buffer": 0}, {"buffer": 21}, {"length": -1}):
        with pytest.raises(ConfigError, match="buffer must be from 1 to max_length"):
            overlong_penalty("", **{"length": 1, "max_length": 20, "buffer": 4, **bad})


def test_repetition_penalty_counts_repeated_ngrams() -> None:
    assert repetition_penalty("a a a a", ngram=1) == -0.75
    assert repetition_penalty("A a", ngram=1, max_penalty=0.5) == -0.25
    assert repetition_penalty("a b a b a", ngram=2) == -0.5
    assert repetition_penalty("a b", ngram=3) == 0.0
    for bad in ({"ngram": 0}, {"max_penalty": -1.0}):
        with pytest.raises(ConfigError, match="ngram must be >= 1"):
            repetition_penalty("a", **bad)


SIMPLE: dict[str, Callable[[str], Any]] = {
    "exact_match": lambda text: exact_match(text, "x"),
    "format_reward": lambda text: [format_reward(text, format=f) for f in ("answer", "tag", "boxed", "hash")],
    "json_valid": json_valid,
    "regex_match": lambda text: regex_match(text, "[a-z ]*"),
    "repetition_penalty": repetition_penalty,
    "tag_count": tag_count,
}


@given(text=st.text(max_size=50), name=st.sampled_from([*SIMPLE]))
def test_no_text_raises(text: str, name: str) -> None:
    SIMPLE[name](text)


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize(
    "piece", ["a ", "<answer>", r"\boxed{", "####\n", "{", "```\n", "<think>", '{"a":', "</think>"]
)
def test_time_is_linear_in_the_length(name: str, piece: str) -> None:
    text = piece * (200_000 // len(piece))
    started = time.process_time()
    SIMPLE[name](text)
    assert time.process_time() - started < 2.0
