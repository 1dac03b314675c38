"""A learner proves itself: a tiny model learns to say the word it was told, from scratch, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_gym.rollout.evaluation import evaluate
from atropos_gym.trainers.grpo import GRPO


@pytest.mark.slow
def test_identity_is_learned_in_seconds(tmp_path: Path) -> None:
    env = "atropos/Identity-v0"
    with GRPO(
        "tiny",
        env,
        seed=0,
        learning_rate=4e-3,
        groups_per_update=24,
        reduction="episode_sum",
        drop_equal=False,
        entropy=(0.02, "answers"),
        folder=tmp_path,
    ) as model:
        model.warm_up(120, batch_size=32)
        before = evaluate(env, model, 200, seed=1, deterministic=False)
        model.learn(updates=30)
        greedy = evaluate(env, model, 200, seed=1)
        sampled = evaluate(env, model, 200, seed=1, deterministic=False)
    assert before.mean < 0.4, "four words: the lesson teaches to guess, which gives 0.25"
    assert greedy.mean > 0.95 and sampled.mean > 0.7
