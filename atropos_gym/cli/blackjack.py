"""The exact value of a policy's play in Blackjack: its answer in every state, then dynamic programming.

With ``history="latest"`` an answer depends on the state alone, so that the value of the table is the value of
the play. With ``"whole"`` it is the value of the answers to a first observation, which can flatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from atropos_gym.envs.blackjack_value import STATES, blackjack_optimal, blackjack_value, stick_on, textbook
from atropos_gym.parsing import parse_action
from atropos_gym.text_env import TextEnv
from atropos_gym.wrappers.gym_text_env import GymTextEnv

__all__ = ["BlackjackScorer", "letters", "reference_values"]

State = tuple[int, int, int]

STICK, HIT = "S", "H"
INVALID = "?"


class Learner(Protocol):
    """What is asked of a learner: greedy answers, and logprobs of given ones."""

    def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, Any]:
        """Returns actions and state, as Stable-Baselines3's ``predict``."""
        ...

    def score(
        self, prompts: list[list[int]], completions: list[list[int]], *, temperature: float = 1.0
    ) -> list[Any]:
        """Returns the logprob of every id of each completion."""
        ...


class BlackjackScorer:
    """Asks a policy for its answer in each of the 280 states and computes what that is worth.

    Args:
        env: ``atropos/Blackjack-v0`` in any style; prompts and parsing are its own.

    Raises:
        TypeError: another environment.
    """

    def __init__(self, env: TextEnv) -> None:
        if not isinstance(env, GymTextEnv) or not self.fits(env):
            raise TypeError(f"exact values are known for Blackjack only, got {type(env).__name__}")
        self._env = env
        self._game: Any = env.simulator.unwrapped
        self.prompts = [env.renderer.prompt(env.opening(state)) for state in STATES]
        assert env.answers is not None, "both answers are words"
        self.said = {
            answer: env.renderer.say(said) for answer, said in zip((STICK, HIT), env.answers, strict=True)
        }

    @staticmethod
    def fits(env: TextEnv) -> bool:
        """Returns whether exact values can be computed for an environment."""
        return isinstance(env, GymTextEnv) and type(env.simulator.unwrapped).__name__ == "BlackjackEnv"

    def greedy(self, model: Learner) -> dict[State, str]:
        """Returns ``"H"``, ``"S"`` or ``"?"`` (neither) for each state: what the most likely ids say."""
        batch = np.empty(len(self.prompts), dtype=object)
        batch[:] = [np.asarray(prompt, np.int32) for prompt in self.prompts]
        actions, _ = model.predict(batch, deterministic=True)
        return {state: self._letter(ids) for state, ids in zip(STATES, actions, strict=True)}

    def sampled(self, model: Learner) -> dict[State, tuple[float, float]]:
        """Returns (P(stick), P(hit)) of the sampled policy for each state; what is left is invalid.

        Only the answers' own ids count: another way to say the same is taken as invalid, so that the value is
        a lower bound, tight for a policy that keeps the format.
        """
        chances = []
        for ids in self.said.values():
            logprobs = model.score(self.prompts, [ids] * len(self.prompts))
            chances.append([math.exp(float(np.sum(row))) for row in logprobs])
        return {state: (stick, hit) for state, stick, hit in zip(STATES, *chances, strict=True)}

    def value(self, table: Mapping[State, str] | Mapping[State, tuple[float, float]]) -> float:
        """Returns the exact mean return of a table under this game's settings."""
        chances = {
            state: _CHANCES[entry] if isinstance(entry, str) else entry for state, entry in table.items()
        }
        return blackjack_value(
            chances,
            natural=bool(self._game.natural),
            sab=bool(self._game.sab),
            invalid_reward=self._env.invalid_reward,
        )

    def references(self) -> dict[str, float]:
        """Returns the values of well-known ways to play under this game's settings."""
        return reference_values(natural=bool(self._game.natural), sab=bool(self._game.sab))

    def _letter(self, ids: Any) -> str:
        reply = self._env.renderer.reply([int(i) for i in ids])
        describer = self._env.describer
        action = parse_action(
            reply.content,
            self._game.action_space,
            self._env.format,
            names=describer.names,
            aliases=describer.aliases,
        )
        return (STICK, HIT)[int(action.value)] if action.valid else INVALID


_CHANCES = {STICK: (1.0, 0.0), HIT: (0.0, 1.0), INVALID: (0.0, 0.0)}


def reference_values(*, natural: bool = False, sab: bool = True) -> dict[str, float]:
    """Returns the exact values that a run is shown beside, best first.

    Example:
        >>> {name: round(value, 4) for name, value in reference_values().items()}
        {'textbook': -0.0431, 'stick on 17': -0.0759, 'always stick': -0.1829, 'random': -0.3942}
    """
    rules = {"natural": natural, "sab": sab}
    return {
        "textbook": blackjack_optimal(**rules)[0],
        "stick on 17": blackjack_value(stick_on(17), **rules),
        "always stick": blackjack_value(lambda *state: 0, **rules),
        "random": blackjack_value(lambda *state: 0.5, **rules),
    }


def letters(table: Mapping[State, str] | None = None) -> dict[str, dict[str, str]]:
    """Returns a table as ``{"hard": {"4": "HHHHHHHHHH", ...}, "soft": ...}``, a letter a dealer's card.

    Args:
        table: a letter for each state; None is textbook play.

    Example:
        >>> letters()["hard"]["16"], letters()["soft"]["18"]
        ('HSSSSSHHHH', 'HSSSSSSSHH')
    """
    if table is None:
        table = {state: HIT if textbook(*state) else STICK for state in STATES}
    rows: dict[str, dict[str, str]] = {"hard": {}, "soft": {}}
    for state in STATES:
        total, _, usable = state
        kind = rows["soft" if usable else "hard"]
        kind[str(total)] = kind.get(str(total), "") + table[state]
    return rows
