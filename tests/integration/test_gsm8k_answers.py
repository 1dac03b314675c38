"""GSM8K's test problems, all of them: ten ways to give each gold are right, ten near misses are wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_gym.rewards import Verdict, read_gold_number, verify_math, verify_number
from tests.tools.gsm8k_answers import near_misses, phrasings

pytestmark = pytest.mark.slow
PROBLEMS = 1319


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """The worked solutions, each with its gold after ``####``."""
    given = os.environ.get("ATROPOS_GYM_GSM8K")
    beside = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"
    path = Path(given) if given else beside
    if not path.is_file():
        pytest.skip("no GSM8K: set ATROPOS_GYM_GSM8K to its test.jsonl")
    return [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("check", [verify_number, verify_math])
def test_every_gold_in_ten_phrasings_and_ten_near_misses(
    check: Callable[[str, str], Verdict], answers: list[str]
) -> None:
    assert len(answers) == PROBLEMS
    bad = []
    for answer in answers:
        gold = answer.rpartition("####")[2].strip()
        for wanted, completions in (("right", phrasings(gold)), ("wrong", near_misses(gold))):
            assert len(completions) == 10
            bad += [
                (gold, kind, verdict.value, verdict.reason)
                for kind, completion in completions.items()
                if (verdict := check(completion, answer)).value != wanted
            ]
    assert bad == []


def test_every_solution_is_right_for_its_own_gold(answers: list[str]) -> None:
    for answer in answers:
        assert verify_number(answer, answer), answer
        assert verify_math(answer, answer), answer
        assert verify_number(f"#### {read_gold_number(answer).value + 1}", answer).value == "wrong", answer
