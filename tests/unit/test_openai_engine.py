"""OpenAIEngine against answers in the documented shapes, and engines seen as text."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from atropos_gym.engines import Engine, OpenAIEngine, ScriptedEngine, TextEngine, as_text_engine, make_engine
from atropos_gym.engines._bytes_chat import messages_of
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import (
    AnswerRefused,
    CollectionFailed,
    ConfigError,
    ContextFull,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
)
from atropos_gym.messages import Message, ToolCall
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.evaluation import evaluate
from tests.tools.text_tasks import Guess
from tests.unit.model_server_cases import BASE, Front, with_front

PARAMS = SamplingParams(max_tokens=50, temperature=0.5)
HI = [Message(role="system", content="Be brief."), Message(role="user", content="hi é")]
KEY = "sk-secret-1234"
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def choice(content: Any = "ok", index: int = 0, finish: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, "refusal": None, **message}
    return {"index": index, "message": said, "logprobs": None, "finish_reason": finish}


def told(*choices: dict[str, Any], tokens: int = 3) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": list(choices), "usage": usage}


class Provider:
    """Answers chat completions; what it was asked is kept."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)

    def engine(self, **options: Any) -> OpenAIEngine:
        options = {"api_key": KEY, "retry_pause": 0.0, **options}
        return OpenAIEngine("gpt-x", transport=httpx.MockTransport(self.answer), **options)


def failure(status: int, message: str, code: str | None = None, **headers: str) -> httpx.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return httpx.Response(status, json={"error": error}, headers=headers)


def test_it_chats() -> None:
    provider = Provider(told(choice("b", 1, "length"), choice("a"), tokens=7))
    engine = provider.engine(reasoning_effort="low", extra_body={"service_tier": "flex"})
    assert isinstance(engine, TextEngine) and isinstance(engine, Engine)
    first, second = run(engine.chat(HI, PARAMS.with_(seed=2**40 + 5, top_p=0.9), 2))
    assert (first.content, first.complete, second.content, second.complete) == ("a", True, "b", False)
    assert str(provider.requests[0].url) == "https://api.openai.com/v1/chat/completions"
    assert provider.requests[0].headers["authorization"] == f"Bearer {KEY}"
    assert provider.bodies[0] == {
        "model": "gpt-x",
        "messages": HI,
        "max_completion_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "seed": 5,
        "reasoning_effort": "low",
        "service_tier": "flex",
    }
    assert engine.metrics()["tokens"] == 7
    engine.shutdown()
    with pytest.raises(EngineError, match="the engine is closed"):
        run(engine.chat(HI, PARAMS))


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("https://openrouter.ai/api/v1/", "https://openrouter.ai/api/v1/chat/completions"),
        ("https://host/v1beta/openai", "https://host/v1beta/openai/chat/completions"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1/chat/completions"),
        ("HTTP://Host:80/v1", "http://host/v1/chat/completions"),
    ],
)
def test_other_providers(base_url: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    provider = Provider(told(choice()))
    engine = provider.engine(base_url=base_url, api_key=None, extra_body={"temperature": None, "top_k": 5})
    run(engine.chat(HI, PARAMS.with_(top_k=5)))
    assert str(provider.requests[0].url) == url and "authorization" not in provider.requests[0].headers
    body = provider.bodies[0]
    assert body["max_tokens"] == 50 and body["top_k"] == 5 and "temperature" not in body
    engine.shutdown()


def test_a_provider_without_n_is_asked_until_there_are_enough() -> None:
    provider = Provider(told(choice("a")), told(choice("b"), choice("c", 1)))
    engine = provider.engine()
    assert [reply.content for reply in run(engine.chat(HI, PARAMS.with_(seed=3), 3))] == ["a", "b", "c"]
    first, second = provider.bodies
    assert (first["n"], second["n"]) == (3, 2) and first["seed"] != second["seed"]
    engine.shutdown()


def test_thinking_tool_calls_and_refusals_are_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    provider = Provider(
        told(
            choice("4", reasoning_content="2+2"),
            choice(None, 1, "tool_calls", tool_calls=[call]),
            choice(None, 2, refusal="no"),
            choice("", 3, "content_filter"),
        )
    )
    engine = provider.engine()
    thought, called, refused, filtered = run(engine.chat(HI, PARAMS, 4))
    assert (thought.content, thought.thinking) == ("4", "2+2")
    assert called.tool_calls == (ToolCall("add", {"a": 1}, "c1"),) and called.complete
    assert refused.content == "no" and not filtered.complete
    assert engine.counters["content_filter"] == 1
    engine.shutdown()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"object": "list", "data": []}, "has no choices"),
        (httpx.Response(200, text="<html>busy"), "has no choices"),
        (told(), "has no choices"),
        (told(choice(), choice("b", 1), choice("c", 2)), "where 2 were asked for"),
        (told(choice(), choice("b", 0)), r"index \[0, 0\]"),
        (told({"index": 0, "text": "old", "finish_reason": "stop"}), "has no message"),
        (told(choice(finish="odd")), "finish_reason 'odd'"),
        (told(choice([{"type": "text"}])), "wanted text"),
        (
            told(choice(tool_calls=[{"function": {"name": "f", "arguments": "{"}}])),
            "a tool call cannot be read",
        ),
    ],
)
def test_an_answer_that_cannot_be_read_is_refused(answer: Any, message: str) -> None:
    engine = Provider(answer).engine(retries=0)
    with pytest.raises(AnswerRefused, match=message) as caught:
        run(engine.chat(HI, PARAMS, 2))
    assert "\n" not in str(caught.value) and engine.counters["lost/AnswerRefused"] == 1
    engine.shutdown()


def test_what_may_pass_is_tried_again() -> None:
    provider = Provider(
        httpx.ConnectError("reset"),
        failure(500, "oops"),
        failure(429, "slow down", "rate_limit_exceeded", **{"retry-after": "0"}),
        told(choice()),
    )
    engine = provider.engine()
    assert run(engine.chat(HI, PARAMS))[0].content == "ok" and len(provider.requests) == 4
    assert engine.metrics()["retries"] == 3
    provider.answers = [failure(503, "down")]
    with pytest.raises(EngineUnreachable, match="503 down"):
        run(engine.chat(HI, PARAMS))
    assert len(provider.requests) == 9
    engine.shutdown()


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (failure(401, f"Incorrect API key provided: {KEY}"), EngineError, "set OPENAI_API_KEY"),
        (failure(404, "The model `gpt-x` does not exist", "model_not_found"), EngineError, "check model="),
        (failure(400, "too many", "context_length_exceeded"), ContextFull, "too long for gpt-x"),
        (failure(400, "'temperature' is unsupported"), EngineError, "extra_body=.'field': None"),
        (failure(429, "You exceeded your quota", "insufficient_quota"), EngineError, "no quota left"),
    ],
)
def test_what_will_not_change_is_asked_once(answer: Any, error: type, message: str) -> None:
    provider = Provider(answer)
    engine = provider.engine()
    with pytest.raises(error, match=message) as caught:
        run(engine.chat(HI, PARAMS))
    assert len(provider.requests) == 1 and "\n" not in str(caught.value)
    assert KEY not in str(caught.value)
    engine.shutdown()


def test_the_key_is_in_no_message(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    provider = Provider(failure(500, f"upstream said: bad {KEY}"))
    engine = provider.engine(api_key=None, retries=1)
    with caplog.at_level(logging.DEBUG), pytest.raises(EngineUnreachable) as caught:
        run(engine.chat(HI, PARAMS))
    assert provider.requests[0].headers["authorization"] == f"Bearer {KEY}"
    said = [str(caught.value), repr(engine), caplog.text, *(f.detail for f in run(engine.check()))]
    assert not any(KEY in one for one in said) and caught.value.__cause__ is None
    engine.shutdown()
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ConfigError, match="set OPENAI_API_KEY"):
        OpenAIEngine("gpt-x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 5}, "have no top_k"),
        ({"min_p": 0.1}, "have no min_p"),
        ({"repetition_penalty": 1.2}, "have no repetition_penalty"),
        ({"min_tokens": 2}, "have no min_tokens"),
        ({"allowed_ids": (3,)}, "allowed_ids"),
    ],
)
def test_what_chat_completions_cannot_do_is_said(changes: dict[str, Any], message: str) -> None:
    provider = Provider(told(choice()))
    engine = provider.engine()
    with pytest.raises(EngineError, match=message):
        run(engine.chat(HI, PARAMS.with_(**changes)))
    assert not provider.requests
    engine.shutdown()


def test_no_answer_in_time() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    engine = OpenAIEngine("m", api_key=KEY, transport=httpx.MockTransport(never), request_timeout=0.05)
    with pytest.raises(EngineTimeout, match=r"request_timeout=0\.05 s"):
        run(engine.chat(HI, PARAMS))
    assert engine.metrics()["running"] == 0
    engine.shutdown()


def test_it_chats_with_our_own_front() -> None:
    """The other end of the protocol, as ``serve-model`` has it: two programs of ours that share no code."""

    async def talk(front: Front) -> None:
        session, loop = await front.open(), asyncio.get_running_loop()

        async def forward(request: httpx.Request) -> httpx.Response:
            sent = front.http.request(request.method, request.url, content=request.content)
            answer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sent, loop))
            return httpx.Response(answer.status_code, content=answer.content)

        url = f"{BASE}/s/{session['id']}/0/v1"
        engine = OpenAIEngine("m", base_url=url, transport=httpx.MockTransport(forward), retries=0)
        replies = await engine.chat(HI, PARAMS, 2)
        assert [(reply.content, reply.complete) for reply in replies] == [("é4", True)] * 2
        assert engine.metrics()["tokens"] == 8
        await engine.close()

    with_front(ScriptedEngine(lambda *asked: [*"é4".encode(), 258]), talk)


# -- as an engine over ids ------------------------------------------------------------------------------


def test_prompts_are_read_back_as_messages() -> None:
    renderer = ChatRenderer("bytes")
    said = [*HI, Message(role="assistant", content="yes"), Message(role="user", content="")]
    assert messages_of(renderer.prompt(said)) == said
    turn = [*renderer.prompt(HI), 111, 107, 258]
    prompt = [*turn, *renderer.bridge(turn, [Message(role="tool", content="4")])]
    assert messages_of(prompt)[2:] == [
        Message(role="assistant", content="ok"),
        Message(role="user", content="4"),
    ]
    for broken in ([1, 2, 261], [257, 260, 104, 105], [257, 104, 260, 261], [257, 260, 263, 261]):
        with pytest.raises(EngineError):
            messages_of(broken)


def test_replies_become_ids_that_cannot_be_trained_on() -> None:
    provider = Provider(told(choice("é!"), choice("long reply", 1, "length")))
    engine = provider.engine()
    prompt = ChatRenderer("bytes").prompt(HI)
    first, second = run(engine.generate(prompt, PARAMS.with_(max_tokens=4), 2, lane="eval"))
    assert provider.bodies[0]["messages"] == HI
    assert (first.ids, first.finish_reason) == ((195, 169, 33, 258), "stop")
    assert (second.ids, second.finish_reason) == (tuple(b"long"), "length")
    assert first.logprobs is None and first.trainable == "text only: gpt-x gives neither ids nor logprobs"
    with pytest.raises(ContextFull):
        run(engine.generate([*prompt[:-1], *[32] * engine.max_context, 261], PARAMS))
    provider.answers = [told(choice("", finish="length"))]
    with pytest.raises(AnswerRefused, match="gone into reasoning"):
        run(engine.generate(prompt, PARAMS))
    engine.shutdown()


def test_environments_are_evaluated_but_never_collected_for_training() -> None:
    engine = Provider(told(choice("7"))).engine()
    result = evaluate(Guess, engine, 4, seed=0)
    assert result.episodes == 4 and engine.metrics()["requests"] >= 4
    collector = GroupCollector(Guess, engine, group_size=2)
    with pytest.raises(CollectionFailed, match="text only: gpt-x"):
        collector.collect(1)
    engine.shutdown()


def test_versions_are_announced_only(tmp_path: Any) -> None:
    async def main() -> None:
        engine = Provider(told(choice())).engine()
        await engine.publish(1, tmp_path)
        async with engine.hold() as held:
            assert held.version == 0 == engine.newest
        with pytest.raises(EngineError, match="loads no adapter"):
            engine.trial(tmp_path)
        text, ids = await engine.check()
        assert (text.status, ids.status) == ("ok", "wrong") and "evaluation, judges and data" in ids.remedy
        await engine.close()
        await engine.close()

    run(main())


@pytest.mark.parametrize(
    ("spec", "url"),
    [
        ("openai:gpt-x", "https://api.openai.com"),
        ({"kind": "openai", "model": "gpt-x", "base_url": "http://here/v1"}, "http://here"),
        ({"kind": "openai", "model": "gpt-x", "url": "http://here/v1"}, "http://here"),
        ({"kind": "openai", "model": "gpt-x", "url": "http://ann:secret@here/v1"}, "http://here"),
    ],
)
def test_specs(spec: Any, url: str) -> None:
    engine = make_engine(spec, api_key=KEY)
    assert repr(engine) == f"OpenAIEngine('gpt-x', {url})"
    engine.shutdown()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="must be 'bytes'"):
        make_engine("openai:gpt-x", api_key=KEY, tokenizer=_OtherTokenizer())


class _OtherTokenizer:
    name, rows, fingerprint = "other", 10, "sha256:0"

    def __len__(self) -> int:
        return 10

    encode: Callable[[str], list[int]] = staticmethod(lambda text: [1])  # type: ignore[assignment]
    decode: Callable[[Any], str] = staticmethod(lambda ids: "")  # type: ignore[assignment]


# -- any engine as text ---------------------------------------------------------------------------------


def test_any_engine_is_seen_as_text() -> None:
    seen = []

    def script(prompt: list[int], params: SamplingParams, number: int) -> list[int]:
        seen.append((prompt, params.stop_ids))
        return [*b"<think>", 50, *b"</think>", 52, 258]

    text = as_text_engine(ScriptedEngine(script))
    assert isinstance(text, TextEngine) and text.model == "scripted" and as_text_engine(text) is text
    replies = run(text.chat(HI, PARAMS, 2))
    assert [(one.content, one.thinking, one.complete) for one in replies] == [("4", "2", True)] * 2
    assert [(list(prompt), stop_ids) for prompt, stop_ids in seen] == [
        (ChatRenderer("bytes").prompt(HI), (258,))
    ] * 2
