"""Groups as clients send and read them: msgpack with arrays as bytes where the server speaks it, else JSON.

Both forms carry the same group: ids and masks as they are, scores as float64, all other arrays as the float32
numbers that the server keeps whichever form they came in.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from pydantic_core import from_json, to_json

from atropos_gym._wire_checks import MASKED
from atropos_gym.wire import ScoredDataGroup

__all__ = ["JSON", "MSGPACK", "Body", "body_of", "body_of_list", "group_of", "unpack"]

JSON = "application/json"
MSGPACK = "application/msgpack"

IDS = ("tokens", "masks")
FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")
TEACHER = {"distill_token_ids": "<i4", "distill_logprobs": "<f4"}
FREE = tuple(name for name in ScoredDataGroup.model_fields if name not in (*IDS, *FLOATS, "scores"))


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a post."""

    content: bytes
    media_type: str


class _Unpackable(Exception):
    """A group that only JSON can say, or that no server takes: then the server shall name what is wrong."""


def body_of(group: ScoredDataGroup, *, packed: bool) -> Body:
    """The body of one group.

    Args:
        group: what is posted; nothing of it is checked here.
        packed: the server reads msgpack.

    >>> group = ScoredDataGroup(tokens=[[5, 6]], masks=[[-100, 6]], scores=[1.0])
    >>> body = body_of(group, packed=True)
    >>> body.media_type, group_of(unpack(body.content)) == group
    ('application/msgpack', True)
    """
    if packed:
        try:
            return Body(_packed(group), MSGPACK)
        except _Unpackable:
            pass
    return Body(group.to_json(), JSON)


def body_of_list(bodies: Sequence[Body]) -> Body:
    """The body of a list of groups, whose own bodies are all of one form."""
    contents = [body.content for body in bodies]
    if bodies[0].media_type == JSON:
        return Body(b"[" + b",".join(contents) + b"]", JSON)
    head: bytes = msgpack.Packer().pack_array_header(len(bodies))
    return Body(head + b"".join(contents), MSGPACK)


def unpack(content: bytes) -> Any:
    """Unpacks msgpack; raises ``ValueError`` where it is none, or cut off."""
    try:
        return msgpack.unpackb(content, raw=False, strict_map_key=True)
    except (msgpack.UnpackException, ValueError, RecursionError) as error:
        raise ValueError(f"no msgpack: {str(error) or type(error).__name__}") from None


def group_of(item: Mapping[str, Any], *, trusted: bool = True) -> ScoredDataGroup:
    """The group that was sent as a map.

    Args:
        item: as :func:`unpack` gives it.
        trusted: it was checked by whoever sent it.

    Raises:
        ValueError: no such map, or, where it is not trusted, a group that cannot be used.
    """
    try:
        fields = {name: item[name] for name in ScoredDataGroup.model_fields if name in item}
        tokens = [np.frombuffer(row, "<i4") if type(row) is bytes else row for row in fields["tokens"]]
        if "mask_bits" in item:
            fields["masks"] = [_masks(row, bits) for row, bits in zip(tokens, item["mask_bits"], strict=True)]
        for name, kind in (*dict.fromkeys(IDS, "<i4").items(), *dict.fromkeys(FLOATS, "<f4").items()):
            if rows := fields.get(name):
                fields[name] = [
                    np.frombuffer(row, kind).tolist() if type(row) is bytes else row for row in rows
                ]
        for name, kind in TEACHER.items():
            if rows := fields.get(name):
                fields[name] = [_teacher(row, kind) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a group: {error!r}") from None
    return ScoredDataGroup.model_construct(**fields) if trusted else ScoredDataGroup.model_validate(fields)


def _packed(group: ScoredDataGroup) -> bytes:
    try:
        tokens, masks = ([_bytes(row, "i") for row in rows] for rows in (group.tokens, group.masks))
        _check_lengths("masks", masks, tokens)
        fields: dict[str, Any] = {"tokens": tokens, **_masks_of(tokens, masks), "scores": group.scores}
        for name in FLOATS:
            if rows := getattr(group, name):
                fields[name] = _floats(rows)
                _check_lengths(name, rows, group.tokens)
        # Through JSON, so that keys and values become what they would be there.
        free = {name: value for name in FREE if (value := getattr(group, name)) is not None}
        fields |= from_json(to_json(free, inf_nan_mode="constants"))
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        return packed
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise _Unpackable(str(error)) from None


def _bytes(row: Sequence[Any], kind: str) -> bytes:
    """A row as 4 bytes a number; numbers of another kind, or beyond 32 bits, are an error."""
    return struct.pack(f"<{len(row)}{kind}", *row)


def _check_lengths(name: str, rows: Sequence[Any], tokens: Sequence[Any]) -> None:
    if [len(row) for row in rows] != [len(row) for row in tokens] or not all(tokens):
        raise ValueError(f"{name} and tokens differ in length, or have none")


def _masks_of(tokens: Sequence[bytes], masks: Sequence[bytes]) -> dict[str, list[bytes]]:
    """Masks as one bit a token where that says everything."""
    bits = []
    for ids, mask in (
        (np.frombuffer(one, "<i4") for one in pair) for pair in zip(tokens, masks, strict=True)
    ):
        trained = mask != MASKED
        if (mask[trained] != ids[trained]).any():
            return {"masks": list(masks)}
        bits.append(np.packbits(trained, bitorder="little").tobytes())
    return {"mask_bits": bits}


def _floats(rows: Sequence[Any]) -> list[Any]:
    """Rows as bytes, or as they are where a number is too large for a float32."""
    try:
        return [_bytes(row, "f") for row in rows]
    except OverflowError:
        return list(rows)


def _masks(tokens: Any, bits: bytes) -> list[int]:
    ids = np.asarray(tokens, np.int32)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(ids), bitorder="little").view(np.bool_)
    masks: list[int] = np.where(flags, ids, np.int32(MASKED)).tolist()
    return masks


def _teacher(row: Any, kind: str) -> Any:
    if isinstance(row, dict):
        return np.frombuffer(row["data"], kind).reshape(-1, row["k"]).tolist()
    return row
