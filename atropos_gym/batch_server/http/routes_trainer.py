"""What trainers call: registration, batches, and the policy that they publish."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import Response

from atropos_gym.batch_server.bodies.details import entry
from atropos_gym.batch_server.http.delivery import BatchReply
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.http.openapi import BINARY, REFUSALS, schema_of
from atropos_gym.batch_server.http.requests import read_body, reply
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.parts import Share
from atropos_gym.batch_server.state.stock import Request as BatchRequest
from atropos_gym.batch_server.store import Store
from atropos_gym.wire import Ack, Extend, Nack, Policy, PolicyUpdate, Registration

__all__ = ["trainer_routes"]

MOST_RANKS = 4096

WaitSeconds = Annotated[float, Query(ge=0, le=600, allow_inf_nan=False)]
LeaseSeconds = Annotated[float | None, Query(ge=1, le=86400, allow_inf_nan=False)]


def trainer_routes(desk: Desk) -> APIRouter:
    """The routes of trainers, on this desk."""
    router = APIRouter(tags=["trainers"], responses=REFUSALS)
    store = desk.store

    @router.post("/register", openapi_extra=schema_of(Registration))
    async def register(request: Request, takeover: bool = False, trainer: str | None = None) -> Response:
        """Registers a trainer: the first one's settings hold until it is silent or replaced.

        Whoever comes again, with other settings, names the id that it got: what it published goes on.
        """
        settings = read_body(request, Registration)
        trainer_id = store.register(settings, desk.now(), takeover=takeover, trainer_id=trainer)
        desk.notify()
        return reply({"uuid": UUID(hex=trainer_id).int, "trainer_id": trainer_id})

    @router.get("/batch", responses=BINARY)
    async def batch(
        wait_seconds: WaitSeconds = 0.0,
        lease_seconds: LeaseSeconds = None,
        groups: Annotated[int | None, Query(ge=1)] = None,
        partial: bool = False,
        trainer: str | None = None,
        rank: Annotated[int | None, Query(ge=0)] = None,
        world_size: Annotated[int | None, Query(ge=1, le=MOST_RANKS)] = None,
        step: Annotated[int | None, Query(ge=-(2**63), lt=2**63)] = None,
    ) -> Response:
        """Hands out the next batch, oldest groups first; null where there is none yet."""
        now = desk.now()
        if not store.registered:
            message = "Trainer not registered. Call /register first."
            return reply({"status": "error", "message": message, "batch": []})
        store.trainer_seen(now, trainer)
        share = _share(rank, world_size, step, lease_seconds)
        wanted = BatchRequest(groups=groups, partial=partial, lease_seconds=lease_seconds, share=share)
        return BatchReply(desk, wanted, wait_seconds, trainer)

    @router.post("/ack", openapi_extra=schema_of(Ack))
    async def ack(request: Request) -> Response:
        """Ends a lease: the batch was used."""
        body = read_body(request, Ack)
        store.trainer_seen(desk.now())
        lease = store.ack(body.batch_id, body.rank)
        return reply(_acked(lease, body.rank, store.status()["current_step"]))

    @router.post("/nack", openapi_extra=schema_of(Nack))
    async def nack(request: Request) -> Response:
        """Gives a batch back to the head of the queue, or drops it."""
        body = read_body(request, Nack)
        store.trainer_seen(desk.now())
        lease = store.nack(body.batch_id, drop=body.drop, reason=body.reason)
        desk.notify()
        return reply({"status": lease.state, "groups": lease.group_count})

    @router.post("/extend", openapi_extra=schema_of(Extend))
    async def extend(request: Request) -> Response:
        """Gives a lease more time, counted from now."""
        body = read_body(request, Extend)
        now = desk.now()
        store.trainer_seen(now)
        lease = store.extend(body.batch_id, body.lease_seconds, now)
        return reply({"status": "extended", "batch_id": lease.batch_id, "expires_at": lease.expires_at})

    @router.post("/policy", openapi_extra=schema_of(PolicyUpdate))
    async def publish(request: Request, force: bool = False, trainer: str | None = None) -> Response:
        """Takes a learner's newest version, or the end of its run; not from a trainer that was replaced."""
        update = read_body(request, PolicyUpdate)
        now = desk.now()
        store.trainer_seen(now, trainer)
        store.publish(update, now, force=force, trainer_id=trainer)
        desk.notify()
        status = "finished" if update.finished else "published"
        return reply({"status": status, "version": store.policy(now).version})

    @router.get("/policy")
    async def policy(
        after: int | None = None,
        wait_seconds: WaitSeconds = 0.0,
        env_id: int | None = None,
        holding: str | None = None,
        registration: str | None = None,
    ) -> Response:
        """Shows the newest version; with ``after``, once the trainer has a newer one or the run has ended.

        Who names its ``registration`` says nothing for another environment that has its number now.
        """
        now = desk.now()
        versions = None if holding is None else _versions(holding)
        if registration is None or _is_of(store, env_id, registration):
            _seen(store, env_id, versions, now)

        def newer() -> Policy | None:
            policy = store.policy(desk.now())
            fresh = policy.version is not None and (after is None or policy.version > after)
            return policy if (fresh and not policy.superseded) or policy.finished else None

        seconds = wait_seconds if after is not None else 0.0
        found = await desk.hold(seconds, newer) or store.policy(desk.now())
        if found.version is None:
            return reply({"version": None, "finished": found.finished, "held": found.held})
        return reply(found.model_dump(exclude=None if found.superseded else {"superseded"}))

    return router


def _is_of(store: Store, env_id: int | None, registration: str) -> bool:
    """Whether a number is of that registration still."""
    if env_id is None or store.env_name(env_id) is None:
        return False
    return store.registration(env_id) == registration


def _seen(store: Store, env_id: int | None, holding: list[int] | None, now: float) -> None:
    """Notes a sign of life of an environment, and which versions it still uses if it says so."""
    store.env_seen(env_id, now)
    if holding is not None:
        store.hold(env_id, holding, now)


def _acked(lease: Lease, rank: int | None, step: int) -> dict[str, Any]:
    """What an ack is answered; of one in parts also whose ack is missing."""
    answer = {"status": "acked", "batch_id": lease.batch_id, "current_step": lease.step_at_end}
    if rank is None:
        return answer
    missing = [one for one in range(lease.world_size or 0) if one not in lease.acked_ranks]
    return answer | {
        "current_step": step if missing else lease.step_at_end,
        "rank": rank,
        "missing_ranks": missing,
    }


def _share(
    rank: int | None, world_size: int | None, step: int | None, lease_seconds: float | None
) -> Share | None:
    """What a rank asks for; raises ``HTTPException`` 422 where the parameters do not go together."""
    if rank is None and world_size is None and step is None:
        return None
    if rank is None or world_size is None:
        name, message = ("rank", "rank and world_size belong together, and step to both")
    elif rank >= world_size:
        name, message = ("rank", f"rank must be below world_size {world_size}, got {rank}")
    elif lease_seconds is None:
        name, message = ("lease_seconds", "parts of a batch are leased: say for how long")
    else:
        return Share(rank, world_size, step)
    raise HTTPException(422, [entry("value_error", ("query", name), message)])


def _versions(text: str) -> list[int]:
    """Reads ``11,12``; nothing at all means that no version is used any more."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        message = f"holding must be versions such as 11,12, got {text[:100]!r}"
        raise HTTPException(422, [entry("int_parsing", ("query", "holding"), message)]) from None
