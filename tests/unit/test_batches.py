"""Rows from the wire: aligned, refused by name, dropped with a reason; the counts add up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.trainers.batches import Batch, RowRules, read_batch
from atropos_gym.trainers.packing import collate, micro_batches
from atropos_gym.wire import ScoredDataGroup
from tests.unit.learner_cases import by_op, close, group_of, row

RULES = RowRules(vocab_size=512)


def group(scores: list[float], **fields: Any) -> ScoredDataGroup:
    """A group of rows ``7 8 9`` whose last two ids are trained, one score each."""
    n = len(scores)
    defaults: dict[str, Any] = {
        "tokens": [[7, 8, 9]] * n,
        "masks": [[-100, 8, 9]] * n,
        "inference_logprobs": [[1.0, -0.5, -0.25]] * n,
    }
    return ScoredDataGroup.model_construct(scores=scores, **{**defaults, **fields})


def counts(batch: Batch) -> dict[str, int]:
    return dict(batch.dropped)


# -- the cases -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", by_op("row_check"))
def test_rows_are_refused_by_reason(case: dict[str, Any]) -> None:
    reasons = []
    for fields in case["inputs"]["rows"]:
        rules = RowRules(fields.get("vocab_size", 512), fingerprint=fields.get("learner_fingerprint"))
        shared = {"tokenizer_fingerprint": fields["fingerprint"]} if "fingerprint" in fields else None
        body = group_of([fields], images=fields.get("images"), group_overrides=shared)
        (refusal,) = read_batch([body], rules).refusals
        reasons.append(refusal.reason)
    assert reasons == case["expect"]["refused"]


@pytest.mark.parametrize("case", by_op("staleness"))
def test_staleness_is_bounded_on_both_sides(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    rules = RowRules(512, version=inputs["current_version"], max_staleness=inputs["max_staleness"])
    for k, version in enumerate(inputs["versions"]):
        batch = read_batch([group([1.0, 0.0], group_overrides={"policy_version": version})], rules)
        assert (len(batch.rows) == 2) == expect["kept"][k]
        assert set(batch.dropped) == ({expect["reasons"][str(k)]} if str(k) in expect["reasons"] else set())
        if batch.rows:
            assert batch.staleness == expect["staleness"][k]


@pytest.mark.parametrize("case", by_op("mask"))
def test_only_sampled_ids_are_trained(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    logprobs = [1.0 if m == -100 else -0.5 for m in inputs["masks"]]
    rows = [{"tokens": inputs["tokens"], "masks": inputs["masks"], "inference_logprobs": logprobs}] * 2
    batch = read_batch([group_of([{**r, "score": float(k)} for k, r in enumerate(rows)])], RULES)
    assert batch.rows[0].positions.tolist() == expect["trained_positions"]
    assert len(batch.rows[0].positions) == expect["trained_tokens"]
    assert batch.rows[0].turns == ((3, 5), (8, 10))


@pytest.mark.parametrize("case", by_op("collate"))
def test_a_pad_id_equal_to_the_end_id_changes_nothing(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    rows = [row(r["tokens"], [k for k, m in enumerate(r["masks"]) if m != -100]) for r in inputs["rows"]]
    batch = collate(rows, [0, 1], pad_id=inputs["pad_id"])
    assert np.bincount(batch.row_M).tolist() == expect["trained_tokens"]
    assert batch.length_B.tolist() == expect["attended"]
    assert batch.ids_BL.tolist()[0] == [5, 8, 2, inputs["pad_id"], inputs["pad_id"]]
    assert batch.target_M.tolist() == [8, 2, 8, 8, 8] and batch.column_M.tolist() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("case", by_op("truncated"))
def test_a_truncated_row_leaves_the_loss_but_not_the_baseline(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    overrides = [{"truncated": r["truncated"]} for r in inputs["rows"]]
    batch = read_batch(
        [group([1.0, 0.0], overrides=overrides)], RowRules(512, mask_truncated=inputs["mask_truncated"])
    )
    assert counts(batch) == {"truncated": 1}
    assert batch.rows[0].advantages.tolist() == [0.5, 0.5]  # the cut row's 0 is still in the mean
    kept = [r for r in inputs["rows"] if not r["truncated"]]
    tokens = sum(r["trained_tokens"] for r in kept)
    close(sum(r["loss_sum"] for r in kept) / tokens, case["expect"]["loss"], case)
    assert tokens == case["expect"]["trained_tokens"]


@pytest.mark.parametrize("case", by_op("denominator"))
def test_dropped_groups_are_outside_the_denominator(case: dict[str, Any]) -> None:
    groups, expect = case["inputs"]["groups"], case["expect"]
    bodies = []
    for body in groups:
        rows = [
            {
                "tokens": [7, *[8] * len(losses)],
                "masks": [-100, *[8] * len(losses)],
                "inference_logprobs": [1.0, *[-0.5] * len(losses)],
                "score": score,
            }
            for score, losses in zip(body["scores"], body["token_losses"], strict=True)
        ]
        bodies.append(group_of(rows))
    total = sum(x for body in groups for member in body["token_losses"] for x in member)
    for drop, name in ((True, "loss_drop_equal_groups"), (False, "loss_keep_equal_groups")):
        batch = read_batch(bodies, RowRules(512, drop_equal=drop))
        tokens = sum(len(r.positions) for r in batch.rows)
        # The losses are -A at ratio 1, so the rows' own advantages give the sum.
        assert -sum(float(r.advantages.sum()) for r in batch.rows) == pytest.approx(total)
        close(total / tokens, expect[name], case)


# -- advantages ----------------------------------------------------------------------------------------


def test_scores_become_advantages_by_group() -> None:
    batch = read_batch([group([1.0, 0.0]), group([5.0, 9.0])], RULES)
    assert [r.advantages[0] for r in batch.rows] == [0.5, -0.5, -2.0, 2.0]
    assert batch.episodes == 4


def test_per_token_advantages_of_the_wire_win_over_scores() -> None:
    body = group([1.0, 0.0], advantages=[[9.0, 0.25, -0.75], [9.0, 0.0, 1.0]])
    batch = read_batch([body], RULES)
    assert [r.advantages.tolist() for r in batch.rows] == [[0.25, -0.75], [0.0, 1.0]]


def test_a_group_of_one_with_its_own_advantages_is_kept() -> None:
    assert len(read_batch([group([1.0], advantages=[[0.0, 1.0, 1.0]])], RULES).rows) == 1


def test_segments_are_recomputed_with_each_episode_once() -> None:
    body = group(
        [1.0, 1.0, 0.0, 0.0],
        advantages=[[9.0] * 3] * 4,
        overrides=[{"episode": 0}, {"episode": 0}, {"episode": 1}, {"episode": 2}],
        group_overrides={"segments": True},
    )
    batch = read_batch([body], RULES)
    assert [round(r.advantages[0], 9) for r in batch.rows] == [
        0.666666667,
        0.666666667,
        -0.333333333,
        -0.333333333,
    ]
    assert batch.episodes == 3 and len(batch.played) == 3


def test_set_advantage_to_zero_keeps_the_tokens() -> None:
    body = group([1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}])
    batch = read_batch([body], RULES)
    assert [r.advantages.tolist() for r in batch.rows] == [[0.0, 0.0], [-0.5, -0.5]]


def test_a_refused_rows_score_stays_in_the_baseline() -> None:
    body = group([1.0, 0.0, 0.5], masks=[[-100, 8, 9], [-100, 0, 1], [-100, 8, 9]])
    batch = read_batch([body], RULES)
    assert [r.advantages[0] for r in batch.rows] == [0.5, 0.0]
    assert counts(batch) == {"mask_not_token": 1}
    assert "position 1: id 8, mask 0" in batch.refusals[0].detail


def test_equal_scores_are_dropped_unless_they_are_wanted() -> None:
    bodies = [group([1.0, 1.0]), group([1.0, 0.0])]
    dropped, kept = read_batch(bodies, RULES), read_batch(bodies, RowRules(512, drop_equal=False))
    assert counts(dropped) == {"equal_scores": 2} and dropped.dropped_groups == {"equal_scores": 1}
    assert len(kept.rows) == 4 and not kept.dropped
    assert dropped.episodes == kept.episodes == 4  # episode_sum divides by all that were played


def test_a_score_that_is_not_finite_drops_its_row_only() -> None:
    batch = read_batch([group([1.0, math.nan, 0.0])], RULES)
    assert counts(batch) == {"score_not_finite": 1}
    assert [r.advantages[0] for r in batch.rows] == [0.5, -0.5] and batch.episodes == 2


# -- what else a row carries ---------------------------------------------------------------------------


def test_rounding_above_zero_becomes_zero() -> None:
    body = group([1.0, 0.0], inference_logprobs=[[1.0, 5e-4, -0.25], [1.0, 2e-3, -0.25]])
    batch = read_batch([body], RULES)
    assert batch.rows[0].logprobs.tolist() == [0.0, -0.25]
    assert counts(batch) == {"logprob_positive": 1}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_must_be_finite_where_trained_only(value: float) -> None:
    good = group([1.0, 0.0], inference_logprobs=[[value, -0.5, -0.25]] * 2)
    assert len(read_batch([good], RULES).rows) == 2
    bad = group([1.0, 0.0], inference_logprobs=[[1.0, value, -0.25]] * 2)
    assert counts(read_batch([bad], RULES)) == {"logprob_not_finite": 2}


def test_the_first_id_of_a_row_cannot_be_trained() -> None:
    batch = read_batch([group([1.0, 0.0], masks=[[7, 8, 9], [-100, 8, 9]])], RULES)
    assert counts(batch) == {"first_id_trained": 1}


def test_temperature_is_taken_in_the_wires_order() -> None:
    sources: dict[str, Any] = {
        "overrides": [{"temperature": 0.1}, {}],
        "generation_params": {"temperature": 0.2},
        "group_overrides": {"temperature": 0.3},
    }
    got = []
    for name in [*sources, None]:
        body = group([1.0, 0.0], **sources)
        got.append(read_batch([body], RULES).rows[0].temperature)
        sources.pop(name, None)
    assert got == [0.1, 0.2, 0.3, 1.0]


def test_a_row_is_as_old_as_its_oldest_turn() -> None:
    overrides = [{"turn_versions": [6, 5]}, {}]
    body = group([1.0, 0.0], overrides=overrides, group_overrides={"policy_version": 7})
    batch = read_batch([body], RowRules(512, version=7, max_staleness=1))
    assert counts(batch) == {"stale": 1} and batch.rows[0].version == 7


def test_an_unknown_version_is_counted_and_never_refused() -> None:
    batch = read_batch([group([1.0, 0.0])], RowRules(512, version=3))
    assert batch.unknown_version == 2 and math.isnan(batch.staleness)


def test_turns_that_do_not_fit_the_row_are_refused() -> None:
    body = group([1.0, 0.0], overrides=[{"turns": [[1, 4]]}, {"turns": [[1, 3]]}])
    batch = read_batch([body], RULES)
    assert counts(batch) == {"turns_mismatch": 1} and batch.rows[0].turns == ((1, 3),)


def test_timesteps_are_turns_and_a_foreign_row_is_one() -> None:
    ours = group(
        [1.0, 0.0], overrides=[{"turn_rewards": [0.0, 1.0], "success": True}, {"turn_rewards": [0.0]}]
    )
    batch = read_batch([ours, group([1.0, 0.0])], RULES)
    assert batch.turns == 5
    assert [e.success for e in batch.played] == [True, None, None, None]


def test_an_empty_batch_has_no_rows() -> None:
    batch = read_batch([], RULES)
    assert batch.rows == [] and batch.rows_in == 0 and batch.turns == 0


# -- properties ----------------------------------------------------------------------------------------

wild_row = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(-1, 9), max_size=4),
        "trained": st.lists(st.booleans(), min_size=4, max_size=4),
        "logprob": st.sampled_from([-0.5, 0.0, 1e-4, 1.0, math.nan]),
        "score": st.sampled_from([0.0, 1.0, math.nan]),
        "cut_by": st.integers(0, 1),
    }
)


@settings(max_examples=80, deadline=None)
@given(groups=st.lists(st.lists(wild_row, max_size=4), max_size=4), version=st.integers(0, 4))
def test_every_row_is_trained_dropped_or_refused(groups: list[list[dict[str, Any]]], version: int) -> None:
    bodies = []
    for members in groups:
        masks = [
            [t if on else -100 for t, on in zip(m["tokens"], m["trained"], strict=False)] for m in members
        ]
        bodies.append(
            ScoredDataGroup.model_construct(
                tokens=[m["tokens"] for m in members],
                masks=[mask[m["cut_by"] :] for mask, m in zip(masks, members, strict=True)],
                inference_logprobs=[[m["logprob"]] * len(m["tokens"]) for m in members],
                scores=[m["score"] for m in members],
                group_overrides={"policy_version": version},
            )
        )
    batch = read_batch(bodies, RowRules(8, version=2, max_staleness=1))
    assert batch.rows_in == sum(map(len, groups)) == len(batch.rows) + sum(batch.dropped.values())
    assert all(np.isfinite(r.logprobs).all() and np.isfinite(r.advantages).all() for r in batch.rows)
    assert all((r.logprobs <= 0).all() and (r.positions > 0).all() for r in batch.rows)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), max_size=30), at_least=st.integers(1, 5), max_ids=st.integers(8, 200)
)
def test_micro_batches_hold_every_row_once_and_keep_the_limit(
    lengths: list[int], at_least: int, max_ids: int
) -> None:
    rows = [row(list(range(n)), [1]) for n in lengths]
    batches = micro_batches(rows, at_least=at_least, max_ids=max_ids)
    assert sorted(k for batch in batches for k in batch) == list(range(len(rows)))
    assert len(batches) >= min(at_least, len(rows))
    for batch in batches:
        padded = len(batch) * max(lengths[k] for k in batch)
        assert padded <= max_ids or len(batch) == 1


# -- what strangers write ------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 0, 1.5, "x", "", [], {}, [None], ["a"], [5], [[1]], [[1, 2, 3]], [[1, "a"]]),
    *([[None, 2]], [[1.5, 2]], {"a": 1}, 10**400, [10**400], 1e300),
]
OVERRIDES = (
    *("temperature", "turns", "turn_versions", "policy_version", "episode", "turn_rewards", "success"),
    *("set_advantage_to_zero", "truncated", "cut"),
)
GROUP_OVERRIDES = ("temperature", "policy_version", "tokenizer_fingerprint", "segments", "number")


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize(
    ("where", "key"),
    [
        *(("overrides", key) for key in OVERRIDES),
        *(("group_overrides", key) for key in GROUP_OVERRIDES),
        ("generation_params", "temperature"),
    ],
)
def test_free_fields_may_hold_anything_and_never_stop_a_run(where: str, key: str, value: Any) -> None:
    said: Any = {key: value}
    body = group([1.0, 0.0], **{where: [said, {}] if where == "overrides" else said})
    batch = read_batch([body, group([1.0, 0.0])], RowRules(512, version=0, fingerprint="f"))
    assert batch.rows_in == len(batch.rows) + sum(batch.dropped.values()) == 4
    assert len(batch.rows) >= 2 and batch.turns >= 1


def test_null_in_a_free_field_says_nothing() -> None:
    nulls = {"temperature": None, "episode": None, "turn_versions": None, "policy_version": None}
    body = group(
        [1.0, 0.0],
        overrides=[nulls, {**nulls, "turns": None, "turn_rewards": None}],
        generation_params={"temperature": None},
        group_overrides={"temperature": 0.5, "policy_version": 3},
    )
    batch = read_batch([body], RowRules(512, version=3))
    assert not batch.dropped
    assert [(row.temperature, row.version, row.advantages[0]) for row in batch.rows] == [
        (0.5, 3, 0.5),
        (0.5, 3, -0.5),
    ]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"turns": [[1, "3"]]}, "turns_mismatch"),
        ({"turns": 5}, "turns_mismatch"),
        ({"episode": [0]}, "episode_no_name"),
    ],
)
def test_a_row_that_says_nonsense_is_refused_by_name(override: dict[str, Any], reason: str) -> None:
    batch = read_batch([group([1.0, 0.0], overrides=[override, {}])], RULES)
    assert counts(batch) == {reason: 1} and len(batch.rows) == 1


@pytest.mark.parametrize(
    "override", [{"policy_version": "7"}, {"turn_versions": ["7"]}, {"turn_versions": 7}]
)
def test_a_version_that_is_no_integer_is_unknown(override: dict[str, Any]) -> None:
    batch = read_batch([group([1.0, 0.0], overrides=[override, {}])], RowRules(512, version=7))
    assert batch.unknown_version == 2 and not batch.dropped
