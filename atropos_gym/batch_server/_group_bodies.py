"""Groups as clients send and read them: msgpack with arrays as bytes where the server speaks it, else JSON.

Both forms carry the same group: ids and masks as they are, scores as float64, all other arrays as the float32
numbers that the server keeps whichever form they came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
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
        raise ValueError(f"no msgpack: {error or type(error).__name__}") from None


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
        tokens = [_array(row, "i") for row in group.tokens]
        masks = [_array(row, "i") for row in group.masks]
        _check_lengths("masks", masks, tokens)
        fields: dict[str, Any] = {"tokens": _bins(tokens, "<i4")}
        trained = [row != MASKED for row in masks]
        if all(
            (mask[flags] == ids[flags]).all() for mask, ids, flags in zip(masks, tokens, trained, strict=True)
        ):
            fields["mask_bits"] = [np.packbits(flags, bitorder="little").tobytes() for flags in trained]
        else:
            fields["masks"] = _bins(masks, "<i4")
        fields["scores"] = group.scores
        for name in FLOATS:
            if rows := getattr(group, name):
                fields[name] = _floats(name, rows, tokens)
        # Through JSON, so that keys and values become what they would be there.
        free = {name: value for name in FREE if (value := getattr(group, name)) is not None}
        fields |= from_json(to_json(free, inf_nan_mode="constants"))
        packed: bytes = msgpack.packb(fields, use_bin_type=True)
        return packed
    except (ValueError, TypeError, OverflowError) as error:
        raise _Unpackable(str(error)) from None


def _array(row: Any, kinds: str) -> NDArray[Any]:
    """A row as an array whose numbers are of these kinds: what else it holds is not for arrays."""
    values = np.array(row)
    if values.ndim != 1 or values.dtype.kind not in kinds:
        raise ValueError(f"a row of {values.dtype}")
    return values


def _check_lengths(name: str, rows: Sequence[Any], tokens: Sequence[Any]) -> None:
    if [len(row) for row in rows] != [len(row) for row in tokens]:
        raise ValueError(f"{name} and tokens differ in length")


def _bins(rows: Sequence[NDArray[Any]], kind: str) -> list[bytes]:
    bounds = np.iinfo(np.int32)
    if any(len(row) and (row.min() < bounds.min or row.max() > bounds.max) for row in rows):
        raise ValueError("an integer beyond 32 bits")
    return [row.astype(kind).tobytes() for row in rows]


def _floats(name: str, rows: Sequence[Any], tokens: Sequence[Any]) -> list[Any]:
    """Rows as bytes, or as they are where a number is too large for a float32."""
    arrays = [_array(row, "if") for row in rows]
    _check_lengths(name, arrays, tokens)
    with np.errstate(over="ignore"):
        narrow = [row.astype("<f4") for row in arrays]
    if all(np.isfinite(row).all() for row in narrow):
        return [row.tobytes() for row in narrow]
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
