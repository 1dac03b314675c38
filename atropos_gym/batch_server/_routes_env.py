"""What environments call: registration, groups, and how much is wanted."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from atropos_gym.batch_server._bodies import (
    GroupsRefused,
    problem_details,
    read_body,
    read_groups,
    reply,
    schema_of,
)
from atropos_gym.batch_server._desk import Desk
from atropos_gym.batch_server.intake import Receipt
from atropos_gym.batch_server.refusals import Refused, Unknown
from atropos_gym.wire import EnvRef, EnvRegistration, ScoredDataGroup

__all__ = ["env_routes"]


def env_routes(desk: Desk) -> APIRouter:
    """The routes of environments, on this desk."""
    router = APIRouter(tags=["environments"])
    store = desk.store

    @router.post("/register-env", openapi_extra=schema_of(EnvRegistration))
    async def register_env(request: Request) -> Response:
        """Registers an environment, once a trainer asks for batches."""
        settings = await read_body(request, EnvRegistration)
        env = store.register_env(settings, desk.now())
        return reply({"status": "wait for trainer to start"} if env is None else store.env_reply(env))

    @router.post("/disconnect-env", openapi_extra=schema_of(EnvRef))
    async def disconnect_env(request: Request) -> Response:
        """Takes an environment out of weights and minimums until its next call."""
        env = await read_body(request, EnvRef)
        desk.now()
        try:
            store.disconnect_env(env.env_id)
        except Unknown as unknown:
            return reply({"status": "failure", "error": str(unknown)})
        desk.notify()
        return reply({"status": "success"})

    @router.get("/status-env")
    async def status_env(request: Request, env_id: Annotated[int | None, Query()] = None) -> Response:
        """Tells an environment how much is queued; its number comes as a query or as a JSON body."""
        if env_id is None:
            env_id = (await read_body(request, EnvRef)).env_id
        store.env_seen(env_id, desk.now())
        return reply(store.status_env(env_id))

    @router.post("/scored_data", openapi_extra=schema_of(ScoredDataGroup))
    async def scored_data(request: Request) -> Response:
        """Takes one group."""
        receipts, unknown = await _take_in(desk, request, many=False)
        receipt = receipts[0]
        answer = {"group_id": receipt.group_id, **({"unknown_fields": unknown} if unknown else {})}
        if receipt.buffered is None:
            return reply({"status": "received", **answer})
        return reply({"status": "buffered", "buffer_size": receipt.buffered, **answer})

    @router.post("/scored_data_list", openapi_extra=schema_of(ScoredDataGroup, many=True))
    async def scored_data_list(request: Request) -> Response:
        """Takes all groups of a list, or none."""
        receipts, unknown = await _take_in(desk, request, many=True)
        answer: dict[str, object] = {"status": "received", "groups_processed": len(receipts)}
        buffered = [receipt.buffered for receipt in receipts if receipt.buffered is not None]
        if buffered:
            answer |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
        answer["group_ids"] = [receipt.group_id for receipt in receipts]
        return reply(answer | ({"unknown_fields": unknown} if unknown else {}))

    return router


async def _take_in(desk: Desk, request: Request, *, many: bool) -> tuple[list[Receipt], list[str]]:
    """Checks and stores what was posted; returns receipts and the names that are not part of a group."""
    store = desk.store
    try:
        incoming = await read_groups(request, many=many)
    except GroupsRefused as refusal:
        for env_id in refusal.senders:
            store.count_refused(env_id, 1)
        raise
    try:
        receipts = store.add_groups(incoming, desk.now())
    except Refused as refusal:
        for one in incoming:
            store.count_refused(one.env_id, 1)
        raise HTTPException(422, problem_details(refusal.problems, ("body",), many=many)) from None
    desk.notify()
    return receipts, sorted({name for one in incoming for name in one.unknown_fields})
