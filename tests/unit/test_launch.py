"""Launching a server: only what was started is taken for it (processes are for the integration tests)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atropos_gym.engines import launch
from atropos_gym.engines.launch import VLLMServer
from atropos_gym.errors import ConfigError, EngineUnreachable

OURS = "ours"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., VLLMServer]:
    """Returns a function that makes a server of ours at a URL where a handler answers."""

    def make(handler: Callable[[httpx.Request], httpx.Response], key: str = OURS) -> VLLMServer:
        client = httpx.Client

        def connected(**options: Any) -> httpx.Client:
            return client(transport=httpx.MockTransport(handler), **options)

        monkeypatch.setattr(httpx, "Client", connected)
        monkeypatch.setattr(launch, "_LOOK_SECONDS", 0.0)
        server = VLLMServer([], {"VLLM_API_KEY": key}, model="m", port=9, log=tmp_path / "log")
        server.log.touch()
        server._guard = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]
        return server

    return make


def keyed(*keys: str, healthy: bool = True) -> Callable[[httpx.Request], httpx.Response]:
    """Answers as vLLM: /health to everybody, /v1/models to who has one of the keys."""

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200 if healthy else 503)
        known = request.headers.get("Authorization", "").removeprefix("Bearer ") in keys
        return httpx.Response(200, json={"data": []}) if known else httpx.Response(401)

    return handler


def test_our_own_server_is_waited_for(served: Callable[..., VLLMServer]) -> None:
    served(keyed(OURS))._wait(0)


def test_a_server_that_is_not_healthy_is_waited_for_as_long_as_was_said(
    served: Callable[..., VLLMServer],
) -> None:
    server = served(keyed(OURS, healthy=False))
    server._startup_timeout = 0.05
    with pytest.raises(EngineUnreachable, match=r"does not serve after startup_timeout=0\.05 s"):
        server._wait(0)


@pytest.mark.parametrize("foreign", [keyed("theirs"), lambda request: httpx.Response(200, json={"data": []})])
def test_somebody_elses_server_is_not_taken_for_ours(
    served: Callable[..., VLLMServer], foreign: Callable[[httpx.Request], httpx.Response]
) -> None:
    with pytest.raises(EngineUnreachable, match="not started here answers at http://127.0.0.1:9"):
        served(foreign)._wait(0)


def test_a_server_that_was_told_to_want_no_key_is_ours(served: Callable[..., VLLMServer]) -> None:
    served(lambda request: httpx.Response(200, json={"data": []}), key="")._wait(0)


def test_a_restart_waits_as_long_as_the_start(
    served: Callable[..., VLLMServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served(keyed(OURS))
    server._startup_timeout = 5000.0
    waited: list[float] = []
    monkeypatch.setattr(server, "_start", lambda: waited.append(server._startup_timeout))
    server.restart()
    server.restart(startup_timeout=7.0)
    server.restart()
    assert waited == [5000.0, 7.0, 7.0]


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .*give another port="):
            VLLMServer.launch(tmp_path, port=port)
    with pytest.raises(ConfigError, match="port must be 1 to 65535, got 0"):
        VLLMServer.launch(tmp_path, port=0)
