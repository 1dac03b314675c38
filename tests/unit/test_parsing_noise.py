"""Nothing is to be won by noise: random text, played, returns no more than uniformly random legal actions.

Texts that know nothing of the game (words, digits, lists, symbols, templates with planted actions) are read,
which gives how often each action comes out; what that player gets on average is then computed exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import atropos_gym  # noqa: F401  (registers the ids)
from atropos_gym.envs.blackjack_value import blackjack_value
from atropos_gym.parsing import ACTION_FORMATS, parse_action
from tests.tools.odd_texts import random_texts
from tests.tools.parsing_cases import BLACKJACK, LAKE, TAXI

WORDS = [format for format in ACTION_FORMATS if format != "box"]


@cache
def chances(names: tuple[str, ...], format: str) -> tuple[float, ...]:
    """How often random text is read as each action; what is left to 1 is invalid.

    The texts are told once for each turn of the names round the circle, so that but for the prose none is
    named more often than another: an action that comes out more often is the parser's doing.
    """
    count = 800
    counted: Counter[int] = Counter()
    dialect = "hermes" if format == "tool_call" else None
    space = spaces.Discrete(len(names))
    for turn in range(len(names)):
        texts = random_texts(names[turn:] + names[:turn], format, dialect, seed=5)
        for _ in range(count):
            parsed = parse_action(next(texts), space, format, names=names, dialect=dialect)
            if parsed.valid:
                counted[parsed.value] += 1
    assert counted and sum(counted.values()) < count * len(names)
    return tuple(counted[action] / count / len(names) for action in range(len(names)))


@pytest.mark.parametrize("format", WORDS)
def test_random_text_wins_no_hand_of_blackjack(format: str) -> None:
    """An invalid reply loses the hand, as atropos/Blackjack-v0 has it; both values are exact."""
    text = blackjack_value(lambda total, dealer, usable: chances(BLACKJACK, format))
    assert text < blackjack_value(lambda total, dealer, usable: 0.5)


def exact_return(
    env: Any, start: Any, turns: int, chance: np.ndarray[Any, Any], invalid_reward: float
) -> float:
    """Mean return within ``turns`` of a player who takes actions with ``chance``, shape (states, actions).

    What is left to 1 is invalid: it pays ``invalid_reward``, and the turn is over.
    """
    moves = np.array(
        [
            (state, action, *outcome)
            for state, actions in env.P.items()
            for action, outcomes in actions.items()
            for outcome in outcomes
        ],
        dtype=float,
    )
    states, acted, after = moves[:, [0, 1, 3]].astype(int).T
    probability, reward, over = moves[:, [2, 4, 5]].T
    values = np.zeros(len(chance))
    for _ in range(turns):
        gain = chance[states, acted] * probability * (reward + (1 - over) * values[after])
        values = (1 - chance.sum(1)) * (invalid_reward + values)
        np.add.at(values, states, gain)
    return float(start @ values)


def both_returns(
    env_id: str, names: tuple[str, ...], format: str, turns: int, invalid: float
) -> tuple[float, float]:
    """Exact mean returns of random text and of uniformly random legal actions."""
    env: Any = gymnasium.make(env_id).unwrapped
    start = np.asarray(env.initial_state_distrib)
    legal = np.ones((len(start), len(names)))
    if hasattr(env, "action_mask"):
        legal = np.array([env.action_mask(state) for state in range(len(start))], dtype=float)
    text = np.array(chances(names, format)) * legal  # what is not legal is invalid
    uniform = legal / legal.sum(1, keepdims=True).clip(1)
    return (
        exact_return(env, start, turns, text, invalid),
        exact_return(env, start, turns, uniform, invalid),
    )


@pytest.mark.parametrize("format", WORDS)
def test_random_text_crosses_no_lake(format: str) -> None:
    text, uniform = both_returns("FrozenLake-v1", LAKE, format, 100, -0.1)
    assert text < uniform


def test_even_where_an_invalid_reply_costs_nothing_noise_gains_nothing() -> None:
    for format in WORDS:
        text, uniform = both_returns("FrozenLake-v1", LAKE, format, 100, 0.0)
        assert text <= 1.02 * uniform  # it is the same walk with pauses


@pytest.mark.parametrize("format", WORDS)
def test_random_text_drives_no_taxi(format: str) -> None:
    text, uniform = both_returns("Taxi-v4", TAXI, format, 40, -1.0)
    assert text < uniform


def test_random_text_played_through_the_environment_returns_no_more_than_random_play() -> None:
    env: Any = gymnasium.make("atropos/Blackjack-v0", describe="terse").unwrapped
    texts = random_texts(BLACKJACK, "bare_word", None, seed=9)

    def play(say: Callable[[], str], hands: int) -> float:
        total = 0.0
        for seed in range(hands):
            env.reset(seed=seed)
            over = False
            while not over:
                ids = env.renderer.say(say())[: env.max_turn_tokens]
                _, reward, terminated, truncated, _ = env.step(np.array(ids, np.int32))
                total += float(reward)
                over = terminated or truncated
        return total / hands

    assert play(lambda: next(texts), 300) < play(env.sample_reply, 300)
