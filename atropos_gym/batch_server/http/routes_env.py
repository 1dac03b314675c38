"""What environments call: registration, groups, and how much is wanted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import to_json

from atropos_gym.batch_server.bodies.details import MAX_ECHO, MAX_ENTRIES, entry, problem_details
from atropos_gym.batch_server.bodies.reading import GroupsRefused
from atropos_gym.batch_server.http.asgi import BODY
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.http.openapi import REFUSALS, schema_of
from atropos_gym.batch_server.http.post_reply import ACCEPT_POST, PostReply, digest_of, key_of
from atropos_gym.batch_server.http.requests import read_body, read_groups, reply
from atropos_gym.batch_server.state.intake import Receipt
from atropos_gym.batch_server.state.refusals import Refused, Unknown
from atropos_gym.wire import EnvRef, EnvRegistration, ScoredDataGroup

__all__ = ["env_routes"]


class _DirectRoute(APIRoute):
    """A route whose endpoint takes the request as it is: to look for parameters would cost a tenth of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself."""
        return self.endpoint


def env_routes(desk: Desk) -> APIRouter:
    """The routes of environments, on this desk."""
    router = APIRouter(tags=["environments"], responses=REFUSALS)
    store = desk.store

    async def scored_data(request: Request) -> Response:
        """Takes one group."""
        return await _take_in(desk, request, many=False)

    async def scored_data_list(request: Request) -> Response:
        """Takes all groups of a list, or none."""
        return await _take_in(desk, request, many=True)

    for path, endpoint, many in (
        ("/scored_data", scored_data, False),
        ("/scored_data_list", scored_data_list, True),
    ):
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            openapi_extra=schema_of(ScoredDataGroup, many=many),
            route_class_override=_DirectRoute,
        )

    @router.get("/status-env")
    async def status_env(request: Request, env_id: Annotated[int | None, Query()] = None) -> Response:
        """Tells an environment how much is queued; its number comes as a query or as a JSON body."""
        if env_id is None and not request.scope[BODY]:
            missing = entry("missing", ("query", "env_id"), "neither query nor body says env_id")
            raise HTTPException(422, [missing])
        if env_id is None:
            env_id = read_body(request, EnvRef).env_id
        store.env_seen(env_id, desk.now())
        response = reply(store.status_env(env_id))
        response.headers["X-Registration"] = store.registration(env_id)
        return response

    @router.post("/register-env", openapi_extra=schema_of(EnvRegistration))
    async def register_env(request: Request) -> Response:
        """Registers an environment, once a trainer asks for batches."""
        settings = read_body(request, EnvRegistration)
        env = store.register_env(settings, desk.now())
        answer = {"status": "wait for trainer to start"} if env is None else store.env_reply(env)
        response = reply(answer)
        response.headers["Accept-Post"] = ACCEPT_POST
        if env is not None:  # a number alone is given to another one after a start with nothing
            response.headers["X-Registration"] = env.registration
        return response

    @router.post("/disconnect-env", openapi_extra=schema_of(EnvRef))
    async def disconnect_env(request: Request) -> Response:
        """Takes an environment out of weights and minimums until its next call."""
        env = read_body(request, EnvRef)
        desk.now()
        try:
            store.disconnect_env(env.env_id)
        except Unknown as unknown:
            return reply({"status": "failure", "error": str(unknown)})
        desk.notify()
        return reply({"status": "success"})

    return router


async def _take_in(desk: Desk, request: Request, *, many: bool) -> Response:
    """Checks and stores what was posted, or finds that it was posted before."""
    store = desk.store
    key = key_of(request)
    try:
        incoming = await read_groups(desk, request, many=many)
    except GroupsRefused as refusal:
        for env_id, groups in refusal.senders.items():
            store.count_refused(env_id, groups, refusal.reason)
        raise
    now, digest = desk.now(), digest_of(incoming, many=many)
    try:
        known = store.find_reply(key, digest, now)
    except Refused as refusal:
        raise HTTPException(422, problem_details(refusal.problems, (), many=False)) from None
    if known is not None:
        for one in incoming:
            store.env_seen(one.env_id, now)
        return PostReply(desk, known, replayed=True)
    try:
        receipts = store.add_groups(incoming, now)
    except Refused as refusal:
        for one in incoming:
            store.count_refused(one.env_id, 1, refusal.problems[0].kind)
        raise HTTPException(422, problem_details(refusal.problems, ("body",), many=many)) from None
    desk.notify()
    for listener in desk.audience:
        listener.received(incoming, receipts, now)
    answer = _list_answer(receipts) if many else _group_answer(receipts[0])
    if unknown := sorted({name for one in incoming for name in one.unknown_fields}):
        answer["unknown_fields"] = [name[:MAX_ECHO] for name in unknown[:MAX_ENTRIES]]
    return PostReply(desk, store.keep_reply(key, digest, to_json(answer), now), replayed=False)


def _group_answer(receipt: Receipt) -> dict[str, Any]:
    if receipt.buffered is None:
        return {"status": "received", "group_id": receipt.group_id}
    return {"status": "buffered", "buffer_size": receipt.buffered, "group_id": receipt.group_id}


def _list_answer(receipts: Sequence[Receipt]) -> dict[str, Any]:
    answer: dict[str, Any] = {"status": "received", "groups_processed": len(receipts)}
    buffered = [receipt.buffered for receipt in receipts if receipt.buffered is not None]
    if buffered:
        answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
    return answer | {"group_ids": [receipt.group_id for receipt in receipts]}
