"""A hundred golds of GSM8K's test split: ten ways to give each are right, ten near misses are wrong.

The golds (numbers only, those with signs and separators among them) lie in tests/cases; the whole split is
tested in tests/integration.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_gym.rewards import Verdict, verify_math, verify_number
from tests.tools.gsm8k_answers import near_misses, phrasings

GOLDS: list[str] = json.loads((Path(__file__).parent.parent / "cases" / "gsm8k_golds.json").read_text())


def test_there_are_a_hundred() -> None:
    assert len(GOLDS) == 100
    assert {"-10", "1,450,000"} < set(GOLDS)


@pytest.mark.parametrize("check", [verify_number, verify_math])
@pytest.mark.parametrize("kind", phrasings("1"))
def test_the_gold_is_right_as(kind: str, check: Callable[[str, str], Verdict]) -> None:
    assert [gold for gold in GOLDS if not check(phrasings(gold)[kind], gold)] == []


@pytest.mark.parametrize("check", [verify_number, verify_math])
@pytest.mark.parametrize("kind", near_misses("1"))
def test_a_near_miss_is_wrong_as(kind: str, check: Callable[[str, str], Verdict]) -> None:
    assert [gold for gold in GOLDS if check(near_misses(gold)[kind], gold).value != "wrong"] == []
