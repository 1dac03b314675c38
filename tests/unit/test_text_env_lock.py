"""Lock test of TextEnv: what tasks, collectors and learners rely on. A failing test means changed behaviour.

TokenSequence (DESIGN section 3; its own tests are in test_spaces.py, vector environments in test_vector.py)
 1. Observation and action spaces are TokenSequence(tokenizer.rows, max_tokens / max_turn_tokens).
 2. Observations are 1-D int32 arrays inside the space.

What an author writes
 3. begin returns a string (one user message) or messages, as plain dicts too.
 4. respond gets a Reply with text, thinking, content, complete, malformed, opened, ids.
 5. Feedback.content is a string (a user message) or messages.
 6. Feedback that neither ends nor says anything is a ValueError.
 7. Content of a terminal feedback goes to messages only.
 8. restart opens a new segment in place of the conversation so far; content follows it.
 9. sample_reply, answers, scores and extra_info have neutral defaults and can be overridden.
10. reseed sets the chance that comes after the start.
11. A wrong type from begin or respond is an error that names class, method and what came.
12. A subclass may define __init__ and call super().__init__(**kwargs); forgetting that is told.

Settings
13. Each class attribute is a constructor keyword too; further keywords are tokenizer, system_prompt,
    render_mode, renderer.
14. max_tokens is computed from the others and max_turns.
15. max_tokens below what two turns need is an error that names the numbers.
16. Impossible settings are errors that name the setting.
17. The system prompt stands first, in every segment.
18. history="latest": system prompt, begin's messages but the last, the newest feedback; each turn a segment.
19. In history="latest" the same feedback gives the same prompt in every turn.
20. Two tokenizers that differ are refused, both named.

What a policy sees
21. The observation is the whole prompt, ending where the assistant is to speak.
22. Anything in the action space is accepted: cut, empty, control ids, ids after an end id.
23. Append only: the next observation begins with observation and action unless the segment grew by one.
24. The final observation is observation and action, nothing added.
25. info always holds segment and turn from 0 and max_new_tokens = max_turn_tokens.
26. info holds plain Python values and fresh lists; numpy values become plain, other objects are refused.
27. invalid, reward_terms, extra info and the feedback's own info appear where they apply.
28. At the end: end_reason; success and is_success only where known.
29. max_turns reached is truncated=True, end_reason max_turns, at the step that finds it.
30. No room for another turn is truncated=True, end_reason max_tokens; a turn begins only if
    len(prompt) + max_turn_tokens <= max_tokens.
31. A one-turn task ends terminated=True whatever was said.
32. An end_reason of the environment's own is kept; both ends of a feedback are passed on.
33. A prompt that does not fit at reset is an error that names the numbers; later ones truncate.
34. A finished episode refuses to step; so does one whose respond failed.
35. Same seed, same options: the same ids, in every process.
36. np_random is the only source of chance.
37. reset(seed=None) goes on with the present generator.
38. options reach begin as a dict of its own.

Around
39. env.unwrapped has renderer, tokenizer, messages, stop_ids, scores and the limits.
40. messages is the conversation so far as text, a new list each episode.
41. render() in "ansi" gives the conversation; otherwise None.
42. close() is idempotent.
43. ResetNeeded on step before reset and after the end.
44. An action outside the space is TypeError or ValueError that names position and value.
45. Returned arrays and infos are the caller's own: changing them changes nothing.
46. check_env of Gymnasium passes without a warning; SB3's with its one warning about Sequence spaces.
47. A user's class registers with Gymnasium and is made by id, version and module form.
48. No text of a policy raises, whatever ids it samples.
49. Rendering that cannot go on opens a new segment by itself.
50. Rewards are Python floats, ends are Python bools; a reward that is no finite number is refused.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError, PromptTooLong, TokenizerMismatch
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.rendering import ChatRenderer
from atropos_gym.spaces import TokenSequence
from atropos_gym.text_env import TextEnv
from tests.tools import imitation_tokenizers as imitation
from tests.tools.text_tasks import Guess, Reverse, Scripted

BOS, END, SYSTEM, USER, ASSISTANT, TOOL = 257, 258, 259, 260, 261, 262


def ids(*parts: int | str) -> list[int]:
    """Returns ids of the bytes tokenizer: strings are UTF-8, ints stand for themselves."""
    return [i for part in parts for i in (part.encode() if isinstance(part, str) else [part])]


def said(text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(ids(text, END), np.int32)


def ended(**fields: Any) -> Feedback:
    return Feedback(terminated=True, **fields)


# --- spaces ---


def test_01_spaces_are_sized_by_the_tokenizer_and_the_limits() -> None:
    env = Guess()
    assert env.observation_space == TokenSequence(264, env.max_tokens)
    assert env.action_space == TokenSequence(264, 16)
    from atropos_gym.tokenizers import load_tokenizer

    assert Guess(tokenizer=load_tokenizer("bytes", rows=300)).action_space == TokenSequence(300, 16)


def test_02_observations_are_int32_members() -> None:
    env = Guess()
    observations = [env.reset(seed=0)[0], env.step(said("1"))[0]]
    for observation in observations:
        assert observation.dtype == np.int32
        assert observation.ndim == 1
        assert observation in env.observation_space


# --- what an author writes ---


@pytest.mark.parametrize(
    ("start", "prompt"),
    [
        ("hi", ids(BOS, USER, "hi", ASSISTANT)),
        ([{"role": "user", "content": "hi"}], ids(BOS, USER, "hi", ASSISTANT)),
        (
            [{"role": "system", "content": "S"}, Message(role="user", content="é")],
            ids(BOS, SYSTEM, "S", USER, "é", ASSISTANT),
        ),
        (
            [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2"},
                {"role": "tool", "content": "3"},
            ],
            ids(BOS, USER, "1", ASSISTANT, "2", END, TOOL, "3", ASSISTANT),
        ),
    ],
)
def test_03_begin_says_a_string_or_messages(start: Any, prompt: list[int]) -> None:
    assert Scripted(start).reset()[0].tolist() == prompt


def test_04_respond_gets_a_reply() -> None:
    env = Scripted()
    env.reset()
    env.step(np.array(ids("<think>a</think>b", END)[:8], np.int32))
    long = Scripted(max_turn_tokens=32)
    long.reset()
    long.step(np.array(ids("<think>a</think>b", END, "x"), np.int32))
    assert env.replies[0].complete is False
    assert long.replies[0] == Reply(
        text="<think>a</think>b",
        content="b",
        ids=tuple(ids("<think>a</think>b", END, "x")),
        thinking="a",
        complete=True,
        malformed=True,
    )


@pytest.mark.parametrize(
    ("content", "bridge"),
    [
        ("low", ids(USER, "low", ASSISTANT)),
        (
            [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}],
            ids(TOOL, "1", USER, "2", ASSISTANT),
        ),
    ],
)
def test_05_feedback_says_a_string_or_messages(content: Any, bridge: list[int]) -> None:
    env = Scripted(script=(Feedback(content),))
    before, _ = env.reset()
    after, *_ = env.step(said("a"))
    assert after.tolist() == [*before.tolist(), *ids("a", END), *bridge]


@pytest.mark.parametrize("content", [None, "", []])
def test_06_feedback_that_goes_on_says_something(content: Any) -> None:
    with pytest.raises(ValueError, match="must say something"):
        Feedback(content, reward=1.0)
    assert Feedback(content, terminated=True).terminated
    assert Feedback(content, truncated=True).truncated


def test_07_terminal_content_goes_to_messages_only() -> None:
    env = Scripted(script=(ended(content="You win."),))
    before, _ = env.reset()
    after, _, terminated, _, _ = env.step(said("a"))
    assert terminated
    assert after.tolist() == [*before.tolist(), *ids("a", END)]
    assert [m["content"] for m in env.messages] == ["go", "a", "You win."]


@pytest.mark.parametrize("history", ["whole", "latest"])
def test_08_restart_opens_a_segment(history: Any) -> None:
    summary = [Message(role="user", content="sum"), Message(role="user", content="now")]
    script = (Feedback("x", restart=summary), Feedback("y"), Feedback(restart=summary[:1]))
    env = Scripted(script=script, system_prompt="S", history=history)
    env.reset()
    observation, _, _, _, info = env.step(said("a"))
    assert observation.tolist() == ids(BOS, SYSTEM, "S", USER, "sum", USER, "now", USER, "x", ASSISTANT)
    assert (info["segment"], info["turn"]) == (1, 1)
    observation, _, _, _, info = env.step(said("b"))
    if history == "whole":
        head = ids(BOS, SYSTEM, "S", USER, "sum", USER, "now", USER, "x", ASSISTANT, "b", END)
        assert observation.tolist() == [*head, *ids(USER, "y", ASSISTANT)]
    else:
        assert observation.tolist() == ids(BOS, SYSTEM, "S", USER, "sum", USER, "now", USER, "y", ASSISTANT)
    observation, _, _, _, info = env.step(said("c"))
    assert observation.tolist() == ids(BOS, SYSTEM, "S", USER, "sum", ASSISTANT)
    assert info["segment"] == (2 if history == "whole" else 3)
    roles = [m["role"] for m in env.messages]
    assert roles.count("assistant") == 3
    assert "go" in [m["content"] for m in env.messages]


def test_08b_a_restart_may_bring_its_own_system_message() -> None:
    own = [Message(role="system", content="T"), Message(role="user", content="now")]
    env = Scripted(script=(Feedback(restart=own),), system_prompt="S")
    env.reset()
    assert env.step(said("a"))[0].tolist() == ids(BOS, SYSTEM, "T", USER, "now", ASSISTANT)


def test_09_optional_parts_are_neutral_and_can_be_overridden() -> None:
    plain = Reverse()
    assert plain.sample_reply() is None
    assert plain.answers is None
    assert dict(plain.scores) == {}
    assert dict(plain.extra_info()) == {}

    class Rich(Reverse):
        answers = ("a", "b")
        scores = {"random": 0.5}

        def sample_reply(self) -> str:
            return str(self.np_random.choice(self.answers))

    rich = Rich()
    rich.reset(seed=0)
    assert rich.sample_reply() in rich.answers
    assert rich.scores["random"] == 0.5
    guess = Guess()
    _, info = guess.reset(seed=0)
    assert info["legal_actions"] == [str(i) for i in range(10)]


def test_10_reseed_sets_what_comes_after_the_start() -> None:
    def play(seed: int | None) -> list[Any]:
        env = Guess()
        first, _ = env.reset(seed=5)
        if seed is not None:
            env.reseed(seed)
        return [first.tolist(), env.step(said("x"))[0].tolist()]

    assert play(1) == play(1)
    assert play(None) == play(None)
    assert play(1)[0] == play(2)[0] == play(None)[0]
    assert len({str(play(seed)[1]) for seed in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    "start", [3, None, [3], [{"role": "user"}], {"role": "user", "content": "x"}], ids=repr
)
def test_11a_begin_of_a_wrong_type_is_named(start: Any) -> None:
    with pytest.raises(TypeError, match=r"Scripted: begin\(\) must be a str or"):
        Scripted(start).reset()


@pytest.mark.parametrize("start", ["", []], ids=repr)
def test_11b_begin_says_something(start: Any) -> None:
    with pytest.raises(ValueError, match=r"begin\(\) said nothing"):
        Scripted(start).reset()


@pytest.mark.parametrize(
    ("feedback", "words"),
    [
        ("well done", r"Scripted.respond\(\) must return Feedback, got str"),
        (None, "got NoneType"),
        (Feedback(3), r"Feedback.content must be a str or .* got int"),  # type: ignore[arg-type]
        (Feedback([{"content": "x"}]), "position 0"),  # type: ignore[list-item]
        (Feedback("x", restart=[{"role": "user"}]), r"Feedback.restart"),  # type: ignore[typeddict-item]
    ],
)
def test_11c_respond_of_a_wrong_type_is_named(feedback: Any, words: str) -> None:
    env = Scripted(script=(feedback,))
    env.reset()
    with pytest.raises(TypeError, match=words):
        env.step(said("a"))


def test_11d_missing_methods_are_named() -> None:
    env = TextEnv()
    with pytest.raises(NotImplementedError, match=r"begin\(self, options\)"):
        env.reset()
    with pytest.raises(NotImplementedError, match=r"respond\(self, reply\)"):
        env.respond(Reply("x", "x"))


def test_12_subclasses_may_have_an_init() -> None:
    assert Scripted("x", max_turns=3, tokenizer="bytes").max_turns == 3

    class Forgot(Reverse):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match=r"super\(\).__init__"):
        Forgot().reset()


# --- settings ---


def test_13_class_attributes_are_keywords() -> None:
    assert (TextEnv.max_turns, TextEnv.max_turn_tokens, TextEnv.max_prompt_tokens) == (1, 64, 512)
    assert (TextEnv.max_feedback_tokens, TextEnv.max_tokens, TextEnv.history) == (256, None, "whole")
    limits = {
        "max_turns": 3,
        "max_turn_tokens": 5,
        "max_prompt_tokens": 30,
        "max_feedback_tokens": 20,
        "max_tokens": 400,
        "history": "latest",
    }
    by_keyword = Scripted(**limits)
    by_class = type("Fixed", (Scripted,), limits)()
    for env in (by_keyword, by_class):
        assert {name: getattr(env, name) for name in limits} == limits
    assert type("Fixed", (Scripted,), limits)(max_turns=7).max_turns == 7
    assert Scripted(renderer=ChatRenderer("bytes", past="template")).renderer.past == "template"
    with pytest.raises(TypeError, match="max_turn_token"):
        Scripted(max_turn_token=3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_turns": 1}, 100 + 10),
        ({"max_turns": 2}, 100 + 2 * 10 + 20 + 3),
        ({"max_turns": 5}, 100 + 5 * 10 + 4 * (20 + 3)),
        ({"max_turns": 5, "history": "latest"}, 100 + 2 * 10 + 20 + 3),
    ],
)
def test_14_max_tokens_is_computed(fields: dict[str, Any], expected: int) -> None:
    env = Scripted(max_turn_tokens=10, max_prompt_tokens=100, max_feedback_tokens=20, **fields)
    assert env.max_tokens == expected
    assert type(env.max_tokens) is int


def test_15_max_tokens_holds_two_turns() -> None:
    limits = {"max_turn_tokens": 10, "max_prompt_tokens": 100, "max_feedback_tokens": 20}
    least = 100 + 2 * 10 + 20 + 3
    assert Scripted(max_turns=2, max_tokens=least, **limits).max_tokens == least
    with pytest.raises(
        ConfigError, match=rf"max_tokens={least - 1} .*at least {least}.*max_prompt_tokens=100"
    ):
        Scripted(max_turns=2, max_tokens=least - 1, **limits)
    assert Scripted(max_turns=1, max_tokens=110, **limits).max_tokens == 110


@pytest.mark.parametrize(
    "settings_",
    [
        {"max_turns": 0},
        {"max_turn_tokens": -1},
        {"max_prompt_tokens": 2.5},
        {"max_feedback_tokens": True},
        {"max_tokens": 0},
        {"history": "none"},
        {"render_mode": "human"},
        {"system_prompt": 3},
    ],
    ids=str,
)
def test_16_impossible_settings_are_named(settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        Scripted(**settings_)


def test_17_the_system_prompt_stands_first() -> None:
    env = Scripted(system_prompt="S")
    assert env.reset()[0].tolist() == ids(BOS, SYSTEM, "S", USER, "go", ASSISTANT)
    assert env.messages[0] == {"role": "system", "content": "S"}
    with pytest.raises(ConfigError, match="system_prompt"):
        Scripted(
            [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], system_prompt="S"
        ).reset()


def test_18_latest_shows_the_newest_feedback_alone() -> None:
    start = [Message(role="user", content="rules"), Message(role="user", content="s0")]
    news = [Message(role="tool", content="t"), Message(role="user", content="s1")]
    env = Scripted(start, script=(Feedback(news), Feedback("s2")), history="latest", system_prompt="S")
    head = ids(BOS, SYSTEM, "S", USER, "rules")
    observation, info = env.reset()
    assert observation.tolist() == [*head, *ids(USER, "s0", ASSISTANT)]
    assert info["segment"] == 0
    observation, _, _, _, info = env.step(said("a"))
    assert observation.tolist() == [*head, *ids(TOOL, "t", USER, "s1", ASSISTANT)]
    assert (info["segment"], info["turn"]) == (1, 1)
    observation, _, _, _, info = env.step(np.array([], np.int32))
    assert observation.tolist() == [*head, *ids(USER, "s2", ASSISTANT)]
    assert (info["segment"], info["turn"]) == (2, 2)
    assert [m["content"] for m in env.messages] == ["S", "rules", "s0", "a", "t", "s1", "", "s2"]


def test_19_latest_repeats_equal_prompts() -> None:
    env = Scripted("go", script=(Feedback("go"), Feedback("go")), history="latest")
    first, _ = env.reset()
    for _ in range(2):
        again, *_ = env.step(said("a"))
        np.testing.assert_array_equal(again, first)


def test_20_two_tokenizers_are_refused() -> None:
    tiny = imitation.tiny_tokenizer()
    renderer = ChatRenderer(tiny)
    assert Scripted(renderer=renderer).tokenizer is renderer.tokenizer
    assert Scripted(renderer=renderer, tokenizer=tiny).renderer is renderer
    other = imitation.tiny_tokenizer(imitation.TRIMS)
    with pytest.raises(TokenizerMismatch, match="tokenizer=.*renderer's"):
        Scripted(renderer=renderer, tokenizer=other)


# --- what a policy sees ---


def test_21_the_observation_is_the_whole_prompt() -> None:
    env = Guess()
    observation, _ = env.reset(seed=0)
    assert observation.tolist() == ids(BOS, USER, "Rules.", USER, "Guess 0-9.", ASSISTANT)
    after, *_ = env.step(said("x"))
    assert after[-1] == ASSISTANT
    assert after.tolist() == env.renderer.prompt(env.messages)


@pytest.mark.parametrize(
    "action",
    [
        [],
        [END],
        ids("abc"),
        ids("a", END, "b"),
        ids("a", END, END),
        [BOS, USER, ASSISTANT, END, 256, 263],
        [195],
        [0] * 8,
        (1, 2),
        np.array([1, 2], np.int64),
        np.array([1], np.uint8),
    ],
    ids=repr,
)
def test_22_anything_in_the_action_space_is_accepted(action: Any) -> None:
    env = Scripted()
    assert action in env.action_space
    before, _ = env.reset()
    after, _, terminated, truncated, _ = env.step(action)
    assert not (terminated or truncated)
    listed = [int(i) for i in action]
    end = [] if listed and listed[-1] == END else [END]
    assert after.tolist() == [*before.tolist(), *listed, *end, *ids(USER, "more", ASSISTANT)]


@given(turns=st.lists(st.lists(st.integers(0, 263), max_size=8), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_23_ids_only_grow_within_a_segment(turns: list[list[int]]) -> None:
    env = Scripted(script=(Feedback("x"), Feedback("y", restart=[Message(role="user", content="r")])))
    observation, info = env.reset()
    for turn in turns:
        before = observation.tolist()
        observation, _, terminated, truncated, after = env.step(np.array(turn, np.int32))
        if after["segment"] == info["segment"]:
            assert observation[: len(before) + len(turn)].tolist() == before + turn
        else:
            assert after["segment"] == info["segment"] + 1
        info = after
        if terminated or truncated:
            break


@pytest.mark.parametrize("history", ["whole", "latest"])
@pytest.mark.parametrize(
    "last", [Feedback("bye", terminated=True), Feedback("bye", truncated=True), Feedback("bye")]
)
def test_24_the_final_observation_adds_nothing(history: Any, last: Feedback) -> None:
    env = Scripted(script=(Feedback("more"), last), max_turns=2, history=history)
    env.reset()
    before, _, _, _, info = env.step(said("a"))
    final, _, terminated, truncated, after = env.step(said("b"))
    assert terminated or truncated
    assert final.tolist() == [*before.tolist(), *ids("b", END)]
    assert final in env.observation_space
    assert after["segment"] == info["segment"]


def test_25_info_counts_from_zero() -> None:
    env = Scripted(max_turns=3)
    infos = [env.reset()[1], *(env.step(said("a"))[4] for _ in range(3))]
    assert [info["turn"] for info in infos] == [0, 1, 2, 3]
    assert [info["segment"] for info in infos] == [0, 0, 0, 0]
    assert [info["max_new_tokens"] for info in infos] == [8, 8, 8, 8]


def test_26_info_holds_plain_values() -> None:
    given_ = {
        "mask": np.array([1, 0]),
        "n": np.int64(3),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "t": (1, "a"),
    }
    env = Scripted(script=(Feedback("x", info={**given_, "d": {"a": 1}}),))
    env.reset()
    info = env.step(said("a"))[4]
    plain = {"mask": [1, 0], "n": 3, "f": 0.5, "b": True, "t": [1, "a"], "d": {"a": 1.0}}
    assert {key: info[key] for key in plain} == plain
    assert [type(info[key]) for key in plain] == [type(value) for value in plain.values()]
    for bad, error in (({"clock": object()}, TypeError), ({"turn": 3}, ValueError)):
        env = Scripted(script=(Feedback("x", info=bad),))
        env.reset()
        with pytest.raises(error, match=next(iter(bad))):
            env.step(said("a"))


def test_27_what_applies_appears_and_nothing_else() -> None:
    env = Scripted(script=(Feedback("x", invalid=True, reward_terms={"a": 1}, info={"k": 1}), Feedback("y")))
    _, first = env.reset()
    second, third = (env.step(said("a"))[4] for _ in range(2))
    always = {"segment", "turn", "max_new_tokens"}
    assert set(first) == set(third) == always
    assert set(second) == always | {"invalid", "reward_terms", "k"}
    assert second["invalid"] is True
    assert second["reward_terms"] == {"a": 1.0}


@pytest.mark.parametrize("success", [True, False, np.bool_(True), None])
def test_28_success_appears_at_the_end_where_known(success: Any) -> None:
    env = Scripted(script=(Feedback("x", success=success), ended(success=success)))
    env.reset()
    middle, last = (env.step(said("a"))[4] for _ in range(2))
    assert not {"success", "is_success", "end_reason"} & set(middle)
    assert last["end_reason"] == "terminated"
    if success is None:
        assert not {"success", "is_success"} & set(last)
    else:
        assert last["success"] is last["is_success"] is bool(success)


def test_29_max_turns_truncates_at_the_step_that_finds_it() -> None:
    env = Scripted(max_turns=2)
    env.reset()
    assert env.step(said("a"))[2:4] == (False, False)
    _, _, terminated, truncated, info = env.step(said("a"))
    assert (terminated, truncated, info["end_reason"]) == (False, True, "max_turns")
    assert env.messages[-1]["content"] == "more"


def test_30_no_room_for_another_turn_truncates() -> None:
    first = len(ids(BOS, USER, "go", ASSISTANT))
    per_turn = len(ids("aaaaaaa", END, USER, "more", ASSISTANT))
    for spare, fits in ((0, True), (-1, False)):
        limit = first + 2 * per_turn + 8 + spare
        env = Scripted(max_tokens=limit, max_prompt_tokens=first, max_feedback_tokens=4)
        env.reset()
        assert env.step(said("aaaaaaa"))[3] is False
        _, _, terminated, truncated, info = env.step(said("aaaaaaa"))
        assert (terminated, truncated) == (False, not fits)
        assert info.get("end_reason") == (None if fits else "max_tokens")
        assert env.messages[-1]["content"] == "more"


@pytest.mark.parametrize(
    "feedback",
    [Feedback("more"), ended(), Feedback(truncated=True), Feedback("x" * 1000)],
    ids=lambda f: str(f)[:40],
)
def test_31_a_one_turn_task_terminates(feedback: Feedback) -> None:
    env = Scripted(script=(feedback,), max_turns=1)
    env.reset()
    _, _, terminated, truncated, info = env.step([])
    assert (terminated, truncated) == (True, False)
    assert info["end_reason"] == ("truncated" if feedback.truncated else "terminated")


def test_32_an_own_end_reason_is_kept() -> None:
    env = Scripted(script=(ended(info={"end_reason": "bust"}),))
    env.reset()
    assert env.step(said("a"))[4]["end_reason"] == "bust"
    env = Scripted(script=(Feedback(terminated=True, truncated=True),))
    env.reset()
    assert env.step(said("a"))[2:4] == (True, True)
    env = Scripted(script=(Feedback(truncated=True),))
    env.reset()
    assert env.step(said("a"))[4]["end_reason"] == "truncated"


@pytest.mark.parametrize("history", ["whole", "latest"])
def test_33_a_prompt_that_does_not_fit(history: Any) -> None:
    with pytest.raises(PromptTooLong, match="103 ids, more than max_prompt_tokens=64 .bytes"):
        Scripted("x" * 100, history=history).reset()
    Scripted("x" * 61, history=history).reset()
    huge = "x" * 1000
    for feedback in (Feedback(huge), Feedback(restart=[Message(role="user", content=huge)])):
        env = Scripted(script=(Feedback("more"), feedback), history=history)
        env.reset()
        env.step(said("a"))
        _, _, terminated, truncated, info = env.step(said("a"))
        assert (terminated, truncated, info["end_reason"]) == (False, True, "max_tokens")


def test_34_what_is_over_refuses_to_step() -> None:
    env = Scripted(script=(ended(reward=1.0),))
    env.reset()
    env.step(said("a"))
    played = len(env.replies)
    with pytest.raises(ResetNeeded, match="terminated"):
        env.step(said("a"))
    assert len(env.replies) == played
    env = Scripted(script=("broken",))
    env.reset()
    with pytest.raises(TypeError):
        env.step(said("a"))
    with pytest.raises(ResetNeeded, match="failed"):
        env.step(said("a"))
    env.reset()
    assert env.messages == [{"role": "user", "content": "go"}]


_PLAY = """
import numpy as np
from tests.tools.text_tasks import Guess
env = Guess()
out = []
for seed in range(5):
    obs, _ = env.reset(seed=seed, options={"target": 11})
    out.append(obs.tolist())
    while True:
        obs, _, terminated, truncated, _ = env.step(np.array(env.renderer.say(env.sample_reply()), np.int32))
        out.append(obs.tolist())
        if terminated or truncated:
            break
print(out)
"""


def test_35_same_seed_same_ids_in_every_process() -> None:
    root = Path(__file__).parent.parent.parent
    printed = {
        subprocess.run(
            [sys.executable, "-c", _PLAY],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count("[") > 20


def test_36_np_random_is_the_only_chance() -> None:
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr,index]
    one = Guess()
    first = [one.reset(seed=3)[0].tolist(), one.step(said("x"))[0].tolist()]
    assert np.random.get_state()[1].tolist() == state  # type: ignore[union-attr,index]
    np.random.seed(99)
    two = Guess()
    assert [two.reset(seed=3)[0].tolist(), two.step(said("x"))[0].tolist()] == first


def test_37_no_seed_goes_on_with_the_generator() -> None:
    def words(seed: int) -> list[str]:
        env = Reverse()
        env.reset(seed=seed)
        return [env.word, *(env.reset() and env.word for _ in range(4))]

    assert words(1) == words(1)
    assert len(set(words(1))) > 1


def test_38_options_reach_begin() -> None:
    env = Scripted()
    mine = {"item": 3}
    env.reset(options=mine)
    assert env.options == mine
    assert env.options is not mine
    env.reset()
    assert env.options == {}


# --- around ---


def test_39_the_unwrapped_environment_shows_its_parts() -> None:
    env = Guess()
    assert env.unwrapped is env
    assert env.renderer.tokenizer is env.tokenizer
    assert env.stop_ids == env.renderer.stop_ids == (END,)
    assert (env.max_turns, env.max_turn_tokens, env.max_prompt_tokens) == (4, 16, 64)
    assert (env.max_feedback_tokens, env.history) == (64, "whole")
    assert env.messages == []


def test_40_messages_are_the_conversation() -> None:
    env = Scripted(script=(Feedback("low"), ended(content="right")))
    env.reset()
    env.step(np.array(ids("5", END, "6"), np.int32))
    env.step(said("7"))
    first = env.messages
    assert first == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "low"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "right"},
    ]
    env.reset()
    assert env.messages is not first
    assert len(first) == 5


def test_40b_an_authors_messages_are_copied() -> None:
    start = [Message(role="user", content="hi")]
    env = Scripted(start)
    env.reset()
    env.messages[0]["content"] = "changed"
    assert start[0]["content"] == "hi"


def test_41_render_gives_the_conversation() -> None:
    env = Scripted(render_mode="ansi")
    env.reset()
    env.step(said("a"))
    assert env.render() == "user: go\nassistant: a\nuser: more"
    assert "ansi" in env.metadata["render_modes"]
    assert Scripted().render() is None
    assert Scripted(render_mode="rgb_array").render() is None


def test_42_close_is_idempotent() -> None:
    env = Scripted()
    env.reset()
    env.close()
    env.close()


def test_43_step_needs_a_reset() -> None:
    env = Scripted(script=(ended(),))
    with pytest.raises(ResetNeeded, match="reset"):
        env.step(said("a"))
    env.reset()
    env.step(said("a"))
    with pytest.raises(ResetNeeded, match="over"):
        env.step(said("a"))


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        (np.array([1, 264]), ValueError, "264 at position 1"),
        (np.array([-1]), ValueError, "-1 at position 0"),
        (np.zeros(9, np.int32), ValueError, "at most 8 ids .*got 9"),
        ([1, 999], ValueError, "999 at position 1"),
        (np.array([1.0]), TypeError, "float64"),
        (np.array([True]), TypeError, "bool"),
        (np.array([[1]]), TypeError, r"\(1, 1\)"),
        (np.array(1), TypeError, r"shape \(\)"),
        ([1, 2.0], TypeError, "2.0 .float. at position 1"),
        ([True], TypeError, "True .bool. at position 0"),
        ("abc", TypeError, "str"),
        (3, TypeError, "int"),
        (None, TypeError, "NoneType"),
    ],
    ids=repr,
)
def test_44_an_action_outside_the_space_is_named(action: Any, error: type[Exception], words: str) -> None:
    env = Scripted()
    env.reset()
    with pytest.raises(error, match=words):
        env.step(action)
    env.step(said("a"))  # the episode is as it was


def test_45_what_is_returned_is_the_callers() -> None:
    env = Guess()
    observation, info = env.reset(seed=0)
    kept = observation.tolist()
    observation[:] = 0
    info["legal_actions"].append("mine")
    action = said("x")
    after, _, _, _, second = env.step(action)
    action[:] = 0
    assert after[: len(kept)].tolist() == kept
    assert after[len(kept)] == ord("x")
    assert "mine" not in second["legal_actions"]
    after[:] = 0
    third = env.step(said("y"))[0]
    assert third[: len(kept)].tolist() == kept


@pytest.mark.parametrize("env_class", [Reverse, Guess])
@pytest.mark.parametrize("history", ["whole", "latest"])
def test_46a_gymnasiums_check_passes_without_a_warning(env_class: type[TextEnv], history: Any) -> None:
    gymnasium.register(id="lock/Checked-v0", entry_point=env_class, kwargs={"history": history})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gymnasium.make("lock/Checked-v0").unwrapped)
            check_env(gymnasium.make("lock/Checked-v0", render_mode="ansi").unwrapped)
    finally:
        gymnasium.registry.pop("lock/Checked-v0")


@pytest.mark.parametrize("env_class", [Reverse, Guess])
def test_46b_sb3s_check_passes_with_its_one_warning(env_class: type[TextEnv]) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checker.check_env(env_class(), warn=True)
    assert caught
    assert all("Sequence" in str(w.message) for w in caught), [str(w.message) for w in caught]


@pytest.fixture
def registered() -> Any:
    gymnasium.register(id="lock/Reverse-v0", entry_point="tests.tools.text_tasks:Reverse")
    yield "lock/Reverse-v0"
    gymnasium.registry.pop("lock/Reverse-v0")


def test_47_users_classes_register(registered: str) -> None:
    env = gymnasium.make(registered, max_turn_tokens=9, system_prompt="S")
    assert isinstance(env.unwrapped, Reverse)
    assert env.action_space == TokenSequence(264, 9)
    check_env(gymnasium.make(registered).unwrapped)
    observation, _ = env.reset(seed=1)
    *_, terminated, truncated, info = env.step(said("abca"))
    assert (terminated, truncated) == (True, False)
    assert info["end_reason"] == "terminated"
    assert gymnasium.make(f"tests.tools.text_tasks:{registered}").unwrapped.max_turns == 1  # type: ignore[attr-defined]
    assert env.spec is not None
    assert gymnasium.make(env.spec).unwrapped.system_prompt == "S"  # type: ignore[attr-defined]
    gymnasium.register(id="lock/Direct-v0", entry_point=Guess, kwargs={"max_turns": 2})
    try:
        assert gymnasium.make("lock/Direct-v0").unwrapped.max_turns == 2  # type: ignore[attr-defined]
    finally:
        gymnasium.registry.pop("lock/Direct-v0")


_ENVIRONMENTS = {
    "bytes": Guess(),
    "chatml": Guess(tokenizer=imitation.tiny_tokenizer()),
    "opens think": Guess(tokenizer=imitation.tiny_tokenizer(imitation.OPENS_THINK)),
}


@given(
    data=st.data(), name=st.sampled_from(sorted(_ENVIRONMENTS)), history=st.sampled_from(["whole", "latest"])
)
@settings(deadline=None, max_examples=80)
def test_48_no_ids_of_a_policy_raise(data: Any, name: str, history: Any) -> None:
    """The feedback echoes what was said, so broken characters and control ids come back as text."""
    env = _ENVIRONMENTS[name]
    env.history = history
    observation, info = env.reset(seed=data.draw(st.integers(0, 9)))
    stops = env.renderer.stop_ids
    for _ in range(4):
        turn = data.draw(st.lists(st.integers(0, env.tokenizer.rows - 1), max_size=env.max_turn_tokens))
        before = observation.tolist()
        observation, _, terminated, truncated, info = env.step(np.array(turn, np.int32))
        assert observation in env.observation_space
        if history == "whole":
            assert observation[: len(before) + len(turn)].tolist() == before + turn
        if terminated or truncated:
            assert observation.tolist() == before + turn
            break
        if history == "whole":
            fresh = observation[len(before) + len(turn) :].tolist()
            supplied = not (turn and turn[-1] in stops)
            assert sum(i in stops for i in fresh) == supplied + (name != "bytes")


def test_49_rendering_that_cannot_go_on_opens_a_segment() -> None:
    env = Scripted(
        tokenizer="bytes",
        renderer=ChatRenderer(imitation.tiny_tokenizer(imitation.TRIMS), past="template"),
        script=(Feedback("x"), Feedback("y")),
    )
    before, _ = env.reset()
    kept = env.renderer.say("a")
    after, _, _, _, info = env.step(kept)
    assert info["segment"] == 0
    assert after[: before.size + len(kept)].tolist() == [*before.tolist(), *kept]
    last, _, _, _, info = env.step(env.renderer.say(" b "))
    assert info["segment"] == 1
    assert last.tolist() == env.renderer.prompt(env.messages)


@pytest.mark.parametrize("reward", [1, True, np.float32(0.5), np.int64(2)])
def test_50a_rewards_and_ends_are_plain(reward: Any) -> None:
    env = Scripted(script=(Feedback("x", reward=reward), Feedback(terminated=np.bool_(True))))  # type: ignore[arg-type]
    env.reset()
    _, got, terminated, truncated, _ = env.step(said("a"))
    assert type(got) is float
    assert got == float(reward)
    assert (terminated, truncated) == (False, False)
    _, _, terminated, truncated, _ = env.step(said("a"))
    assert terminated is True
    assert truncated is False


@pytest.mark.parametrize(
    ("reward", "error"),
    [(float("nan"), ValueError), (float("inf"), ValueError), (None, TypeError), ("x", TypeError)],
)
def test_50b_a_reward_is_a_finite_number(reward: Any, error: type[Exception]) -> None:
    env = Scripted(script=(Feedback("x", reward=reward),))
    env.reset()
    with pytest.raises(error, match="Feedback.reward must be"):
        env.step(said("a"))
