"""The slope test tells neighbouring versions apart, and says when it cannot."""

from __future__ import annotations

import numpy as np
import pytest

from atropos_gym.trainers.adapters import AdapterState, Lora, add_lora
from atropos_gym.trainers.scoring import Scorer, rows_of, score_rows
from atropos_gym.trainers.slope import slope_test
from atropos_gym.trainers.tiny import tiny_model

RNG = np.random.default_rng(0)
OLD = RNG.uniform(-5, -0.1, 256)
MOVE = RNG.normal(0.0, 1e-2, 256)
NOISE = RNG.normal(0.0, 5e-6, 256)


def test_an_honest_swap_has_slope_one() -> None:
    found = slope_test(OLD + MOVE + NOISE, OLD + MOVE, OLD)
    assert found.verdict == "swapped" and found.slope == pytest.approx(1.0, abs=1e-3)


def test_an_engine_that_serves_the_old_weights_has_slope_zero() -> None:
    found = slope_test(OLD + NOISE, OLD + MOVE, OLD)
    assert found.verdict == "not_swapped" and found.slope == pytest.approx(0.0, abs=1e-3)


def test_a_wrong_scale_shows() -> None:
    assert slope_test(OLD + 0.5 * MOVE + NOISE, OLD + MOVE, OLD).verdict == "not_swapped"


def test_a_half_stale_prefix_cache_shows() -> None:
    stale = np.where(np.arange(256) % 3 == 0, OLD, OLD + MOVE) + NOISE
    found = slope_test(stale, OLD + MOVE, OLD)
    assert found.verdict == "not_swapped" and 0.5 < found.slope < 0.8


@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_an_update_below_the_noise_is_unmeasurable(size: float) -> None:
    found = slope_test(OLD + NOISE, OLD + size * RNG.normal(size=256), OLD)
    assert found.verdict == "unmeasurable" and "unmeasurable" in str(found)


def test_noise_of_bfloat16_needs_more_ids_not_another_verdict() -> None:
    noise = RNG.normal(0.0, 0.045, 256)
    found = slope_test(OLD + MOVE + noise, OLD + MOVE, OLD, noise=0.045, both_float32=False)
    assert found.verdict == "unmeasurable"
    many = RNG.normal(0.0, 2e-2, 40_000)
    found = slope_test(
        many + RNG.normal(0.0, 0.045, 40_000), many, np.zeros(40_000), noise=0.045, both_float32=False
    )
    assert found.verdict == "swapped"


def test_no_ids_are_unmeasurable() -> None:
    nothing = np.zeros(0)
    assert slope_test(nothing, nothing, nothing).verdict == "unmeasurable"


def test_neighbouring_versions_of_a_real_adapter_are_told_apart() -> None:
    model = add_lora(tiny_model(), Lora(rank=4))
    adapter, scorer = AdapterState(model), Scorer(model)
    prompts = RNG.integers(0, 256, (16, 12)).tolist()
    completions = RNG.integers(0, 256, (16, 8)).tolist()

    def score() -> np.ndarray:
        return np.concatenate(score_rows(scorer, rows_of(prompts, completions)))

    old = score()
    for name, tensor in adapter.state_dict().items():
        if "lora_B" in name:
            tensor += np.float32(1e-3)
    new = score()
    assert slope_test(new, new, old).verdict == "swapped"
    assert slope_test(old, new, old).verdict == "not_swapped"
