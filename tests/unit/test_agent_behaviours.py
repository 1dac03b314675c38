"""Agents that send their past back in every way there is, in every family's form of calls.

1. Spelt otherwise, it is the same past: the next prompt is the ids so far, the sampled ids and a bridge.
2. Said otherwise, it is another past: a new segment, never a row of ids that were not sampled.
"""

from __future__ import annotations

import asyncio
import json
import random
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.engines import SamplingParams, ScriptedEngine
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._echo import key_of
from atropos_gym.rollout.conversation import Conversation, GroupSession, Said
from tests.tools.calculator import ADD
from tests.tools.imitation_families import family_renderer
from tests.unit.rollout_cases import run_moved
from tests.unit.session_cases import check_group

Message = dict[str, Any]

HERMES = [
    '<tool_call>\n{"name": "add",  "arguments": {"b": 3, "a": 2}}\n</tool_call>',
    '<tool_call>{"name": "add"}</tool_call>',
]
CODER = ["<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"]
LLAMA = ['{"name": "add", "parameters": {"a": 2,  "b": 3}}']
MISTRAL = [
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "abcdefghi"}]',
    '[TOOL_CALLS][{"name": "add", "arguments": {}}]',
]
HARMONY = ['<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a":  2}<|call|>']

#: How each family writes calls, and thoughts.
SPOKEN: dict[str, tuple[list[str], list[str]]] = {
    "bytes": (HERMES, ["<think>hm</think>\n\n"]),
    "Qwen3": (HERMES, ["<think>\nhm\n</think>\n\n"]),
    "Qwen3.5": (CODER, ["hm\n</think>\n\n"]),
    "Llama 3.1": (LLAMA, []),
    "Mistral v3": (MISTRAL, []),
    "Gemma 3": (HERMES, []),
    "gpt-oss": (HARMONY, ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant"]),
}


@cache
def renderer_of(family: str) -> ChatRenderer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatRenderer("bytes") if family == "bytes" else family_renderer(family)


def sampled(renderer: ChatRenderer, text: str) -> list[int]:
    """The ids that a model samples for a text: control tokens are themselves."""
    hf = getattr(renderer.tokenizer, "hf", None)
    return renderer.tokenizer.encode(text) if hf is None else hf.encode(text, add_special_tokens=False)


def policy(family: str, seed: int) -> ScriptedEngine:
    """Says words, thoughts and calls; sometimes it is cut in the middle of them, or says nothing."""
    renderer = renderer_of(family)
    calls, thoughts = SPOKEN[family]

    def script(prompt: tuple[int, ...], params: SamplingParams, number: int) -> list[int]:
        chance = random.Random(f"{seed} {number}")
        words = ["", "", "It is 5.", " well \n", "a  b", "é", "\n\n"]
        said = chance.choice([*thoughts, ""])
        said += chance.choice(words)
        said += "".join(chance.choice(calls) for _ in range(chance.choice([0, 1, 1, 2])))
        said += chance.choice(["", "", "", " done", "\n"])
        if family == "gpt-oss" and not said.endswith("<|call|>"):
            said = chance.choice([*thoughts, ""]) + "<|channel|>final<|message|>" + chance.choice(words)
        ids = sampled(renderer, said)
        if chance.random() < 0.2:
            return ids[: chance.randrange(len(ids) + 1)]
        return ids if ids and ids[-1] in renderer.stop_ids else [*ids, renderer.stop_ids[0]]

    return ScriptedEngine(
        script,
        tokenizer=renderer.tokenizer,
        max_context=10**6,
        delay=lambda number: asyncio.sleep(number % 3),
    )


# --- what agents do to a message that they were given ---


def _arguments(message: Message, write: Callable[[Any], str]) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        function["arguments"] = write(json.loads(function["arguments"]))
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls} if calls else message


def _padded(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": f" {content}\n"} if isinstance(content, str) else message


#: What an agent makes of a message that it was given, once.
KEPT: dict[str, Callable[[Message], Message]] = {
    "as it was": lambda m: m,
    "trimmed": lambda m: {**m, "content": (m["content"] or "").strip()},
    "parts": lambda m: {**m, "content": [{"type": "text", "text": m["content"] or ""}]},
    "thoughtless": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
    "bare": lambda m: {k: v for k, v in m.items() if k in ("role", "content", "tool_calls")},
    "empty": lambda m: {**m, "content": m["content"] or ""},
    "null": lambda m: {**m, "content": m["content"] or None},
    "without words": lambda m: {**m, "content": None} if m.get("tool_calls") else m,
}
#: How it may look another time.
SPELT: dict[str, Callable[[Message], Message]] = {
    "as it was": lambda m: m,
    "padded": _padded,
    "compact": lambda m: _arguments(m, lambda a: json.dumps(a, separators=(",", ":"))),
    "sorted": lambda m: _arguments(m, lambda a: json.dumps(a, sort_keys=True, indent=1)),
    "more keys": lambda m: {**m, "refusal": None, "annotations": [], "audio": None, "function_call": None},
}


def _other_calls(message: Message, change: Callable[[list[Any]], list[Any]]) -> Message:
    calls = change(list(message.get("tool_calls") or ()))
    return {
        **{k: v for k, v in message.items() if k != "tool_calls"},
        **({"tool_calls": calls} if calls else {}),
    }


SAID: dict[str, Callable[[Message], Message]] = {
    "edited": lambda m: {**m, "content": "x"},
    "other ids": lambda m: _other_calls(m, lambda calls: [{**call, "id": "zzzzzzzzz"} for call in calls]),
    "turned round": lambda m: _other_calls(m, lambda calls: calls[::-1]),
    "one call less": lambda m: _other_calls(m, lambda calls: calls[1:]),
    "other arguments": lambda m: _arguments(m, lambda a: json.dumps({**a, "a": 77})),
    "calls as text": lambda m: {"role": "assistant", "content": json.dumps(m.get("tool_calls"))},
    "gone": lambda m: {"role": "assistant", "content": "-"},
}


def told(said: Said | None) -> list[Any]:
    """All that an agent can know a turn by: what was said and heard up to it."""
    keys: list[Any] = []
    while said is not None:
        keys += [key_of(said.message), *map(key_of, said.prompt.heard)]
        said = said.prompt.after
    return keys


class Agent:
    """Sends histories that it knows, each message spelt in some way, some of them changed."""

    def __init__(self, chat: Conversation, seed: str) -> None:
        self.chat = chat
        self.chance = random.Random(seed)
        self.histories: list[tuple[list[Message], Said | None]] = [
            ([{"role": "user", "content": "2 + 3?"}], None)
        ]

    async def act(self) -> None:
        chance = self.chance
        history, last = chance.choice(self.histories[-5:])
        changed = False
        places = [i for i, message in enumerate(history) if message["role"] == "assistant"]
        if places and chance.random() < 0.25:
            place = chance.choice(places)
            other = SAID[chance.choice([*SAID])](history[place])
            changed = other != history[place]
            history = [*history[:place], other, *history[place + 1 :]]
        elif chance.random() < 0.1:
            changed, history = True, [{"role": "user", "content": chance.choice("ab")}, *history[1:]]
        spelt = [self.spell(message) if message["role"] == "assistant" else message for message in history]
        # Also a result whose call is gone, or calls that nobody made: it is written in a form that is taken.
        prompt = self.chat.find(spelt, [ADD])  # type: ignore[arg-type]
        if last is not None and not changed:
            assert prompt.after is not None, spelt
            assert told(prompt.after) == told(last)
        replies = await self.chat.ask(prompt, tools=[ADD], n=chance.choice([1, 1, 2]))
        for said in replies:
            message = json.loads(json.dumps(said.message))
            if message.get("tool_calls") and not message["content"]:
                message["content"] = None
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": chance.choice(["5", "error"])}
                for call in message.get("tool_calls", ())
            ]
            more = [] if results and chance.random() < 0.7 else [{"role": "user", "content": "go on"}]
            message = KEPT[chance.choice([*KEPT])](message)
            self.histories.append(([*history, message, *results, *more], said))

    def spell(self, message: Message) -> Message:
        return SPELT[self.chance.choice([*SPELT])](message)


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize("family", SPOKEN)
@settings(max_examples=2)
@given(seed=st.integers(0, 10**6))
def test_any_agent_leaves_what_was_sampled(family: str, seed: int) -> None:
    engine = policy(family, seed)
    renderer = renderer_of(family)

    async def play() -> Any:
        sampling = SamplingParams(max_tokens=200)
        async with GroupSession(engine, renderer, seed=seed, sampling=sampling, same_start=False) as session:
            agents = [Agent(session.conversation(), f"{seed} {member}") for member in range(2)]
            for _ in range(4):
                await asyncio.gather(*(agents[i % 2].act() for i in range(4)))
            return session.group([1.0 if agent.chat.trainable else None for agent in agents])

    check_group(run_moved(play()), engine.calls)


@pytest.mark.filterwarnings("ignore:the chat template")
@pytest.mark.parametrize("family", SPOKEN)
@pytest.mark.parametrize("change", SAID)
def test_a_past_that_was_said_otherwise_is_refused_by_no_template(family: str, change: str) -> None:
    """Results without their calls, calls that nobody made, and a system that speaks in the middle."""
    renderer = renderer_of(family)
    calls, thoughts = SPOKEN[family]
    spoken = sampled(renderer, "".join([*thoughts[:1], calls[0]]))
    stops = [] if spoken[-1] in renderer.stop_ids else [renderer.stop_ids[0]]
    engine = ScriptedEngine(
        lambda prompt, params, number: [*spoken, *stops], tokenizer=renderer.tokenizer, max_context=10**6
    )
    user, brief = {"role": "user", "content": "go on"}, {"role": "system", "content": "be brief"}

    async def play() -> None:
        sampling = SamplingParams(max_tokens=200)
        async with GroupSession(engine, renderer, seed=1, sampling=sampling, same_start=False) as session:
            chat = session.conversation()
            question: Any = {"role": "user", "content": "2 + 3?"}
            [said] = await chat.ask(chat.find([question], [ADD]), tools=[ADD])
            message = json.loads(json.dumps(said.message))
            [call] = message["tool_calls"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            past = [question, SAID[change](message), result]
            for more in ([], [user], [brief], [user, brief], [brief, user]):
                ids = chat.find([*past, *more], [ADD]).whole()  # type: ignore[list-item]
                text = renderer.tokenizer.decode(ids)
                assert text.count("go on") == (user in more)

    asyncio.run(play())
