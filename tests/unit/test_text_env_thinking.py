"""Lock test of ``TextEnv(thinking=...)``: what a mode asks of a reply, and what a reply that breaks it gives.

 1. The mode is a class attribute and a keyword: "auto", "required", "forbidden" or an int >= 1.
 2. A reply that breaks the mode reaches respond with empty content and no tool calls; its text, thinking and
    ids stay. info says invalid and why; nothing is raised and the episode goes on as respond says.
 3. required: a thought that is closed and not empty stands before the content.
 4. forbidden: no thought but an empty one.
 5. N: no thought, or at most N sampled ids before the id that begins its closing tag, however ids split it.
 6. A thought that is not closed breaks every mode but "auto".
 7. A thought that the generation prompt opened counts from the first sampled id.
 8. A further block inside the content is thinking too.
 9. "required" and "forbidden" set the template's own switch; a renderer that is given stays as it is.
10. What was said stays in ids and messages.
11. say(content) is what a policy that keeps to the mode would have sampled.
12. Cut replies, ids behind an end id and control ids inside reach respond as they are, in every mode.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rendering import ChatRenderer
from atropos_gym.text_env import TextEnv
from atropos_gym.wrappers.gym_text_env import GymTextEnv
from tests.tools import imitation_tokenizers as imitation
from tests.tools import rendering_cases
from tests.tools.imitation_families import FAMILIES, family_renderer
from tests.tools.text_tasks import Scripted

END = 258
#: An empty think block in the generation prompt where thinking is switched off, as Qwen3 has it.
SWITCHED = imitation.CHATML.replace(
    "assistant\\n' }}",
    "assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
)
HF = imitation.tiny_tokenizer()
HF_OPENS = imitation.tiny_tokenizer(imitation.OPENS_THINK)
HF_SWITCHED = imitation.tiny_tokenizer(SWITCHED)


class Asked(Scripted):
    max_turn_tokens = 64
    max_prompt_tokens = 128

    def begin(self, options: dict[str, Any]) -> Any:
        super().begin(options)
        return "go"


def ask(mode: Any, text: str | list[int], tokenizer: Any = "bytes") -> tuple[Reply, dict[str, Any]]:
    """Returns what respond read of a reply, and the step's info."""
    env = Asked(thinking=mode, tokenizer=tokenizer)
    env.reset()
    turn = text if isinstance(text, list) else env.renderer.say(text)
    _, _, terminated, truncated, info = env.step(np.array(turn, np.int32))
    assert not (terminated or truncated)
    return env.replies[0], info


# --- 1: the setting ---


def test_01a_class_attribute_and_keyword() -> None:
    assert TextEnv.thinking == "auto"
    assert type("Thinks", (Scripted,), {"thinking": "required"})().thinking == "required"
    assert type("Thinks", (Scripted,), {"thinking": "required"})(thinking=5).thinking == 5
    assert type(Scripted(thinking=np.int64(7)).thinking) is int


@pytest.mark.parametrize("value", ["no", "", True, False, 0, -1, 2.0, (1,), b"auto", "10"], ids=repr)
def test_01b_another_value_is_one_line_that_names_it(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Scripted(thinking=value)
    assert "thinking must be 'auto', 'required', 'forbidden' or an int >= 1" in str(refused.value)
    assert repr(value) in str(refused.value)
    assert "\n" not in str(refused.value)


# --- 2 to 8: the table of replies ---

#: reply, then what breaks in: required, forbidden, and N = 9 ids (of bytes) before the closing tag
NONE, MISSING, UNCLOSED, FORBIDDEN, LONG = (
    None,
    "no_thinking",
    "unclosed_think",
    "thinking_forbidden",
    "thinking_too_long",
)
REPLIES: list[tuple[str, str | None, str | None, str | None]] = [
    ("4", MISSING, NONE, NONE),
    ("", MISSING, NONE, NONE),
    ("<think>hm</think>4", NONE, FORBIDDEN, NONE),
    ("<think>hmm</think>4", NONE, FORBIDDEN, LONG),
    (" \n<think>\nh</think>4", NONE, FORBIDDEN, LONG),
    ("<think>hm</think>", NONE, FORBIDDEN, NONE),
    ("<think></think>4", MISSING, NONE, NONE),
    ("<think>\n\n</think>\n\n4", MISSING, NONE, NONE),
    ("<think>hm", UNCLOSED, FORBIDDEN, UNCLOSED),
    ("<think>hm</thin", UNCLOSED, FORBIDDEN, UNCLOSED),
    ("<think>", UNCLOSED, UNCLOSED, UNCLOSED),
    ("4<think>hm</think>", MISSING, FORBIDDEN, LONG),
    ("<think></think><think>hm</think>4", MISSING, FORBIDDEN, LONG),
    ("<think>h</think>4<think>", UNCLOSED, FORBIDDEN, UNCLOSED),
    ("hm</think>4", MISSING, NONE, NONE),
    ("<THINK>hm</THINK>4", MISSING, NONE, NONE),
]


@pytest.mark.parametrize(("text", "required", "forbidden", "nine"), REPLIES, ids=lambda v: repr(v)[:30])
def test_02_to_08_what_breaks_a_mode(
    text: str, required: str | None, forbidden: str | None, nine: str | None
) -> None:
    plain, info = ask("auto", text)
    assert (plain.fault, info.get("invalid"), info.get("invalid_reason")) == (None, None, None)
    for mode, fault in (("required", required), ("forbidden", forbidden), (9, nine)):
        reply, info = ask(mode, text)
        assert reply.fault == info.get("invalid_reason") == fault, mode
        assert info.get("invalid") == (True if fault else None)
        assert reply.content == ("" if fault else plain.content)
        assert (reply.text, reply.thinking, reply.ids) == (plain.text, plain.thinking, plain.ids)
        assert (reply.complete, reply.malformed) == (True, False)


@pytest.mark.parametrize(
    ("text", "required", "forbidden", "nine"),
    [
        ("hm</think>4", NONE, FORBIDDEN, NONE),
        ("hmhmhmhmhmhmhmhm</think>4", NONE, FORBIDDEN, LONG),
        ("</think>4", MISSING, NONE, NONE),
        ("\n</think>\n\n4", MISSING, NONE, NONE),
        ("4", UNCLOSED, FORBIDDEN, UNCLOSED),
        ("", UNCLOSED, UNCLOSED, UNCLOSED),
        ("h</think><think>hm</think>4", NONE, FORBIDDEN, NONE),
    ],
)
def test_07_where_the_prompt_opened_the_thought(
    text: str, required: str | None, forbidden: str | None, nine: str | None
) -> None:
    plain = ask("auto", text, HF_OPENS)[0]
    assert (plain.opened, plain.fault) == ("<think>", None)
    for mode, fault in (("required", required), ("forbidden", forbidden), (9, nine)):
        reply, info = ask(mode, text, HF_OPENS)
        assert reply.fault == info.get("invalid_reason") == fault, mode
        assert reply.content == ("" if fault else plain.content)


def test_02b_tool_calls_do_not_count_either(monkeypatch: pytest.MonkeyPatch) -> None:
    from atropos_gym.messages import ToolCall

    env = Asked(thinking="required")
    env.reset()
    called = Reply("x", "x", ids=(120, END), tool_calls=(ToolCall("f", {}),))
    monkeypatch.setattr(env.renderer, "reply", lambda ids: called)
    env.step(np.array([120, END], np.int32))
    assert env.replies[0].tool_calls == ()
    assert called.tool_calls


def test_02c_a_task_goes_on_as_it_says() -> None:
    env = Asked(
        script=(Feedback("again", reward=-0.5, info={"invalid_reason": "own"}),), thinking="forbidden"
    )
    env.reset()
    _, reward, terminated, truncated, info = env.step(env.renderer.say("<think>a</think>b"))
    assert (reward, terminated, truncated) == (-0.5, False, False)
    assert info["invalid_reason"] == "thinking_forbidden"
    info = env.step(env.renderer.say("b"))[4]
    assert not {"invalid", "invalid_reason"} & set(info)


def test_02d_harmony_thinks_in_a_channel() -> None:
    hf = imitation.tiny_tokenizer(rendering_cases.DATA["templates"]["harmony"], imitation.HARMONY_TOKENS)
    env = Asked(tokenizer=hf)
    stop = hf.convert_tokens_to_ids("<|return|>")

    def fault(mode: Any, text: str) -> tuple[str, str | None]:
        env.thinking = mode
        env.reset()
        ids = [*hf(text, add_special_tokens=False)["input_ids"], stop]
        info = env.step(np.array(ids, np.int32))[4]
        return env.replies[-1].content, info.get("invalid_reason")

    thought = "<|channel|>analysis<|message|>hm"
    text = thought + "<|end|><|start|>assistant<|channel|>final<|message|>4"
    before = len(hf(thought, add_special_tokens=False)["input_ids"])
    assert fault("auto", text) == fault("required", text) == fault(before, text) == ("4", None)
    assert fault("forbidden", text) == ("", "thinking_forbidden")
    assert fault(before - 1, text) == ("", "thinking_too_long")
    assert fault(99, thought) == fault("required", thought) == ("", "unclosed_think")
    assert fault("required", "<|channel|>final<|message|>4") == ("", "no_thinking")
    assert fault("forbidden", "<|channel|>final<|message|>4") == ("4", None)
    # Think tags are words here, and a call that goes through the channel of thoughts is none.
    for mode in ("forbidden", 3):
        assert fault(mode, "<|channel|>final<|message|>no <think>") == ("no <think>", None)
    for call in (
        "<|channel|>analysis to=python code<|message|>1",
        " to=python<|channel|>analysis<|message|>1",
    ):
        assert fault("required", f"{thought}<|end|><|start|>assistant{call}") == ("", None)
        assert fault("forbidden", call) == ("", None)
        assert fault("required", call) == ("", "no_thinking")


def test_02e_a_channel_is_a_word_where_a_family_has_none() -> None:
    text = "<think>\n<|channel|>analysis\n</think>\n\n4"
    for mode in ("required", 60):
        assert ask(mode, text)[0].content == "4"


# --- 5: the limit, in sampled ids ---


def _ids_before_the_tag(ids: list[int], env: TextEnv) -> int:
    """Returns by trying every length how many ids stand before the one that begins the closing tag."""
    text = env.tokenizer.decode(ids)
    head = text[: text.index(env.renderer.think_tags[1]) + 1]
    return next(k for k in range(len(ids) + 1) if env.tokenizer.decode(ids[:k]).startswith(head)) - 1


_LIMITED = {name: Asked(tokenizer=t) for name, t in (("bytes", "bytes"), ("hf", HF), ("opens", HF_OPENS))}


@given(
    name=st.sampled_from(sorted(_LIMITED)),
    thought=st.lists(st.one_of(st.integers(0, 255), st.sampled_from([12, 60, 195, 300])), max_size=12),
    split=st.lists(st.booleans(), min_size=8, max_size=8),
    tail=st.lists(st.integers(0, 255), max_size=6),
)
@settings(deadline=None, max_examples=150)
def test_05_the_limit_counts_sampled_ids(
    name: str, thought: list[int], split: list[bool], tail: list[int]
) -> None:
    """Any ids, broken characters among them, and the tag in any pieces: decoded, never encoded again."""
    env = _LIMITED[name]
    tag = [i for piece in _pieces("</think>", split) for i in env.tokenizer.encode(piece)]
    opener = [] if env.renderer.opens_thinking else env.tokenizer.encode("<think>")
    thought = [i for i in thought if i < env.tokenizer.rows and i not in env.stop_ids]
    ids = [*opener, *thought, *tag, *[i for i in tail if i not in env.stop_ids]]
    said = env.tokenizer.decode(ids)
    before = _ids_before_the_tag(ids, env)
    if said.count("<think>") != bool(opener) or before < 2:
        return  # the bytes happened to spell another tag, or there is no smaller limit
    faults = []
    for limit in (before - 1, before, before + 1):
        env.thinking = limit
        env.reset()
        faults.append(env.step(np.array(ids, np.int32))[4].get("invalid_reason"))
    assert faults == ["thinking_too_long", None, None]


def _pieces(text: str, split: list[bool]) -> list[str]:
    pieces = [""]
    for char, cut in zip(text, split, strict=True):
        pieces[-1] += char
        if cut:
            pieces.append("")
    return pieces


def test_05b_control_ids_inside_the_tag_change_nothing() -> None:
    ids = [*b"<think>hm</th", 256, 263, *b"ink>4", END]
    assert ask(9, ids)[0].content == "4"
    assert ask(8, ids)[1]["invalid_reason"] == "thinking_too_long"


@pytest.mark.parametrize(("limit", "fault"), [(14, "thinking_too_long"), (15, None)])
def test_05c_a_models_own_tags(monkeypatch: pytest.MonkeyPatch, limit: int, fault: str | None) -> None:
    """A tag whose first character takes three ids: the first of them ends the count."""
    env = Asked(thinking=limit, renderer=ChatRenderer("bytes"))
    monkeypatch.setattr(env.renderer, "think_tags", ("\u25c1think\u25b7", "\u25c1/think\u25b7"))
    thought = "\u25c1think\u25b7a\u00e9b"
    said = ChatRenderer("bytes").say(f"{thought}\u25c1/think\u25b74")
    assert len(thought.encode()) == 15
    monkeypatch.setattr(
        env.renderer,
        "reply",
        lambda ids: Reply(env.tokenizer.decode(ids), "4", ids=tuple(ids), thinking="a\u00e9b"),
    )
    env.reset()
    assert env.step(np.array(said, np.int32))[4].get("invalid_reason") == fault


# --- 9: the template's switch ---


def test_09a_the_switch_of_the_template_is_set() -> None:
    def head(mode: Any, **kwargs: Any) -> str:
        env = Asked(thinking=mode, **kwargs)
        return env.tokenizer.decode(env.reset()[0].tolist())

    plain = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    closed = plain + "<think>\n\n</think>\n\n"
    assert [head(mode, tokenizer=HF_SWITCHED) for mode in ("auto", "required", 9)] == [plain] * 3
    assert head("forbidden", tokenizer=HF_SWITCHED) == closed
    assert [head(mode, tokenizer=HF) for mode in ("auto", "required", "forbidden", 9)] == [plain] * 4
    assert head("forbidden", renderer=ChatRenderer(HF_SWITCHED)) == plain
    own = ChatRenderer(HF_SWITCHED, template_kwargs={"enable_thinking": False})
    assert head("required", renderer=own) == closed


def test_09b_one_renderer_for_all_environments_of_a_mode() -> None:
    one, two = (Asked(thinking="forbidden", tokenizer=HF_SWITCHED) for _ in range(2))
    assert one.renderer is two.renderer
    assert one.tokenizer is Asked(tokenizer=HF_SWITCHED).tokenizer
    assert one.renderer is not Asked(tokenizer=HF_SWITCHED).renderer


def test_09c_without_its_switch_a_forbidden_reply_is_plain() -> None:
    assert ask("forbidden", "4", HF_SWITCHED)[0].content == "4"
    assert ask("required", "<think>a</think>4", HF_SWITCHED)[0].content == "4"


# --- 10 to 12 ---


@pytest.mark.parametrize("mode", ["auto", "required", "forbidden", 3])
@pytest.mark.parametrize("history", ["whole", "latest"])
def test_10_what_was_said_stays(mode: Any, history: Any) -> None:
    env = Asked(thinking=mode, history=history)
    before = env.reset()[0].tolist()
    turn = env.renderer.say("<think>hmm</think>4")
    after = env.step(np.array(turn, np.int32))[0].tolist()
    assert env.messages[1]["content"] == "<think>hmm</think>4"
    assert (after[: len(before) + len(turn)] == before + turn) == (history == "whole")


@pytest.mark.parametrize("mode", ["auto", "required", "forbidden", 3])
@pytest.mark.parametrize(
    "tokenizer", ["bytes", HF, HF_OPENS, HF_SWITCHED], ids=["bytes", "hf", "opens", "switch"]
)
def test_11_say_keeps_to_the_mode(mode: Any, tokenizer: Any) -> None:
    env = Asked(thinking=mode, tokenizer=tokenizer)
    env.reset()
    info = env.step(env.say("hit 4"))[4]
    assert env.replies[0].content == "hit 4"
    assert "invalid" not in info
    assert env.replies[0].complete


@pytest.mark.parametrize("mode", ["auto", "required", "forbidden", 20])
def test_12_cut_malformed_and_control_ids(mode: Any) -> None:
    thought = [*b"<think>a</think>"] if mode == "required" else []
    cases = [
        ([*thought, *b"4"], "4", False, False),
        ([*thought, *b"4", END, *b"5"], "4", True, True),
        ([*thought, *b"4", END, END], "4", True, True),
        ([*thought, *b"4", 260, *b"5", 257, END], "45", True, False),
        ([*thought, 195, END], "\ufffd", True, False),
    ]
    for ids, content, complete, malformed in cases:
        reply, info = ask(mode, ids)
        assert (reply.content, reply.complete, reply.malformed) == (content, complete, malformed)
        assert "invalid" not in info
    reply, info = ask(mode, [])
    assert (reply.content, reply.complete, reply.malformed) == ("", False, False)
    assert info.get("invalid_reason") == ("no_thinking" if mode == "required" else None)


@pytest.mark.filterwarnings("ignore:the chat template of")  # what some families do to roles and history
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_03_to_11_hold_for_every_family(name: str) -> None:
    renderer = family_renderer(name)
    opening, closing = renderer.think_tags
    opener = "" if renderer.opener else opening
    env = Asked(renderer=renderer, max_turn_tokens=128, max_prompt_tokens=256, max_feedback_tokens=128)

    def play(mode: Any, turn: list[int]) -> tuple[str, str | None]:
        env.thinking = mode
        env.reset()
        info = env.step(np.array(turn, np.int32))[4]
        return env.replies[-1].content, info.get("invalid_reason")

    for mode in ("auto", "required", "forbidden", 5):
        env.thinking = mode
        assert play(mode, env.say("hit 4")) == ("hit 4", None), mode
    if name == "gpt-oss":
        return  # its thoughts are a channel: test_02d
    thought = renderer.say(f"{opener}hm{closing}4")
    assert play("required", thought) == play("auto", thought) == ("4", None)
    assert play("forbidden", thought) == ("", "thinking_forbidden")
    before = _ids_before_the_tag(thought, env)
    assert play(before, thought) == ("4", None)
    if before > 1:
        assert play(before - 1, thought) == ("", "thinking_too_long")
    assert play("required", renderer.say(f"{opener}hm")) == ("", "unclosed_think")


def test_12b_a_reply_cut_inside_its_thought() -> None:
    for tokenizer, text in (("bytes", "<think>I wonder"), (HF_OPENS, "I wonder")):
        for mode in ("auto", "required", "forbidden", 50):
            env = Asked(thinking=mode, tokenizer=tokenizer)
            before = env.reset()[0].tolist()
            turn = env.tokenizer.encode(text)
            after, *_, info = env.step(np.array(turn, np.int32))
            reply = env.replies[0]
            assert (reply.content, reply.complete, reply.thinking) == ("", False, "I wonder")
            faults = {"auto": None, "forbidden": "thinking_forbidden"}
            assert info.get("invalid_reason") == faults.get(str(mode), "unclosed_think")
            # The bridge supplies the end of the turn, and not the end of the thought.
            fresh = after.tolist()[len(before) + len(turn) :]
            assert fresh == env.renderer.bridge(turn, [{"role": "user", "content": "more"}])
            assert "</think>" not in env.tokenizer.decode(fresh)


_TASKS = {
    (name, mode): Asked(thinking=mode, tokenizer=tokenizer)
    for name, tokenizer in (("bytes", "bytes"), ("hf", HF), ("opens", HF_OPENS), ("switch", HF_SWITCHED))
    for mode in ("required", "forbidden", 4)
}


@given(data=st.data(), which=st.sampled_from(sorted(_TASKS, key=str)))
@settings(deadline=None, max_examples=80)
def test_02e_no_ids_raise_in_any_mode(data: Any, which: Any) -> None:
    env = _TASKS[which]
    env.reset()
    tags = [env.tokenizer.encode(t) for t in ("<think>", "</think>", "\n")] + [list(env.stop_ids)]
    piece = st.one_of(st.sampled_from(tags), st.lists(st.integers(0, env.tokenizer.rows - 1), max_size=5))
    for _ in range(3):
        turn = [i for part in data.draw(st.lists(piece, max_size=6)) for i in part][: env.max_turn_tokens]
        info = env.step(np.array(turn, np.int32))[4]
        reply = env.replies[-1]
        assert (reply.fault is not None) == info.get("invalid", False)
        assert reply.content == "" or reply.fault is None


def test_02f_a_simulators_action_does_not_count() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = GymTextEnv("FrozenLake-v1", simulator_kwargs={"is_slippery": False}, thinking="required")
    env.reset(seed=0)
    info = env.step(env.renderer.say("<action>down</action>"))[4]
    assert (info["invalid"], info["invalid_reason"]) == (True, "no_thinking")
    assert "did not think" in env.messages[-1]["content"]
    assert "row 0, column 0" in env.messages[-1]["content"]
    info = env.step(env.say("<action>down</action>"))[4]
    assert "invalid" not in info
    assert "row 1, column 0" in env.messages[-1]["content"]
