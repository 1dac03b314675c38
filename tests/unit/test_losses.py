"""Losses, KL estimators, weights and reductions give the numbers of tests/cases/e_learner.json."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.trainers import losses
from atropos_gym.trainers.losses import Totals, token_weights
from tests.unit.learner_cases import CASES, LEFT_OUT, Flat, by_op, close

OPS_ELSEWHERE = {
    "advantages", "whiten", "turn_returns", "process_supervision", "mixture", "overlong", "kl_in_reward",
    "update", "score", "mask", "collate", "row_check", "staleness", "truncated", "denominator", "no_drift",
    "score_dtype", "kl_to_base",
}  # fmt: skip
OPS_HERE = {
    "clip", "reductions", "gspo", "cispo", "reinforce", "kl", "kl_in_loss", "kl_weighted", "tis", "mis",
    "sequence_weight", "entropy", "data_parallel", "metrics", "clip_fraction",
}  # fmt: skip


def test_every_case_is_run_or_left_out_with_a_reason() -> None:
    assert {c["op"] for c in CASES.values() if c["id"] not in LEFT_OUT} == OPS_HERE | OPS_ELSEWHERE
    assert len(CASES) == 60 and set(LEFT_OUT) == {"e59"}


def totals(flat: Flat, **fields: Any) -> Totals:
    return Totals(tokens=len(flat.row), rows=len(flat.mask), **fields)


@pytest.mark.parametrize("case", by_op("clip"))
def test_clip(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    flat = Flat(inputs)
    band = {k: inputs[k] for k in ("eps_low", "eps_high") if k in inputs}
    per_token = losses.clipped_loss(
        flat.logp, flat.old, flat.advantage, **band, dual_clip=inputs.get("dual_clip")
    )
    loss = (token_weights(flat.row, totals(flat), inputs["reduction"]) * per_token).sum()
    loss.backward()
    close(loss, expect["loss"], case)
    close(flat.lay(per_token.detach()), expect["per_token"], case)
    close(flat.lay(flat.logp.grad), expect["grad_logp"], case)
    ratio = losses.importance_ratio(flat.logp, flat.old)
    close(losses.clip_fraction(ratio, flat.advantage, **band).mean(), expect["clip_fraction"], case)


def test_max_for_negative_advantages_would_show() -> None:
    wrong = CASES["e20"]["wrong"]["max_for_negative"]["per_token_row_1"]
    flat = Flat(CASES["e20"]["inputs"])
    per_token = flat.lay(losses.clipped_loss(flat.logp, flat.old, flat.advantage).detach())
    assert per_token[1] != pytest.approx(wrong)


@pytest.mark.parametrize("case", by_op("reductions"))
def test_reductions(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    for reduction, expect in case["expect"].items():
        flat = Flat(inputs)
        per_token = losses.clipped_loss(flat.logp, flat.old, flat.advantage)
        weights = token_weights(flat.row, totals(flat, max_length=inputs["max_length"]), reduction)
        (weights * per_token).sum().backward()
        close((weights * per_token).sum(), expect["loss"], case)
        close(flat.lay(flat.logp.grad), expect["grad_logp"], case)


def test_episode_sum_divides_by_all_episodes_dead_ones_too() -> None:
    weights = token_weights(torch.tensor([0, 0, 1]), Totals(tokens=3, rows=2, episodes=8), "episode_sum")
    assert weights.tolist() == [1 / 8] * 3


def test_unknown_reduction_is_named() -> None:
    with pytest.raises(ConfigError, match="token_mean, seq_mean, constant, episode_sum, got 'mean'"):
        token_weights(torch.tensor([0]), Totals(tokens=1), "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", by_op("gspo"))
def test_gspo(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    flat = Flat(inputs)
    per_token = losses.gspo_loss(
        flat.logp, flat.old, flat.advantage, flat.row, eps_low=inputs["eps_low"], eps_high=inputs["eps_high"]
    )
    loss = (token_weights(flat.row, totals(flat), inputs["reduction"]) * per_token).sum()
    loss.backward()
    close(losses.geometric_weights(flat.logp, flat.old, flat.row), expect["sequence_ratio"], case)
    close(loss, expect["loss"], case)
    close(flat.lay(flat.logp.grad), expect["grad_logp"], case)


@pytest.mark.parametrize("case", by_op("cispo", "reinforce"))
def test_losses_whose_gradient_is_never_cut(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    flat = Flat(inputs)
    if case["op"] == "cispo":
        per_token = losses.cispo_loss(flat.logp, flat.old, flat.advantage, ratio_max=inputs["ratio_max"])
    else:
        per_token = losses.reinforce_loss(flat.logp, flat.advantage)
    loss = (token_weights(flat.row, totals(flat), inputs["reduction"]) * per_token).sum()
    loss.backward()
    close(loss, expect["loss"], case)
    close(flat.lay(per_token.detach()), expect["per_token"], case)
    close(flat.lay(flat.logp.grad), expect["grad_logp"], case)


@pytest.mark.parametrize("case", by_op("kl"))
def test_kl_estimators(case: dict[str, Any]) -> None:
    for name, expect in case["expect"].items():
        logp = torch.tensor(case["inputs"]["logp_new"], dtype=torch.float64, requires_grad=True)
        ref = torch.tensor(case["inputs"]["logp_ref"], dtype=torch.float64)
        value = getattr(losses, name)(logp, ref)
        value.sum().backward()
        close(value.tolist(), expect["value"], case)
        close(logp.grad.tolist(), expect["grad"], case)


@pytest.mark.parametrize("case", by_op("kl_in_loss"))
def test_kl_in_the_loss_has_the_policy_terms_denominator(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    flat = Flat(inputs)
    weights = token_weights(flat.row, totals(flat), inputs["reduction"])
    policy = (weights * losses.clipped_loss(flat.logp, flat.old, flat.advantage)).sum()
    kl = (weights * losses.k3(flat.logp, flat.pick(inputs["logp_ref"]))).sum()
    loss = policy + inputs["beta"] * kl
    loss.backward()
    close(
        {"policy_loss": policy, "kl": kl, "loss": loss, "grad_logp": flat.lay(flat.logp.grad)}, expect, case
    )


@pytest.mark.parametrize("case", by_op("kl_weighted"))
def test_weighted_kl_has_the_gradient_of_the_reverse_kl(case: dict[str, Any]) -> None:
    logp, ref, old = (
        torch.tensor(case["inputs"][name], dtype=torch.float64)
        for name in ("logp_new", "logp_ref", "logp_old")
    )
    logp.requires_grad_()
    value = losses.weighted_k3(logp, ref, old)
    value.sum().backward()
    close({"value": value.tolist(), "grad": logp.grad.tolist()}, case["expect"], case)


@pytest.mark.parametrize("case", by_op("tis"))
def test_truncated_weights_correct_engine_against_learner(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    flat = Flat(inputs, old="logp_learner_old")
    weights = losses.truncated_weights(flat.old, flat.pick(inputs["logp_engine"]), inputs["cap"])
    per_token = weights * losses.clipped_loss(flat.logp, flat.old, flat.advantage)
    loss = (token_weights(flat.row, totals(flat)) * per_token).sum()
    loss.backward()
    close({"weights": flat.lay(weights), "loss": loss, "grad_logp": flat.lay(flat.logp.grad)}, expect, case)


@pytest.mark.parametrize("case", by_op("mis"))
def test_masked_weights_keep_all_ids_in_the_denominator(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    (ratio,) = inputs["ratio_learner_engine"]
    old = torch.tensor(ratio, dtype=torch.float64).log()
    weights = losses.masked_weights(old, torch.zeros_like(old), tuple(inputs["band"]))
    close([weights.tolist()], expect["weights"], case)
    close([(weights > 0).double().tolist()], expect["kept"], case)
    close((weights == 0).double().mean(), expect["masked_fraction"], case)
    everything = token_weights(torch.zeros(len(ratio), dtype=torch.int64), Totals(tokens=len(ratio)))
    close((everything * weights * -inputs["advantages"][0]).sum(), expect["loss_denominator_all"], case)


@pytest.mark.parametrize("case", by_op("sequence_weight"))
def test_a_sequences_weight_is_the_geometric_mean(case: dict[str, Any]) -> None:
    ratio = torch.tensor(case["inputs"]["log_ratio"][0], dtype=torch.float64)
    rows = torch.zeros(len(ratio), dtype=torch.int64)
    weights = losses.geometric_weights(ratio, torch.zeros_like(ratio), rows)
    close(weights.tolist(), [case["expect"]["geometric"]], case)
    assert weights.item() != pytest.approx(case["expect"]["product"])


@pytest.mark.parametrize("case", by_op("entropy"))
def test_entropy_of_the_distribution_that_was_sampled(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    logits = torch.tensor(inputs["logits"], dtype=torch.float64)
    temperature = torch.tensor(inputs["temperature"], dtype=torch.float64)
    entropy = losses.entropy(logits / temperature[:, None])
    close(entropy.tolist(), expect["entropy"], case)
    trained = entropy[torch.tensor(inputs["mask"]) == 1]
    close(trained.mean(), expect["mean"], case)
    close(-inputs["coef"] * trained.mean(), expect["bonus_in_loss"], case)


def test_entropy_of_logits_that_cannot_be_sampled_has_no_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    losses.entropy(logits).sum().backward()
    assert losses.entropy(logits).item() == pytest.approx(math.log(2))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("case", by_op("data_parallel"))
def test_ranks_divide_by_the_tokens_of_all_of_them(case: dict[str, Any]) -> None:
    ranks = case["inputs"]["ranks"]
    # Gradients are averaged over ranks, so each divides by the mean token count.
    shared = Totals(tokens=sum(rank["tokens"] for rank in ranks) / len(ranks))
    backward = [
        float(token_weights(torch.zeros(1, dtype=torch.int64), shared)) * rank["loss_sum"] for rank in ranks
    ]
    close(backward, case["expect"]["backward_loss_per_rank"], case)
    close(sum(backward) / len(ranks), case["expect"]["effective_loss"], case)


@pytest.mark.parametrize("case", by_op("metrics"))
def test_metrics_between_engine_and_learner(case: dict[str, Any]) -> None:
    learner, engine = (
        torch.tensor(case["inputs"][k], dtype=torch.float64) for k in ("logp_learner", "logp_engine")
    )
    got = {
        "alignment": losses.alignment(learner, engine).mean(),
        "ratio_mean": losses.importance_ratio(learner, engine).mean(),
        "approx_kl": losses.approx_kl(learner, engine).mean(),
    }
    close(got, case["expect"], case)


@pytest.mark.parametrize("case", by_op("clip_fraction"))
def test_clip_fraction_counts_removed_gradients_only(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    ratio, advantage = (torch.tensor(inputs[k], dtype=torch.float64) for k in ("ratio", "advantages"))
    share = losses.clip_fraction(ratio, advantage, inputs["eps_low"], inputs["eps_high"]).mean()
    close(share, case["expect"]["clip_fraction"], case)
    outside = ((ratio < 0.8) | (ratio > 1.2)).double().mean()
    close(outside, case["expect"]["outside_band"], case)


@settings(max_examples=50, deadline=None)
@given(
    new=st.lists(st.floats(-1e4, 0), min_size=1, max_size=6),
    old=st.floats(-1e4, 0),
    advantage=st.floats(-10, 10),
)
def test_no_logprob_makes_a_loss_or_gradient_infinite(new: list[float], old: float, advantage: float) -> None:
    logp = torch.tensor(new, requires_grad=True)
    other = torch.full_like(logp.detach(), old)
    terms = [
        losses.clipped_loss(logp, other, torch.full_like(other, advantage)),
        losses.k3(logp, other),
        losses.weighted_k3(logp, other, other),
    ]
    total = torch.stack([term.sum() for term in terms]).sum()
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(logp.grad).all()


def test_no_gradient_reaches_old_reference_or_engine_logprobs() -> None:
    other = torch.tensor([-1.0, -0.5], requires_grad=True)
    logp = torch.tensor([-0.9, -0.6], requires_grad=True)
    advantage = torch.ones(2)
    loss = (
        losses.clipped_loss(logp, other, advantage) * losses.truncated_weights(other, other)
        + losses.k3(logp, other)
        + losses.weighted_k3(logp, other, other)
        + losses.cispo_loss(logp, other, advantage, ratio_max=2.0)
    )
    loss.sum().backward()
    assert other.grad is None and logp.grad is not None
