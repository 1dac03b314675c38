"""Merged rows give the gradient, the entropy and the counts of the rows they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.entropy import AnswerTrie
from atropos_gym.trainers.losses import Reduction
from atropos_gym.trainers.merging import merge_rows
from atropos_gym.trainers.update import Accumulated, LossSettings, accumulate, alignment_of, totals_of
from tests.unit.learner_cases import Bigram, row

WEIGHTS = [[0.2, -0.5, 0.9], [1.1, 0.3, -0.4], [-0.7, 0.6, 0.1]]
TRIE = AnswerTrie([[1, 2], [2, 1], [2, 2]])


def gradient(rows: list[Row], settings_: LossSettings, episodes: int) -> tuple[np.ndarray, Accumulated]:
    model = Bigram(WEIGHTS)
    result = accumulate(
        model.score,
        rows,
        totals_of(rows, episodes, max_length=5),
        settings_,
        entropy_coef=0.1,
        score_base=Bigram([[0.0] * 3] * 3).score,
        dtype=torch.float64,
    )
    return model.table.weight.grad.numpy(), result


short_row = st.builds(
    lambda ids, advantage, old: row(
        ids, list(range(1, len(ids))), advantage, logprobs=[old] * (len(ids) - 1)
    ),
    st.lists(st.integers(0, 2), min_size=2, max_size=3),
    st.sampled_from([-1.0, -0.25, 0.0, 0.5, 2.0]),
    st.sampled_from([-1.0, -1.0 + 1e-3, -3.0]),
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(short_row, min_size=1, max_size=12),
    kind=st.sampled_from(["ids", "answers"]),
    data=st.data(),
)
@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean", "constant", "episode_sum"])
def test_merging_changes_no_gradient(rows: list[Row], kind: Any, data: Any, reduction: Reduction) -> None:
    for one in rows:
        one.turns = ((1, len(one.ids)),)
    loss = LossSettings(reduction=reduction, kl_coef=0.05, entropy_kind=kind, trie=TRIE)
    plain, before = gradient(rows, loss, episodes=len(rows))
    merged, became = merge_rows(rows)
    got, after = gradient(merged, loss, episodes=len(rows))
    assert np.allclose(got, plain, rtol=1e-9, atol=1e-12)
    for name in ("tokens", "loss", "entropy", "clip_fraction", "approx_kl", "kl_base", "ratio_max"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-9, abs=1e-12, nan_ok=True)
    assert sum(one.count for one in merged) == len(rows) == len(became)
    alone = alignment_of(rows, range(len(rows)), before.logprobs)
    assert alignment_of(rows, became, after.logprobs) == pytest.approx(alone)


def test_equal_rows_of_one_sign_become_one() -> None:
    rows = [row([0, 1, 2], [1, 2], 0.5), row([0, 1, 2], [1, 2], 0.25)]
    (merged,), became = merge_rows(rows)
    assert merged.count == 2 and merged.advantages.tolist() == [0.75, 0.75] and became == [0, 0]
    assert rows[0].count == 1 and rows[0].advantages.tolist() == [0.5, 0.5], "the rows given are left alone"


@pytest.mark.parametrize(
    "other",
    [
        row([0, 1, 1], [1, 2], 0.5),
        row([0, 1, 2], [2], 0.5),
        row([0, 1, 2], [1, 2], -0.5),
        row([0, 1, 2], [1, 2], 0.0),
        row([0, 1, 2], [1, 2], 0.5, temperature=0.7),
        row([0, 1, 2], [1, 2], 0.5, version=4),
        row([0, 1, 2], [1, 2], 0.5, turns=((1, 2), (2, 3))),
        row([0, 1, 2], [1, 2], 0.5, logprobs=[-1.0, -1.0001]),
    ],
    ids=["ids", "mask", "sign", "zero", "temperature", "version", "turns", "old logprobs"],
)
def test_rows_that_differ_stay_apart(other: Row) -> None:
    merged, became = merge_rows([row([0, 1, 2], [1, 2], 0.5), other])
    assert len(merged) == 2 and became == [0, 1]


def test_old_logprobs_within_rounding_merge_and_the_first_ones_are_used() -> None:
    rows = [row([0, 1], [1], logprobs=[-1.0]), row([0, 1], [1], logprobs=[-1.000009])]
    (merged,), _ = merge_rows(rows)
    assert merged.logprobs.tolist() == [-1.0]


def test_per_token_signs_must_agree_everywhere() -> None:
    rows = [row([0, 1, 2], [1, 2]), row([0, 1, 2], [1, 2])]
    rows[0].advantages, rows[1].advantages = np.array([1.0, -1.0]), np.array([1.0, 1.0])
    assert len(merge_rows(rows)[0]) == 2
