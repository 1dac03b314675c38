"""``/sessions``: what the trainer's side calls to open groups and to finish them with scores."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response

from atropos_gym.errors import GroupRefused, ServerError
from atropos_gym.model_server._desk import Desk
from atropos_gym.model_server.refusals import Refusal
from atropos_gym.model_server.requests import Finish, OpenSession, read_body

__all__ = ["session_routes"]


def session_routes(desk: Desk) -> APIRouter:
    """Returns the routes; where there is a token, all but ``/health`` need it."""
    routes = APIRouter()
    guarded = APIRouter(dependencies=[Depends(_guard(desk.token))])

    @guarded.post("/sessions")
    async def open_session(request: Request) -> Response:
        wanted = OpenSession.model_validate_json(await read_body(request, desk.max_body_bytes))
        desk.check_open()
        session = await desk.sessions.open(wanted)
        here = str(request.base_url).rstrip("/")
        members = [
            {
                "member": one.member,
                "base_url": f"{here}/s/{session.key}/{one.member}/v1",
                "api_key": f"{session.key}.{one.member}",
            }
            for one in session.members
        ]
        report = session.report()
        return JSONResponse(
            {
                "id": session.key,
                "number": report["number"],
                "version": report["version"],
                "model": desk.engine.model,
                "members": members,
            },
            201,
        )

    @guarded.get("/sessions")
    async def all_sessions() -> dict[str, Any]:
        return desk.report()

    @guarded.get("/sessions/{key}")
    async def one_session(key: str) -> dict[str, Any]:
        return desk.sessions.find(key).report()

    @guarded.post("/sessions/{key}/finish")
    async def finish(key: str, request: Request) -> dict[str, Any]:
        body = Finish.model_validate_json(await read_body(request, desk.max_body_bytes))
        return await _finish(desk, key, body.scores)

    @guarded.delete("/sessions/{key}")
    async def drop(key: str) -> dict[str, Any]:
        return await desk.sessions.drop(key)

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        return desk.health()

    routes.include_router(guarded)
    return routes


def _guard(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """Returns what lets in only who knows the token."""

    async def guard(request: Request) -> None:
        if token is None:
            return
        scheme, _, said = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(said.strip().encode(), token.encode()):
            raise Refusal("missing or wrong token", 401, kind="authentication_error", code="invalid_token")

    return guard


async def _finish(desk: Desk, key: str, scores: list[float | None]) -> dict[str, Any]:
    """Ends a group and hands it on: to the batch server, or back to who asks."""
    done = desk.unposted.pop(key, None) or await desk.sessions.finish(key, scores)
    told: dict[str, Any] = {
        "group": None,
        "posted": None,
        "withheld": done.withheld,
        "left_out": done.left_out,
        **done.report,
    }
    if done.group is None:
        return told
    if desk.outlet is None:
        told["group"] = done.group.to_wire().model_dump(mode="json")
        return told
    try:
        told["posted"] = await desk.outlet.post(done.group) or True
    except GroupRefused:
        raise
    except ServerError:
        desk.unposted[key] = done  # who asks again has it posted
        raise
    return told
