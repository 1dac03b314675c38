"""The front that speaks OpenAI's API, request by request.

1. What a program is told is what was sampled; the group holds it id for id.
2. Wishes that would make rows untrainable are never followed in silence.
3. Every refusal has the shape that OpenAI's clients read.
4. Every group that was opened ends in one count.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.batch_server import create_app as batch_app
from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.engines import SamplingParams, ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, VersionExpired
from atropos_gym.model_server import AgentCollector, create_app
from atropos_gym.model_server.outlet import Outlet
from atropos_gym.tokenizers import BytesTokenizer
from atropos_gym.wire import ScoredDataGroup
from tests.unit.model_server_cases import BASE, Connection, Front, with_front
from tests.unit.rollout_cases import END, run_moved, say, saying

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NAMES = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "id",
    "type",
    "text",
    "function",
    "arguments",
]
FIELDS = [
    "prompt",
    "tools",
    "stop",
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "seed",
    "tool_choice",
    "response_format",
    "json_schema",
    "surprise",
]
MORE = {"role": "user", "content": "more"}


def rows(told: dict[str, Any]) -> list[list[int]]:
    """The trained ids of each row of a group."""
    group = ScoredDataGroup.model_validate(told["group"])
    return [[mark for mark in mask if mark != -100] for mask in group.masks]


# --- answers ---


def test_a_conversation_is_one_row_of_what_was_sampled() -> None:
    engine = ScriptedEngine(lambda p, s, n: say(["ja", "nein"][n % 2]))

    async def talk(front: Front) -> Any:
        await front.open(2, name="dialogue")
        for member in range(2):
            first = await front.chat(HI, member)
            message = first["choices"][0]["message"]
            assert message == {"role": "assistant", "content": "ja", "refusal": None}
            assert first["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
            assert (first["object"], first["model"]) == ("chat.completion", "scripted")
            await front.chat([*HI, message, MORE], member)
        return await front.finish(1.0, 0.0)

    told = with_front(engine, talk)
    assert rows(told) == [[*say("ja"), *say("nein")]] * 2
    group = told["group"]
    assert group["scores"] == [1.0, 0.0]
    assert [one["turns"] for one in group["overrides"]] == [[[5, 8], [14, 19]]] * 2
    sampled = [value for call in engine.calls for value in call.outcome.logprobs]  # type: ignore[union-attr]
    assert [x for row in group["inference_logprobs"] for x in row if x != 1.0] == sampled
    assert (told["name"], told["version"], told["left_out"], told["withheld"]) == ("dialogue", 0, {}, None)


def test_n_replies_and_the_one_that_goes_on() -> None:
    engine = ScriptedEngine(lambda p, s, n: say("abcd"[n]))

    async def talk(front: Front) -> Any:
        await front.open()
        told = await front.chat(HI, n=3, return_token_ids=True)
        assert [one["index"] for one in told["choices"]] == [0, 1, 2]
        assert [one["token_ids"] for one in told["choices"]] == [say("a"), say("b"), say("c")]
        assert told["usage"]["prompt_tokens"] == 5
        await front.chat([*HI, told["choices"][1]["message"], MORE])
        return await front.finish(1.0)

    assert sorted(rows(with_front(engine, talk))) == [say("a"), [*say("b"), *say("d")], say("c")]


def test_tool_choice_none_leaves_calls_as_text_and_goes_on() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    said = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'

    async def talk(front: Front) -> Any:
        await front.open()
        first = (await front.chat(HI, tools=[tool]))["choices"][0]
        assert first["message"]["content"] is None and first["finish_reason"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": first["message"]["tool_calls"][0]["id"], "content": "4"}
        last = await front.chat([*HI, first["message"], result], tools=[tool], tool_choice="none")
        assert last["choices"][0]["message"]["content"] == said
        return await front.finish(1.0)

    assert rows(with_front(saying(said), talk)) == [say(said) * 2]


def test_logprobs_are_those_of_the_sampled_ids() -> None:
    engine = ScriptedEngine(lambda p, s, n: [*"é".encode(), END])

    async def talk(front: Front) -> None:
        await front.open()
        [entry, second, last] = (await front.chat(HI, logprobs=True))["choices"][0]["logprobs"]["content"]
        outcome: Any = engine.calls[0].outcome
        assert [entry["logprob"], second["logprob"], last["logprob"]] == list(outcome.logprobs)
        assert (entry["bytes"], second["bytes"], last["token"]) == ([0xC3], [0xA9], "<end>")
        told = (await front.post("/completions", {"prompt": "x", "logprobs": 0})).json()["choices"][0]
        assert told["text"] == "é" and len(told["logprobs"]["token_logprobs"]) == 3

    with_front(engine, talk)


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_go_on_where_their_prompt_does(as_ids: bool) -> None:
    engine = ScriptedEngine(lambda p, s, n: list(b"ab"))

    async def talk(front: Front) -> Any:
        await front.open()
        text = "Q"
        for _ in range(2):
            prompt = list(text.encode()) if as_ids else text
            told = (await front.post("/completions", {"prompt": prompt, "max_tokens": 2})).json()
            assert told["object"] == "text_completion"
            assert told["choices"][0]["finish_reason"] == "length"
            text += told["choices"][0]["text"] + "Q"
        many = (await front.post("/completions", {"prompt": ["x", "y"], "n": 2})).json()
        assert [one["index"] for one in many["choices"]] == [0, 1, 2, 3]
        assert many["usage"]["prompt_tokens"] == 2
        return await front.finish(1.0)

    assert sorted(map(bytes, rows(with_front(engine, talk)))) == [b"ab"] * 4 + [b"abab"]


def test_limits_and_stop_strings_end_a_reply() -> None:
    async def talk(front: Front) -> None:
        await front.open(max_tokens=6)
        for asked, text, why in [
            ({}, "abc de", "length"),
            ({"max_tokens": 2}, "ab", "length"),
            ({"max_completion_tokens": 3, "max_tokens": 1}, "abc", "length"),
            ({"stop": " "}, "abc", "stop"),
            ({"stop": ["zz", "c "]}, "ab", "stop"),
        ]:
            choice = (await front.chat(HI, **asked))["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, why)

    with_front(saying("abc de f"), talk)


# --- wishes ---


WISH = {"temperature": 0, "top_p": 0.9, "seed": 7, "presence_penalty": 0.0, "top_k": 0}


def test_the_sessions_sampling_counts_and_what_is_ignored_is_said() -> None:
    engine = saying("ja")

    async def talk(front: Front) -> Any:
        await front.open()
        response = await front.post("/chat/completions", {"messages": HI, **WISH})
        assert response.headers["x-atropos-ignored"] == "temperature=0, top_p=0.9, seed"
        assert "x-atropos-ignored" not in (await front.post("/chat/completions", {"messages": HI})).headers
        return await front.finish(1.0)

    told = with_front(engine, talk)
    assert told["ignored"] == {"temperature=0": 1, "top_p=0.9": 1, "seed": 1}
    assert rows(told) == [say("ja")] * 2
    assert {(call.params.temperature, call.params.top_p) for call in engine.calls} == {(1.0, 1.0)}
    assert len({call.params.seed for call in engine.calls}) == 2


def test_what_a_request_wants_is_followed_and_not_trained_where_it_is_another_distribution() -> None:
    engine = saying("ja")

    async def talk(front: Front) -> Any:
        await front.open(temperature=0.5)
        first = await front.chat(HI, temperature=0)
        await front.chat([*HI, first["choices"][0]["message"], MORE], temperature=0.5)
        return await front.finish(1.0)

    told = with_front(engine, talk, wishes="request")
    assert rows(told) == [say("ja")]
    assert told["counts"]["untrainable: temperature=0"] == 1
    assert told["group"]["generation_params"] == {"temperature": 0.5}
    assert [call.params.temperature for call in engine.calls] == [0, 0.5]


SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}}
FORCED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice=required"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice=function"),
    ({"response_format": {"type": "json_object"}}, "response_format=json_object"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Out", "schema": SCHEMA}}},
        "response_format=json_schema",
    ),
]


@pytest.mark.parametrize(("forced", "name"), FORCED, ids=[name for _, name in FORCED])
@pytest.mark.parametrize("wishes", ["session", "request", "refuse"])
def test_what_only_constrained_decoding_keeps_is_the_policys_to_learn(
    wishes: Any, forced: dict[str, Any], name: str
) -> None:
    async def talk(front: Front) -> Any:
        await front.open()
        body = {"messages": HI, "tools": [TOOL], **forced}
        response = await front.post("/chat/completions", body)
        if wishes != "session":
            await _expect(response, 400, f"{name} needs constrained decoding")
            assert response.json()["error"]["param"] == name.partition("=")[0]
            return
        assert response.headers["x-atropos-ignored"] == name
        body["messages"] = [*HI, response.json()["choices"][0]["message"], MORE]
        assert (await front.post("/chat/completions", body)).status_code == 200
        told = await front.finish(1.0)
        assert told["ignored"] == {name: 2}
        assert rows(told) == [say("ja") * 2]

    with_front(saying("ja"), talk, wishes=wishes)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ([], "Answer with JSON alone"),
        ([{"role": "system", "content": "Be kind."}], "Be kind.\n\nAnswer with JSON alone"),
        ([{"role": "developer", "content": [{"type": "text", "text": "Kind."}]}], "Kind.\nAnswer with JSON"),
        ([{"role": "system", "content": None}], "Answer with JSON alone"),
    ],
)
def test_the_schema_of_an_answer_is_told(first: list[Any], told: str) -> None:
    engine = saying('{"value": 3}')

    async def talk(front: Front) -> None:
        await front.open()
        await front.chat([*first, *HI], **FORCED[-1][0])

    with_front(engine, talk)
    prompt = BytesTokenizer().decode(engine.calls[0].prompt_ids)
    assert told in prompt and json.dumps(SCHEMA) in prompt


def test_fields_that_nobody_knows_are_counted_by_name() -> None:
    async def talk(front: Front) -> Any:
        await front.open()
        extras: list[dict[str, Any]] = [
            {"reasoning_effort": "low", "user": None, "store": False},
            {"ünknown": 1, "a b\r\n": 2, "x" * 50: 3, "store": True},
            {f"f{i:02}": i for i in range(30)},
        ]
        for extra in extras:
            response = await front.post("/chat/completions", {"messages": HI, **extra})
            assert response.status_code == 200 and len(response.headers["x-atropos-ignored"]) < 100
        return await front.finish(1.0)

    few = {f"f{i:02}": 1 for i in range(16)}
    told = with_front(saying("ja"), talk)
    assert told["ignored"] == {"reasoning_effort": 1, "store": 2, "other fields": 2, **few}


# --- refusals ---


async def _expect(response: httpx.Response, status: int, said: str, code: str | None = None) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"] if code else None) == (status, code), response.text
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat/completions", {}, "messages: Field required"),
        ("chat/completions", {"messages": "hi"}, "messages: Input should be a valid array"),
        ("chat/completions", {"messages": []}, "a prompt needs at least one message"),
        (
            "chat/completions",
            {"messages": [{"role": "owner", "content": "x"}]},
            "the role of message 0 must be",
        ),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "nothing was said"),
        ("chat/completions", {"messages": HI, "n": 0}, "n: Input should be greater"),
        ("chat/completions", {"messages": HI, "max_tokens": 0}, "max_tokens: Input should be greater"),
        ("chat/completions", {"messages": HI, "tools": [{"type": "function"}]}, "a tool must be a mapping"),
        ("chat/completions", {"messages": HI, "tool_choice": "any"}, "tool_choice must be 'none', 'auto'"),
        ("chat/completions", {"messages": HI, "response_format": {"type": "xml"}}, "response_format must be"),
        (
            "chat/completions",
            {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "'json_schema' with a schema",
        ),
        ("chat/completions", {"messages": HI, "logit_bias": {"1": 2}}, "logit_bias is not supported"),
        ("chat/completions", {"messages": HI, "functions": [{}]}, "use tools"),
        ("completions", {"prompt": ""}, "the prompt is empty"),
        ("completions", {"prompt": []}, "prompt is an empty list"),
        ("completions", {"prompt": [[]]}, "the prompt is empty"),
        ("completions", {"prompt": [5, 264]}, "the id 264; those of this model lie below 264"),
        ("completions", {"prompt": "x", "echo": True}, "echo is not supported"),
        ("completions", {"prompt": "x", "best_of": 3}, "best_of is not supported"),
        ("completions", {"prompt": [5, "x"]}, "prompt"),
    ],
)
def test_bad_requests_are_explained_in_openais_shape(path: str, body: dict[str, Any], said: str) -> None:
    async def talk(front: Front) -> None:
        await front.open()
        await _expect(await front.post(f"/{path}", body), 400, said)

    with_front(saying("ja"), talk)


CALLS: list[Any] = [
    "x",
    {"a": 1},
    [1],
    [{}],
    [{"function": 3}],
    [{"id": [1], "function": {"name": "f"}}],
    [{"id": "a", "function": {"name": 1}}],
    [{"id": "a", "function": {"name": "f", "arguments": 5}}],
    [{"id": "a", "function": {"name": "f", "arguments": "{bad"}}],
    [{"id": "a", "function": {"name": "f", "arguments": "[1]"}}],
    [{"id": None, "function": {"name": "f", "arguments": None}}],
]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(CALLS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=30)
@given(data=st.data())
def test_no_body_is_an_internal_error(data: st.DataObject) -> None:
    async def talk(front: Front) -> None:
        await front.open()
        first = (await front.chat(HI, tools=[TOOL]))["choices"][0]["message"]
        message = data.draw(st.dictionaries(st.sampled_from(NAMES), JUNK, max_size=5))
        roles = st.sampled_from(["user", "assistant", "tool", "system", "developer"])
        own = {"role": data.draw(roles), "content": "x"} | message
        places = [[own], [*HI, own], [*HI, first, own], [*HI, {**first, **message}, MORE]]
        body = {"messages": data.draw(st.sampled_from(places)), "n": 1, "max_tokens": 8}
        body |= data.draw(st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=2))
        content = json.dumps(body).encode()
        for path in ("chat/completions", "completions"):
            url = f"/s/{front.session['id']}/0/v1/{path}"
            response = await front.http.post(url, content=content)
            assert response.status_code in (200, 400), response.text

    with_front(saying('<tool_call>{"name": "f", "arguments": {}}</tool_call>'), talk)


def test_where_a_session_can_be_refused() -> None:
    async def talk(front: Front) -> None:
        http, body = front.http, {"messages": HI}
        await _expect(
            await http.post("/v1/chat/completions", json=body), 401, "whose conversation", "no_session"
        )
        await _expect(await http.post("/s/x/0/v1/completions", json={}), 404, "no such", "session_not_found")
        key = (await front.open(2))["id"]
        await _expect(await front.post("/chat/completions", body, 2), 404, "below 2", "member_not_found")
        refused = await http.post(f"/sessions/{key}/finish", json={"scores": [1.0]})
        await _expect(refused, 400, "2 members need as many scores, got 1")
        await _expect(await http.post("/sessions", json={"group_size": 0}), 400, "group_size")
        await _expect(await http.post("/v1/responses", json={}), 404, "there are /v1/chat/completions")
        await front.finish(None, None)
        await _expect(await front.post("/chat/completions", body), 410, "was finished", "session_ended")
        counts = (await http.get("/sessions")).json()["counts"]
        assert counts == {"requests without a session": 3, "opened": 1, "withheld": 1}

    with_front(saying("ja"), talk)


@pytest.mark.parametrize("how", ["header", "key"])
def test_a_session_is_found_by_header_or_api_key(how: str) -> None:
    async def talk(front: Front) -> Any:
        session = await front.open(2)
        key = session["members"][1]["api_key"]
        headers = {"x-atropos-session": key} if how == "header" else {"Authorization": f"Bearer {key}"}
        response = await front.http.post("/v1/chat/completions", json={"messages": HI}, headers=headers)
        assert response.status_code == 200
        listed = (await front.http.get("/v1/models", headers=headers)).json()
        assert listed["data"][0]["id"] == "scripted"
        return (await front.http.get(f"/sessions/{session['id']}")).json()

    assert [one["replies"] for one in with_front(saying("ja"), talk)["members"]] == [0, 1]


def test_models() -> None:
    async def talk(front: Front) -> None:
        assert (await front.http.get("/v1/models/scripted")).json()["object"] == "model"
        await _expect(await front.http.get("/v1/models/gpt-x"), 404, "only 'scripted'")
        assert (await front.http.get("/health")).json()["status"] == "ok"

    with_front(saying("ja"), talk)


def test_engine_errors_say_whether_to_try_again() -> None:
    faults = {0: EngineError("down"), 1: VersionExpired("gone")}
    engine = saying("ja", faults=faults, max_context=40)

    async def talk(front: Front) -> None:
        await front.open()
        response = await front.post("/chat/completions", {"messages": HI})
        await _expect(response, 503, "down", "engine_error")
        assert response.headers["x-should-retry"] == "true"
        response = await front.post("/chat/completions", {"messages": HI})
        await _expect(response, 410, "gone", "version_expired")
        assert response.headers["x-should-retry"] == "false"
        long = [{"role": "user", "content": "x" * 40}]
        refused = await front.post("/chat/completions", {"messages": long})
        await _expect(refused, 400, "maximum context length is 40", "context_length_exceeded")
        assert rows(await _scored(front)) == [say("ja")]

    async def _scored(front: Front) -> dict[str, Any]:
        await front.chat(HI)
        return await front.finish(1.0)

    with_front(engine, talk)


def test_the_sessions_need_the_token_and_members_do_not() -> None:
    async def talk(front: Front) -> None:
        await _expect(
            await front.http.post("/sessions", json={"group_size": 1}), 401, "token", "invalid_token"
        )
        front.http.headers["Authorization"] = "Bearer secret"
        await front.open()
        del front.http.headers["Authorization"]
        await front.chat(HI)

    with_front(saying("ja"), talk, token="secret")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="wishes must be"):
        create_app(saying("ja"), wishes="mine")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_body_bytes must be >= 1, got 0"):
        create_app(saying("ja"), max_body_bytes=0)


@pytest.mark.parametrize("told", [True, False], ids=["length is told", "in pieces"])
@pytest.mark.parametrize(
    "path", ["/s/{id}/0/v1/chat/completions", "/v1/completions", "/sessions", "/sessions/{id}/finish"]
)
def test_a_body_that_is_too_long(path: str, told: bool) -> None:
    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    async def talk(front: Front) -> None:
        member = (await front.open())["members"][0]
        url = path.format(id=front.session["id"])
        headers = {"Authorization": f"Bearer {member['api_key']}"}
        body = json.dumps({"messages": HI, "prompt": "x", "group_size": 1, "scores": [1.0]}).encode()
        for size, refused in ((2**20 + 1, True), (2**20, False)):
            content = body.ljust(size) if told else pieces(body.ljust(size))
            response = await front.http.post(url, content=content, headers=headers)
            assert (response.status_code == 413) == refused, response.text
            if refused:
                await _expect(response, 413, "the body is longer than 1 MiB", "body_too_large")

    with_front(saying("ja"), talk, max_body_bytes=2**20)


# --- how groups end ---


def test_a_client_that_leaves_cancels_its_request() -> None:
    gate = asyncio.Event()
    engine = saying("ja", delay=lambda number: gate.wait() if number == 0 else asyncio.sleep(0))

    async def talk(front: Front) -> Any:
        await front.open()
        asked = asyncio.create_task(front.chat(HI))
        while not engine.calls:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        await front.chat(HI)
        return await front.finish(1.0)

    told = with_front(engine, talk)
    assert rows(told) == [say("ja")]
    assert told["counts"]["cancelled"] == 1


def test_a_connection_that_closes_cancels_its_request() -> None:
    """As a real server says it: by a message, while the program's task runs on."""
    engine = saying("ja", delay=lambda number: asyncio.Event().wait())

    async def talk(front: Front) -> Any:
        key = (await front.open())["id"]
        asked = Connection(front, {"messages": HI})
        while not engine.calls:
            await asyncio.sleep(0)
        asked.leave()
        await asked.serving
        return asked.status, front.app.state.desk.sessions.find(key).group.counts["cancelled"]

    assert with_front(engine, talk) == (499, 1)


def test_a_reply_that_is_ready_when_its_program_has_left_is_not_kept() -> None:
    connections: list[Connection] = []

    async def leave(number: int) -> None:
        if number == 0:
            connections[0].leave()

    async def talk(front: Front) -> Any:
        await front.open()
        connections.append(Connection(front, {"messages": HI}))
        await connections[0].serving
        assert connections[0].status == 499
        await front.chat([MORE])
        return await front.finish(1.0)

    assert rows(with_front(saying("ja", delay=leave), talk)) == [say("ja")]


@pytest.mark.parametrize("failing", range(3))
def test_prompts_that_failed_together_leave_nothing_behind(failing: int) -> None:
    """A program that gets an error has none of the replies, so none of them is trained."""
    engine = ScriptedEngine(
        lambda prompt, params, number: list(b"abcdefghij"[number : number + 1]),
        faults={failing: EngineError("down")},
        delay=lambda number: asyncio.sleep(0),
    )

    async def talk(front: Front) -> Any:
        await front.open()
        body = {"prompt": ["x", "y", "z"], "max_tokens": 1}
        await _expect(await front.post("/completions", body), 503, "down", "engine_error")
        assert front.app.state.desk.sessions.find(front.session["id"]).group.counts["replies"] == 0
        assert (await front.post("/completions", body)).status_code == 200
        return await front.finish(1.0)

    assert sorted(map(bytes, rows(with_front(engine, talk)))) == [b"d", b"e", b"f"]


def test_finishing_cancels_what_is_still_being_asked() -> None:
    engine = saying("ja", delay=lambda number: asyncio.Event().wait() if number == 1 else asyncio.sleep(0))

    async def talk(front: Front) -> Any:
        await front.open()
        await front.chat(HI)
        late = asyncio.create_task(front.post("/chat/completions", {"messages": HI}))
        while len(engine.calls) < 2:
            await asyncio.sleep(0)
        told = await front.finish(1.0)
        await _expect(await late, 410, "was finished", "session_ended")
        return told

    told = with_front(engine, talk)
    assert rows(told) == [say("ja")]
    assert told["counts"]["cancelled"] == 1


def test_members_without_score_or_reply_are_left_out_and_told() -> None:
    async def talk(front: Front) -> Any:
        await front.open(4)
        for member in range(3):
            await front.chat(HI, member)
        told = await front.finish(1.0, None, 0.0, 1.0)
        await front.open(2)
        await front.chat(HI)
        return told, await front.finish(1.0, 1.0)

    told, withheld = with_front(saying("ja"), talk)
    assert told["left_out"] == {"1": "no score", "3": "no reply that can be trained on"}
    assert told["group"]["scores"] == [1.0, 0.0]
    assert withheld["group"] is None
    assert withheld["withheld"] == "1 of 2 members have a score and a reply, 2 are needed"


def test_silent_sessions_expire_and_let_their_version_go() -> None:
    engine = saying("ja")

    async def talk() -> Any:
        app = create_app(engine, idle_seconds=100)
        sessions = app.state.desk.sessions
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            front = Front(app, http)
            await front.open()
            for _ in range(3):
                await asyncio.sleep(60)
                await front.chat(HI)
            assert len(sessions) == 1
            await asyncio.sleep(101)
            await _expect(await front.post("/chat/completions", {"messages": HI}), 410, "was expired")
            await front.open(idle_seconds=5)
            await asyncio.sleep(6)
            await front.open()
            assert (await http.delete(f"/sessions/{front.session['id']}")).status_code == 200
        await sessions.close()
        return sessions.counts

    counts = run_moved(talk())
    assert counts == {"opened": 3, "expired": 2, "dropped": 1, "requests without a session": 1}


def test_a_session_plays_the_version_that_was_newest_when_it_began() -> None:
    engine = saying("ja")

    async def talk(front: Front) -> Any:
        await front.open()
        await engine.publish(1, "/adapters/r-v1")
        await front.chat(HI)
        return await front.finish(1.0)

    assert with_front(engine, talk)["group"]["group_overrides"]["policy_version"] == 0
    assert engine.newest == 1


# --- collecting ---


async def _agent(base_url: str, api_key: str, start: Any) -> float | None:
    """A program of its own: it keeps its history and asks twice."""
    messages = [{"role": "user", "content": start}]
    async with httpx.AsyncClient(transport=_transport, base_url=base_url) as http:
        for _ in range(2):
            body = {"model": "any", "messages": messages}
            told = (await http.post("/chat/completions", json=body)).json()
            messages += [told["choices"][0]["message"], {"role": "user", "content": "on"}]
    member = int(api_key.rpartition(".")[2])
    if start == "bad" and member:
        raise RuntimeError("broken")
    return float(member)


_transport: Any = None


def test_the_collector_plays_groups_and_counts_what_fails() -> None:
    global _transport
    engine = saying("ja")

    async def collect() -> Any:
        global _transport
        app = create_app(engine)
        _transport = httpx.ASGITransport(app)
        collector = AgentCollector(_agent, BASE, group_size=3, concurrency=2, transport=_transport, name="a")
        groups = await collector.collect(["x", "bad", "y"])
        return groups, collector.counts, app.state.desk.sessions.counts

    groups, counts, ended = asyncio.run(collect())
    assert [group.start for group in groups] == ["x", "bad", "y"]
    assert groups[0].group.scores == [0.0, 1.0, 2.0]
    assert groups[1].group is None and "1 of 3" in groups[1].withheld
    assert [str(error) for error in groups[1].failures] == ["broken", "broken"]
    assert counts == {"finished": 2, "withheld": 1, "failed run: RuntimeError": 2}
    assert ended == {"opened": 3, "finished": 2, "withheld": 1}


def test_a_deadline_ends_a_run_and_not_its_group() -> None:
    async def slow(base_url: str, api_key: str, start: Any) -> float:
        if api_key.endswith(".1"):
            await asyncio.sleep(1000)
        return await _agent(base_url, api_key, start) or 0.0

    async def collect() -> Any:
        global _transport
        _transport = httpx.ASGITransport(create_app(saying("ja")))
        collector = AgentCollector(slow, BASE, group_size=3, deadline=10, transport=_transport)
        return await collector.collect(["x"])

    [group] = run_moved(collect())
    assert group.scores == [0.0, None, 2.0]
    assert [type(error).__name__ for error in group.failures] == ["TimeoutError"]
    assert group.group.scores == [0.0, 2.0]


async def _give_up() -> None:
    task = asyncio.create_task(asyncio.sleep(1000))
    task.cancel()
    await task


async def _cancelled_within(base_url: str, api_key: str, start: Any) -> float:
    """A program that cancels a part of its own and awaits it."""
    if start == "stop" and api_key.endswith(".1"):
        await _give_up()
    return float(api_key.rpartition(".")[2])


def _cancelled_in_a_thread(base_url: str, api_key: str, start: Any) -> float:
    return asyncio.run(_cancelled_within(base_url, api_key, start))


@pytest.mark.parametrize("agent", [_cancelled_within, _cancelled_in_a_thread])
def test_a_program_that_cancels_itself_is_a_failed_run(agent: Any) -> None:
    async def collect() -> Any:
        transport = httpx.ASGITransport(create_app(saying("ja")))
        collector = AgentCollector(agent, BASE, group_size=3, concurrency=1, transport=transport)
        return await collector.collect(["stop", "x"]), collector.counts

    groups, counts = asyncio.run(collect())
    assert [group.scores for group in groups] == [[0.0, None, 2.0], [0.0, 1.0, 2.0]]
    assert [type(error) for error in groups[0].failures] == [asyncio.CancelledError]
    assert counts == {"withheld": 2, "failed run: CancelledError": 1}


def test_a_collection_that_is_cancelled_ends_and_gives_its_groups_up() -> None:
    async def collect() -> Any:
        app = create_app(saying("ja"))
        started = asyncio.Event()

        async def agent(base_url: str, api_key: str, start: Any) -> float:
            started.set()
            await asyncio.sleep(1000)
            return 1.0

        collector = AgentCollector(agent, BASE, group_size=2, transport=httpx.ASGITransport(app))
        collecting = asyncio.create_task(collector.collect(["x"]))
        await started.wait()
        collecting.cancel()
        await asyncio.wait([collecting])
        return collecting.cancelled(), app.state.desk.sessions.counts, collector.counts

    assert asyncio.run(collect()) == (True, {"opened": 1, "dropped": 1}, {})


def test_a_group_that_cannot_be_finished_does_not_end_the_others() -> None:
    async def collect() -> Any:
        global _transport
        app = create_app(saying("ja"))
        _transport = httpx.ASGITransport(app)
        sessions, finish, broken = app.state.desk.sessions, app.state.desk.sessions.finish, iter([True])

        async def finish_later(key: str, scores: Any) -> Any:
            if next(broken, False):
                raise EngineError("no")
            return await finish(key, scores)

        sessions.finish = finish_later
        collector = AgentCollector(_agent, BASE, group_size=2, concurrency=1, transport=_transport)
        return await collector.collect(["x", "y"]), collector.counts

    groups, counts = asyncio.run(collect())
    assert [group.group is None for group in groups] == [True, False]
    assert groups[0].withheld is not None and "no" in groups[0].withheld
    assert counts == {"not finished": 1, "finished": 1}


def test_a_plain_function_is_an_agent_too() -> None:
    caught: list[Any] = []

    def agent(base_url: str, api_key: str, start: Any) -> float:
        caught.append((api_key.rpartition(".")[2], start))
        return 1.0

    async def collect() -> Any:
        transport = httpx.ASGITransport(create_app(saying("ja")))
        return await AgentCollector(agent, BASE, group_size=2, transport=transport).collect(["x"])

    [group] = asyncio.run(collect())
    assert sorted(caught) == [("0", "x"), ("1", "x")]
    assert group.report["left_out"] == {
        "0": "no reply that can be trained on",
        "1": "no reply that can be trained on",
    }


TRAINER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 2,
    "max_token_len": 512,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 1,
    "starting_step": 0,
    "num_steps": 3,
}


def test_groups_go_to_a_trainer_and_its_versions_come_into_the_engine(tmp_path: Path) -> None:
    engine = saying("ja")

    async def train() -> Any:
        transport = httpx.ASGITransport(batch_app())
        trainer = AsyncBatchClient(BASE, transport=transport)
        outlet = Outlet(engine, AsyncBatchClient(BASE, transport=transport), name="agents", group_size=2)
        app = create_app(engine, outlet=outlet)
        await trainer.register(**TRAINER)
        await trainer._http.get("/batch")  # now it has started
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http,
        ):
            front = Front(app, http)
            told = []
            for version in (0, 1):
                path = None if version == 0 else str(tmp_path / f"r-v{version}")
                await trainer.publish_policy(
                    run="r", version=version, model_name=f"r-v{version}", adapter_path=path
                )
                async with asyncio.timeout(60):
                    while outlet.version != version:
                        await asyncio.sleep(0.01)
                await front.open(2)
                for member in range(2):
                    await front.chat(HI, member)
                told.append(await front.finish(1.0, 0.0))
            batches = [await trainer.batch(wait_seconds=10) for _ in range(2)]
            await trainer.finish("r")
            async with asyncio.timeout(60):
                while not outlet.finished:
                    await asyncio.sleep(0.01)
            await _expect(
                await http.post("/sessions", json={"group_size": 1}), 410, "has finished", "finished"
            )
            collector = AgentCollector(_agent, BASE, transport=httpx.ASGITransport(app))
            assert [one async for one in collector.stream(itertools.count())] == []
            report = (await http.get("/sessions")).json()
        await trainer.close()
        return told, batches, report

    told, batches, report = asyncio.run(train())
    assert [one["group"] for one in told] == [None, None] and all(one["posted"] for one in told)
    groups = [group for batch in batches for group in batch.groups]
    assert [group.scores for group in groups] == [[1.0, 0.0]] * 2
    assert [group.policy_version for group in groups] == [0, 1]
    assert (report["posted"], report["version"], report["counts"]["finished"]) == (2, 1, 2)
    assert engine.published == [(1, tmp_path / "r-v1")]


def test_a_version_that_cannot_be_taken_over_is_said_to_who_opens_a_group() -> None:
    engine = saying("ja")

    async def train() -> None:
        transport = httpx.ASGITransport(batch_app())
        trainer = AsyncBatchClient(BASE, transport=transport)
        outlet = Outlet(engine, AsyncBatchClient(BASE, transport=transport))
        app = create_app(engine, outlet=outlet)
        await trainer.register(**TRAINER)
        await trainer._http.get("/batch")
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http,
        ):
            await trainer.publish_policy(
                run="r", version=0, model_name="r-v0", tokenizer_fingerprint="sha256:other"
            )
            async with asyncio.timeout(60):
                while outlet.problem is None:
                    await asyncio.sleep(0.01)
            refused = await http.post("/sessions", json={"group_size": 1})
            await _expect(refused, 503, "use the same", "versions_lost")
            assert (await http.get("/health")).json()["status"] == "failing"
        await trainer.close()

    asyncio.run(train())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("lora_A"), MemoryError()])
def test_whatever_a_publish_raises_is_said_in_health(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = saying("ja")

    async def publish(version: int, adapter: str | Path) -> None:
        raise error

    monkeypatch.setattr(engine, "publish", publish)
    policy = {
        "run": "r",
        "version": 1,
        "model_name": "r-v1",
        "adapter_path": str(tmp_path),
        "finished": False,
    }

    def handle(request: httpx.Request) -> httpx.Response:
        registered = {"status": "success", "env_id": 0}
        return httpx.Response(200, json=registered if request.url.path == "/register-env" else policy)

    async def follow() -> None:
        client = AsyncBatchClient(BASE, transport=httpx.MockTransport(handle))
        app = create_app(engine, outlet=Outlet(engine, client))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http,
        ):
            async with asyncio.timeout(60):
                while (health := (await http.get("/health")).json())["status"] == "ok":
                    await asyncio.sleep(0.01)
            assert f"no longer followed: {type(error).__name__}" in health["problem"]
            refused = await http.post("/sessions", json={"group_size": 1})
            await _expect(refused, 503, type(error).__name__, "versions_lost")

    asyncio.run(follow())
    assert str(error) in caplog.text


def test_a_group_that_could_not_be_posted_is_posted_when_asked_again() -> None:
    answers = iter([503, 200])

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/register-env":
            return httpx.Response(200, json={"status": "success", "env_id": 0})
        if request.url.path == "/scored_data":
            return httpx.Response(next(answers), json={"status": "received", "uuid": "g1"})
        return httpx.Response(200, json={})

    async def post() -> Any:
        client = AsyncBatchClient(BASE, transport=httpx.MockTransport(handle), retry_seconds=0)
        engine = saying("ja")
        app = create_app(engine, outlet=Outlet(engine, client))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            front = Front(app, http)
            await front.open()
            await front.chat(HI)
            path = f"/sessions/{front.session['id']}/finish"
            await _expect(await http.post(path, json={"scores": [1.0]}), 502, "not posted", "not_posted")
            told = (await http.post(path, json={"scores": [1.0]})).json()
            await _expect(await http.post(path, json={"scores": [1.0]}), 410, "was finished")
        await client.close()
        return told["posted"]

    assert asyncio.run(post())


class _Anew(httpx.AsyncBaseTransport):
    """A batch server that can be started anew with nothing."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._server = httpx.ASGITransport(batch_app())

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._server.handle_async_request(request)


def test_groups_go_out_under_an_own_number_where_the_batch_server_was_started_anew() -> None:
    async def post() -> list[int | None]:
        batches = _Anew()
        engine = saying("ja")
        outlet = Outlet(engine, AsyncBatchClient(BASE, transport=batches), name="agents", group_size=1)
        app = create_app(engine, outlet=outlet)
        trainer = AsyncBatchClient(BASE, transport=batches)
        numbers: list[int | None] = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            for anew in (False, True):
                if anew:
                    batches.start()
                await trainer.register(**TRAINER | {"batch_size": 1})
                await trainer.batch()
                if anew:  # it has the number that was ours
                    await trainer.register_env(desired_name="other", max_token_length=64, group_size=4)
                front = Front(app, http)
                await front.open()
                await front.chat(HI)
                await front.finish(1.0)
                batch = await trainer.batch()
                numbers += [group.env_id for group in (batch.groups if batch else [])]
        await outlet.close()
        await trainer.close()
        return numbers

    assert asyncio.run(post()) == [0, 1]


def test_sampling_is_the_servers() -> None:
    engine = saying("ja")

    async def talk(front: Front) -> Any:
        await front.open()
        await front.chat(HI)
        return await front.finish(1.0)

    told = with_front(engine, talk, sampling=SamplingParams(max_tokens=7, temperature=0.7), seed=3)
    assert (engine.calls[0].params.max_tokens, engine.calls[0].params.temperature) == (7, 0.7)
    assert told["group"]["generation_params"] == {"temperature": 0.7}
