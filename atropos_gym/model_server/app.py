"""The model server as an ASGI application: programs speak to a model as to OpenAI's, and leave groups behind.

A group is opened with ``POST /sessions``; each of its members has a base URL (and an api key) for a program
that knows nothing of training. When the programs are through, ``POST /sessions/ID/finish`` brings their
scores, and the group holds, id for id, what the engine sampled for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from atropos_gym.batch_server.access import Access, Guard
from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.errors import AtroposError, ConfigError, ServerError
from atropos_gym.model_server._desk import Desk
from atropos_gym.model_server._routes_model import model_routes
from atropos_gym.model_server._routes_sessions import session_routes
from atropos_gym.model_server.outlet import Outlet
from atropos_gym.model_server.refusals import Refusal, refusal_of
from atropos_gym.model_server.requests import Wishes
from atropos_gym.model_server.sessions import Sessions
from atropos_gym.rendering import ChatRenderer

__all__ = ["create_app"]


def create_app(
    engine: Engine,
    *,
    renderer: ChatRenderer | None = None,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    name: str = "agent",
    wishes: Wishes = "session",
    idle_seconds: float = 3600.0,
    alternatives: Literal["train", "drop"] = "train",
    outlet: Outlet | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
    max_body_bytes: int = 256 * 2**20,
    keep_alive: float = 10.0,
) -> FastAPI:
    """Builds the server; two of them can live in one process.

    Args:
        engine: who speaks.
        renderer: writes messages as ids; the default one of the engine's tokenizer if None.
        sampling: of every reply; temperature 1 and at most 512 ids by default.
        seed: of the run.
        name: of groups that bring none.
        wishes: what becomes of a request's own temperature, top_p and so on: ``"session"`` ignores and counts
            them, so that every reply can be trained on; ``"request"`` follows them and does not train what
            was sampled otherwise; ``"refuse"`` answers 400. A forced tool or form of the answer is ignored
            and counted, or with the latter two refused.
        idle_seconds: a group without a request for so long is given up and counted.
        alternatives: what becomes of replies that nothing went on from; see ``GroupSession``.
        outlet: where finished groups are posted and versions come from; None: ``finish`` returns groups.
        token: opens ``/sessions``; a member's URL and key are secrets of their own.
        hosts: names besides loopback's that requests may be addressed to; ``"*"`` is any.
        max_body_bytes: a request with a longer body is answered 413.
        keep_alive: seconds from one sign of life to the next while a streamed reply is being sampled.

    Returns:
        The application; its ``state.desk.sessions`` has counts and what is being played.

    Raises:
        ConfigError: a setting that cannot work.

    >>> from atropos_gym.engines import ScriptedEngine
    >>> create_app(ScriptedEngine(lambda prompt, params, number: [104, 105, 258])).title
    'Model server'
    """
    if wishes not in ("session", "request", "refuse"):
        raise ConfigError(f"wishes must be 'session', 'request' or 'refuse', got {wishes!r}")
    if max_body_bytes < 1:
        raise ConfigError(f"max_body_bytes must be >= 1, got {max_body_bytes}")
    if not keep_alive > 0:
        raise ConfigError(f"keep_alive must be > 0, got {keep_alive}")
    sampling = sampling or SamplingParams(max_tokens=512)
    sessions = Sessions(
        engine,
        renderer,
        sampling=sampling,
        seed=seed,
        name=name,
        idle_seconds=idle_seconds,
        alternatives=alternatives,
    )
    desk = Desk(engine, sessions, wishes, token, outlet, max_body_bytes, keep_alive)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if outlet is not None:
            outlet.start()
        yield
        await sessions.close()
        if outlet is not None:
            await outlet.close()

    app = FastAPI(title="Model server", summary="Agents in, groups out.", version="1", lifespan=lifespan)
    app.state.desk = desk
    app.include_router(model_routes(desk))
    app.include_router(session_routes(desk))

    for kind in (AtroposError, Refusal):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(ServerError, _not_posted)
    app.add_exception_handler(ValidationError, _invalid)
    app.add_exception_handler(HTTPException, _unknown)
    app.add_exception_handler(Exception, _failed)
    # A token makes up for the Host header; see Guard.
    app.add_middleware(Guard, hosts=("*",) if token is not None else tuple(hosts), access=Access())
    return app


async def _refused(request: Request, error: Exception) -> JSONResponse:
    refusal = refusal_of(error)
    if refusal is None:
        raise error
    return refusal.response()


async def _not_posted(request: Request, error: Exception) -> JSONResponse:
    return Refusal(
        f"the group was not posted: {error}", 502, kind="server_error", code="not_posted"
    ).response()


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "body"
    return Refusal(f"{where}: {first['msg']}", 400, param=where).response()


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    told = f"{request.method} {request.url.path}: {error.detail}"
    return Refusal(
        f"{told}; there are /v1/chat/completions, /v1/completions, /v1/models and /sessions",
        error.status_code,
    ).response()


async def _failed(request: Request, error: Exception) -> JSONResponse:
    # The error itself goes to the log: Starlette raises it again after this answer.
    return Refusal.internal().response()
