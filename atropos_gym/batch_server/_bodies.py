"""Bodies in, replies out: reading JSON and msgpack, and saying where a body is wrong.

Groups go straight into arrays where they are plainly right. Everything else is read by pydantic's parser,
which refuses NaN, lone surrogates and deep nesting but says only at which column; only where it refuses is
the body read once more, slowly, to name the place.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from atropos_gym.batch_server._fast_json import read_json_groups
from atropos_gym.batch_server._msgpack import MSGPACK, expand, read_msgpack_groups, unpack
from atropos_gym.batch_server.intake import Incoming
from atropos_gym.batch_server.refusals import Problem
from atropos_gym.wire import ScoredDataGroup

__all__ = [
    "GroupsRefused",
    "parse_groups",
    "problem_details",
    "read_body",
    "read_groups",
    "reply",
    "schema_of",
    "validation_details",
]

MAX_ENTRIES = 20
"""Most entries in the ``detail`` of one refusal."""

MAX_ECHO = 200
"""Longest input that is shown again to its sender, in characters."""

LARGE_BYTES = 4 * 2**20
"""Larger bodies are read in a thread."""

Model = TypeVar("Model", bound=BaseModel)
Path = tuple[str | int, ...]


def reply(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(to_json(content), status, media_type="application/json")


@cache
def schema_of(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    """The ``requestBody`` of a route for the OpenAPI page; the route itself reads the body."""
    schema = model.model_json_schema()
    if many:
        schema = {"type": "array", "items": schema}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class GroupsRefused(HTTPException):
    """Posted groups that cannot be used.

    Attributes:
        senders: environments of the refused groups, None where unknown.
    """

    def __init__(self, status: int, detail: Any, senders: Sequence[int | None]) -> None:
        super().__init__(status, detail)
        self.senders = senders

    @property
    def reason(self) -> str:
        """A word for the first thing that is wrong."""
        return str(self.detail[0]["type"]) if isinstance(self.detail, list) else f"status_{self.status_code}"


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _parsed(body: bytes, media_type: str) -> Any:
    """Parses a body, JSON or msgpack.

    Raises:
        HTTPException: 415 where the body is neither, 400 where it is not UTF-8, 422 where it is broken or
            holds what cannot be stored.
    """
    if media_type == MSGPACK:
        return _unpack(body)
    if not _is_json(media_type):
        raise HTTPException(
            415, f"Content-Type must be application/json or {MSGPACK}, got {media_type[:100]!r}"
        )
    return parse(body)


def _is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


async def read_groups(request: Request, *, many: bool, foreign_masks: str = "refuse") -> list[Incoming]:
    """Reads and checks posted groups; large bodies in a thread, so that others are answered meanwhile.

    Args:
        request: a post of one group, or of a list of them.
        many: whether it must be a list.
        foreign_masks: ``"keep"`` takes masks that are neither -100 nor the id.

    Raises:
        GroupsRefused: 400, 415 or 422; then no group of the list may be kept.
    """
    body, media_type = await request.body(), _media_type(request)
    if len(body) > LARGE_BYTES:
        return await asyncio.to_thread(_groups, body, media_type, many, foreign_masks)
    return _groups(body, media_type, many, foreign_masks)


def _groups(body: bytes, media_type: str, many: bool, foreign_masks: str) -> list[Incoming]:
    """The fast way where it is open, else the exact one."""
    packed = media_type == MSGPACK
    if _is_json(media_type) and (groups := read_json_groups(body, many=many)) is not None:
        return groups
    try:
        value = _parsed(body, media_type)
    except HTTPException as refusal:
        raise GroupsRefused(refusal.status_code, refusal.detail, [None]) from None
    if packed and (groups := read_msgpack_groups(value, many=many)) is not None:
        return groups
    try:
        return parse_groups(value, many=many, packed=packed, foreign_masks=foreign_masks)
    except HTTPException as refusal:
        senders = [_sender(item) for item in (value if many and isinstance(value, list) else [value])]
        raise GroupsRefused(refusal.status_code, refusal.detail, senders) from None


def _sender(item: Any) -> int | None:
    env_id = item.get("env_id") if isinstance(item, dict) else None
    return env_id if isinstance(env_id, int) else None


def _unpack(body: bytes) -> Any:
    try:
        return unpack(body)
    except ValueError as error:
        raise HTTPException(422, [_entry("msgpack_invalid", ("body",), str(error))]) from None


async def read_body(request: Request, model: type[Model]) -> Model:
    """Reads and checks a request's body; raises ``HTTPException`` 400, 415 or 422."""
    value = _parsed(await request.body(), _media_type(request))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise HTTPException(422, list(validation_details(error, ("body",)))) from None


def parse(body: bytes) -> Any:
    """Parses JSON; raises ``HTTPException`` 400 or 422 that names the place."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        complaint = str(error)
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError):
        raise HTTPException(422, [_entry("json_invalid", ("body",), complaint)]) from None
    found = next(_unstorable(value), None)
    if found is None:
        raise HTTPException(422, [_entry("json_invalid", ("body",), complaint)])
    kind, path, message = found
    raise HTTPException(422, [_entry(kind, ("body", *path), message)])


def parse_groups(
    value: Any, *, many: bool, packed: bool = False, foreign_masks: str = "refuse"
) -> list[Incoming]:
    """Checks groups with the exact validator.

    Args:
        value: one group, or a list of them.
        many: whether it must be a list.
        packed: they came as msgpack.
        foreign_masks: ``"keep"`` takes masks that are neither -100 nor the id.

    Raises:
        HTTPException: 422 that names the bad places; then no group of the list may be kept.
    """
    if many and not isinstance(value, list):
        raise HTTPException(422, [_entry("list_type", ("body",), "the body must be a list of groups")])
    details: list[dict[str, Any]] = []
    incoming: list[Incoming] = []
    for index, item in enumerate(value if many else [value]):
        root: Path = ("body", index) if many else ("body",)
        try:
            incoming.append(_parse_group(item, packed=packed, foreign_masks=foreign_masks))
        except ValidationError as error:
            details.extend(validation_details(error, root))
        except _Unstorable as error:
            details.append(_entry(error.kind, (*root, *error.path), str(error)))
        if len(details) >= MAX_ENTRIES:
            break
    if details:
        raise HTTPException(422, details[:MAX_ENTRIES])
    return incoming


def _parse_group(item: Any, *, packed: bool, foreign_masks: str) -> Incoming:
    if packed:
        item = expand(item)
        if isinstance(item, dict) and "mask_bits" in item and _has_rows(item.get("tokens")):
            wanted = "one bin of ceil(len / 8) bytes a sequence, no bit behind its last token, and no masks"
            raise _Unstorable("mask_bits", ("mask_bits",), f"mask_bits must be {wanted}")
        _refuse_unstorable(item)  # bytes, names that are no strings: JSON cannot say them
    group = ScoredDataGroup.model_validate(item, context={"foreign_masks": foreign_masks})
    incoming = Incoming.of(group, tuple(name for name in item if name not in ScoredDataGroup.model_fields))
    # 1e999 is legal JSON and becomes infinite; in a free field only the output shows it.
    free = to_json(incoming.free, inf_nan_mode="constants")
    if b"Infinity" in free or b"NaN" in free:
        _refuse_unstorable(item)
    return incoming


def _has_rows(tokens: Any) -> bool:
    return isinstance(tokens, list) and all(isinstance(row, list) for row in tokens)


def _refuse_unstorable(item: Any) -> None:
    for kind, path, message in _unstorable(item):
        raise _Unstorable(kind, path, message)


class _Unstorable(Exception):
    def __init__(self, kind: str, path: Path, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.path = path


def _unstorable(root: Any) -> Iterator[tuple[str, Path, str]]:
    """Yields every place that JSON can say but cannot be served again, in order, without recursion."""
    waiting: list[tuple[Path, Any]] = [((), root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield "finite_number", path, f"must be a finite number, got {value}"
        elif isinstance(value, str) and not _encodable(value):
            yield "string_unicode", path, "holds a lone surrogate, which is no character"
        elif isinstance(value, list):
            waiting.extend(((*path, index), value[index]) for index in reversed(range(len(value))))
        elif not isinstance(value, str | int | float | dict | None):
            yield "json_type", path, f"must be what JSON can say, got {type(value).__name__}"
        elif isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    yield "string_type", path, f"has a key that is no string: {str(key)[:100]}"
                elif not _encodable(key):
                    yield "string_unicode", path, "has a key with a lone surrogate"
            waiting.extend(((*path, str(key)), value[key]) for key in reversed(value))


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def validation_details(error: ValidationError, root: Path) -> Iterable[dict[str, Any]]:
    """Turns pydantic's errors into the entries of a 422, at most 20."""
    for one in error.errors(include_url=False, include_context=False)[:MAX_ENTRIES]:
        yield _entry(one["type"], (*root, *one["loc"]), one["msg"], one["input"])


def problem_details(problems: Sequence[Problem], root: Path, *, many: bool) -> list[dict[str, Any]]:
    """Turns a store's problems into the entries of a 422, at most 20."""
    return [
        _entry(problem.kind, (*root, *((problem.index,) if many else ()), *problem.path), problem.message)
        for problem in problems[:MAX_ENTRIES]
    ]


def _entry(kind: str, path: Path, message: str, value: Any = None) -> dict[str, Any]:
    """One entry; the input is shown only where it is a short scalar."""
    entry: dict[str, Any] = {"type": kind, "loc": list(path), "msg": message}
    if isinstance(value, str | int | float) and len(shown := repr(value)[: MAX_ECHO + 1]) <= MAX_ECHO:
        entry["input"] = value if not isinstance(value, float) or math.isfinite(value) else shown
    return entry
