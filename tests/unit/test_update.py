"""One optimizer step: any split into micro-batches, temperature by row, base and dropout off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from atropos_gym.trainers import losses
from atropos_gym.trainers.adapters import AdapterState, Lora, add_lora
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.packing import collate
from atropos_gym.trainers.scoring import Scorer, adapter_off, logprobs_of, rows_of, score_rows
from atropos_gym.trainers.tiny import tiny_model
from atropos_gym.trainers.update import Accumulated, LossSettings, accumulate, alignment_of, totals_of
from tests.unit.learner_cases import Bigram, by_op, close, row, rows_of_case


def step(model: Bigram, rows: list[Row], split: list[list[int]] | None = None, **fields: Any) -> Accumulated:
    loss = LossSettings(**fields)
    return accumulate(model.score, rows, totals_of(rows, len(rows)), loss, split=split, dtype=torch.float64)


@pytest.mark.parametrize("case", by_op("update"))
def test_update(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    rows = rows_of_case(inputs)
    for split in inputs.get("micro_batches", [None]):
        model = Bigram(inputs["W"])
        lr = inputs.get("learning_rate", 0.0)
        kind = torch.optim.AdamW if inputs.get("optimizer") == "adamw" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=lr, weight_decay=inputs.get("weight_decay", 0.0))
        result = step(model, rows, split)
        if result.tokens:
            optimizer.step()
        got = {
            "loss": result.loss,
            "grad_W": None if model.table.weight.grad is None else model.table.weight.grad.tolist(),
            "W_after": model.table.weight.tolist(),
            "step_taken": result.tokens > 0,
            "ratio": result.ratio_max,
            "clip_fraction": result.clip_fraction,
            "approx_kl": result.approx_kl,
            "alignment": alignment_of(rows, range(len(rows)), result.logprobs)[0] if result.tokens else None,
        }
        close({key: got[key] for key in expect}, expect, case)


@pytest.mark.parametrize("case", by_op("score"))
def test_scores_are_shifted_by_one_and_use_the_rows_temperature(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    model = Bigram(inputs["W"])
    trained = [k for k, m in enumerate(inputs["masks"]) if m != -100]
    assert trained == expect["trained_positions"]
    rows = [row(inputs["tokens"], trained, temperature=t) for t in inputs["temperatures"]]
    batch = collate(rows, range(len(rows)), dtype=torch.float64)
    logp = logprobs_of(model.score(batch), batch.target_M).reshape(len(rows), -1)
    close(logp.tolist(), expect["logp"], case)
    ratio = losses.importance_ratio(logp[0], logp[1]).tolist()
    close(ratio, expect["ratio_if_temperature_is_forgotten"], case)


@pytest.mark.parametrize("case", by_op("score_dtype"))
def test_logits_are_cast_to_float32_before_the_softmax(case: dict[str, Any]) -> None:
    logits = torch.tensor(case["inputs"]["logits_bfloat16"], dtype=torch.bfloat16)
    targets = torch.tensor(case["inputs"]["targets"])
    logp = logprobs_of(logits.repeat(len(targets), 1), targets)
    assert logp.dtype == torch.float32
    close(logp.tolist(), case["expect"]["logp"], case)


@pytest.mark.parametrize("case", by_op("kl_to_base"))
def test_the_base_is_the_adapter_switched_off(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.tensor(inputs["W_base"], dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> Any:
            return self.table(ids)

    config = LoraConfig(r=2, lora_alpha=2, target_modules=["table"])
    model = get_peft_model(Table(), config, autocast_adapter_dtype=False).double()
    layer = model.base_model.model.table
    layer.lora_embedding_A["default"].data = torch.eye(2, dtype=torch.float64)
    layer.lora_embedding_B["default"].data = torch.tensor(inputs["delta"], dtype=torch.float64).T
    ids = torch.tensor(inputs["tokens"])

    def score() -> torch.Tensor:
        return logprobs_of(model(ids[:-1]), ids[1:])

    with adapter_off(model):
        base = score()
    assert not base.requires_grad and score().requires_grad
    with pytest.raises(RuntimeError, match="on purpose"), adapter_off(model):
        raise RuntimeError("on purpose")
    logp = score().detach()
    got = {"logp": logp.tolist(), "logp_base": base.tolist(), "k3": losses.k3(logp, base).tolist()}
    close({**got, "mean_k3": losses.k3(logp, base).mean()}, expect, case)


def test_what_was_frozen_stays_frozen_after_the_base_was_asked() -> None:
    model = add_lora(tiny_model(), Lora(rank=2))
    frozen = next(p for name, p in model.named_parameters() if "lora_A" in name)
    frozen.requires_grad_(False)
    with adapter_off(model):
        pass
    assert not frozen.requires_grad


@pytest.mark.parametrize("case", by_op("no_drift"))
def test_a_learning_rate_of_zero_changes_no_bit(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    model = add_lora(tiny_model(), Lora(rank=4, dropout=inputs["lora_dropout"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.01, generator=torch.Generator().manual_seed(len(name)))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=inputs["learning_rate"], weight_decay=inputs["weight_decay"])
    scorer = Scorer(model)
    rows = [row([1, 5, 9, 3], [2, 3], 0.5), row([1, 5, 7], [1, 2], -0.5)]
    weights = {name: t.clone() for name, t in AdapterState(model).state_dict().items()}
    before = score_rows(scorer, rows)
    again = score_rows(scorer, rows)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(before, again, strict=True))
    assert difference == expect["two_scorings_differ_by"]
    for _ in range(inputs["steps"]):
        optimizer.zero_grad()
        accumulate(scorer, rows, totals_of(rows, 2), LossSettings())
        assert any(p.grad is not None and p.grad.any() for p in parameters)
        optimizer.step()
    now = AdapterState(model).state_dict()
    assert all(torch.equal(now[name], weights[name]) for name in weights)
    after = score_rows(scorer, rows)
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) == 0.0


# -- what no split, padding or value outside the mask can change -------------------------------------------

any_row = st.builds(
    lambda ids, advantage, first: row(ids, list(range(min(first, len(ids)), len(ids))), advantage),
    st.lists(st.integers(0, 2), min_size=2, max_size=7),
    st.floats(-2, 2),
    st.integers(1, 7),
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(any_row, min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 7), max_size=3),
    data=st.data(),
)
def test_order_and_micro_batches_change_no_gradient(rows: list[Row], cuts: list[int], data: Any) -> None:
    weights = [[0.2, -0.5, 0.9], [1.1, 0.3, -0.4], [-0.7, 0.6, 0.1]]
    order = data.draw(st.permutations(range(len(rows))))
    bounds = sorted({0, len(rows), *(c for c in cuts if c <= len(rows))})
    split = [order[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    for reduction in ("token_mean", "seq_mean", "constant", "episode_sum"):
        whole, parts = Bigram(weights), Bigram(weights)
        first = step(whole, rows, [list(range(len(rows)))], reduction=reduction)
        second = step(parts, rows, split, reduction=reduction)
        assert first.loss == pytest.approx(second.loss, rel=1e-9, abs=1e-12)
        if first.tokens:
            assert np.allclose(whole.table.weight.grad, parts.table.weight.grad, rtol=1e-9, atol=1e-12)


def test_averaging_micro_batch_means_would_show() -> None:
    (case,) = [p.values[0] for p in by_op("update") if p.id == "e39"]
    model = Bigram(case["inputs"]["W"])
    step(model, rows_of_case(case["inputs"]), [[0], [1], [2]])
    wrong = np.array(case["wrong"]["mean_of_micro_means_grad_W"])
    assert not np.allclose(model.table.weight.grad, wrong, atol=1e-3)


def test_engine_and_learner_as_two_policies_are_weighted_and_clipped_apart() -> None:
    rows = [row([0, 1, 2], [1, 2], 1.0, logprobs=[-0.5, -4.0])]
    plain = Bigram(np.zeros((3, 3)).tolist())
    old = step(plain, rows).logprobs  # log 1/3, the learner before the step
    model = Bigram(np.zeros((3, 3)).tolist())
    result = accumulate(
        model.score, rows, totals_of(rows, 1), LossSettings(tis_cap=2.0), old=old, dtype=torch.float64
    )
    weights = [math.exp(-math.log(3) + 0.5), 2.0]
    assert result.ratio_max == pytest.approx(1.0)  # learner against learner
    assert result.loss == pytest.approx(-sum(weights) / 2)  # learner against engine


# -- the scorer ----------------------------------------------------------------------------------------------


def test_padding_changes_no_score() -> None:
    scorer = Scorer(tiny_model())
    rows = rows_of([[1, 2, 3], [4], [5, 6]], [[7, 8], [9, 10, 11, 12], [13]])
    together = score_rows(scorer, rows)
    alone = [score_rows(scorer, [one])[0] for one in rows]
    for a, b in zip(together, alone, strict=True):
        assert np.abs(a - b).max() < 1e-5


def test_the_scorers_logits_are_the_models_own() -> None:
    model = tiny_model()
    (one,) = rows_of([[1, 2, 3]], [[4, 5]], temperature=0.7)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    want = (model(input_ids=ids).logits[0, 2:4] / 0.7).log_softmax(-1)[[0, 1], [4, 5]]
    assert score_rows(Scorer(model), [one])[0] == pytest.approx(want.tolist(), abs=1e-6)


def test_a_head_that_does_more_is_asked_for_its_own_logits() -> None:
    class Capped(type(tiny_model())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = 0.1 * torch.tanh(out.logits / 0.1)
            return out

    model = tiny_model()
    model.__class__ = Capped
    (one,) = rows_of([[1, 2, 3]], [[4, 5]])
    want = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 2:4].log_softmax(-1)[[0, 1], [4, 5]]
    assert score_rows(Scorer(model), [one])[0] == pytest.approx(want.tolist(), abs=1e-6)


def test_an_empty_completion_has_no_scores() -> None:
    scored = score_rows(Scorer(tiny_model()), rows_of([[1, 2], [3]], [[], [4]]))
    assert [len(one) for one in scored] == [0, 1]
