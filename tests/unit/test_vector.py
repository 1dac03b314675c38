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
from tests.tools.vector_tasks import Counting

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
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
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
    with pytest.raises(TypeError, match=r"TokenSequence\(264, max_length=\d+\).*disable `shared_memory`"):
        gymnasium.make_vec(ID, num_envs=2, vectorization_mode="async")


def test_the_parents_memory_is_not_shared_with_an_action() -> None:
    """A policy may write into its action array after the step: nothing of the episode changes."""
    env = gymnasium.make_vec(ID, num_envs=2)
    first, _ = env.reset(seed=0)
    action = np.array([*b"no digit", 258], np.int32)
    second, *_ = env.step((action, action))
    kept = [ids.tolist() for ids in second]
    action[:] = 7
    third, *_ = env.step((action, action))
    assert [ids.tolist() for ids in second] == kept
    assert all(ids.tolist()[: len(before)] == before for ids, before in zip(third, kept, strict=True))
    env.close()


def test_info_survives_the_merge() -> None:
    """The first reporter decides a column's dtype: ours keeps one type a key, and lists stay lists."""
    env = SyncVectorEnv([lambda: Counting(max_turns=3) for _ in range(3)], autoreset_mode="SameStep")
    env.reset(seed=[0, 1, 2], options={"length": 3})
    *_, info = env.step(tuple(np.array([*text, 258], np.int32) for text in (b"?", b"x", b"yy")))
    kinds = {key: column.dtype.kind for key, column in info.items() if isinstance(column, np.ndarray)}
    assert {key: kinds[key] for key in ("segment", "turn", "max_new_tokens")} == dict.fromkeys(
        ("segment", "turn", "max_new_tokens"), "i"
    )
    assert (kinds["share"], info["share"].tolist()) == ("f", [1.0, 1.0, 1.0])
    assert info["reward_terms"]["heard"].dtype.kind == "f"
    assert info["left"].tolist() == [[2, 2]] * 3 and type(info["left"][0]) is list
    assert info["word"].tolist() == ["?", "x", "yy"]
    assert info["invalid"].tolist() == info["_invalid"].tolist() == [True, False, False]
    env.close()


@pytest.mark.parametrize("env_id", ["atropos/Taxi-v0", "atropos/Blackjack-v0", "atropos/Arithmetic-v0"])
def test_info_of_ready_tasks_is_that_of_single_environments(env_id: str) -> None:
    said = [b"<action>north</action>", b"hit", b"The answer is 7."]
    vector = gymnasium.make_vec(env_id, num_envs=3, vector_kwargs={"autoreset_mode": "SameStep"})
    single = [gymnasium.make(env_id) for _ in range(3)]
    vector.reset(seed=[0, 1, 2])
    answers = tuple(np.array([*text[: vector.single_action_space.max_length - 1], 258]) for text in said)
    *_, merged = vector.step(answers)
    for index, env in enumerate(single):
        env.reset(seed=index)
        *_, terminated, _, info = env.step(answers[index])
        column = merged["final_info"] if terminated else merged
        for key, value in info.items():
            assert column[f"_{key}"][index] and type(value) in (int, float, str, bool, list)
            found = column[key][index]
            assert (found.item() if isinstance(found, np.generic) else found) == value
    vector.close()


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
    "TransformObservation": lambda env: wrappers.TransformObservation(env, lambda ids: ids, None),
    "TransformAction": lambda env: wrappers.TransformAction(env, lambda ids: ids, None),
    "ClipReward": lambda env: wrappers.ClipReward(env, -1.0, 1.0),
    "NormalizeReward": wrappers.NormalizeReward,
}
TASKS: dict[str, tuple[Callable[[], TextEnv], list[str]]] = {
    "multi-turn": (Guess, ["1", "22", "3"]),
    "terse Blackjack": (
        lambda: (
            gymnasium.make(
                "atropos/Blackjack-v0", describe="terse", history="latest", on_invalid="retry"
            ).unwrapped
        ),
        ["well", "now", "stick"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_leave_the_ids_alone(name: str, task: str) -> None:
    make, said = TASKS[task]
    bare, wrapped = make(), WRAPPERS[name](make())
    one, _ = bare.reset(seed=7)
    two, _ = wrapped.reset(seed=7)
    np.testing.assert_array_equal(one, two)
    for turn, text in enumerate(said, 1):
        action = np.array([*text.encode(), 258], np.int32)
        one, reward, over, *_ = bare.step(action)
        two, gain, terminated, truncated, info = wrapped.step(action)
        np.testing.assert_array_equal(one, two)
        assert (info["turn"], terminated) == (turn, over)
        if name == "TransformReward":
            assert gain == reward + 1
        elif name != "NormalizeReward":
            assert gain == reward
        assert truncated == (name == "TimeLimit" and turn == 2)
        if truncated:
            break


def test_order_is_enforced_by_gymnasiums_own_error() -> None:
    with pytest.raises(gymnasium.error.ResetNeeded):
        wrappers.OrderEnforcing(Guess()).step(actions(0)[0])
    with pytest.raises(gymnasium.error.ResetNeeded):
        Guess().step(actions(0)[0])


def test_a_frame_stack_stacks_prompts() -> None:
    env = wrappers.FrameStackObservation(Guess(), 2, padding_type="reset")
    first, _ = env.reset(seed=0)
    assert len(first) == 2 and first in env.observation_space
    second, *_ = env.step(actions(0)[0])
    np.testing.assert_array_equal(second[0], first[1])


def test_episode_statistics_count_turns() -> None:
    env = wrappers.RecordEpisodeStatistics(Guess(max_turns=2))
    env.reset(seed=0)
    env.step(actions(0)[0])
    *_, info = env.step(actions(0)[0])
    assert info["episode"]["l"] == 2
    assert info["end_reason"] == "max_turns"


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_vector_episode_statistics_count_turns_of_real_steps_only(mode: str) -> None:
    env = wrappers.vector.RecordEpisodeStatistics(
        SyncVectorEnv([lambda: Guess(max_turns=2)] * 2, autoreset_mode=mode)
    )
    env.reset(seed=0)
    for turn in range(8):
        *_, truncated, info = env.step(actions(turn, 2))
        if truncated.any():
            assert info["episode"]["l"].tolist() == [2, 2]
    assert list(env.length_queue) == [2] * (6 if mode == "NextStep" else 8)
    env.close()


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


@pytest.mark.parametrize("wrap", ["VecMonitor", "VecNormalize"])
def test_wrappers_of_sb3_that_leave_observations_alone(wrap: str) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    inner = vec_env.DummyVecEnv([lambda: Guess(max_turns=2) for _ in range(2)])
    env = vec_env.VecMonitor(inner) if wrap == "VecMonitor" else vec_env.VecNormalize(inner, norm_obs=False)
    env.seed(3)
    first = env.reset()
    for turn in range(2):
        observations, _, dones, infos = env.step(list(actions(turn, 2)))
    assert dones.all() and [info["turn"] for info in infos] == [2, 2]
    if wrap == "VecMonitor":
        assert [info["episode"]["l"] for info in infos] == [2, 2]
    # The next start comes back at once, the last observation in info: no step is lost.
    for before, last, after in zip(first, infos, observations, strict=True):
        assert last["terminal_observation"].tolist()[: len(before)] == before.tolist()
        assert len(after) < len(last["terminal_observation"])


@pytest.mark.parametrize(
    ("wrap", "options", "error"),
    [
        ("VecFrameStack", {"n_stack": 2}, AssertionError),
        ("VecNormalize", {}, ValueError),
        ("VecCheckNan", {}, TypeError),
    ],
)
def test_wrappers_of_sb3_that_need_numbers_refuse(
    wrap: str, options: dict[str, Any], error: type[Exception]
) -> None:
    """As the module's docstring of atropos_gym.spaces says."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    with pytest.raises(error):
        env = getattr(vec_env, wrap)(vec_env.DummyVecEnv([Guess]), **options)
        env.reset()
        env.step([actions(0)[0]])


@forks
def test_subproc_vec_env_refuses_prompts_of_different_lengths() -> None:
    """It stacks; prompts that happen to be equally long become rows of one array."""
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    env = vec_env.SubprocVecEnv([Guess, Guess], start_method="fork")
    try:
        assert env.reset().ndim == 2
        with pytest.raises(ValueError, match="same shape"):
            env.step(list(actions(0, 2)))
    finally:
        env.close()


def test_evaluate_policy_plays_all_turns_of_many_episodes() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    class Sticks:
        def predict(self, observation: Any, **_: Any) -> tuple[list[Any], None]:
            return [np.array([*b"stick", 258], np.int32) for _ in observation], None

    keywords = {"describe": "terse", "history": "latest"}
    env = Monitor(gymnasium.make("atropos/Blackjack-v0", **keywords))
    env.reset(seed=1)
    rewards, lengths = evaluate_policy(Sticks(), env, n_eval_episodes=300, return_episode_rewards=True)  # type: ignore[arg-type]
    assert lengths == [1] * 300 and set(rewards) == {-1.0, 0.0, 1.0}
    assert abs(np.mean(rewards) + 0.1829248) < 4 * np.std(rewards) / 300**0.5


def test_sb3_makes_environments_by_id() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_util import make_vec_env

    # SB3 asks for render_mode="rgb_array" unasked; Gymnasium says that we do not list it, and goes on.
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        env = make_vec_env(ID, n_envs=2, seed=3)
    assert env.reset().shape == (2,)
    assert isinstance(env.unwrapped.envs[0].unwrapped, TextEnv)  # type: ignore[attr-defined]
