"""One known trajectory from environment to loss, every number worked out by hand.

The task: two numbers are said, one after another; the policy answers each with one byte. Bytes tokenizer:
BOS 257, END 258, USER 260, ASSISTANT 261. The "model" of the learner gives every id the same chance, 1/264.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.text_env import TextEnv
from atropos_gym.trainers.batches import RowRules, read_batch
from atropos_gym.trainers.update import LossSettings, accumulate, alignment_of, totals_of
from tests.unit.learner_cases import Bigram


class TwoNumbers(TextEnv):
    """Pays the number of turns answered with "y"."""

    max_turns = 2
    max_turn_tokens = 4
    max_prompt_tokens = 8
    max_feedback_tokens = 8

    def begin(self, options: dict[str, Any]) -> str:
        self.turn = 0
        return "1"

    def respond(self, reply: Reply) -> Feedback:
        self.turn += 1
        reward = float(reply.content == "y")
        return Feedback("2" if self.turn == 1 else None, reward=reward, terminated=self.turn == 2)


Y, N, END = ord("y"), ord("n"), 258
FIRST = (257, 260, ord("1"), 261)  # BOS USER "1" ASSISTANT
#: member 0 says y, y and earns 2; member 1 says n (its end id cut off) and y: 1.
SAID = {
    FIRST: [[Y, END], [N, N, N, N]],
    (*FIRST, Y, END, 260, ord("2"), 261): [[Y, END]],
    (*FIRST, N, N, N, N, END, 260, ord("2"), 261): [[Y, END]],
}
LOGPROB = {Y: math.log(0.5), N: math.log(0.25), END: math.log(0.125)}


def test_a_trajectory_from_environment_to_loss() -> None:
    answers = {prompt: iter(replies) for prompt, replies in SAID.items()}
    engine = ScriptedEngine(
        lambda prompt, params, number: next(answers[prompt]),
        logprob=lambda prompt, ids, position, version: LOGPROB[ids[position]],
    )
    collector = GroupCollector(TwoNumbers, engine, group_size=2, concurrency=1)
    (group,) = collector.collect(1)
    collector.close()
    body = group.to_wire()

    # Prompt, reply, (the missing end id,) USER "2" ASSISTANT, reply: sampled ids are masked by themselves.
    x = -100
    assert body.tokens == [
        [*FIRST, Y, END, 260, 50, 261, Y, END],
        [*FIRST, N, N, N, N, END, 260, 50, 261, Y, END],
    ]
    assert body.masks == [
        [x, x, x, x, Y, END, x, x, x, Y, END],
        [x, x, x, x, N, N, N, N, x, x, x, x, Y, END],
    ]
    assert body.scores == [2.0, 1.0]

    batch = read_batch([body], RowRules(vocab_size=264, fingerprint=engine.tokenizer.fingerprint, version=0))
    assert not batch.dropped and batch.episodes == 2 and batch.turns == 4
    first, second = batch.rows
    assert first.positions.tolist() == [4, 5, 9, 10] and second.positions.tolist() == [4, 5, 6, 7, 12, 13]
    assert first.turns == ((4, 6), (9, 11)) and second.turns == ((4, 8), (12, 14))
    # Scores 2 and 1, mean 1.5.
    assert first.advantages.tolist() == [0.5] * 4 and second.advantages.tolist() == [-0.5] * 6
    half, quarter, eighth = LOGPROB[Y], LOGPROB[N], LOGPROB[END]
    assert np.allclose(first.logprobs, [half, eighth, half, eighth])
    assert np.allclose(second.logprobs, [quarter] * 4 + [half, eighth])

    model = Bigram(np.zeros((264, 264)).tolist())
    result = accumulate(
        model.score,
        batch.rows,
        totals_of(batch.rows, batch.episodes),
        LossSettings(reduction="episode_sum"),
        dtype=torch.float64,
    )
    # Ratios: (1/264)/(1/2) = 1/132, (1/264)/(1/4) = 1/66, (1/264)/(1/8) = 1/33, all far below 0.8.
    # A = +1/2 is not clipped from below: -r/2. A = -1/2 is clipped: +0.8/2, no gradient.
    gained = -0.5 * (1 / 132 + 1 / 33 + 1 / 132 + 1 / 33)
    lost = 0.5 * 6 * 0.8
    assert result.loss == pytest.approx((gained + lost) / 2)
    assert result.clip_fraction == pytest.approx(6 / 10)
    assert result.ratio_max == pytest.approx(1 / 33)
    uniform = math.log(264)
    gaps = (
        [uniform + half, uniform + eighth] * 2 + [uniform + quarter] * 4 + [uniform + half, uniform + eighth]
    )
    mean, largest = alignment_of(batch.rows, [0, 1], result.logprobs)
    assert mean == pytest.approx(sum(gaps) / 10) and largest == pytest.approx(uniform + half)

    # Gradient of the loss at the logits after ASSISTANT (261), where member 0 said "y" twice:
    # d/dz_y = 2 * -(1/2) * r * (1 - 1/264) / episodes, every other id + 1/264 of it.
    grad = model.table.weight.grad
    assert grad is not None
    at_y = -(1 / 132) * (1 - 1 / 264) / 2
    assert grad[261, Y].item() == pytest.approx(at_y)
    assert grad[261, N].item() == pytest.approx((1 / 132) / 264 / 2)
    assert grad[N].abs().max().item() == 0.0, "a clipped id teaches nothing"
