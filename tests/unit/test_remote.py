"""One HTTP server: which failures may pass, what a server says, pauses, addresses; the loop in its thread."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from typing import Any

import httpx
import pytest

from atropos_gym.engines._loop import LoopThread
from atropos_gym.engines._remote import Answer, Endpoint, Passing, RetryPolicy
from atropos_gym.errors import ConfigError, EngineError


def ask(handler: Any, *, close: bool = True) -> Answer:
    async def main() -> Answer:
        endpoint = Endpoint("http://host:8000/v1/", "key", transport=httpx.MockTransport(handler))
        try:
            return await endpoint.ask("POST", "/v1/x", {"a": 1})
        finally:
            assert endpoint.running == 0
            await endpoint.close()

    return asyncio.run(main())


def test_a_request() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://host:8000/v1/x"
        assert request.headers["authorization"] == "Bearer key"
        assert (request.headers["content-type"], request.content) == ("application/json", b'{"a":1}')
        return httpx.Response(200, json={"b": 2})

    assert ask(handler).data == {"b": 2}


@pytest.mark.parametrize("status", [400, 401, 404, 409, 422])
def test_a_4xx_is_an_answer(status: int) -> None:
    assert ask(lambda request: httpx.Response(status)).status == status


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass(status: int) -> None:
    with pytest.raises(Passing, match=f"fails: {status} slow down") as caught:
        ask(lambda request: httpx.Response(status, text="slow down", headers={"retry-after": "2.5"}))
    assert (caught.value.reason, caught.value.after) == (str(status), 2.5)


@pytest.mark.parametrize("header", ["Wed, 21 Oct 2026 07:28:00 GMT", "-1", "inf", "soon"])
def test_a_wait_that_is_no_number_of_seconds(header: str) -> None:
    with pytest.raises(Passing) as caught:
        ask(lambda request: httpx.Response(429, headers={"retry-after": header}))
    assert caught.value.after is None


@pytest.mark.parametrize(
    "error",
    [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectTimeout, httpx.PoolTimeout],
)
def test_a_connection_that_fails_may_pass(error: type[httpx.TransportError]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error("broken", request=request)

    with pytest.raises(
        Passing, match="no answer from http://host:8000: broken; is the server running"
    ) as caught:
        ask(handler)
    assert caught.value.reason == "connection"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no such thing", "code": 404}}', "no such thing"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"detail": "Not Found"}', '{"detail":"Not Found"}'),
        (b'{"message": "old form"}', "old form"),
        (b"plain text", "plain text"),
        (b"", ""),
        (b"[1]", "[1]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_a_server_says(body: bytes, said: str) -> None:
    assert Answer(400, body).message == said


def test_numbers_that_are_no_json_are_read_to_be_refused() -> None:
    data = Answer(200, b'{"a": [NaN, -Infinity, 1]}').data
    assert math.isnan(data["a"][0]) and data["a"][1:] == [-math.inf, 1]


def test_pauses_grow_and_end() -> None:
    policy = RetryPolicy(retries=3, first_pause=1.0, longest_pause=10.0)
    for tries, most in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 10.0), (100_000, 10.0)):
        assert all(most / 2 <= policy.pause(tries, None) <= most for _ in range(20))
    assert policy.pause(1, 7.0) == 7.0, "what the server asks for"
    assert policy.pause(1, 3600.0) == 10.0, "within reason"
    with pytest.raises(ConfigError, match="retry_pause must be >= 0"):
        RetryPolicy(first_pause=-1.0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "", "model", "http://h:x"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="an engine's URL is such as"):
        Endpoint(url)


@pytest.mark.parametrize(
    ("url", "key", "sent"),
    [
        ("http://ann:secret@host:8000/v1", None, "Basic YW5uOnNlY3JldA=="),
        ("http://ann:se%2Fcret@host:8000/v1/", None, "Basic YW5uOnNlL2NyZXQ="),
        ("http://ann:secret@host:8000/v1", "key", "Bearer key"),
        ("http://host:8000/v1", None, None),
    ],
)
def test_a_password_in_the_url_is_sent_and_never_shown(url: str, key: str | None, sent: str | None) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://host:8000/v1/x"
        assert request.headers.get("authorization") == sent
        return httpx.Response(503, text="slow down")

    async def main() -> None:
        endpoint = Endpoint(url, key, transport=httpx.MockTransport(handler))
        assert (endpoint.url, endpoint.below) == ("http://host:8000", "/v1")
        with pytest.raises(Passing, match="^http://host:8000/v1/x fails: 503 slow down$"):
            await endpoint.ask("GET", "/v1/x")
        await endpoint.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "url", ["ann:secret@host:8000", "ftp://ann:secret@host", "http://ann:secret@", "http://ann:secret@host:x"]
)
def test_a_password_in_what_is_no_url_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="an engine's URL is such as") as caught:
        Endpoint(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "proxied"),
    [
        ("http://127.0.0.1:1", False),
        ("http://localhost:1", False),
        ("http://[::1]:1", False),
        ("http://gpu:1", True),
    ],
)
def test_no_proxy_to_this_machine(url: str, proxied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    async def main() -> bool:
        endpoint = Endpoint(url)
        found = any(transport is not None for transport in endpoint._new_client()._mounts.values())
        await endpoint.close()
        return found

    assert asyncio.run(main()) == proxied


# -- the loop --------------------------------------------------------------------------------------------


def test_work_of_several_threads_runs_on_one() -> None:
    thread = LoopThread("test-loop")

    async def where() -> str:
        return threading.current_thread().name

    async def caller() -> str:
        return await thread.run(where())

    assert {asyncio.run(caller()), thread.wait(where())} == {"test-loop"}
    thread.close()
    thread.close()
    with pytest.raises(EngineError, match="closed"):
        thread.wait(where())
    assert "test-loop" not in {other.name for other in threading.enumerate()}


def test_cancelling_and_failing_pass_through() -> None:
    thread = LoopThread("test-loop")
    ended: list[bool] = []

    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await thread.run(fail())
        started = threading.Event()

        async def forever() -> None:
            started.set()
            await asyncio.Event().wait()

        future = thread.submit(forever(), lambda task: ended.append(task.cancelled()))
        await asyncio.to_thread(started.wait, 30)
        waiting = asyncio.wrap_future(future)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        while not ended:
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert ended == [True]
    thread.close()


def test_a_loop_that_nobody_has_any_more_ends() -> None:
    thread = LoopThread("forgotten")
    worker = thread._thread
    del thread
    gc.collect()
    worker.join(timeout=30)
    assert not worker.is_alive()
