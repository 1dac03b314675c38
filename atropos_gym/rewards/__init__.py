"""Rewards: pure functions on strings.

``verify_number``, ``verify_math`` and ``verify_choice`` check answers and say right, wrong or unparsed, with
a reason to count by. The rest is small: the same text, the right form, length and repetition. ``combine``
makes a weighted sum.
"""

from __future__ import annotations

from atropos_gym.errors import UnusableGold, VerifierError
from atropos_gym.rewards._worker import start as warm_up
from atropos_gym.rewards.answers import read_gold_number, verify_math, verify_number
from atropos_gym.rewards.choice import verify_choice
from atropos_gym.rewards.lengths import length_penalty, overlong_penalty, repetition_penalty
from atropos_gym.rewards.registry import REWARDS, RewardFunction, combine
from atropos_gym.rewards.simple import exact_match, format_reward, json_valid, regex_match, tag_count
from atropos_gym.rewards.verdict import Verdict, VerdictValue

__all__ = [
    "REWARDS",
    "RewardFunction",
    "UnusableGold",
    "Verdict",
    "VerdictValue",
    "VerifierError",
    "combine",
    "exact_match",
    "format_reward",
    "json_valid",
    "length_penalty",
    "overlong_penalty",
    "read_gold_number",
    "regex_match",
    "repetition_penalty",
    "tag_count",
    "verify_choice",
    "verify_math",
    "verify_number",
    "warm_up",
]
