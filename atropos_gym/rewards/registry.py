"""All rewards by name, and weighted sums of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from atropos_gym.errors import ConfigError
from atropos_gym.rewards.answers import verify_math, verify_number
from atropos_gym.rewards.choice import verify_choice
from atropos_gym.rewards.lengths import length_penalty, overlong_penalty, repetition_penalty
from atropos_gym.rewards.simple import exact_match, format_reward, json_valid, regex_match, tag_count
from atropos_gym.rewards.verdict import Verdict

__all__ = ["REWARDS", "RewardFunction", "combine"]

RewardFunction = Callable[..., Verdict | float]

REWARDS: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        exact_match,
        format_reward,
        json_valid,
        length_penalty,
        overlong_penalty,
        regex_match,
        repetition_penalty,
        tag_count,
        verify_choice,
        verify_math,
        verify_number,
    )
}
"""Name -> function of a completion; a ``Verdict`` counts 1.0 where right, else 0.0. Add your own here."""


def combine(weights: Mapping[str, float]) -> Callable[..., tuple[float, dict[str, float]]]:
    """Returns a weighted sum of rewards.

    The sum is a function of a completion and keywords; each reward is given the keywords that it names. It
    returns the total and its terms, each already weighted.

    Args:
        weights: name in ``REWARDS`` -> weight.

    Raises:
        ConfigError: no weights, or a name that is no reward.

    Example:
        >>> reward = combine({"verify_number": 1.0, "format_reward": 0.25})
        >>> reward("#### 4", gold="4", format="hash")
        (1.25, {'verify_number': 1.0, 'format_reward': 0.25})
    """
    unknown = sorted(set(weights) - set(REWARDS))
    if unknown or not weights:
        raise ConfigError(f"weights must name rewards of {', '.join(REWARDS)}; got {unknown or 'none'}")
    known = {name: frozenset(inspect.signature(REWARDS[name]).parameters) for name in weights}

    def reward(completion: str, **keywords: Any) -> tuple[float, dict[str, float]]:
        stray = set(keywords).difference(*known.values())
        if stray:
            raise TypeError(f"no reward of {', '.join(weights)} takes {', '.join(sorted(stray))}")
        terms = {}
        for name, weight in weights.items():
            own = {key: value for key, value in keywords.items() if key in known[name]}
            result = REWARDS[name](completion, **own)
            terms[name] = weight * float(bool(result) if isinstance(result, Verdict) else result)
        return sum(terms.values()), terms

    return reward
