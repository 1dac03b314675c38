"""What an environment says is legal, as what an engine may sample: who says it, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from atropos_gym import Feedback, GroupCollector, GymTextEnv, TextEnv, evaluate
from atropos_gym.cli import collect as collect_verb
from atropos_gym.cli import eval as eval_verb
from atropos_gym.cli import main
from atropos_gym.engines import SamplingParams
from atropos_gym.engines.hf import HFEngine
from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import CollectionFailed, ConfigError, EngineError
from atropos_gym.rollout._legal import LegalReplies
from atropos_gym.rollout.episode import Episode, EpisodeGroup
from atropos_gym.rollout.writers import JSONLWriter, read_jsonl, rollouts_html
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.tiny_llama import tiny_llama

NONSENSE = ScriptedEngine(lambda prompt, params, number: [*b"I will think about it.", 258])


class Corridor(gymnasium.Env[int, int]):
    """Right leads to the end; left is legal behind the start only; ``mask`` may say that nothing is."""

    observation_space, action_space = Discrete(4), Discrete(2)

    def __init__(self, mask: tuple[int, ...] | None = None) -> None:
        self.at, self._mask = 0, mask

    def _info(self) -> dict[str, Any]:
        mask = (self.at > 0, True) if self._mask is None else self._mask
        return {"action_mask": np.array(mask, np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self.at, self._info()

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert action or self.at, "left of the start"
        self.at += 1 if action else -1
        return self.at, 0.0, self.at == 3, False, self._info()


def corridor(format: str = "tag", mask: tuple[int, ...] | None = None, **keywords: Any) -> GymTextEnv:
    return GymTextEnv(Corridor(mask), format=format, names=("left", "right"), max_turns=6, **keywords)


class Menu(TextEnv):
    """Few answers, of which ``extra_info`` may mask some."""

    answers = ("soup", "fish", "cake")
    mask: tuple[int, ...] | None = (0, 1, 1)

    def begin(self, options: dict[str, Any]) -> str:
        return "What do you want?"

    def respond(self, reply: Any) -> Feedback:
        return Feedback(reward=float(reply.content == "cake"), terminated=True)

    def extra_info(self) -> dict[str, Any]:
        return {} if self.mask is None else {"action_mask": list(self.mask)}


# -- what is legal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "first", "later"),
    [
        ("tag", ("<action>right</action>",), ("<action>left</action>", "<action>right</action>")),
        ("bare_word", ("right",), ("left", "right")),
        ("number", ("1",), ("0", "1")),
        ("json", ('{"action": "right"}',), ('{"action": "left"}', '{"action": "right"}')),
    ],
)
def test_a_simulators_mask_in_the_declared_format(
    format: str, first: tuple[str, ...], later: tuple[str, ...]
) -> None:
    env = corridor(format)
    assert env.legal_replies() is None, "nothing is known before reset"
    env.reset(seed=0)
    assert env.legal_replies() == first
    env.step(np.array(env.say(first[0]), np.int32))
    assert env.legal_replies() == later


def test_tool_calls_are_written_in_full() -> None:
    env = corridor("tool_call")
    env.reset(seed=0)
    assert env.legal_replies() == (
        '<tool_call>\n{"name": "act", "arguments": {"action": "right"}}\n</tool_call>',
    )


def test_without_a_mask_all_answers_are_legal() -> None:
    env = gymnasium.make("atropos/Blackjack-v0").unwrapped
    env.reset(seed=0)
    assert isinstance(env, TextEnv) and env.legal_replies() == env.answers == ("stick", "hit")


def test_many_actions_of_which_few_are_legal_are_told() -> None:
    class Wide(Corridor):
        action_space = Discrete(5000)

        def _info(self) -> dict[str, Any]:
            mask = np.zeros(5000, np.int8)
            mask[[1, 4711]] = 1
            return {"action_mask": mask}

    env = GymTextEnv(Wide(), format="number")
    env.reset(seed=0)
    assert env.answers is None and env.legal_replies() == ("1", "4711")


def test_a_tasks_own_answers_and_mask() -> None:
    env = Menu()
    assert env.legal_replies() == ("fish", "cake")
    env.mask = None
    assert env.legal_replies() == ("soup", "fish", "cake")
    env.mask = (1,)
    with pytest.raises(
        ConfigError, match=r"Menu: action_mask has 1 entries for 3 answers; define legal_repl"
    ):
        env.legal_replies()


# -- what is sampled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["tag", "bare_word", "number", "json", "tool_call"])
def test_an_engine_that_talks_nonsense_plays_legally(format: str) -> None:
    free = evaluate(lambda: corridor(format), NONSENSE, 4, seed=1, deterministic=False)
    assert free.valid == 0.0
    for deterministic in (False, True):
        result = evaluate(
            lambda: corridor(format), NONSENSE, 4, seed=1, deterministic=deterministic, legal_only=True
        )
        assert result.valid == 1.0


@pytest.mark.parametrize("served", [False, True], ids=["hf", "vllm"])
def test_an_untrained_model_plays_legally(served: bool) -> None:
    model = tiny_llama(max_position_embeddings=512)
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes", seed=0)
    env = {"describe": "terse", "history": "latest"}
    try:
        free = evaluate("atropos/Blackjack-v0", engine, 8, seed=3, deterministic=False, env_kwargs=env)
        assert free.valid < 0.5
        with FakeVLLM(backend=engine, max_model_len=512).engine() as vllm:
            for deterministic in (True, False):
                result = evaluate(
                    "atropos/Blackjack-v0",
                    vllm if served else engine,
                    8,
                    seed=3,
                    deterministic=deterministic,
                    env_kwargs=env,
                    legal_only=True,
                )
                assert result.valid == 1.0 and result.episodes == 8
    finally:
        asyncio.run(engine.close())


def test_each_turn_is_asked_for_what_is_legal_in_it() -> None:
    engine = ScriptedEngine(lambda prompt, params, number: [*b"<action>right</action>", 258])
    evaluate(lambda: corridor(), engine, 1, seed=1, legal_only=True)
    words = [
        [bytes(choice[:-1]).decode()[8:-9] for choice in call.params.choices or ()] for call in engine.calls
    ]
    assert words == [["right"], ["left", "right"], ["left", "right"]]


def test_a_thought_that_is_required_is_part_of_the_reply() -> None:
    def make() -> GymTextEnv:
        return corridor(thinking="required")

    engine = ScriptedEngine(NONSENSE._script)
    assert evaluate(make, engine, 1, seed=1, legal_only=True).valid == 1.0
    said = bytes(engine.calls[0].outcome.ids[:-1]).decode()  # type: ignore[union-attr]
    assert said == "<think>\n...\n</think>\n\n<action>right</action>"


def test_a_blocking_environment_is_asked_in_its_own_thread() -> None:
    class Far(Menu):
        blocking = True
        asked: list[str] = []  # noqa: RUF012

        def begin(self, options: dict[str, Any]) -> str:
            self.asked.append(threading.current_thread().name)
            return super().begin(options)

        def legal_replies(self) -> tuple[str, ...]:
            self.asked.append(threading.current_thread().name)
            return ("cake",)

    assert evaluate(Far, NONSENSE, 1, seed=1, legal_only=True).mean == 1.0
    assert len(set(Far.asked)) == 1 and threading.current_thread().name not in Far.asked


# -- what cannot work ---------------------------------------------------------------------------------------


class Essay(TextEnv):
    """Anything can be said."""

    def begin(self, options: dict[str, Any]) -> str:
        return "Write."

    def respond(self, reply: Any) -> Feedback:
        return Feedback(terminated=True)


class Steering(Corridor):
    action_space = Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Essay, "Essay"),
        (lambda: GymTextEnv(Steering()), "GymTextEnv"),
        (lambda: GymTextEnv(Corridor(), parse=lambda text: 1), "GymTextEnv"),
    ],
    ids=["free text", "box", "own parser"],
)
def test_an_environment_that_does_not_say_what_is_legal(make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} does not say which replies are legal.*legal_replies"):
        evaluate(make, NONSENSE, 1, seed=1, legal_only=True)


def test_nothing_legal_is_an_error_that_says_so() -> None:
    with pytest.raises(EngineError, match="nothing legal: GymTextEnv has no legal reply in turn 0"):
        evaluate(lambda: corridor(mask=(0, 0)), NONSENSE, 1, seed=1, legal_only=True)


def test_a_reply_that_does_not_fit_in_a_turn_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'<action>right</action>' has 23 ids, and a turn has 8: raise max"
    ):
        evaluate(lambda: corridor(max_turn_tokens=8), NONSENSE, 1, seed=1, legal_only=True)


def test_only_engines_can_be_held_to_what_is_legal() -> None:
    with pytest.raises(ConfigError, match="give an engine, got 'random'"):
        evaluate("atropos/Blackjack-v0", "random", 1, seed=1, legal_only=True)


def test_sets_of_replies_are_written_as_ids_once() -> None:
    said: list[str] = []

    def say(text: str) -> list[int]:
        said.append(text)
        return [*text.encode(), 258]

    legal = LegalReplies("Menu")
    sampling = SamplingParams(max_tokens=8)
    for _ in range(3):
        assert legal.narrowed(sampling, ("a", "b"), say).choices == ((97, 258), (98, 258))
    assert legal.narrowed(sampling, ["a", "b"], say).choices == ((97, 258), (98, 258))
    assert said == ["a", "b"]
    with pytest.raises(ConfigError, match=r"Menu: legal_replies\(\) must return a tuple of texts, got 'ab'"):
        legal.narrowed(sampling, "ab", say)


# -- what becomes of it -------------------------------------------------------------------------------------


def test_a_group_that_cannot_be_trained_on_is_no_body_of_the_wire() -> None:
    def episode(trainable: Any) -> Episode:
        return Episode(
            rows=[],
            rewards=[0.0],
            messages=[],
            end_reason="terminated",
            success=None,
            truncated=False,
            invalid_turns=0,
            seed=0,
            member=0,
            score=0.0,
            trainable=trainable,
        )

    group = EpisodeGroup("e", 3, [episode(True), episode("choices")], 0, 1.0, "sha256:0")
    assert group.trainable == "choices"
    with pytest.raises(ConfigError, match=r"group 3 cannot be trained on \(choices\).*legal_only"):
        group.to_wire()
    again = EpisodeGroup.from_dict(group.to_dict())
    assert [one.trainable for one in again.episodes] == [True, "choices"]
    group.episodes.pop()
    assert group.trainable is True


@pytest.mark.parametrize("on_partial", ["drop", "keep", "retry"])
def test_a_collector_of_legal_replies(on_partial: Any, tmp_path: Path) -> None:
    collector = GroupCollector(
        corridor, NONSENSE, group_size=2, seed=1, on_partial=on_partial, legal_only=True
    )
    [group] = collector.collect(1)
    assert [episode.invalid_turns for episode in group.episodes] == [0, 0]
    assert group.trainable == "choices"
    for episode in group.episodes:
        for turn in episode.turns:
            said = episode.rows[0].ids[turn.start : turn.end]
            words = turn.legal_actions or []
            assert said in [[*f"<action>{word}</action>".encode(), 258] for word in words]
            assert (len(words) == 1) == (sum(episode.rows[0].logprobs[turn.start : turn.end]) == 0.0)
    assert collector.report["episodes"]["untrainable"] == {"choices": 2}
    assert collector.report["delivered"] == 1 and collector.report["failed"] == {}
    with pytest.raises(ConfigError, match="group 0 cannot be trained on"):
        group.to_wire()

    with JSONLWriter(tmp_path / "g.jsonl", collector.env.renderer) as writer:
        writer.write(group)
    assert list(read_jsonl(tmp_path / "g.jsonl")) == [group]
    assert "right" in rollouts_html([group], collector.env.renderer)
    collector.close()


@pytest.mark.parametrize("on_partial", ["drop", "keep", "retry"])
def test_a_collector_says_at_once_what_the_environment_lacks(on_partial: Any) -> None:
    collector = GroupCollector(Essay, NONSENSE, on_partial=on_partial, legal_only=True)
    with pytest.raises(ConfigError, match="Essay does not say which replies are legal"):
        collector.collect(1)
    collector.close()


def test_turns_without_anything_legal_are_counted() -> None:
    collector = GroupCollector(lambda: corridor(mask=(0, 0)), NONSENSE, group_size=2, legal_only=True)
    with pytest.raises(CollectionFailed, match="nothing legal"):
        collector.collect(1)
    assert set(collector.report["failed"]) == {"nothing legal"}
    collector.close()


def test_without_legal_only_nothing_is_masked() -> None:
    engine = ScriptedEngine(lambda prompt, params, number: [*b"<action>right</action>", 258])
    collector = GroupCollector(corridor, engine, group_size=2, seed=1)
    [group] = collector.collect(1)
    assert {call.params.choices for call in engine.calls} == {None}
    assert group.trainable is True and collector.report["episodes"]["untrainable"] == {}
    assert len(group.to_wire().tokens) == 2
    collector.close()


# -- on the command line -----------------------------------------------------------------------------------


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to work in, where whatever model is named talks nonsense."""
    for module in (eval_verb, collect_verb):
        monkeypatch.setattr(module, "open_engine", lambda config: nullcontext(NONSENSE))
        monkeypatch.setattr(module, "with_saved_run", lambda command: command.config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_eval_legal_only(opened: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--policy", "m", "--env", "atropos/Blackjack-v0", "--episodes", "4"]
    assert main([*words, "--legal-only"]) == 0
    assert "100.0 %" in capsys.readouterr().out
    assert main(words) == 0
    assert "0.0 %" in capsys.readouterr().out
    assert main(["eval", "--policy", "random", "--legal-only"]) == 2
    assert "legal_only masks what an engine samples" in capsys.readouterr().err
    assert main(["eval", "--policy", "m", "--env", f"{__name__}:Essay", "--legal-only"]) == 2
    assert "does not say which replies are legal" in capsys.readouterr().err


def test_collect_legal_only(opened: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["collect", "atropos/Blackjack-v0", "--policy", "m", "--legal-only"]
    assert main([*words, "--to", "http://127.0.0.1:1"]) == 2
    assert "--legal-only: such groups cannot be trained on" in capsys.readouterr().err
    assert main([*words, "--out", "a.jsonl", "--groups", "2", "--group-size", "2"]) == 0
    groups = list(read_jsonl(opened / "a.jsonl"))
    assert [group.trainable for group in groups] == ["choices", "choices"]
    assert not any(episode.invalid_turns for group in groups for episode in group.episodes)
