"""Text environments in vector environments, wrappers and Stable-Baselines3's helpers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from atropos_gym.text_env import TextEnv
from tests.tools.text_tasks import Guess, Reverse

ID = "vector/Guess-v0"
ASYNC = {"shared_memory": False}
# A worker is forked from a process that may hold threads of other tests; it only plays and exits.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register(id=ID, entry_point="tests.tools.text_tasks:Guess")
    yield
    gymnasium.registry.pop(ID)


def actions(turn: int, count: int = 3) -> tuple[np.ndarray[Any, Any], ...]:
    """Ragged actions: members say texts of different lengths."""
    return tuple(np.array([*("x" * (i + turn)).encode(), 258], np.int32) for i in range(count))


def play(env: VectorEnv[Any, Any, Any], turns: int = 6) -> list[Any]:
    """Plays past the end of episodes and returns all that came back, as lists."""
    observations, info = env.reset(seed=[3, 4, 5])
    seen: list[Any] = [[o.tolist() for o in observations], info["turn"].tolist()]
    for turn in range(turns):
        observations, rewards, terminated, truncated, info = env.step(actions(turn))
        assert len(observations) == 3
        seen += [
            [o.tolist() for o in observations],
            rewards.tolist(),
            terminated.tolist(),
            truncated.tolist(),
            info["segment"].tolist(),
            info["turn"].tolist(),
        ]
    env.close()
    return seen


def alone() -> list[list[int]]:
    """First prompts of three environments of their own."""
    return [gymnasium.make(ID).reset(seed=seed)[0].tolist() for seed in (3, 4, 5)]


def test_sync_gives_the_ids_of_single_environments() -> None:
    env = gymnasium.make_vec(ID, num_envs=3)
    assert isinstance(env, SyncVectorEnv)
    assert play(env)[0] == alone()


@forks
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_async_gives_the_ids_of_sync(context: str) -> None:
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {context}")
    sync = play(gymnasium.make_vec(ID, num_envs=3))
    env = gymnasium.make_vec(
        ID, num_envs=3, vectorization_mode="async", vector_kwargs={**ASYNC, "context": context}
    )
    assert isinstance(env, AsyncVectorEnv)
    assert play(env) == sync


@forks
def test_shared_memory_is_refused_by_gymnasium_itself() -> None:
    with pytest.raises(TypeError, match="disable `shared_memory`"):
        gymnasium.make_vec(ID, num_envs=2, vectorization_mode="async")


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_every_autoreset_mode_starts(mode: str) -> None:
    env = gymnasium.make_vec(ID, num_envs=3, vector_kwargs={"autoreset_mode": mode})
    play(env, turns=4)


def test_batched_spaces_sample_and_contain() -> None:
    env = gymnasium.make_vec(ID, num_envs=3)
    env.action_space.seed(1)
    sample = env.action_space.sample()
    assert sample in env.action_space
    assert len(sample) == 3
    assert env.reset(seed=0)[0] in env.observation_space
    env.close()


WRAPPERS: dict[str, Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]] = {
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 2),
    "OrderEnforcing": wrappers.OrderEnforcing,
    "PassiveEnvChecker": wrappers.PassiveEnvChecker,
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "Autoreset": wrappers.Autoreset,
    "TransformReward": lambda env: wrappers.TransformReward(env, lambda reward: reward + 1),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_leave_the_ids_alone(name: str) -> None:
    bare, wrapped = Guess(), WRAPPERS[name](Guess())
    one, _ = bare.reset(seed=7)
    two, _ = wrapped.reset(seed=7)
    np.testing.assert_array_equal(one, two)
    for turn in range(2):
        one, *_ = bare.step(actions(turn)[1])
        two, _, terminated, truncated, info = wrapped.step(actions(turn)[1])
        np.testing.assert_array_equal(one, two)
    assert truncated == (name == "TimeLimit")
    assert not terminated
    assert info["turn"] == 2


def test_episode_statistics_count_turns() -> None:
    env = wrappers.RecordEpisodeStatistics(Guess(max_turns=2))
    env.reset(seed=0)
    env.step(actions(0)[0])
    *_, info = env.step(actions(0)[0])
    assert info["episode"]["l"] == 2
    assert info["end_reason"] == "max_turns"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"]
)
def test_an_environment_in_mid_flight_copies(copied: Any) -> None:
    env = Guess()
    env.reset(seed=1)
    env.step(actions(0)[0])
    twin = copied(env)
    assert twin.tokenizer is env.tokenizer
    np.testing.assert_array_equal(twin.step(actions(1)[1])[0], env.step(actions(1)[1])[0])


# --- Stable-Baselines3 ---


class _RightWord:
    """A policy that answers Reverse rightly, row by row, as SB3 calls it."""

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[list[Any], Any]:
        out = []
        for ids in observation:
            word = bytes(i for i in ids if i < 256).decode().split()[1]
            out.append(np.array([*word[::-1].encode(), 258], np.int32))
        return out, state


@pytest.mark.parametrize("count", [1, 3])
def test_dummy_vec_env_monitor_and_evaluate_policy(count: int) -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([lambda: Monitor(Reverse()) for _ in range(count)])
    env.seed(0)
    observations = env.reset()
    assert observations.shape == (count,)
    assert observations.dtype == object
    assert all(row in env.observation_space for row in observations)
    rewards, lengths = evaluate_policy(_RightWord(), env, n_eval_episodes=6, return_episode_rewards=True)  # type: ignore[arg-type]
    assert rewards == [1.0] * 6
    assert lengths == [1] * 6


def test_sb3_makes_environments_by_id() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env

    # SB3 asks for render_mode="rgb_array" unasked; Gymnasium says that we do not list it, and goes on.
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        env = make_vec_env(ID, n_envs=2, seed=3)
    assert env.reset().shape == (2,)
    assert isinstance(env.unwrapped.envs[0].unwrapped, TextEnv)  # type: ignore[attr-defined]
