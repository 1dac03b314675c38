"""What agent frameworks send, as recorded of langchain-openai 1, openai-agents 0.24 and smolagents 1.

Each plays two turns with a tool. One that sends its past back as it was goes on in the same row, id for id,
however it spells it; one that rewrites its past has a row for each turn. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from atropos_gym.engines import ScriptedEngine
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import load_tokenizer
from tests.tools.calculator import ADD, add
from tests.tools.imitation_tokenizers import tiny_tokenizer
from tests.unit.model_server_cases import Front, check_wire, with_front
from tests.unit.session_cases import CALLS

Message = dict[str, Any]
CALL = '<tool_call>\n{"name": "add",   "arguments": {"b": 3, "a": 2}}\n</tool_call>'


@cache
def renderer_of(family: str) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(tiny_tokenizer(CALLS) if family == "template" else "bytes"))


def _parts(text: str) -> list[Message]:
    return [{"type": "text", "text": text}]


def _langchain(answer: Message, results: list[str]) -> list[Message]:
    calls = [{"type": "function", "id": c["id"], "function": c["function"]} for c in answer["tool_calls"]]
    return [
        {"content": answer["content"], "role": "assistant", "tool_calls": calls},
        *(
            {"content": result, "role": "tool", "tool_call_id": call["id"]}
            for call, result in zip(calls, results, strict=True)
        ),
    ]


def _agents(answer: Message, results: list[str]) -> list[Message]:
    return [
        {"role": "assistant", "content": answer["content"], "tool_calls": answer["tool_calls"]},
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": result}
            for call, result in zip(answer["tool_calls"], results, strict=True)
        ),
    ]


def _client(answer: Message, results: list[str]) -> list[Message]:
    """The openai package's own: the answer as it came, results as parts, with the tool's name."""
    return [
        {**answer, "annotations": [], "audio": None, "function_call": None},
        *(
            {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": _parts(result)}
            for call, result in zip(answer["tool_calls"], results, strict=True)
        ),
    ]


def _smolagents(answer: Message, results: list[str]) -> list[Message]:
    """Writes calls as text of its own: no history that was said."""
    calls = [{"id": c["id"], "type": "function", "function": c["function"]} for c in answer["tool_calls"]]
    said = f"{answer['content'] or ''}\nCalling tools:\n{calls}".lstrip()
    return [
        {"role": "assistant", "content": _parts(said)},
        {"role": "user", "content": _parts("Observation:\n" + "\n".join(results))},
    ]


@dataclass(frozen=True)
class Shape:
    """A framework: the fields of its requests, how it begins, and how it sends a turn with calls back."""

    name: str
    fields: Message
    system: Message
    user: Message
    back: Callable[[Message, list[str]], list[Message]]
    rows: int = 1
    ignored: tuple[str, ...] = ()


SYSTEM = "You calculate with tools."
ASK = "What is 2 + 3?"
PLAIN: tuple[Message, Message] = ({"content": SYSTEM, "role": "system"}, {"content": ASK, "role": "user"})
SHAPES = [
    Shape("create_agent", {"model": "gpt-4o", "stream": False}, *PLAIN, _langchain),
    Shape(
        "create_agent, sampling of its own",
        {"model": "gpt-4o", "stream": False, "max_completion_tokens": 300, "seed": 3, "temperature": 0.0},
        *PLAIN,
        _langchain,
        ignored=("temperature=0", "seed"),
    ),
    Shape(
        "create_agent, typed",
        {
            "model": "gpt-4o",
            "stream": False,
            "parallel_tool_calls": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Out", "strict": True, "schema": {"type": "object"}},
            },
        },
        *PLAIN,
        _langchain,
        ignored=("parallel_tool_calls=false", "response_format=json_schema"),
    ),
    Shape(
        "openai-agents",
        {
            "model": "gpt-4o",
            "parallel_tool_calls": False,
            "store": False,
            "temperature": 0.2,
            "tool_choice": "required",
        },
        *PLAIN,
        _agents,
        ignored=("parallel_tool_calls=false", "store", "temperature=0.2", "tool_choice=required"),
    ),
    Shape(
        "openai",
        {"model": "gpt-4o", "n": 1, "stop": None, "logit_bias": {}, "tool_choice": "auto", "user": "me"},
        {"role": "developer", "content": _parts(SYSTEM)},
        {"role": "user", "content": _parts(ASK), "name": "me"},
        _client,
        ignored=("user",),
    ),
    Shape(
        "smolagents",
        {"model": "x", "stop": ["Observation:", "Calling tools:"], "tool_choice": "required"},
        {"role": "system", "content": _parts(SYSTEM)},
        {"role": "user", "content": _parts(f"New task:\n{ASK}")},
        _smolagents,
        rows=3,
        ignored=("tool_choice=required",),
    ),
]


@pytest.mark.parametrize(
    ("family", "words"),
    [("template", ""), ("bytes", "Let me see.\n")],
    ids=["template, calls alone", "bytes, words before them"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_a_framework_sends_back_goes_on_id_for_id(shape: Shape, family: str, words: str) -> None:
    renderer = renderer_of(family)
    spoken = [words + CALL, words + CALL + CALL, "It is 5."]
    engine = ScriptedEngine(lambda p, s, n: renderer.say(spoken[n]), tokenizer=renderer.tokenizer)

    async def talk(front: Front) -> Any:
        await front.open()
        messages = [shape.system, shape.user]
        for _ in range(2):
            answer = (await front.chat(messages, tools=[ADD], **shape.fields))["choices"][0]["message"]
            assert (answer["content"] or "").strip() == words.strip()
            results = [add(call["function"]["arguments"]) for call in answer["tool_calls"]]
            assert set(results) == {"5"}
            messages = [*messages, *shape.back(answer, results)]
        last = (await front.chat(messages, tools=[ADD], **shape.fields))["choices"][0]["message"]
        assert last["content"] == "It is 5."
        return await front.finish(1.0)

    told = with_front(engine, talk)
    assert sorted(told["ignored"]) == sorted(shape.ignored)
    assert len(check_wire(told["group"], engine)) == 3
    assert len(told["group"]["tokens"]) == shape.rows


def test_legacy_completions_as_langchain_asks() -> None:
    engine = ScriptedEngine(lambda p, s, n: [*b"ja", 258])
    fields: Message = {
        "model": "x",
        "frequency_penalty": 0,
        "logprobs": None,
        "max_tokens": 256,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "temperature": 0.7,
        "top_p": 1,
    }

    async def talk(front: Front) -> Any:
        await front.open()
        for body in (fields, {**fields, "n": 2, "best_of": 2}):
            response = await front.post("/completions", {"prompt": ["one", "two"], **body})
            assert [choice["text"] for choice in response.json()["choices"]] == ["ja"] * 2 * body["n"]
        return await front.finish(1.0)

    told = with_front(engine, talk)
    assert told["ignored"] == {"temperature=0.7": 2}
    assert len(check_wire(told["group"], engine)) == 6
