"""Requests read, large bodies where they keep nobody waiting, and short answers."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from atropos_gym.batch_server.bodies.details import validation_details
from atropos_gym.batch_server.bodies.exact import parse_body
from atropos_gym.batch_server.bodies.reader_process import Lost, reader
from atropos_gym.batch_server.bodies.reading import GroupsRefused, exact_groups, plain_groups
from atropos_gym.batch_server.http.asgi import BODY, drop_body
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.state.intake import Incoming

__all__ = ["read_body", "read_groups", "reply"]

SMALL_BYTES = 64 * 2**10
"""Smaller bodies take less time than a turn of the loop."""

LARGE_BYTES = 2 * 2**20
"""Larger bodies are read in a thread."""

HUGE_BYTES = 8 * 2**20
"""Larger bodies are read in another process."""

ODD_BYTES = 64 * 2**10
"""Larger bodies that only the exact validator can read are read there too: a megabyte can take a second."""

Model = TypeVar("Model", bound=BaseModel)


def reply(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(to_json(content), status, media_type="application/json")


def read_body(request: Request, model: type[Model]) -> Model:
    """Reads and checks a request's body; raises ``HTTPException`` 400, 415 or 422."""
    value = parse_body(request.scope[BODY], _media_type(request))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise HTTPException(422, list(validation_details(error, ("body",)))) from None


async def read_groups(desk: Desk, request: Request, *, many: bool) -> list[Incoming]:
    """Reads and checks posted groups; large bodies elsewhere, so that others are answered meanwhile.

    Args:
        desk: where they were posted.
        request: a post of one group, or of a list of them.
        many: whether it must be a list.

    Raises:
        GroupsRefused: 400, 413, 415, 422, or 503 where memory is short; then none of the groups may be kept.
    """
    try:
        return await _read_groups(desk, request.scope[BODY], _media_type(request), many)
    finally:
        drop_body(request.scope)


async def _read_groups(desk: Desk, body: bytes, media_type: str, many: bool) -> list[Incoming]:
    if len(body) > SMALL_BYTES:
        await desk.turn()
    foreign_masks = desk.store.limits.foreign_masks
    if len(body) > HUGE_BYTES:
        return await _read_elsewhere(body, media_type, many, foreign_masks)
    if len(body) > LARGE_BYTES:
        groups = await asyncio.to_thread(plain_groups, body, media_type, many)
    else:
        groups = plain_groups(body, media_type, many)
    if groups is not None:
        return groups
    if len(body) > ODD_BYTES:
        return await _read_elsewhere(body, media_type, many, foreign_masks)
    return exact_groups(body, media_type, many, foreign_masks)


async def _read_elsewhere(body: bytes, media_type: str, many: bool, foreign_masks: str) -> list[Incoming]:
    question = {"media_type": media_type, "many": many, "foreign_masks": foreign_masks}
    try:
        found = await reader().read(body, question)
    except Lost as error:
        raise GroupsRefused(503, f"{error}: is memory short?", [(None, 1)]) from None
    if isinstance(found, dict):
        raise GroupsRefused(**found)
    return found


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
