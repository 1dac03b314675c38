"""Bodies in, replies out: reading JSON and msgpack, and saying where a body is wrong.

Groups go straight into arrays where they are plainly right. Everything else is read by pydantic's parser,
which refuses NaN, lone surrogates and deep nesting but says only at which column; only where it refuses is
the body read once more, slowly, to name the place.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import orjson
from fastapi import HTTPException, Request
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from atropos_gym.batch_server.bodies.details import MAX_ENTRIES, Path, entry, validation_details
from atropos_gym.batch_server.bodies.fast_json import read_json_groups
from atropos_gym.batch_server.bodies.msgpack import MSGPACK, expand, read_msgpack_groups, unpack, unpack_plain
from atropos_gym.batch_server.bodies.reader_process import Lost, reader
from atropos_gym.batch_server.http.asgi import BODY
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.limits import MOST_GROUPS
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.wire import ScoredDataGroup

__all__ = [
    "GroupsRefused",
    "parse_groups",
    "read_body",
    "read_groups",
    "reply",
]

SMALL_BYTES = 64 * 2**10
"""Smaller bodies take less time than a turn of the loop."""

LARGE_BYTES = 2 * 2**20
"""Larger bodies are read in a thread."""

HUGE_BYTES = 8 * 2**20
"""Larger bodies are read in another process."""

ODD_BYTES = 64 * 2**10
"""Larger bodies that only the exact validator can read are read there too: a megabyte can take a second."""

MOST_SENDERS = 1000
"""So many environments are told apart among the groups of one refused list."""

Model = TypeVar("Model", bound=BaseModel)


def reply(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(to_json(content), status, media_type="application/json")


class GroupsRefused(HTTPException):
    """Posted groups that cannot be used.

    Attributes:
        senders: how many groups of which environments, None where unknown.
    """

    def __init__(self, status: int, detail: Any, senders: Iterable[tuple[int | None, int]]) -> None:
        super().__init__(status, detail)
        self.senders = dict(senders)

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


async def read_groups(desk: Desk, request: Request, *, many: bool) -> list[Incoming]:
    """Reads and checks posted groups; large bodies elsewhere, so that others are answered meanwhile.

    Args:
        desk: where they were posted.
        request: a post of one group, or of a list of them.
        many: whether it must be a list.

    Raises:
        GroupsRefused: 400, 413, 415, 422, or 503 where memory is short; then none of the groups may be kept.
    """
    body, media_type = request.scope[BODY], _media_type(request)
    if len(body) > SMALL_BYTES:
        await desk.turn()
    foreign_masks = desk.store.limits.foreign_masks
    if len(body) > HUGE_BYTES:
        return await _read_elsewhere(body, media_type, many, foreign_masks)
    if len(body) > LARGE_BYTES:
        groups = await asyncio.to_thread(_groups, body, media_type, many)
    else:
        groups = _groups(body, media_type, many)
    if groups is not None:
        return groups
    if len(body) > ODD_BYTES:
        return await _read_elsewhere(body, media_type, many, foreign_masks)
    return _exact_groups(body, media_type, many, foreign_masks)


def _groups(body: bytes, media_type: str, many: bool) -> list[Incoming] | None:
    """The fast way; None where it is not open."""
    if media_type != MSGPACK:
        return read_json_groups(body, many=many) if _is_json(media_type) else None
    try:
        return read_msgpack_groups(unpack_plain(body), many=many)
    except ValueError:
        return None


async def _read_elsewhere(body: bytes, media_type: str, many: bool, foreign_masks: str) -> list[Incoming]:
    question = {"media_type": media_type, "many": many, "foreign_masks": foreign_masks}
    try:
        found = await reader().read(body, question)
    except Lost as error:
        raise GroupsRefused(503, f"{error}: is memory short?", [(None, 1)]) from None
    if isinstance(found, dict):
        raise GroupsRefused(**found)
    return found


def answer(body: bytes, question: dict[str, Any]) -> list[Incoming] | dict[str, Any]:
    """What the other process says of a body: its groups, or what ``GroupsRefused`` is made of."""
    try:
        media_type, many = question["media_type"], question["many"]
        groups = _groups(body, media_type, many)
        return _exact_groups(body, media_type, many, question["foreign_masks"]) if groups is None else groups
    except GroupsRefused as refusal:
        return {
            "status": refusal.status_code,
            "detail": refusal.detail,
            "senders": list(refusal.senders.items()),
        }


def _exact_groups(body: bytes, media_type: str, many: bool, foreign_masks: str) -> list[Incoming]:
    """The exact way."""
    try:
        value = _parsed(body, media_type)
    except HTTPException as refusal:
        raise GroupsRefused(refusal.status_code, refusal.detail, [(None, 1)]) from None
    try:
        return parse_groups(value, many=many, packed=media_type == MSGPACK, foreign_masks=foreign_masks)
    except HTTPException as refusal:
        senders = Counter(map(_sender, value if many and isinstance(value, list) else [value]))
        named = senders.most_common(MOST_SENDERS)
        if others := senders.total() - sum(count for _, count in named):
            named.append((-1, others))
        raise GroupsRefused(refusal.status_code, refusal.detail, named) from None


def _sender(item: Any) -> int | None:
    env_id = item.get("env_id") if isinstance(item, dict) else None
    return env_id if isinstance(env_id, int) else None


def _unpack(body: bytes) -> Any:
    try:
        return unpack(body)
    except ValueError as error:
        raise HTTPException(422, [entry("msgpack_invalid", ("body",), str(error))]) from None


def read_body(request: Request, model: type[Model]) -> Model:
    """Reads and checks a request's body; raises ``HTTPException`` 400, 415 or 422."""
    value = _parsed(request.scope[BODY], _media_type(request))
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
        raise HTTPException(422, [entry("json_invalid", ("body",), complaint)]) from None
    found = next(_unstorable(value), None)
    if found is None:
        raise HTTPException(422, [entry("json_invalid", ("body",), complaint)])
    kind, path, message = found
    raise HTTPException(422, [entry(kind, ("body", *path), message)])


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
        HTTPException: 422 that names the bad places, 413 where there are too many groups; then no group of
            the list may be kept.
    """
    if many and not isinstance(value, list):
        raise HTTPException(422, [entry("list_type", ("body",), "the body must be a list of groups")])
    if many and len(value) > MOST_GROUPS:
        message = f"list has {len(value)} groups, one post may bring {MOST_GROUPS}: post it in parts"
        raise HTTPException(413, message)
    details: list[dict[str, Any]] = []
    incoming: list[Incoming] = []
    for index, item in enumerate(value if many else [value]):
        root: Path = ("body", index) if many else ("body",)
        try:
            incoming.append(_parse_group(item, packed=packed, foreign_masks=foreign_masks))
        except ValidationError as error:
            details.extend(validation_details(error, root))
        except _Unstorable as error:
            details.append(entry(error.kind, (*root, *error.path), str(error)))
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
        if not _storable(item):
            _refuse_unstorable(item)
    group = ScoredDataGroup.model_validate(item, context={"foreign_masks": foreign_masks})
    incoming = Incoming.of(group, tuple(name for name in item if name not in ScoredDataGroup.model_fields))
    # 1e999 is legal JSON and becomes infinite; in a free field only the output shows it.
    free = to_json(incoming.free, inf_nan_mode="constants")
    if b"Infinity" in free or b"NaN" in free:
        _refuse_unstorable(item)
    return incoming


def _storable(item: Any) -> bool:
    """Whether msgpack plainly brought what JSON can say: no bytes, no names that are no strings, no NaN."""
    try:
        orjson.dumps(item)
    except TypeError:
        return False
    text = to_json(item, inf_nan_mode="constants")
    return b"NaN" not in text and b"Infinity" not in text


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
