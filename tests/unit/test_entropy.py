"""Entropy over the answers that can be legal: where a choice is, and what it is worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.entropy import AnswerTrie, branch_entropy
from atropos_gym.trainers.losses import Totals
from atropos_gym.trainers.packing import collate
from atropos_gym.trainers.update import LossSettings, accumulate
from tests.unit.learner_cases import Bigram, row

END = 9
TRIE = AnswerTrie([[1, 2, END], [1, 3, END], [4, END]])


def test_the_trie_knows_what_can_follow() -> None:
    assert TRIE.children == {(): (1, 4), (1,): (2, 3), (1, 2): (END,), (1, 3): (END,), (4,): (END,)}


def test_choices_are_found_in_every_turn_and_only_within_answers() -> None:
    #          0  1  2    3    4  5    6  7  8
    ids = [0, 1, 3, END, 7, 4, END, 1, 8, 2]
    played = row(ids, [1, 2, 3, 5, 6, 7, 8, 9], turns=((1, 4), (5, 7), (7, 10)))
    assert TRIE.branches(played) == [(1, (1, 4)), (2, (2, 3)), (5, (1, 4)), (7, (1, 4)), (8, (2, 3))]


def test_a_turn_that_leaves_the_answers_has_no_further_choice() -> None:
    assert TRIE.branches(row([0, 5, 1, 2], [1, 2, 3], turns=((1, 4),))) == [(1, (1, 4))]


def test_one_answer_is_no_choice() -> None:
    with pytest.raises(ConfigError, match="at least two answers, the environment has 1"):
        AnswerTrie([[1, END], [1, END]])


def test_branch_entropy_is_that_of_the_children_renormalised() -> None:
    logits = torch.tensor([[2.0, 0.0, 2.0, 50.0], [0.0, math.log(3.0), 0.0, 0.0]], requires_grad=True)
    entropy = branch_entropy(logits, torch.tensor([[0, 2, -1], [0, 1, -1]]))
    quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.tolist() == pytest.approx([math.log(2), quarter])
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all() and logits.grad[0, 3] == 0.0, (
        "what is no answer gets no gradient"
    )


def test_choices_point_at_their_trained_ids() -> None:
    rows = [row([0, 4, END], [1, 2], turns=((1, 3),)), row([0, 0, 1, 2, END], [2, 3, 4], turns=((2, 5),))]
    branches = collate(rows, [1, 0], trie=TRIE).branches
    assert branches is not None
    assert branches.index_Q.tolist() == [0, 1, 3]  # row 1's first two ids, then row 0's first
    assert branches.children_QK.tolist() == [[1, 4], [2, 3], [1, 4]]


@pytest.mark.parametrize("reduction", ["episode_sum", "token_mean"])
def test_the_bonus_is_in_the_losses_own_reduction_dead_rows_included(reduction: str) -> None:
    weights = np.zeros((10, 10)).tolist()
    rows = [
        row([0, 4, END], [1, 2], 0.0, turns=((1, 3),)),
        row([0, 1, 3, END], [1, 2, 3], 0.0, turns=((1, 4),)),
    ]
    rows[1].count = 3
    settings = LossSettings(reduction=reduction, entropy_kind="answers", trie=TRIE)  # type: ignore[arg-type]
    totals = Totals(tokens=2 + 3 * 3, rows=4, episodes=8)
    model = Bigram(weights)
    result = accumulate(model.score, rows, totals, settings, entropy_coef=0.5, dtype=torch.float64)
    choices = 1 + 3 * 2  # every one is between two equally likely answers
    denominator = 8 if reduction == "episode_sum" else 11
    assert result.loss == pytest.approx(-0.5 * choices * math.log(2) / denominator)
    assert result.entropy == pytest.approx(math.log(2))


def test_rows_without_choices_have_no_entropy() -> None:
    rows = [row([0, 5], [1], turns=((1, 2),))]
    settings = LossSettings(entropy_kind="answers", trie=AnswerTrie([[1, 2], [1, 3]]))
    result = accumulate(
        Bigram(np.zeros((6, 6)).tolist()).score,
        rows,
        Totals(1),
        settings,
        entropy_coef=0.5,
        dtype=torch.float64,
    )
    assert math.isnan(result.entropy)
    assert result.loss == pytest.approx(-math.exp(1.0 - math.log(6.0)))  # the policy term alone, ratio 0.45
