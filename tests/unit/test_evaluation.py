"""Evaluation: every kind of policy, on starts that training never sees, nothing dropped."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from atropos_gym.engines import SamplingParams, ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, TokenizerMismatch
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.evaluation import EvalResult, evaluate
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import BytesTokenizer
from tests.unit.rollout_cases import END, Countdown, say, saying


class Echo(TextEnv):
    """Say the word you were told, twice; anything but a known word is invalid."""

    max_turns = 2
    max_turn_tokens = 8
    answers = ("ja", "nein")

    def begin(self, options: dict[str, Any]) -> str:
        self.turn = 0
        return self.ask()

    def ask(self) -> str:
        self.word = self.answers[int(self.np_random.integers(2))]
        return self.word

    def respond(self, reply: Reply) -> Feedback:
        self.turn += 1
        right = reply.text == self.word
        invalid = reply.text not in self.answers
        if self.turn == 2:
            return Feedback(reward=float(right), terminated=True, success=right, invalid=invalid)
        return Feedback(self.ask(), reward=float(right), invalid=invalid)

    def sample_reply(self) -> str:
        return self.answers[int(self.np_random.integers(2))]


def told(prompt: Any) -> str:
    """The word at the end of a prompt: user id, the word, assistant id."""
    ids = [int(i) for i in prompt]
    start = len(ids) - 1 - ids[::-1].index(BytesTokenizer.USER)
    return bytes(ids[start + 1 : -1]).decode()


class Learner:
    """A policy as Stable-Baselines3 has it."""

    tokenizer = BytesTokenizer()

    def __init__(self) -> None:
        self.batches: list[tuple[int, bool]] = []

    def predict(self, observation: Any, deterministic: bool = False) -> tuple[Any, None]:
        assert observation.dtype == object
        assert all(prompt.dtype == np.int32 for prompt in observation)
        self.batches.append((len(observation), deterministic))
        actions = np.empty(len(observation), dtype=object)
        actions[:] = [np.array(say(told(prompt)), np.int32) for prompt in observation]
        return actions, None


def echoing(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, params, number: say(told(prompt)), **options)


PERFECT = {
    "learner": Learner(),
    "engine": echoing(),
    "function": lambda obs, info: say(told(obs)),
}


@pytest.mark.parametrize("kind", PERFECT)
def test_a_perfect_policy_of_every_kind(kind: str) -> None:
    result = evaluate(Echo, PERFECT[kind], 50, seed=1)
    assert result == EvalResult(mean=2.0, stderr=0.0, episodes=50, valid=1.0, success=1.0, exact=None)


def test_random_play_is_the_environments_own() -> None:
    result = evaluate(Echo, "random", 400, seed=3)
    assert result.mean == pytest.approx(1.0, abs=4 * result.stderr)
    assert result.stderr == pytest.approx(math.sqrt(0.5 / 400), rel=0.15)
    assert result.valid == 1.0
    assert result.success == pytest.approx(0.5, abs=0.1)


def test_valid_is_the_share_of_turns() -> None:
    def first_turn_only(obs: Any, info: dict[str, Any]) -> list[int]:
        return say(told(obs) if info["turn"] == 0 else "hm")

    result = evaluate(Echo, first_turn_only, 20, seed=1)
    assert (result.mean, result.valid, result.success) == (1.0, 0.5, 0.0)


def test_success_is_unknown_where_the_task_does_not_say() -> None:
    class Silent(Echo):
        def respond(self, reply: Reply) -> Feedback:
            feedback = super().respond(reply)
            feedback.success = None
            return feedback

    assert evaluate(Silent, "random", 5, seed=0).success is None


def test_a_learner_answers_all_games_in_one_batch() -> None:
    learner = Learner()
    evaluate(Echo, learner, 10, seed=1, concurrency=4, deterministic=False)
    assert max(size for size, _ in learner.batches) == 4
    assert sum(size for size, _ in learner.batches) == 20
    assert {deterministic for _, deterministic in learner.batches} == {False}


@pytest.mark.parametrize(("deterministic", "temperature"), [(True, 0.0), (False, 1.0)])
def test_an_engine_is_asked_for_the_most_likely_ids_unless_told(
    deterministic: bool, temperature: float
) -> None:
    engine = echoing()
    evaluate(Echo, engine, 3, seed=1, deterministic=deterministic)
    assert {call.params.temperature for call in engine.calls} == {temperature}
    assert {call.params.stop_ids for call in engine.calls} == {(END,)}


def test_equal_seeds_give_equal_results_whatever_the_concurrency() -> None:
    results = [evaluate(Echo, "random", 60, seed=4, concurrency=c) for c in (1, 7, 500)]
    assert results[0] == results[1] == results[2]
    assert evaluate(Echo, "random", 60, seed=5) != results[0]

    def by_seed(prompt: tuple[int, ...], params: SamplingParams, number: int) -> list[int]:
        return say(str(params.seed % 10))

    engines = [evaluate(Countdown, ScriptedEngine(by_seed), 20, seed=4, concurrency=c) for c in (1, 9)]
    assert engines[0] == engines[1]


def test_starts_and_samples_are_disjoint_from_trainings() -> None:
    starts: dict[str, set[int]] = {"training": set(), "evaluation": set()}

    class Watched(Echo):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            assert seed is not None
            starts[stage].add(seed)
            return super().reset(seed=seed, options=options)

    trainer, evaluator = echoing(), echoing()
    stage = "training"
    collector = GroupCollector(Watched, trainer, group_size=2, seed=7)
    collector.collect(30)
    collector.close()
    stage = "evaluation"
    evaluate(Watched, evaluator, 30, seed=7)
    assert len(starts["training"]) == len(starts["evaluation"]) == 30
    assert not starts["training"] & starts["evaluation"]
    seeds = [{call.params.seed for call in engine.calls} for engine in (trainer, evaluator)]
    assert not seeds[0] & seeds[1]


def test_progress_is_told_to_the_end() -> None:
    seen: list[int] = []
    evaluate(Echo, "random", 12, seed=1, progress=seen.append)
    assert seen == list(range(1, 13))


def test_it_also_works_inside_a_running_event_loop() -> None:
    async def notebook() -> EvalResult:
        return evaluate(Echo, echoing(), 5, seed=1)

    assert asyncio.run(notebook()).mean == 2.0


def test_a_single_episode_has_no_standard_error() -> None:
    assert math.isnan(evaluate(Echo, "random", 1, seed=1).stderr)


def test_the_engines_aborts_are_asked_for_again() -> None:
    assert evaluate(Echo, echoing(faults={0: "abort"}), 5, seed=1).mean == 2.0


def test_an_engine_that_fails_ends_the_evaluation_with_its_own_error() -> None:
    with pytest.raises(EngineError, match="gone"):
        evaluate(Echo, echoing(faults={3: EngineError("gone")}), 5, seed=1)


@pytest.mark.parametrize("policy", [echoing(), lambda obs, info: say("ja")], ids=["engine", "function"])
def test_an_environment_that_fails_raises_as_it_is(policy: Any) -> None:
    class Broken(Echo):
        def respond(self, reply: Reply) -> Feedback:
            raise ZeroDivisionError("in respond")

    with pytest.raises(ZeroDivisionError, match="in respond"):
        evaluate(Broken, policy, 5, seed=1)


def test_a_random_player_is_needed_to_play_random() -> None:
    with pytest.raises(ConfigError, match=r"Countdown knows no random player: define sample_reply\(\)"):
        evaluate(Countdown, "random", 5, seed=1)


@pytest.mark.parametrize("policy", ["greedy", 7, None])
def test_what_cannot_play_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy must be a learner"):
        evaluate(Echo, policy, 5, seed=1)


def test_numbers_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="episodes must be a whole number >= 1, got 0"):
        evaluate(Echo, "random", 0, seed=1)


def test_the_environment_is_bound_to_the_policys_tokenizer() -> None:
    class Other(BytesTokenizer):
        name = "other"
        fingerprint = "sha256:0000000000000000"

    with pytest.raises(TokenizerMismatch, match="bytes .* other"):
        evaluate(lambda: Echo(), saying("ja", tokenizer=Other()), 5, seed=1)


def test_it_prints_as_one_line() -> None:
    line = str(EvalResult(mean=-0.043, stderr=0.0095, episodes=10_000, valid=0.999, success=0.43))
    assert line == "-0.0430 ± 0.0095 (10000 episodes, 99.9 % valid, 43.0 % solved)"


@pytest.mark.parametrize("where", ["step", "reset", "policy"])
def test_what_was_made_is_closed_also_when_an_evaluation_fails(where: str) -> None:
    made: list[Echo] = []
    closed: list[Echo] = []

    class Closing(Echo):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            made.append(self)

        def begin(self, options: dict[str, Any]) -> str:
            if where == "reset" and self is made[-1] and len(made) == 3:
                raise RuntimeError("boom")
            return super().begin(options)

        def respond(self, reply: Reply) -> Feedback:
            if where == "step":
                raise RuntimeError("boom")
            return super().respond(reply)

        def close(self) -> None:
            closed.append(self)

    def act(observation: Any, info: dict[str, Any]) -> list[int]:
        if where == "policy":
            raise RuntimeError("boom")
        return say(told(observation))

    with pytest.raises(RuntimeError, match="boom"):
        evaluate(Closing, act, 3, seed=0)
    assert len(made) == 3 and set(closed) == set(made)


class Thoughtful(TextEnv):
    """Says what counts; a reply must be thought over first."""

    thinking = "required"
    max_turn_tokens = 64

    def begin(self, options: Any) -> str:
        return "Say yes."

    def respond(self, reply: Reply) -> Feedback:
        return Feedback(reward=float(reply.content == "yes"), terminated=True, invalid=reply.content != "yes")

    def sample_reply(self) -> str:
        return "yes"


def test_the_random_player_keeps_to_the_thinking_mode() -> None:
    result = evaluate(Thoughtful, "random", episodes=4, seed=0)
    assert (result.mean, result.valid) == (1.0, 1.0)
