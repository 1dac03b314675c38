"""What anyone may read, and the reset that the old tools call first."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from atropos_gym.batch_server.bodies.forms import LARGE_BYTES, Form
from atropos_gym.batch_server.bodies.msgpack import pack
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.http.openapi import MAY_FAIL
from atropos_gym.batch_server.http.requests import reply
from atropos_gym.batch_server.metrics import CONTENT_TYPE, counter, exposition, gauge
from atropos_gym.batch_server.state.packed import PackedGroup

__all__ = ["info_routes"]

NO_EXAMPLE: dict[str, list[object]] = {
    "tokens": [],
    "masks": [],
    "scores": [],
    "advantages": [],
    "ref_logprobs": [],
    "generation_params": [],
    "inference_logprobs": [],
    "messages": [],
    "images": [],
}


def info_routes(desk: Desk) -> APIRouter:
    """The read-only routes, on this desk."""
    router = APIRouter(tags=["information"])
    store = desk.store

    @router.get("/")
    async def root() -> Response:
        """Says what this is."""
        return reply({"message": "AtroposLib API"})

    @router.get("/wandb_info")
    async def wandb_info() -> Response:
        """Where the trainer logs to."""
        return reply(store.wandb_info())

    @router.get("/info")
    async def info() -> Response:
        """What the trainer wants."""
        return reply(store.info())

    @router.get("/status")
    async def status() -> Response:
        """How far training is and how much is queued."""
        desk.now()
        return reply(store.status())

    @router.get("/envs")
    async def envs() -> Response:
        """All environments."""
        desk.now()
        return reply({"envs": store.envs()})

    @router.get("/health", responses=MAY_FAIL)
    async def health() -> Response:
        """Whether all is well, with a sentence for each kind of trouble."""
        desk.now()
        body = store.health()
        return reply(body, 200 if body["status"] == "ok" else 503)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """All numbers, for Prometheus."""
        desk.now()
        held = [
            gauge("held_posts", "Posts that wait because too much is queued.", desk.held_posts),
            counter("hold_seconds_total", "Seconds for which posts were held.", desk.hold_seconds),
        ]
        return Response(exposition([*store.metrics(), *held]), media_type=CONTENT_TYPE)

    @router.get("/latest_example")
    async def latest_example(request: Request) -> Response:
        """The group that came last, with all 14 keys."""
        packed = store.latest_example()
        if packed is None:
            return reply(NO_EXAMPLE)
        form = Form.of(request.headers)
        write = _as_msgpack if form.packed else _as_json
        large = len(packed.data) > LARGE_BYTES
        body = await asyncio.to_thread(write, packed) if large else write(packed)
        return Response(body, headers=form.headers)

    @router.get("/reset_data", response_class=PlainTextResponse)
    async def reset_data() -> Response:
        """Forgets everything but the numbers of environments."""
        store.reset()
        desk.notify()
        return PlainTextResponse("Reset successful")

    return router


def _as_json(group: PackedGroup) -> bytes:
    body = group.to_json()
    if "inference_logprobs" in group.columns().floats:
        return body
    return body[:-1] + b',"inference_logprobs":null}'


def _as_msgpack(group: PackedGroup) -> bytes:
    return pack({"inference_logprobs": None, **group.to_map()})
