"""Ours and the single-file reference give the same loss and the same gradient on the same groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atropos_gym.trainers.adapters import Lora, add_lora
from atropos_gym.trainers.batches import RowRules, read_batch
from atropos_gym.trainers.entropy import AnswerTrie
from atropos_gym.trainers.merging import merge_rows
from atropos_gym.trainers.scoring import Scorer, adapter_off
from atropos_gym.trainers.tiny import tiny_model
from atropos_gym.trainers.update import LossSettings, accumulate, totals_of
from atropos_gym.wire import ScoredDataGroup
from tests import reference_grpo as reference

ANSWERS = [[1, 2, 9], [1, 3, 9], [4, 9]]


def groups(seed: int) -> list[list[reference.Episode]]:
    """Three groups of four: short answers that repeat, two rows an episode here and there, one dead group."""
    rng = np.random.default_rng(seed)
    played = []
    for number in range(3):
        prompt = [7, 5 + number, 8]
        group = []
        for _ in range(4):
            rows = []
            for _ in range(int(rng.integers(1, 3)) if number == 1 else 1):
                answer = ANSWERS[int(rng.integers(3))][: int(rng.integers(2, 4))]
                ids = [*prompt, *answer]
                trained = [False] * 3 + [True] * len(answer)
                engine = [1.0] * 3 + (-1.0 - 0.1 * np.arange(len(answer)) - ids[4] / 8).tolist()
                rows.append({"ids": ids, "trained": trained, "engine": engine, "temperature": 0.8})
            group.append(reference.Episode(rows, 1.0 if number == 2 else float(rng.integers(0, 3))))
        played.append(group)
    return played


def to_wire(group: list[reference.Episode]) -> ScoredDataGroup:
    rows = [(k, episode.score, row) for k, episode in enumerate(group) for row in episode.rows]
    return ScoredDataGroup(
        tokens=[row["ids"] for _, _, row in rows],
        masks=[[i if on else -100 for i, on in zip(r["ids"], r["trained"], strict=True)] for _, _, r in rows],
        scores=[score for _, score, _ in rows],
        inference_logprobs=[row["engine"] for _, _, row in rows],
        advantages=[[0.0] * len(row["ids"]) for _, _, row in rows] if len(rows) > len(group) else None,
        overrides=[{"episode": k, "temperature": row["temperature"]} for k, _, row in rows],
        group_overrides={"segments": True} if len(rows) > len(group) else {},
    )


def adapted() -> Any:
    model = add_lora(tiny_model(), Lora(rank=4)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05, generator=generator)
    return model


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean", "constant", "episode_sum"])
@pytest.mark.parametrize("entropy", ["ids", "answers"])
@pytest.mark.parametrize("drop_equal", [True, False])
def test_gradients_are_the_references(reduction: Any, entropy: Any, drop_equal: bool) -> None:
    played = groups(seed=len(reduction))
    settings = {"reduction": reduction, "eps_low": 0.2, "eps_high": 0.3, "kl_coef": 0.05}
    theirs, ours = adapted(), adapted()

    def base(ids: torch.Tensor) -> torch.Tensor:
        with adapter_off(theirs):
            return theirs(input_ids=ids[None]).logits[0]

    answers = ANSWERS if entropy == "answers" else []
    loss = reference.update_loss(
        lambda ids: theirs(input_ids=ids[None]).logits[0],
        base,
        played,
        reference.Settings(
            **settings, entropy_coef=0.1, answers=answers, drop_equal=drop_equal, max_length=6
        ),
    )
    loss.backward()

    batch = read_batch([to_wire(g) for g in played], RowRules(264, drop_equal=drop_equal))
    rows, _ = merge_rows(batch.rows)
    assert len(rows) < len(batch.rows), "nothing merged: the comparison would say less"
    scorer = Scorer(ours)

    def score_base(micro_batch: Any) -> torch.Tensor:
        with adapter_off(ours):
            return scorer(micro_batch)

    trie = AnswerTrie(ANSWERS) if entropy == "answers" else None
    result = accumulate(
        scorer,
        rows,
        totals_of(rows, batch.episodes, max_length=6),
        LossSettings(**settings, entropy_kind=entropy, trie=trie, sub_batches=3),
        entropy_coef=0.1,
        score_base=score_base,
        dtype=torch.float64,
    )
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    trained = [(a.grad, b.grad) for a, b in pairs if a.requires_grad]
    assert trained
    for a, b in trained:
        # transformers computes norms in float32 even in a float64 model, which stops the comparison here.
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8)


def test_the_reference_itself_learns() -> None:
    curve = reference.main()
    assert curve[0] < 0.5 and min(curve[-5:]) > 0.9
