"""RecordTransitions: every sampled action is played or reported as ignored, and none is trained on twice.

Promises, in every autoreset mode, sync and async:
1. An action is in exactly one transition, or its environment is among ``ignored``: the environments
   themselves heard exactly the actions in the transitions, in that order.
2. A transition's observation is the prompt that the action answered, and ``next_observation`` begins with
   both.
3. Its ``info`` is what a single environment would have said.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import Autoreset
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

from atropos_gym.errors import ConfigError
from atropos_gym.wrappers.transitions import RecordTransitions, Transition
from tests.tools.vector_tasks import Counting

ID = "vector/Counting-v0"
MODES = ["NextStep", "SameStep", "Disabled"]
KINDS = ["sync", "async"]
# A worker is forked from a process that may hold threads of other tests; it only plays and exits.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register(id=ID, entry_point="tests.tools.vector_tasks:Counting")
    yield
    gymnasium.registry.pop(ID)


def make(kind: str, mode: str, count: int = 3) -> RecordTransitions:
    keywords: dict[str, Any] = {"autoreset_mode": mode}
    if kind == "async":
        keywords["shared_memory"] = False
    return RecordTransitions(
        gymnasium.make_vec(ID, num_envs=count, vectorization_mode=kind, vector_kwargs=keywords)
    )


def words() -> Iterator[str]:
    """Texts that are all different, so that no action can be mistaken for another."""
    return map(str, itertools.count())


def say(text: str) -> np.ndarray[Any, Any]:
    return np.array([*text.encode(), 258], np.int32)


def play(
    envs: RecordTransitions, steps: int, said: Iterator[str]
) -> tuple[list[list[str]], list[Transition]]:
    """Plays steps; returns what was said to each environment, and all transitions."""
    sampled: list[list[str]] = [[] for _ in range(envs.num_envs)]
    seen: list[Transition] = []
    for _ in range(steps):
        texts = [next(said) for _ in range(envs.num_envs)]
        _, _, terminated, truncated, _ = envs.step(tuple(map(say, texts)))
        for index, text in enumerate(texts):
            sampled[index].append(text)
        assert sorted([t.index for t in envs.transitions] + list(envs.ignored)) == list(range(envs.num_envs))
        seen += envs.transitions
        over = terminated | truncated
        if envs.metadata["autoreset_mode"].value == "Disabled" and over.any():
            envs.reset(options={"reset_mask": over})
    return sampled, seen


@forks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_action_is_played_once_or_reported(kind: str, mode: str) -> None:
    envs, said = make(kind, mode), words()
    envs.reset(seed=[1, 2, 3])
    sampled, seen = play(envs, 9, said)
    # In the middle of some episodes and at the end of others: a start that was asked for.
    envs.reset(seed=[4, 5, 6], options={"length": 1})
    more, later = play(envs, 7, said)
    envs.reset(seed=[7, 8, 9])  # every episode had one turn, so the ends are fresh
    last, latest = play(envs, 5, said)
    heard = envs.unwrapped.get_attr("heard")
    envs.close()
    everything = [*seen, *later, *latest]
    for index in range(3):
        trained = [bytes(t.action[:-1].tolist()).decode() for t in everything if t.index == index]
        assert trained == list(heard[index])
        assert set(trained) <= {*sampled[index], *more[index], *last[index]}
    assert envs.played_count == len(everything) == sum(map(len, heard))
    assert envs.played_count + envs.ignored_count == 3 * (9 + 7 + 5)
    assert (envs.ignored_count == 0) is (mode != "NextStep")


@forks
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_transitions_are_those_of_single_environments(kind: str, mode: str) -> None:
    envs = make(kind, mode)
    first, _ = envs.reset(seed=[1, 2, 3])
    _, seen = play(envs, 10, words())
    envs.close()
    for index in range(3):
        alone = Counting()
        observation, _ = alone.reset(seed=index + 1)
        np.testing.assert_array_equal(observation, first[index])
        for transition in (t for t in seen if t.index == index):
            np.testing.assert_array_equal(transition.observation, observation)
            observation, reward, terminated, truncated, info = alone.step(transition.action)
            np.testing.assert_array_equal(transition.next_observation, observation)
            prompt = [*transition.observation.tolist(), *transition.action.tolist()]
            assert transition.next_observation.tolist()[: len(prompt)] == prompt
            assert (transition.reward, transition.terminated, transition.truncated) == (
                reward,
                terminated,
                truncated,
            )
            assert transition.info == info
            assert {key: type(value) for key, value in transition.info.items()} == {
                key: type(value) for key, value in info.items()
            }
            if terminated or truncated:
                observation, _ = alone.reset()


@forks
def test_a_reset_that_async_forgets_is_no_turn() -> None:
    """Gymnasium's worker remembers the end over an explicit reset when memory is not shared."""
    envs = make("async", "NextStep", 2)
    envs.reset(seed=0, options={"length": 1})
    envs.step((say("a"), say("b")))
    envs.reset(seed=0, options={"length": 3})
    _, rewards, *_, info = envs.step((say("c"), say("d")))
    if envs.unwrapped.get_attr("heard") == (["a"], ["b"]):  # as Gymnasium 1.4 has it
        assert rewards.tolist() == [0, 0] and info["turn"].tolist() == [0, 0]
        assert envs.transitions == () and envs.ignored == (0, 1)
    else:  # mended: both were played
        assert [t.reward for t in envs.transitions] == [2.0, 2.0] and envs.ignored == ()
    envs.close()


def test_statistics_inside_and_outside() -> None:
    inside = RecordTransitions(
        RecordEpisodeStatistics(
            gymnasium.make_vec(ID, num_envs=2, vector_kwargs={"autoreset_mode": "SameStep"})
        )
    )
    inside.reset(seed=0, options={"length": 2})
    ends = [t.info for t in play(inside, 4, words())[1] if t.terminated]
    assert ends[0]["episode"]["l"] == 2 and ends[0]["turn"] == 2
    # Outside, it keeps the statistics of environments that a reset_mask leaves alone.
    outside = RecordEpisodeStatistics(make("sync", "Disabled", 2))
    outside.reset(seed=[0, 1], options={"length": 3})
    lengths = []
    for turn in range(3):
        *_, terminated, _, info = outside.step((say("x"), say("y")))
        if turn == 0:
            outside.reset(options={"reset_mask": np.array([True, False]), "length": 3})
        lengths += info["episode"]["l"][terminated].tolist() if terminated.any() else []
    assert lengths == [3]


def test_a_list_of_infos_goes_around() -> None:
    envs = DictInfoToList(make("sync", "SameStep", 2))
    _, infos = envs.reset(seed=0)
    assert [info["turn"] for info in infos] == [0, 0]
    infos = envs.step((say("x"), say("y")))[4]
    assert len(envs.env.transitions) == 2 and len(infos) == 2


def test_a_single_environment_that_resets_itself_shows_the_same_mark() -> None:
    env = Autoreset(Counting())
    env.reset(seed=0, options={"length": 1})
    *_, terminated, _, info = env.step(say("a"))
    assert terminated and info["turn"] == 1
    _, reward, terminated, truncated, info = env.step(say("b"))
    assert (reward, terminated, truncated, info["turn"]) == (0.0, False, False, 0)
    assert env.unwrapped.heard == ["a"]  # type: ignore[attr-defined]


def test_other_environments_are_refused_by_name() -> None:
    envs = RecordTransitions(gymnasium.make_vec("FrozenLake-v1", num_envs=2))
    envs.reset(seed=0)
    with pytest.raises(ConfigError, match="needs text environments: info of environment 0 has no 'turn'"):
        envs.step(np.zeros(2, dtype=np.int64))


def test_options_keep_their_reset_mask() -> None:
    envs = make("sync", "Disabled", 2)
    envs.reset(seed=0)
    options = {"reset_mask": np.array([True, False])}
    envs.reset(options=options)
    assert "reset_mask" in options


@forks
@pytest.mark.filterwarnings("ignore:.*ERROR.*:UserWarning")  # Gymnasium tells of a worker's exception so
@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_environment_that_nobody_reset_is_not_stepped(kind: str) -> None:
    """Without autoreset: sync refuses by itself, in a worker the text environment does."""
    envs = make(kind, "Disabled", 2)
    envs.reset(seed=0, options={"length": 1})
    envs.step((say("a"), say("b")))
    if kind == "sync":
        with pytest.raises(AssertionError):
            envs.step((say("c"), say("d")))
        assert [env.unwrapped.heard for env in envs.unwrapped.envs] == [["a"], ["b"]]
        envs.close()
    else:
        with pytest.raises(gymnasium.error.ResetNeeded, match="the episode is over"):
            envs.step((say("c"), say("d")))
        envs.close(terminate=True)
    assert envs.played_count == 2 and len(envs.transitions) == 2
