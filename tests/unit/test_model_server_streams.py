"""Streamed answers of the front.

1. The pieces put together are the answer, whoever puts them together.
2. While a reply is being sampled there are signs of life.
3. A failure is a status before the first of them, and an event after it.
4. A program that has left has its request cancelled, and nothing is kept of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_gym.engines.base import Engine
from atropos_gym.errors import ConfigError, EngineError
from atropos_gym.html import Pieces
from atropos_gym.model_server import create_app
from atropos_gym.model_server.answers import _cut
from tests.tools.calculator import ADD
from tests.unit.model_server_cases import Connection, Front, client_of, fronted, with_front
from tests.unit.rollout_cases import run_moved, say, saying

openai = pytest.importorskip("openai")

HI: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": "é"}}</tool_call>'


def after(*seconds: float) -> Callable[[int], Any]:
    """A delay for each request, in order; the last one is everybody else's."""
    return lambda number: asyncio.sleep(seconds[min(number, len(seconds) - 1)])


async def events(front: Front, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await front.post(path, {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


# --- pieces ---


def test_a_stream_says_the_same_in_pieces() -> None:
    text = "ä" * 40 + "b"

    async def talk(front: Front) -> None:
        await front.open()
        usage = {"stream_options": {"include_usage": True}, "logprobs": True}
        *chunks, last = await events(front, "/chat/completions", {"messages": HI, **usage})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [delta["content"] for delta in deltas[1:-1]] == [*text]  # the bytes' ids, whole characters
        assert deltas[-1] == {} and {chunk["usage"] for chunk in chunks} == {None}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
        assert len(chunks[-1]["choices"][0]["logprobs"]["content"]) == 82
        assert last["choices"] == [] and last["usage"]["completion_tokens"] == 82
        told = await events(front, "/completions", {"prompt": "hi"})
        assert "".join(event["choices"][0]["text"] for event in told) == text
        assert told[-1]["choices"][0]["finish_reason"] == "stop" and "usage" not in told[-1]

    with_front(saying(text), talk)


def test_a_call_begins_with_id_and_name_and_its_arguments_follow() -> None:
    said = f"<think>hm</think>Now.{CALL}{CALL}"

    async def talk(front: Front) -> None:
        await front.open()
        told = await events(front, "/chat/completions", {"messages": HI, "tools": [ADD]})
        deltas = [event["choices"][0]["delta"] for event in told]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "Now."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls] == sorted(call["index"] for call in calls)
        for number in (0, 1):
            first, *rest = [call for call in calls if call["index"] == number]
            assert (first["type"], first["function"]) == ("function", {"name": "add", "arguments": ""})
            assert len(first["id"]) == 9 and all(set(one) == {"index", "function"} for one in rest)
            assert "".join(one["function"]["arguments"] for one in rest) == '{"a": 2, "b": "é"}'
        assert told[-1]["choices"][0]["finish_reason"] == "tool_calls"

    with_front(saying(said), talk)


LETTERS = st.text(st.sampled_from("ab é\n€"), max_size=12)


@given(spelt=st.lists(LETTERS, max_size=6), text=LETTERS, start=st.integers(0, 9), size=st.integers(0, 9))
def test_pieces_are_the_text(spelt: list[str], text: str, start: int, size: int) -> None:
    part = "".join(spelt)[start : start + size]
    for one in (text, part):
        pieces = _cut(one, spelt)
        assert "".join(pieces) == one and all(pieces)
    if part and "".join(spelt).find(part) == start:
        borders = {sum(map(len, spelt[:n])) for n in range(len(spelt) + 1)}
        cuts = [start + sum(map(len, _cut(part, spelt)[:n])) for n in range(1, len(_cut(part, spelt)))]
        assert set(cuts) <= borders


@pytest.mark.parametrize("said", ["It is 5.", f"Well. {CALL}", f"<think>a b</think>\n\nc{CALL}", "", " \n"])
@pytest.mark.parametrize("n", [1, 3])
def test_openais_helper_reads_the_same_as_from_a_whole_answer(said: str, n: int) -> None:
    async def talk(front: Front) -> None:
        member = (await front.open())["members"][0]
        client = client_of(front.app, member["base_url"], member["api_key"])
        asked = {"model": "x", "messages": HI, "tools": [ADD], "n": n, "logprobs": True}
        whole = await client.chat.completions.create(**asked)
        kinds = set()
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            async for event in stream:
                kinds.add(event.type)
            final = await stream.get_final_completion()
        assert (final.usage, final.model, final.id == whole.id) == (whole.usage, whole.model, False)
        for one, other in zip(whole.choices, final.choices, strict=True):
            assert (one.index, one.finish_reason) == (other.index, other.finish_reason)
            assert len(one.logprobs.content) == len(other.logprobs.content)
            before, now = one.message, other.message
            assert (before.content or "") == (now.content or "")
            assert before.model_extra == now.model_extra  # reasoning_content
            calls = [
                [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
                for message in (before, now)
            ]
            # Ids are each request's own.
            assert [call[1:] for call in calls[0]] == [call[1:] for call in calls[1]]
        assert ("tool_calls.function.arguments.done" in kinds) == (CALL in said)

    with_front(saying(said), talk)


# --- while it is being sampled ---


def moved(engine: Engine, talk: Callable[[Front], Any], **settings: Any) -> Any:
    """Runs ``talk`` on a clock that is moved by its timers."""

    async def inside() -> Any:
        async with fronted(engine, **settings) as front:
            await front.open()
            return await talk(front)

    return run_moved(inside())


def test_there_are_signs_of_life_while_a_reply_is_sampled() -> None:
    async def talk(front: Front) -> Any:
        begun = asyncio.get_running_loop().time()
        asked = Connection(front, {"messages": HI, "stream": True})
        await asked.serving
        assert asked.status == 200
        assert [round(at - begun) for at in asked.alive] == [10, 20, 30]
        told = b"".join(part for at, part in asked.parts if round(at - begun) == 35)
        assert told.endswith(b"data: [DONE]\n\n") and b'"finish_reason": "stop"' in told
        quick = Connection(front, {"messages": HI, "stream": True})
        await quick.serving
        assert quick.alive == []
        return await front.finish(1.0)

    told = moved(saying("ja", delay=after(35, 5)), talk)
    assert sum(mark != -100 for row in told["group"]["masks"] for mark in row) == 2 * len(say("ja"))


@pytest.mark.parametrize("keep_alive", [3600.0, 0.001], ids=["before the first sign of life", "after it"])
def test_a_failure_is_read_by_openais_client(keep_alive: float) -> None:
    """On the real clock, since the client asks a thread for its platform; timers still come in order."""
    engine = saying("ja", delay=after(0.05), faults={0: EngineError("down")})

    async def talk(front: Front) -> Any:
        member = (await front.open())["members"][0]
        client = client_of(front.app, member["base_url"], member["api_key"])

        async def read() -> None:
            stream = await client.chat.completions.create(model="x", messages=HI, stream=True)
            assert [chunk async for chunk in stream] == []

        with pytest.raises(openai.APIError, match="down") as failed:
            await read()
        assert failed.value.code == "engine_error"
        assert isinstance(failed.value, openai.InternalServerError) == (keep_alive > 1)
        return front.app.state.desk.sessions.find(front.session["id"]).group.counts

    counts = with_front(engine, talk, keep_alive=keep_alive)
    assert (counts["failed: EngineError"], counts["replies"]) == (1, 0)


def test_the_end_of_the_group_ends_its_streams() -> None:
    async def talk(front: Front) -> Any:
        asked = Connection(front, {"messages": HI, "stream": True})
        await asyncio.sleep(15)
        await front.finish(1.0)
        await asked.serving
        return asked

    asked = moved(saying("ja", delay=after(100)), talk)
    [error] = [json.loads(part[6:]) for _, part in asked.parts if part.startswith(b"data: ")]
    assert error["error"]["code"] == "session_ended"


def test_a_fault_of_ours_is_told_and_raised_for_the_log() -> None:
    async def talk(front: Front) -> Any:
        [member] = front.app.state.desk.sessions.find(front.session["id"]).members

        def keep(*_: Any, **__: Any) -> Any:
            raise KeyError("secret")

        member.keep = keep
        asked = Connection(front, {"messages": HI, "stream": True})
        with pytest.raises(KeyError, match="secret"):
            await asked.serving
        return asked

    asked = moved(saying("ja", delay=after(15)), talk)
    [error] = [json.loads(part[6:]) for _, part in asked.parts if part.startswith(b"data: ")]
    assert error["error"]["code"] == "internal" and "secret" not in error["error"]["message"]


@pytest.mark.parametrize("seconds", [5, 15], ids=["before the first sign of life", "after it"])
@pytest.mark.parametrize("how", ["disconnect", "server stops"])
def test_who_has_left_has_the_request_cancelled(seconds: float, how: str) -> None:
    async def talk(front: Front) -> Any:
        asked = Connection(front, {"messages": HI, "stream": True})
        await asyncio.sleep(seconds)
        asked.leave() if how == "disconnect" else asked.serving.cancel()
        await asyncio.wait([asked.serving])
        assert asyncio.get_running_loop().time() < 1000
        await front.chat([{"role": "user", "content": "other"}])
        counts = dict(front.app.state.desk.sessions.find(front.session["id"]).group.counts)
        return counts, await front.finish(1.0)

    counts, told = moved(saying("ja", delay=after(1000, 0)), talk)
    assert (counts["requests"], counts["cancelled"], counts["replies"]) == (2, 1, 1)
    assert len(told["group"]["tokens"]) == 1


def test_who_leaves_as_the_reply_comes_has_none() -> None:
    connections: list[Connection] = []

    async def leave(number: int) -> None:
        if number == 0:
            await asyncio.sleep(15)
            connections[0].leave()

    async def talk(front: Front) -> Any:
        connections.append(Connection(front, {"messages": HI, "stream": True}))
        await connections[0].serving
        return front.app.state.desk.sessions.find(front.session["id"]).group.counts["replies"]

    assert moved(saying("ja", delay=leave), talk) == 0


def test_the_time_between_signs_of_life_is_checked() -> None:
    with pytest.raises(ConfigError, match="keep_alive must be > 0, got 0"):
        create_app(saying("ja"), keep_alive=0)
    assert isinstance(create_app(saying("ja")).state.desk.pieces, Pieces)
