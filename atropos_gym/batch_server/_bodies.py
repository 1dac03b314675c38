"""JSON in, JSON out: reading bodies, and saying where one is wrong.

Bodies are read by pydantic's parser, which refuses NaN, lone surrogates and deep nesting but says only at
which column. Only then is the body read a second time, slowly, to name the place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from fastapi import HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from atropos_gym.batch_server.intake import Incoming
from atropos_gym.batch_server.refusals import Problem
from atropos_gym.wire import ScoredDataGroup

__all__ = [
    "parse_groups",
    "problem_details",
    "read_body",
    "read_json",
    "reply",
    "schema_of",
    "validation_details",
]

MAX_ENTRIES = 20
"""Most entries in the ``detail`` of one refusal."""

MAX_ECHO = 200
"""Longest input that is shown again to its sender, in characters."""

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


async def read_json(request: Request) -> Any:
    """Reads a request's JSON body.

    Raises:
        HTTPException: 415 where the body is not sent as JSON, 400 where it is not UTF-8, 422 where it is not
            JSON or holds what cannot be stored.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, f"Content-Type must be application/json, got {media_type[:100]!r}")
    return parse(await request.body())


async def read_body(request: Request, model: type[Model]) -> Model:
    """Reads and checks a request's body; raises ``HTTPException`` 400, 415 or 422."""
    value = await read_json(request)
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


def parse_groups(value: Any, *, many: bool) -> list[Incoming]:
    """Checks groups that were parsed from JSON.

    Args:
        value: one group, or a list of them.
        many: whether it must be a list.

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
            incoming.append(_parse_group(item))
        except ValidationError as error:
            details.extend(validation_details(error, root))
        except _Unstorable as error:
            details.append(_entry(error.kind, (*root, *error.path), str(error)))
        if len(details) >= MAX_ENTRIES:
            break
    if details:
        raise HTTPException(422, details[:MAX_ENTRIES])
    return incoming


def _parse_group(item: Any) -> Incoming:
    group = ScoredDataGroup.model_validate(item)
    payload = group.to_json()
    # 1e999 is legal JSON and becomes infinite; in a free field only the output shows it.
    if b"Infinity" in payload or b"NaN" in payload:
        for kind, path, message in _unstorable(item):
            raise _Unstorable(kind, path, message)
    unknown = tuple(item.keys() - ScoredDataGroup.model_fields.keys())
    return Incoming(group, payload, unknown)


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
        elif isinstance(value, dict):
            for key in value:
                if not _encodable(key):
                    yield "string_unicode", path, "has a key with a lone surrogate"
            waiting.extend(((*path, key), value[key]) for key in reversed(value))


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
