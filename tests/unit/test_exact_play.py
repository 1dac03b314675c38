"""The exact value of a policy's play in Blackjack, asked of policies whose value is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest

import atropos_gym  # noqa: F401
from atropos_gym.cli.blackjack import BlackjackScorer, letters, reference_values
from atropos_gym.envs.blackjack_value import STATES, textbook
from atropos_gym.text_env import TextEnv

State = tuple[int, int, int]


def make(**kwargs: Any) -> TextEnv:
    env = gymnasium.make("atropos/Blackjack-v0", **kwargs).unwrapped
    assert isinstance(env, TextEnv)
    return env


class Player:
    """Reads the prompt as a model would, and answers by a rule: a text, or the chance of each answer."""

    def __init__(
        self, env: TextEnv, says: Callable[[State], str], hits: float = 0.5, keeps: float = 1.0
    ) -> None:
        self.env, self.says, self.hits, self.keeps = env, says, hits, keeps

    def state(self, prompt: Any) -> State:
        text = self.env.tokenizer.decode([int(i) for i in prompt if i < 256])
        found: State = self.env.describer.parse(text)  # type: ignore[attr-defined]
        return found

    def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, None]:
        assert deterministic
        assert observation.dtype == object
        return [self.env.renderer.say(self.says(self.state(prompt))) for prompt in observation], None

    def score(self, prompts: Any, completions: Any, *, temperature: float = 1.0) -> list[Any]:
        rows = []
        for _, ids in zip(prompts, completions, strict=True):
            chance = self.keeps * (self.hits if ids == self.env.renderer.say("hit") else 1 - self.hits)
            rows.append(np.full(len(ids), math.log(chance) / len(ids)))
        return rows


@pytest.fixture(params=["terse", "full"])
def env(request: pytest.FixtureRequest) -> TextEnv:
    return make(describe=request.param, history="latest")


@pytest.mark.parametrize(
    ("says", "value"),
    [
        (lambda state: "hit" if textbook(*state) else "stick", -0.0431),
        (lambda state: "hit" if state[0] < 17 else "stick", -0.0759),
        (lambda state: "stick", -0.1829),
        (lambda state: "hit", -1.0),
        (lambda state: "pass", -1.0),
        (lambda state: "", -1.0),
        (lambda state: "hit or stick", -1.0),
    ],
    ids=["textbook", "stick on 17", "always stick", "always hit", "another word", "nothing", "both"],
)
def test_greedy_play_is_worth_what_is_known_of_it(
    env: TextEnv, says: Callable[[State], str], value: float
) -> None:
    scorer = BlackjackScorer(env)
    assert scorer.value(scorer.greedy(Player(env, says))) == pytest.approx(value, abs=5e-5)


def test_what_is_neither_answer_is_marked_and_costs_the_hand(env: TextEnv) -> None:
    scorer = BlackjackScorer(env)
    table = scorer.greedy(Player(env, lambda state: "fold" if state == (20, 10, 0) else "stick"))
    assert [state for state, letter in table.items() if letter == "?"] == [(20, 10, 0)]
    assert scorer.value(table) < -0.1829


@pytest.mark.parametrize(("keeps", "value"), [(1.0, -0.3942), (0.5, None), (1e-9, -1.0)])
def test_sampled_play_counts_the_rest_as_invalid(keeps: float, value: float | None) -> None:
    env = make(describe="terse")
    scorer = BlackjackScorer(env)
    chances = scorer.sampled(Player(env, lambda state: "stick", keeps=keeps))
    assert all(sum(pair) == pytest.approx(keeps) for pair in chances.values())
    found = scorer.value(chances)
    if value is None:
        assert -1 < found < -0.3942
    else:
        assert found == pytest.approx(value, abs=5e-5)


def test_the_games_own_settings_count() -> None:
    env = make(describe="terse", sab=False)
    scorer = BlackjackScorer(env)
    best = scorer.value(scorer.greedy(Player(env, lambda state: "hit" if textbook(*state) else "stick")))
    assert best == pytest.approx(-0.0466, abs=5e-5)
    assert scorer.references()["random"] == pytest.approx(-0.3959, abs=5e-5)


def test_every_prompt_is_the_one_that_an_episode_begins_with(env: TextEnv) -> None:
    prompts = {tuple(prompt) for prompt in BlackjackScorer(env).prompts}
    assert len(prompts) == len(STATES) == 280
    for seed in range(50):
        observation, _ = env.reset(seed=seed)
        assert tuple(int(i) for i in observation) in prompts


def test_other_environments_have_no_exact_value() -> None:
    lake = gymnasium.make("atropos/FrozenLake-v0").unwrapped
    assert isinstance(lake, TextEnv)
    assert not BlackjackScorer.fits(lake)
    with pytest.raises(TypeError, match="Blackjack"):
        BlackjackScorer(lake)


def test_tables_are_written_a_row_a_sum() -> None:
    table = letters()
    assert set(table["hard"]) == {str(n) for n in range(4, 22)}
    assert set(table["soft"]) == {str(n) for n in range(12, 22)}
    assert table["hard"]["12"] == "HHHSSSHHHH"
    assert {len(row) for kind in table.values() for row in kind.values()} == {10}


def test_reference_values_are_in_falling_order() -> None:
    values = list(reference_values().values())
    assert values == sorted(values, reverse=True)
