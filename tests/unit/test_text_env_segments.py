"""Every way an episode can go on, over random ids: ids grow within a segment, or a segment grew by one.

A small model of its own keeps the conversation of the segment. In a new segment the observation is the prompt
of that conversation; within one it is observation, action and what the renderer puts behind them. Where the
template rewrites history, a segment goes on exactly as long as the rendered conversation begins with the ids
so far. What was sampled is decoded and never encoded again where ids only grow.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.messages import Feedback, Message, Reply, as_messages
from atropos_gym.rendering import ChatRenderer
from atropos_gym.text_env import TextEnv
from tests.tools import imitation_tokenizers as imitation

#: Strips thoughts from all turns but the last one, as Qwen3 does.
FORGETS_THOUGHTS = imitation.CHATML.replace(
    "m.content +",
    "(m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' and not loop.last "
    "else m.content) +",
)


def _hf(template: str, **settings_: Any) -> ChatRenderer:
    return ChatRenderer(imitation.tiny_tokenizer(template), **settings_)


def _headers() -> ChatRenderer:
    hf = imitation.tiny_tokenizer(imitation.HEADERS, imitation.HEADER_TOKENS)
    _, user, _, tool = hf.convert_tokens_to_ids(list(imitation.HEADER_TOKENS))
    return ChatRenderer(hf, stop_ids=[user, tool])


with pytest.warns(UserWarning, match="segment of its own"):
    _COUNTS = _hf(imitation.COUNTS)

RENDERERS = {
    "bytes": ChatRenderer("bytes"),
    "bytes, template": ChatRenderer("bytes", past="template"),
    "chatml": _hf(imitation.CHATML),
    "chatml, template": _hf(imitation.CHATML, past="template"),
    "trims": _hf(imitation.TRIMS),
    "trims, template": _hf(imitation.TRIMS, past="template"),
    "opens, template": _hf(imitation.OPENS_THINK, past="template"),
    "forgets, template": _hf(FORGETS_THOUGHTS, past="template"),
    "counts": _COUNTS,
    "headers": _headers(),
}


class Played(TextEnv):
    """Answers with the next Feedback of a script."""

    max_turns = 6
    max_turn_tokens = 12
    max_prompt_tokens = 128
    max_feedback_tokens = 128
    script: list[Feedback]

    def begin(self, options: dict[str, Any]) -> list[Message]:
        return [Message(role="user", content="rules"), Message(role="user", content="go")]

    def respond(self, reply: Reply) -> Feedback:
        self.reply = reply
        return self.script.pop(0)


class Model:
    """What the conversation of the segment is, by the words of the contract."""

    def __init__(self, env: TextEnv) -> None:
        self.renderer, self.history = env.renderer, env.history
        start = [Message(role="user", content="rules"), Message(role="user", content="go")]
        said = env.system_prompt
        self.system = [] if said is None else [Message(role="system", content=said)]
        self.segment = [*self.system, *start]
        self.standing = self.segment[:-1]

    def turn(self, ids: list[int], feedback: Feedback) -> None:
        """Adds a turn and what came back."""
        stops = self.renderer.stop_ids
        end = next((k for k, i in enumerate(ids) if i in stops), len(ids))
        answer = Message(role="assistant", content=self.renderer.tokenizer.decode(ids[:end]))
        news = as_messages(feedback.content)
        if feedback.restart:
            opening = [*self.system, *feedback.restart]
            self.segment = [*opening, *news]
            self.standing = opening if news else opening[:-1]
            self.opens: bool | None = True
        elif self.history == "latest":
            self.segment = [*self.standing, *news]
            self.opens = True
        else:
            self.segment = [*self.segment, answer, *news]
            self.opens = None

    def prompt(self) -> list[int]:
        return self.renderer.prompt(self.segment)


_TEXTS = st.sampled_from(["x", " y\n", "<|im_end|>", "<think>a</think>b", "\n\n", "é😀", "low"])
_MESSAGES = st.lists(_TEXTS.map(lambda t: Message(role="user", content=t)), min_size=1, max_size=2)


@st.composite
def _feedback(draw: Any) -> Feedback:
    kind = draw(st.sampled_from(["text", "text", "messages", "restart", "both"]))
    content = draw(_TEXTS) if kind in ("text", "both") else draw(_MESSAGES) if kind == "messages" else None
    return Feedback(content, restart=draw(_MESSAGES) if kind in ("restart", "both") else None)


def _turns(renderer: ChatRenderer) -> Any:
    """Random ids, and turns that a template keeps or rewrites."""
    rows, stops = renderer.tokenizer.rows, st.sampled_from(renderer.stop_ids)
    kept = st.sampled_from(["ok", " ok", "<think>\nhm\n</think>\n\nok", ""]).map(
        lambda text: renderer.tokenizer.encode(text)[:11]
    )
    any_ids = st.lists(st.integers(0, rows - 1), max_size=11)
    return st.tuples(st.one_of(kept, any_ids), st.one_of(st.none(), stops)).map(
        lambda parts: [*parts[0], *([] if parts[1] is None else [parts[1]])]
    )


@pytest.mark.filterwarnings("ignore:.*takes no system message here")  # COUNTS: it changes with one
@pytest.mark.parametrize("name", sorted(RENDERERS))
@pytest.mark.parametrize("history", ["whole", "latest"])
def test_ids_grow_or_a_segment_opens(name: str, history: Any) -> None:
    renderer = RENDERERS[name]
    env = Played(renderer=renderer, history=history, system_prompt="S")

    @given(data=st.data())
    @settings(deadline=None, max_examples=12)
    def check(data: Any) -> None:
        observation, info = env.reset(seed=0)
        model = Model(env)
        assert observation.tolist() == model.prompt()
        for _ in range(env.max_turns):
            before, segment = observation.tolist(), info["segment"]
            turn = data.draw(_turns(renderer))
            feedback = data.draw(_feedback())
            env.script = [feedback]
            observation, _, terminated, truncated, info = env.step(np.array(turn, np.int32))
            after = observation.tolist()
            assert observation in env.observation_space
            if terminated or truncated:
                assert after == before + turn
                assert info["segment"] == segment
                return
            model.turn(turn, feedback)
            grew = after[: len(before) + len(turn)] == before + turn
            whole = model.prompt()
            if info["segment"] == segment:
                assert grew
                assert model.opens is None
                if renderer.past == "template":
                    assert after == whole
            else:
                assert info["segment"] == segment + 1
                assert after == whole
                if model.opens is None and renderer.past == "template":
                    assert whole[: len(before) + len(turn)] != before + turn

    check()


@pytest.mark.parametrize(
    ("name", "turns", "segments"),
    [
        ("chatml", ["<think>\nhm\n</think>\n\nok", " b "], [0, 0]),
        ("chatml, template", ["<think>\nhm\n</think>\n\nok", " b "], [0, 0]),
        ("trims", [" a ", "b"], [0, 0]),
        ("trims, template", ["a", " b ", "c"], [0, 1, 1]),
        ("forgets, template", ["ok", "<think>\nhm\n</think>\n\nok", "ok"], [0, 1, 1]),
        ("opens, template", ["hm\n</think>\n\nok", "x"], [1, 2]),
        ("counts", ["a", "b"], [1, 2]),
        ("headers", ["a", "b"], [0, 0]),
    ],
)
def test_segments_of_known_turns(name: str, turns: list[str], segments: list[int]) -> None:
    """The same turns with ``past="append"`` stay one row; a template that rewrites them forks it."""
    env = Played(renderer=RENDERERS[name], max_turn_tokens=32)
    env.reset()
    env.script = [Feedback(text) for text in ("x", "y", "z")]
    said = [env.renderer.say(text) for text in turns]
    assert [env.step(np.array(ids, np.int32))[4]["segment"] for ids in said] == segments


def test_a_turn_that_ended_with_another_header_opens_a_segment() -> None:
    env = Played(renderer=RENDERERS["headers"])
    env.reset()
    user, tool = env.stop_ids
    env.script = [Feedback("x"), Feedback("y")]
    assert env.step(np.array([50, user], np.int32))[4]["segment"] == 0
    observation, *_, info = env.step(np.array([50, tool], np.int32))
    assert info["segment"] == 1
    assert observation.tolist() == env.renderer.prompt(env.messages)


def _watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]) -> None:
    """Tells ``note`` the arguments of every call."""
    real = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        given_ = [argument for argument in arguments if argument is not None]  # tools are None here
        note(*given_)
        return real(*arguments)

    monkeypatch.setattr(owner, name, watched)


@pytest.mark.parametrize("name", ["bytes", "chatml", "trims", "headers"])
def test_what_was_sampled_is_never_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled text is one that no message says; in append mode no encoder ever sees it."""
    renderer = RENDERERS[name]
    env = Played(renderer=renderer)
    env.reset()
    seen: list[str] = []
    for name in ("prompt", "bridge"):
        _watch(monkeypatch, renderer, name, lambda *arguments: seen.append(str(arguments[-1])))
    env.script = [Feedback("x"), Feedback("y")]
    for _ in range(2):
        env.step(np.array([*renderer.tokenizer.encode("Zebra"), renderer.stop_ids[0]], np.int32))
    assert len(seen) == 2
    assert "Zebra" not in str(seen)
    assert "Zebra" in str(env.messages)


# --- growth ---


class Talk(Played):
    """Two hundred turns of equal length."""

    max_turns = 201

    def respond(self, reply: Reply) -> Feedback:
        return Feedback("Say it again, please.")


def _long_episode(name: str) -> tuple[Talk, Any]:
    env = Talk(renderer=RENDERERS[name])
    env.reset()
    return env, np.array(env.renderer.say("word"), np.int32)


@pytest.mark.parametrize("name", ["bytes", "chatml"])
def test_a_late_turn_renders_its_new_text_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env, turn = _long_episode(name)
    read: list[int] = []
    monkeypatch.setattr(env.renderer, "prompt", lambda *_: pytest.fail("the whole conversation was rendered"))
    _watch(monkeypatch, env.renderer, "bridge", lambda ids, said: read.append(len(ids) + len(str(said))))
    _watch(monkeypatch, type(env.tokenizer), "decode", lambda _, ids: read.append(len(ids)))
    lengths = [env.step(turn)[0].size for _ in range(200)]
    assert lengths[-1] > 150 * (lengths[1] - lengths[0])  # the prompt did grow
    assert len(set(read)) == 2  # what is read in a turn did not


def test_a_late_turn_keeps_no_copy_of_the_prompt() -> None:
    env, turn = _long_episode("bytes")
    for _ in range(20):
        env.step(turn)
    tracemalloc.start()
    held = tracemalloc.get_traced_memory()[0]
    for _ in range(170):
        observation = env.step(turn)[0]
    grown = tracemalloc.get_traced_memory()[0] - held - observation.nbytes
    tracemalloc.stop()
    # A copy a turn would be megabytes; what stays are the new messages and ids, with room to grow.
    assert observation.nbytes * 170 / 2 > 1_000_000
    assert grown < 200_000
