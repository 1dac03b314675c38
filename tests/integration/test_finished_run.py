"""What a finished main job must have reached: run after ``make demo`` with ATROPOS_GYM_RUN=runs/<name>."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
RANDOM = -0.3942
OPTIMAL = -0.0431


@pytest.fixture(scope="module")
def run() -> Path:
    folder = os.environ.get("ATROPOS_GYM_RUN")
    if folder is None:
        pytest.skip("set ATROPOS_GYM_RUN to the folder of a finished main job (make demo)")
    return Path(folder)


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def test_the_format_lesson_taught_the_format_and_nothing_else(summary: dict[str, Any]) -> None:
    assert summary["before"]["valid"] >= 0.985
    assert abs(summary["before"]["exact_sampled"] - RANDOM) <= 0.05


def test_the_untrained_model_says_nothing_valid(summary: dict[str, Any]) -> None:
    assert summary["untrained"]["valid"] < 0.05
    assert summary["untrained"]["mean"] < -0.9


def test_grpo_learned_to_play(summary: dict[str, Any]) -> None:
    assert OPTIMAL >= summary["after"]["exact"] - 1e-9
    assert summary["after"]["exact"] >= -0.08
    assert summary["after"]["exact_sampled"] >= -0.10


def test_played_episodes_agree_with_the_exact_value(summary: dict[str, Any]) -> None:
    after = summary["after"]
    assert after["episodes"] >= 10_000
    assert abs(after["mean"] - after["exact"]) <= 3 * after["stderr"]


def test_reference_values_stand_beside(summary: dict[str, Any]) -> None:
    assert math.isclose(summary["random"], RANDOM, abs_tol=5e-5)
    assert math.isclose(summary["optimal"], OPTIMAL, abs_tol=5e-5)


def test_every_update_was_swapped_in(summary: dict[str, Any]) -> None:
    assert summary["updates"] == 200
    assert summary["swaps"] >= summary["updates"]


def test_it_stayed_within_its_time(summary: dict[str, Any]) -> None:
    assert sum(summary["seconds"].values()) < 480
    assert summary["cpu_seconds"] < 450


def test_its_files_are_there(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 200
    assert json.loads(lines[-1])["update"] == 200
    for name in ("config.yaml", "report.html", "base/config.json"):
        assert (run / name).is_file()
    assert list(run.glob("rollouts/*.jsonl"))
    assert list(run.rglob("adapter_model.safetensors"))
