"""GRPO as an algorithm of Stable-Baselines3: learn, predict, save, load, callbacks, exact resume."""

from __future__ import annotations

import asyncio
import json
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    ProgressBarCallback,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.utils import LinearSchedule

from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, MissingData, TokenizerMismatch
from atropos_gym.messages import Feedback, Reply
from atropos_gym.text_env import TextEnv
from atropos_gym.trainers._parts import RunFolder
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.schedules import Geometric


class Say(TextEnv):
    """Say "a" or "b", whichever was asked for; two turns. Babble is paid a little by its first id."""

    answers = ("a", "b")
    max_turns = 2
    max_turn_tokens = 3
    max_prompt_tokens = 8
    max_feedback_tokens = 8

    def begin(self, options: dict[str, Any]) -> str:
        self.turn, self.wanted = 0, str(self.np_random.choice(self.answers))
        return self.wanted

    def respond(self, reply: Reply) -> Feedback:
        self.turn += 1
        right = reply.content == self.wanted
        paid = float(right) + (reply.ids[0] % 8 if reply.ids else 0) / 16
        self.wanted = str(self.np_random.choice(self.answers))
        if self.turn == 2:
            return Feedback("end", reward=paid, terminated=True, success=right)
        return Feedback(self.wanted, reward=paid)

    def sample_reply(self) -> str:
        return str(self.np_random.choice(self.answers))


SMALL: dict[str, Any] = {
    "seed": 0,
    "lora": Lora(rank=2),
    "group_size": 4,
    "groups_per_update": 3,
    "drop_equal": False,
    "device": "cpu",
    "deterministic": True,
}


def make(env: Any = Say, **fields: Any) -> GRPO:
    model = GRPO("tiny", env, **{**SMALL, **fields})
    return model.warm_up(2, batch_size=4)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[GRPO]:
    with make(folder=tmp_path / "run") as made:
        yield made


def metrics_of(model: GRPO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model.run_folder / "metrics.jsonl").read_text().splitlines()]


def weights(model: GRPO) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.policy.adapter.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


# -- learning ----------------------------------------------------------------------------------------------


def test_each_update_makes_the_next_version_and_a_line_of_metrics(model: GRPO) -> None:
    before = weights(model)
    assert model.learn(updates=2) is model
    assert model.version == 2 and model.engine.newest == 2
    assert not same(before, weights(model))
    lines = metrics_of(model)
    assert [(line["update"], line["version"]) for line in lines] == [(1, 1), (2, 2)]
    wanted = {
        "rollout/ep_rew_mean", "rollout/ep_len_mean", "rollout/success_rate", "time/total_timesteps",
        "time/fps", "train/loss", "train/learning_rate", "train/entropy", "train/ratio_max",
        "train/clip_fraction", "train/approx_kl", "train/grad_norm", "train/alignment", "train/staleness",
        "time/collect", "time/read", "time/train", "time/publish",
    }  # fmt: skip
    assert wanted <= set(lines[-1])
    assert lines[-1]["train/alignment"] < 2e-5 and lines[-1]["train/alignment_max"] < 2e-4
    assert lines[-1]["train/staleness"] == 0.0


def test_adapters_are_complete_folders_named_by_run_and_version(model: GRPO) -> None:
    model.learn(updates=2)
    names = {folder.name for folder in model.adapter_dir.iterdir()}
    assert names == {f"{model.run}-v1", f"{model.run}-v2"}
    assert {p.name for p in (model.adapter_dir / f"{model.run}-v2").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_old_adapters_are_deleted_once_nothing_serves_them(model: GRPO) -> None:
    model.learn(updates=9)
    kept = sorted(int(folder.name.rsplit("-v")[-1]) for folder in model.adapter_dir.iterdir())
    assert kept == [4, 5, 6, 7, 8, 9] and set(model.engine.live_versions) - {0} <= set(kept)


def test_a_timestep_is_a_turn_and_callbacks_hear_each(model: GRPO) -> None:
    heard: list[tuple[float, bool, dict[str, Any]]] = []

    class Listen(BaseCallback):
        rollouts = 0

        def _on_step(self) -> bool:
            heard.append((self.locals["rewards"][0], self.locals["dones"][0], self.locals["infos"][0]))
            return True

        def _on_rollout_end(self) -> None:
            self.rollouts += 1

    listen = Listen()
    model.learn(updates=2, callback=listen)
    turns = 2 * 3 * 4 * 2  # updates, groups, members, turns
    assert model.num_timesteps == listen.n_calls == len(heard) == turns and listen.rollouts == 2
    ends = [info for _, done, info in heard if done]
    assert len(ends) == turns / 2 and all(info["episode"]["l"] == 2 and "is_success" in info for info in ends)
    assert sum(reward for reward, _, _ in heard) == sum(info["episode"]["r"] for info in ends)
    assert len(model.ep_info_buffer) == len(model.ep_success_buffer) == turns / 2


def test_total_timesteps_is_a_lower_bound_in_whole_updates(model: GRPO) -> None:
    model.learn(total_timesteps=25)  # an update has 24
    assert model.num_timesteps == 48 and model.version == 2


@pytest.mark.parametrize("given", [{}, {"total_timesteps": 10, "updates": 1}])
def test_one_of_timesteps_and_updates_is_given(model: GRPO, given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="one of total_timesteps and updates"):
        model.learn(**given)


def test_a_callback_can_stop_before_the_update(model: GRPO) -> None:
    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return self.n_calls < 30  # in the second batch

    model.learn(updates=5, callback=Stop())
    assert model.version == 1 and model.group_numbers == [3]


def test_schedules_follow_updates_and_the_warm_up_comes_on_top(tmp_path: Path) -> None:
    rates = LinearSchedule(1e-3, 1e-4, 1.0)
    with make(
        folder=tmp_path,
        learning_rate=rates,
        warm_up_updates=2,
        entropy=(Geometric(0.4, 0.1), "answers"),
        reduction="episode_sum",
    ) as model:
        model.learn(updates=4)
        lines = metrics_of(model)
    want = [1e-3 / 2, 1e-3 - 0.9e-3 / 4, 1e-3 - 0.9e-3 / 2, 1e-3 - 2.7e-3 / 4]
    assert [line["train/learning_rate"] for line in lines] == pytest.approx(want)
    assert [line["train/entropy_coef"] for line in lines] == pytest.approx(
        [0.4 * 0.25 ** (k / 4) for k in range(4)]
    )
    assert 0.0 < lines[0]["train/entropy"] <= math.log(2) + 1e-6


def test_a_batch_that_teaches_nothing_takes_no_step_but_makes_a_version(tmp_path: Path) -> None:
    class Equal(Say):
        def respond(self, reply: Reply) -> Feedback:
            feedback = super().respond(reply)
            feedback.reward = 0.0
            return feedback

    with make(Equal, folder=tmp_path, drop_equal=True) as model:
        before = weights(model)
        model.learn(updates=1)
        (line,) = metrics_of(model)
        assert same(before, weights(model)) and model.version == 1
        assert line["train/dropped/equal_scores"] == 12.0 and line["train/empty_updates"] == 1.0


def test_several_environments_share_the_groups_by_weight(tmp_path: Path) -> None:
    with make(
        {"atropos/Identity-v0": 3.0, "atropos/Blackjack-v0": 1.0}, folder=tmp_path, groups_per_update=4
    ) as model:
        model.learn(updates=2)
        assert model.group_numbers == [6, 2]


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    results = []
    for name in ("a", "b"):
        with make(folder=tmp_path / name) as model:
            results.append(weights(model.learn(updates=2)))
    assert same(*results)


def test_learning_works_inside_a_running_event_loop(model: GRPO) -> None:
    async def notebook() -> None:
        model.learn(updates=1)
        model.predict(np.array([257, 260, 97, 261], dtype=np.int32))

    asyncio.run(notebook())
    assert model.version == 1


def test_kl_epochs_and_clipping_are_logged(tmp_path: Path) -> None:
    with make(folder=tmp_path, kl_coef=0.1, n_epochs=3, learning_rate=5e-2) as model:
        model.learn(updates=2)
        second = metrics_of(model)[1]
    assert (
        second["train/kl_base"] > 0.0 and second["train/ratio_max"] > 1.0 and second["train/approx_kl"] > 0.0
    )


# -- acting ------------------------------------------------------------------------------------------------


def test_predict_takes_one_prompt_or_a_batch(model: GRPO) -> None:
    prompt = np.array([257, 260, 97, 261], dtype=np.int32)
    action, state = model.predict(prompt, state=None, deterministic=True)
    assert (
        action.dtype == np.int32
        and action.ndim == 1
        and model.action_space.contains(action)
        and state is None
    )
    ragged = np.empty(2, dtype=object)
    ragged[:] = [prompt, prompt[:3]]
    for batch in (ragged, (prompt, prompt[:3]), [prompt, prompt[:3]]):
        actions, _ = model.predict(batch, deterministic=True)
        assert len(actions) == 2 and actions[0].tolist() == action.tolist()


def test_predict_refuses_what_reset_returns(model: GRPO) -> None:
    with pytest.raises(TypeError, match="takes the observation alone"):
        model.predict(Say().reset(seed=0))


@pytest.mark.parametrize("observation", ["hi", b"hi", None, 3, {"a": 1}, [1, 2.5], [[1], [0.5]], [[[1]]]])
def test_predict_refuses_what_is_no_ids(model: GRPO, observation: Any) -> None:
    with pytest.raises(TypeError, match="an observation is "):
        model.predict(observation)


def test_what_is_no_number_of_steps_is_refused(model: GRPO) -> None:
    for updates in (-1, 1.5, "3"):
        with pytest.raises(ConfigError, match="updates must be a whole number >= 0, got"):
            model.learn(updates=updates)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="total_timesteps must be a number >= 0, got 'x'"):
        model.learn("x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="steps of a lesson must be a whole number >= 1, got '9'"):
        model.warm_up("9")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"learning_rate": -1}, "learning_rate must be a number >= 0 or a schedule, got -1"),
        ({"learning_rate": "x"}, "learning_rate must be a number >= 0 or a schedule, got 'x'"),
        ({"seed": "a"}, "seed must be a whole number >= 0, got 'a'"),
        ({"env": "CartPole-v1"}, "'CartPole-v1' takes no tokenizer=: wrap a simulator in GymTextEnv"),
    ],
)
def test_what_a_learner_is_made_of_is_checked(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make(**fields)


def test_a_learner_that_was_not_saved_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no saved learner in '.*nothing.zip'"):
        GRPO.load(tmp_path / "nothing.zip")


def test_predict_follows_the_learner(model: GRPO) -> None:
    prompt = [257, 260, 97, 261]
    model.predict([prompt])
    model.learn(updates=1)
    model.predict([prompt])
    assert model.engine.newest == model.version == 1


def test_scores_are_those_the_engine_sampled_with(model: GRPO) -> None:
    model.learn(updates=1)
    params = SamplingParams(max_tokens=6, temperature=0.7, seed=1)
    prompt = [257, 260, 97, 261]
    answer = asyncio.run(model.engine.generate(prompt, params))[0]
    (scored,) = model.score([prompt], [list(answer.ids)], temperature=0.7)
    assert scored == pytest.approx(np.array(answer.logprobs), abs=2e-5)


def test_evaluate_policy_and_get_env(model: GRPO) -> None:
    env = model.get_env()
    assert env.num_envs == 1 and env.action_space == model.action_space
    mean, std = evaluate_policy(model, env, n_eval_episodes=4)
    assert 0.0 <= mean <= 3.0 and std >= 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate_policy(model, Monitor(Say()), n_eval_episodes=2)


@pytest.mark.filterwarnings("ignore:rich is experimental")
def test_callbacks_of_sb3(model: GRPO, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [
        CheckpointCallback(24, str(tmp_path / "saved")),
        EvalCallback(
            model.get_env(), n_eval_episodes=2, eval_freq=24, verbose=0, best_model_save_path=str(tmp_path)
        ),
        ProgressBarCallback(),
    ]
    model.learn(updates=2, callback=callbacks)
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {
        "rl_model_24_steps.zip",
        "rl_model_48_steps.zip",
    }
    assert (tmp_path / "best_model.zip").is_file()
    with GRPO.load(tmp_path / "best_model.zip") as best:
        assert best.version == 0  # saved in the first batch, before its update


def test_the_logger_is_sb3s(model: GRPO, tmp_path: Path) -> None:
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn(updates=2, log_interval=1)
    model.logger.close()
    header, *lines = (tmp_path / "progress.csv").read_text().splitlines()
    assert "train/loss" in header.split(",") and len(lines) == 2


# -- keeping -----------------------------------------------------------------------------------------------


def test_a_loaded_learner_goes_on_exactly(tmp_path: Path) -> None:
    with make(folder=tmp_path / "whole") as whole:
        whole.learn(updates=4)
        expected, steps = weights(whole), whole.num_timesteps
    with make(folder=tmp_path / "first") as first:
        # The same schedule needs the same total: stop half way.
        first.learn(updates=4, callback=_StopAfter(2))
        assert first.version == 2
        first.save(tmp_path / "half.zip")
        name = first.run
    with GRPO.load(tmp_path / "half.zip", env=Say, folder=tmp_path / "second", device="cpu") as second:
        assert second.run != name and second.version == 2 and second.group_numbers == [6]
        second.learn(updates=2, reset_num_timesteps=False)
        assert same(weights(second), expected) and second.num_timesteps == steps
        assert [line["update"] for line in metrics_of(second)] == [3, 4]


class _StopAfter(BaseCallback):
    """Stops in the batch after so many updates."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.updates = updates

    def _on_step(self) -> bool:
        return self.model._n_updates < self.updates


def test_checkpoints_are_whole_and_can_be_gone_on_from(tmp_path: Path) -> None:
    with make(folder=tmp_path, checkpoint_every=2) as model:
        model.learn(updates=4)
        expected = weights(model)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["000002.zip", "000004.zip"]
    with GRPO.load(tmp_path / "checkpoints" / "000002.zip", env=Say, device="cpu") as model:
        model.learn(updates=2, reset_num_timesteps=False)
        assert same(weights(model), expected)


def test_a_save_amid_a_batch_goes_back_to_its_beginning(model: GRPO, tmp_path: Path) -> None:
    class SaveAt(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls == 30:
                self.model.save(tmp_path / "amid.zip")
            return True

    model.learn(updates=2, callback=SaveAt())
    with GRPO.load(tmp_path / "amid.zip") as loaded:
        assert loaded.num_timesteps == 24 and loaded.group_numbers == [3] and loaded.version == 1


def test_a_saved_tiny_model_brings_its_base_along(model: GRPO, tmp_path: Path) -> None:
    model.learn(updates=1)
    model.save(tmp_path / "model.zip")
    prompt, said = [[257, 260, 97, 261]], [[97, 258]]
    expected = model.score(prompt, said)[0]
    with GRPO.load(tmp_path / "model.zip") as loaded:
        assert loaded.get_env() is None and loaded.lessons == 2
        assert np.array_equal(loaded.score(prompt, said)[0], expected)
        first, _ = model.predict(np.array(prompt[0]), deterministic=True)
        second, _ = loaded.predict(np.array(prompt[0]), deterministic=True)
        assert first.tolist() == second.tolist()


def test_the_lesson_writes_the_base_that_adapters_belong_to(model: GRPO, tmp_path: Path) -> None:
    with GRPO(model.run_folder / "base", Say, **SMALL) as again:
        prompt, said = [[257, 260, 97, 261]], [[97, 258]]
        assert np.array_equal(again.score(prompt, said)[0], model.score(prompt, said)[0])
        again.warm_up(1, batch_size=2)  # of a model that is not "tiny" the adapter is taught
        assert again.version == 1 and again.engine.newest == 1


def test_a_temporary_folder_goes_when_the_learner_is_closed() -> None:
    model = make()
    folder = model.run_folder
    model.learn(updates=1)
    model.close()
    model.close()
    assert not folder.exists()
    with pytest.raises(ConfigError, match="this learner is closed"):
        model.learn(updates=1, reset_num_timesteps=False)


# -- engines that cannot be trusted ----------------------------------------------------------------------


def broken_engine(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, params, number: [97 + number % 2, 258], **fields)


@pytest.mark.parametrize(("kind", "variable"), [("vllm", "VLLM_API_KEY"), ("sglang", "SGLANG_API_KEY")])
def test_every_server_is_told_the_learners_run_and_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, variable: str
) -> None:
    asked: list[dict[str, Any]] = []

    def make_engine(spec: str, **options: Any) -> ScriptedEngine:
        asked.append(options)
        return broken_engine()

    monkeypatch.setattr("atropos_gym.engines.make_engine", make_engine)
    monkeypatch.setenv(variable, "secret")
    with GRPO("tiny", Say, **SMALL, engine=f"{kind}:http://127.0.0.1:9", folder=tmp_path) as model:
        assert model.engine.newest == 0
        assert asked[0]["api_key"] == "secret" and asked[0]["run"] == model.run


def test_an_engine_that_disagrees_is_warned_of_and_corrected(tmp_path: Path) -> None:
    model = make(engine="hf", folder=tmp_path)
    model._parts.engine = broken_engine(logprob=lambda *_: -0.5)
    with pytest.warns(UserWarning, match="engine and learner disagree"):
        model.learn(updates=1)
    (line,) = metrics_of(model)
    assert line["train/alignment"] > 1e-2
    assert line["train/ratio_max"] == pytest.approx(1.0)  # learner against learner
    model.close()


@pytest.mark.filterwarnings("ignore:engine and learner disagree")
def test_the_slope_test_refuses_a_stale_engine_and_then_stops(tmp_path: Path) -> None:
    with make(folder=tmp_path, slope_test=True, learning_rate=1e-2) as model:
        stale: dict[int, Any] = {}

        def never_swapped(prompt: Any, ids: Any, position: int, version: int) -> float:
            key = (tuple(prompt), tuple(ids[: position + 1]))
            if key not in stale:
                stale[key] = float(first.score([list(prompt)], [list(ids[: position + 1])])[0][-1])
            return stale[key]

        model.save(tmp_path / "first.zip")
        first = GRPO.load(tmp_path / "first.zip")
        model._parts.engine = broken_engine(logprob=never_swapped)
        with (
            pytest.warns(UserWarning, match="its batch is refused"),
            pytest.raises(EngineError, match="engine serves old weights .* second time in a row"),
        ):
            model.learn(updates=5)
        first.close()


def test_the_slope_test_passes_an_honest_engine(tmp_path: Path) -> None:
    with make(folder=tmp_path, slope_test=True, learning_rate=1e-2) as model:
        model.learn(updates=3)
        slopes = [line["train/slope"] for line in metrics_of(model) if "train/slope" in line]
    assert slopes and slopes == pytest.approx([1.0] * len(slopes), abs=0.05)


# -- what cannot work --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 1), ({"threads": 2}, 2), ({"threads": 2, "deterministic": True}, 1)],
    ids=["tiny", "asked for", "deterministic"],
)
def test_learning_computes_on_the_threads_that_are_wanted(fields: dict[str, Any], expected: int) -> None:
    class Threads(BaseCallback):
        seen: set[int] = set()

        def _on_step(self) -> bool:
            self.seen.add(torch.get_num_threads())
            return True

    before, callback = torch.get_num_threads(), Threads()
    callback.seen = set()
    with GRPO("tiny", Say, **{**SMALL, "deterministic": False, **fields}) as model:
        model.warm_up(2, batch_size=4).learn(updates=1, callback=callback)
    assert callback.seen == {expected}
    assert torch.get_num_threads() == before


def test_an_untrained_tiny_model_is_warned_of() -> None:
    with GRPO("tiny", Say, **SMALL) as model, pytest.warns(UserWarning, match="untrained.*warm_up"):
        model.learn(updates=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 1}, "group_size must be >= 2"),
        ({"groups_per_update": 0}, "groups_per_update must be >= 1, got 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"entropy": (0.1, "words")}, "entropy must be a number or"),
        ({"threads": 0}, "threads must be >= 1 or None, got 0"),
        ({"reduction": "mean"}, "reduction must be one of token_mean, seq_mean, .*'mean'"),
        ({"scale": "std"}, "scale must be one of none, group"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_settings_that_cannot_work_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPO("tiny", Say, **fields)


def test_an_environment_with_another_tokenizer_is_refused_by_name() -> None:
    class Wide(TextEnv):
        def begin(self, options: dict[str, Any]) -> str:
            return "x"

    env = Wide()
    env.tokenizer = type("Other", (), {"name": "other", "rows": 264, "fingerprint": "sha256:0"})()
    with pytest.raises(TokenizerMismatch, match="'other', the policy 'bytes'"):
        GRPO("tiny", env)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="nothing-here"):
        GRPO(tmp_path / "nothing-here", Say)


def test_answers_without_an_environment_are_refused() -> None:
    class NoAnswers(Say):
        answers = None

        def begin(self, options: dict[str, Any]) -> str:
            self.turn, self.wanted = 0, "a"
            return "a"

        def respond(self, reply: Reply) -> Feedback:
            return Feedback(terminated=True)

        def sample_reply(self) -> str:
            return "a"

    with (
        make(NoAnswers, entropy=(0.1, "answers")) as model,
        pytest.raises(ConfigError, match="no list of answers"),
    ):
        model.learn(updates=1)
    with GRPO("tiny", "http://127.0.0.1:9", entropy=(0.1, "answers"), seed=0) as model:
        with pytest.raises(ConfigError, match="give env= besides the server"):
            model.warm_up(1)
        with pytest.raises(ConfigError, match="has no environment: give env="):
            model.get_env().reset()


def test_a_tiny_lesson_comes_before_the_first_update(model: GRPO) -> None:
    model.learn(updates=1)
    with pytest.raises(ConfigError, match="before the first update"):
        model.warm_up(1)


def test_nothing_to_learn_is_said() -> None:
    with GRPO("tiny") as model, pytest.raises(ConfigError, match="nothing to learn: give env="):
        model.learn(updates=1)


def test_gymnasium_environments_must_speak_ids() -> None:
    with pytest.raises(ConfigError, match="wrap it with GymTextEnv"):
        GRPO("tiny", lambda: __import__("gymnasium").make("CartPole-v1"))


def test_old_adapters_go_those_of_earlier_runs_too_and_held_ones_stay(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    names = ["run-aaaa-v1", "run-aaaa-v2", "run-bbbb-v2", "run-bbbb-v10", "canary-1", ".run-bbbb-v1.part"]
    for name in names:
        (folder.adapters / name).mkdir(parents=True)
    folder.prune({2, 10})
    assert sorted(path.name for path in folder.adapters.iterdir()) == sorted(set(names) - {"run-aaaa-v1"})
