"""Advantages: baselines by group id, episodes once, nothing dropped without a name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.advantages import (
    group_advantages,
    kl_shaped_scores,
    mixed_advantages,
    overlong_penalty,
    process_supervision,
    spread_over_turns,
    turn_returns,
    whitened,
)
from tests.unit.learner_cases import by_op, close, numbers


@pytest.mark.parametrize("case", by_op("advantages"))
def test_group_advantages(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    scores = numbers(inputs["scores"])
    if inputs.get("dtype") == "float32":
        scores = [float(np.float32(score)) for score in scores]
    options = {k: inputs[k] for k in ("baseline", "scale", "ddof", "eps") if k in inputs}
    if "overrides" in inputs:
        options["zero"] = [bool(o.get("set_advantage_to_zero")) for o in inputs["overrides"]]
    got = group_advantages(scores, inputs["group"], inputs.get("episode"), **options)
    close(got.values.tolist(), expect["advantages"], case)
    assert got.dropped_groups == expect["dropped_groups"]
    assert {str(k): v for k, v in got.dropped_rows.items()} == expect.get("dropped_rows", {})


@pytest.mark.parametrize("case", by_op("whiten"))
def test_whitened_without_groups(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    got = whitened(inputs["scores"], ddof=inputs["ddof"], eps=inputs["eps"])
    close(got.tolist(), case["expect"]["advantages"], case)


@pytest.mark.parametrize("case", by_op("turn_returns"))
def test_returns_by_turn(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    returns = turn_returns(inputs["turn_rewards"], inputs["gamma"])
    close(returns.tolist(), expect["returns"], case)
    spread = spread_over_turns(returns.tolist(), inputs["turns"], inputs["length"])
    close(spread.tolist(), expect["per_token"], case)


@pytest.mark.parametrize("case", by_op("process_supervision"))
def test_process_supervision(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    got = process_supervision(inputs["step_rewards"], gamma=inputs["gamma"], ddof=inputs["ddof"])
    close([member.tolist() for member in got], case["expect"]["advantages"], case)


@pytest.mark.parametrize("case", by_op("mixture"))
def test_outcomes_mixed_with_turn_rewards(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    arguments = inputs["scores"], inputs["turn_rewards"]
    returns = [turn_returns(rewards, inputs["gamma"]).tolist() for rewards in inputs["turn_rewards"]]
    close(returns, expect["turn_returns"], case)
    turns_only = mixed_advantages(*arguments, gamma=inputs["gamma"], outcome_weight=0.0)
    close([member.tolist() for member in turns_only], expect["turn_advantages"], case)
    weights = {k: inputs[k] for k in ("gamma", "outcome_weight", "turn_weight")}
    mixed = mixed_advantages(*arguments, **weights)
    close([member.tolist() for member in mixed], expect["advantages"], case)


@pytest.mark.parametrize("case", by_op("overlong"))
def test_overlong_penalty(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    got = [overlong_penalty(n, inputs["max_length"], inputs["cache"]) for n in inputs["lengths"]]
    close(got, case["expect"]["penalty"], case)


@pytest.mark.parametrize("case", by_op("kl_in_reward"))
def test_kl_as_a_reward_comes_before_the_baseline(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    shaped = kl_shaped_scores(inputs["scores"], inputs["k1"], inputs["beta"])
    close(shaped.tolist(), expect["shaped_scores"], case)
    close(group_advantages(shaped.tolist(), inputs["group"]).values.tolist(), expect["advantages"], case)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"baseline": "median"}, "baseline must be one of mean, leave_one_out, got 'median'"),
        ({"scale": False}, "scale must be one of none, group, .*got False"),
    ],
)
def test_unknown_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_advantages([1.0, 0.0], ["a", "a"], **options)


def test_dead_groups_that_are_kept_have_no_advantage_under_any_scale() -> None:
    for scale in ("none", "group", "atropos", "batch", "whiten_centred"):
        got = group_advantages([1.0, 1.0, 1.0, 1.0], ["a", "a", "b", "b"], scale=scale, drop_equal=False)
        assert got.values.tolist() == [0.0] * 4 and not got.dropped_groups


finite = st.floats(-100, 100)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(finite, st.integers(0, 3)), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_order_and_names_of_groups_mean_nothing(rows: list[tuple[float, int]], order: Any) -> None:
    scores, groups = [s for s, _ in rows], [g for _, g in rows]
    straight = group_advantages(scores, groups)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    other = group_advantages([scores[k] for k in shuffled], [("name", groups[k]) for k in shuffled])
    assert np.allclose(other.values, straight.values[shuffled], rtol=1e-12, atol=1e-12)
    assert {g[1]: r for g, r in other.dropped_groups.items()} == straight.dropped_groups


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.one_of(finite, st.just(math.nan), st.just(math.inf)), min_size=1, max_size=8))
def test_every_advantage_is_finite_and_each_group_sums_to_zero(scores: list[float]) -> None:
    got = group_advantages(scores, ["g"] * len(scores), scale="group")
    assert np.isfinite(got.values).all()
    assert abs(got.values.sum()) < 1e-6
    assert len(got.dropped_rows) == sum(not math.isfinite(s) for s in scores)
