"""A model server without a port, and openai's client in front of it."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from atropos_gym.engines import ScriptedEngine
from atropos_gym.engines.base import Engine
from atropos_gym.model_server import create_app
from atropos_gym.wire import ScoredDataGroup
from tests.unit.session_cases import Turn, match_turns

BASE = "http://127.0.0.1"


class Front:
    """Speaks to a server as the trainer's side, and as programs.

    Attributes:
        app: the server.
        http: a client of it.
        session: the one that was opened last.
    """

    def __init__(self, app: FastAPI, http: httpx.AsyncClient) -> None:
        self.app = app
        self.http = http
        self.session: dict[str, Any] = {}

    async def open(self, size: int = 1, **settings: Any) -> dict[str, Any]:
        response = await self.http.post("/sessions", json={"group_size": size, **settings})
        assert response.status_code == 201, response.text
        self.session = response.json()
        return self.session

    async def post(self, path: str, body: dict[str, Any], member: int = 0) -> httpx.Response:
        return await self.http.post(f"/s/{self.session['id']}/{member}/v1{path}", json=body)

    async def chat(self, messages: list[Any], member: int = 0, **body: Any) -> dict[str, Any]:
        response = await self.post("/chat/completions", {"model": "m", "messages": messages, **body}, member)
        assert response.status_code == 200, response.text
        told: dict[str, Any] = response.json()
        return told

    async def finish(self, *scores: float | None) -> dict[str, Any]:
        response = await self.http.post(f"/sessions/{self.session['id']}/finish", json={"scores": scores})
        assert response.status_code == 200, response.text
        told: dict[str, Any] = response.json()
        return told


class Connection:
    """One request as a real server passes it on: its answer part by part, with the time of each."""

    def __init__(self, front: Front, body: dict[str, Any]) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        self.status = 0
        self.parts: list[tuple[float, bytes]] = []
        self.serving = asyncio.create_task(front.app(self.scope(front), self.inbox.get, self.send))

    def scope(self, front: Front) -> dict[str, Any]:
        return {
            "type": "http",
            "method": "POST",
            "path": f"/s/{front.session['id']}/0/v1/chat/completions",
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "root_path": "",
        }

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.parts.append((asyncio.get_running_loop().time(), message["body"]))

    def leave(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    @property
    def alive(self) -> list[float]:
        """When there was a sign of life."""
        return [at for at, part in self.parts if part == b": keep-alive\n\n"]


@asynccontextmanager
async def fronted(engine: Engine, **settings: Any) -> AsyncIterator[Front]:
    app = create_app(engine, **settings)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
        yield Front(app, http)
        await app.state.desk.sessions.close()


def with_front(engine: ScriptedEngine, talk: Callable[[Front], Awaitable[Any]], **settings: Any) -> Any:
    async def inside() -> Any:
        async with fronted(engine, **settings) as front:
            return await talk(front)

    return asyncio.run(inside())


def client_of(app: Any, base_url: str, api_key: str) -> Any:
    """openai's client, for an application without a port."""
    import openai

    if not hasattr(app.state, "http"):
        http = importlib.import_module("httpx2" if hasattr(openai, "DefaultAsyncHttpx2Client") else "httpx")
        app.state.http = http.AsyncClient(transport=http.ASGITransport(app))
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=app.state.http, max_retries=0)


def check_wire(group: Any, engine: Any, *, cut: bool = False) -> list[Turn]:
    """Holds a body of the wire against what the engine sampled; returns the turns that it trains."""
    group = ScoredDataGroup.model_validate(group)
    turns: list[Turn] = []
    for row, extra in enumerate(group.overrides or ()):
        ids, logprobs = group.tokens[row], (group.inference_logprobs or [])[row]
        trained = {i for start, end in extra["turns"] for i in range(start, end)}
        assert group.masks[row] == [id_ if i in trained else -100 for i, id_ in enumerate(ids)]
        assert all(value == 1.0 for i, value in enumerate(logprobs) if i not in trained)
        turns += [
            (tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs[start:end]))
            for start, end in extra["turns"]
        ]
    match_turns(turns, engine.calls, cut=cut)
    return turns
