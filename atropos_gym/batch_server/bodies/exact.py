"""The exact way in: bodies read by pydantic's parsers, which take the unusual, and name the place of a fault.

They refuse NaN, lone surrogates and deep nesting but say only at which column; where they refuse, the body is
read once more, slowly, to name the place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import orjson
from fastapi import HTTPException
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from atropos_gym.batch_server.bodies.details import MAX_ENTRIES, Path, entry, validation_details
from atropos_gym.batch_server.bodies.msgpack import MSGPACK, expand, unpack
from atropos_gym.batch_server.limits import MOST_GROUPS
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.packed import FREE
from atropos_gym.wire import ScoredDataGroup

__all__ = ["is_json", "parse", "parse_body", "parse_groups"]


def parse_body(body: bytes, media_type: str) -> Any:
    """Parses a body, JSON or msgpack.

    Raises:
        HTTPException: 415 where the body is neither, 400 where it is not UTF-8, 422 where it is broken or
            holds what cannot be stored.
    """
    if media_type == MSGPACK:
        return _unpack(body)
    if not is_json(media_type):
        raise HTTPException(
            415, f"Content-Type must be application/json or {MSGPACK}, got {media_type[:100]!r}"
        )
    return parse(body)


def is_json(media_type: str) -> bool:
    """Whether a media type is JSON, or a kind of it."""
    return media_type == "application/json" or media_type.endswith("+json")


def _unpack(body: bytes) -> Any:
    try:
        return unpack(body)
    except ValueError as error:
        raise HTTPException(422, [entry("msgpack_invalid", ("body",), str(error))]) from None


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
    unknown = tuple(name for name in item if name not in ScoredDataGroup.model_fields)
    try:
        incoming = Incoming.of(group, unknown)
    except ValueError:  # msgpack nests more deeply than JSON is written and read
        _refuse_deep(group)
        raise
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


def _refuse_deep(group: ScoredDataGroup) -> None:
    for name in FREE:
        try:
            from_json(to_json({name: getattr(group, name)}, inf_nan_mode="constants"))
        except ValueError as error:
            message = "lists and maps are nested too deeply to be served as JSON"
            raise _Unstorable("recursion", (name,), message) from error


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
