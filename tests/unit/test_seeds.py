"""Seeds depend on where they are used, on nothing else, and evaluation's are never training's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.rollout.seeds import chance_seed, sampling_seed, start_seed

numbers = st.integers(min_value=0, max_value=2**40)
run_seeds = st.integers(min_value=-(2**63), max_value=2**63 - 1)


def test_values_never_change() -> None:
    """A changed value would silently change every recorded run."""
    assert sampling_seed(0, 12, 3, 0) == 2704944296954391742
    assert start_seed(0, 12) == 550897042


def test_another_process_gets_the_same_seeds() -> None:
    code = (
        "from atropos_gym.rollout.seeds import *; print(sampling_seed(5, 4, 3, 2, 1), chance_seed(5, 4, 3))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(sampling_seed(5, 4, 3, 2, 1)), str(chance_seed(5, 4, 3))]


@settings(max_examples=100, deadline=None)
@given(run_seeds, numbers, numbers, numbers, numbers)
def test_training_and_evaluation_are_disjoint_and_within_their_bits(
    run: int, group: int, member: int, turn: int, attempt: int
) -> None:
    where = (run, group, member, turn, attempt)
    assert 0 <= sampling_seed(*where) < 2**62 <= sampling_seed(*where, evaluation=True) < 2**63
    assert 0 <= start_seed(run, group) < 2**30 <= start_seed(run, group, evaluation=True) < 2**31
    assert 0 <= chance_seed(run, group, member) < 2**30
    assert 2**30 <= chance_seed(run, group, member, evaluation=True) < 2**31


def test_every_coordinate_matters() -> None:
    base = (1, 2, 3, 4, 5)
    moved = [tuple(value + (i == j) for j, value in enumerate(base)) for i in range(5)]
    seeds = {sampling_seed(*where) for where in [base, *moved]}
    assert len(seeds) == 6
    assert len({start_seed(1, 2), chance_seed(1, 2, 0), chance_seed(1, 2, 1), start_seed(1, 3)}) == 4


def test_swapped_coordinates_do_not_collide() -> None:
    seeds = {
        sampling_seed(0, g, m, t, a) for g in range(6) for m in range(6) for t in range(6) for a in range(3)
    }
    assert len(seeds) == 6 * 6 * 6 * 3


@pytest.mark.parametrize("bad", [2**70, -(2**64), 1.5, "7", None])
def test_a_seed_that_is_no_64_bit_integer_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="64-bit integers"):
        start_seed(bad, 0)
