"""Groups as msgpack: arrays are little-endian bytes, or lists as in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgpack  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from atropos_gym._wire_checks import MASKED
from atropos_gym.batch_server.bodies.fast_check import Odd, read, trained_by
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.packed import FLOATS

__all__ = ["MSGPACK", "expand", "pack", "read_msgpack_groups", "unpack", "unpack_plain"]

MSGPACK = "application/msgpack"

MOST_MEMBERS = 40_000
"""Members of lists and maps in a body that is read fast: each is a Python object."""

IDS = ("tokens", "masks")
TEACHER = {"distill_token_ids": "<i4", "distill_logprobs": "<f4"}


def unpack(body: bytes) -> Any:
    """Unpacks a body; raises ``ValueError`` where it is no msgpack."""
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True)
    except msgpack.FormatError:  # it says nothing itself
        raise ValueError("body is not valid msgpack: 0xc1, with which no value begins") from None
    except msgpack.StackError:  # nor does this one
        raise ValueError("body is not valid msgpack: lists and maps are nested too deeply") from None
    except (msgpack.UnpackException, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"body is not valid msgpack: {error}") from None


def unpack_plain(body: bytes) -> Any:
    """Unpacks a body of few lists and maps; raises ``ValueError`` where there are more, or it is no msgpack.

    >>> unpack_plain(pack({"tokens": [b"four"]}))
    {'tokens': [b'four']}
    """
    left = MOST_MEMBERS

    def count(container: Any) -> Any:
        nonlocal left
        left -= 1 + len(container)
        if left < 0:
            raise ValueError("too many lists and maps")
        return container

    most = {"max_array_len": MOST_MEMBERS, "max_map_len": MOST_MEMBERS}
    return msgpack.unpackb(body, raw=False, strict_map_key=True, list_hook=count, object_hook=count, **most)


def pack(value: Any) -> bytes:
    """Packs a reply. An integer beyond 64 bits, which JSON may have brought, becomes a float.

    >>> unpack(pack([2**70, 2**60]))
    [1.1805916207174113e+21, 1152921504606846976]
    """
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_no_int64)
    return packed


def _no_int64(value: Any) -> float | str:
    if not isinstance(value, int):
        raise TypeError(f"cannot pack {value!r}")
    try:
        return float(value)
    except OverflowError:
        return str(value)


def expand(value: Any) -> Any:
    r"""A group with its bytes written out as lists, so that the exact validator can read it.

    What cannot be written out stays as it is, and the validator will say what is wrong with it.

    >>> expand({"tokens": [b"\1\0\0\0\2\0\0\0"], "mask_bits": [b"\2"]})
    {'tokens': [[1, 2]], 'masks': [[-100, 2]]}
    """
    if not isinstance(value, dict):
        return value
    found = dict(value)
    for name in (*IDS, *FLOATS):
        if isinstance(rows := found.get(name), list):
            kind = "<i4" if name in IDS else "<f4"
            found[name] = [_listed(row, kind) for row in rows]
    for name, kind in TEACHER.items():
        if isinstance(rows := found.get(name), list):
            found[name] = [_teacher(row, kind) for row in rows]
    bits, tokens = found.get("mask_bits"), found.get("tokens")
    if bits is not None and "masks" not in found and isinstance(tokens, list):
        try:
            lengths = [len(row) for row in tokens]
            trained = np.split(_trained(bits, lengths), np.cumsum(lengths)[:-1])
        except (Odd, TypeError, ValueError):
            return found
        found["masks"] = [
            [one if flag else MASKED for one, flag in zip(row, flags, strict=True)]
            for row, flags in zip(tokens, trained, strict=True)
        ]
        del found["mask_bits"]
    return found


def _listed(row: Any, kind: str) -> Any:
    if type(row) is bytes and len(row) % 4 == 0:
        return np.frombuffer(row, kind).tolist()
    return row


def _teacher(row: Any, kind: str) -> Any:
    if isinstance(row, dict) and row.keys() == {"k", "data"}:
        k, data = row["k"], row["data"]
        if type(k) is int and k > 0 and type(data) is bytes and len(data) % (4 * k) == 0:
            return np.frombuffer(data, kind).reshape(-1, k).tolist()
    return row


def read_msgpack_groups(value: Any, *, many: bool) -> list[Incoming] | None:
    """Reads groups out of an unpacked msgpack body; None where the exact validator must look."""
    try:
        values = value if many and isinstance(value, list) else [value]
        return [read(_BinaryGroup(one)) for one in values]
    except (Odd, KeyError, ValueError, TypeError, RecursionError):
        return None


class _BinaryGroup:
    """One group whose arrays are little-endian bytes."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise Odd
        self._value = dict(value)
        if "mask_bits" in value:
            if "masks" in value:
                raise Odd
            self._value["masks"] = None
        self.names = [name for name in self._value if name != "mask_bits"]

    def ids(self, name: str) -> tuple[list[int], NDArray[np.integer[Any]]]:
        """Lengths of the rows, and all their integers."""
        return _bins(self._value[name], "<i4")

    def trained(self, ids: NDArray[np.integer[Any]]) -> tuple[list[int], NDArray[np.bool_]]:
        """Lengths of the masks' rows, and where the mask is the id of the token."""
        if "mask_bits" in self._value:
            lengths = [len(row) // 4 for row in self._value["tokens"]]
            return lengths, _trained(self._value["mask_bits"], lengths)
        lengths, masks = self.ids("masks")
        return lengths, trained_by(masks, ids)

    def floats(self, name: str) -> tuple[list[int], NDArray[np.floating[Any]]] | None:
        """Lengths of the rows and all their numbers; None where the field is absent or empty."""
        rows = self._value.get(name)
        if not rows:
            return None
        return _bins(rows, "<f4")

    def scores(self) -> NDArray[np.float64]:
        """The scores."""
        values = self._value["scores"]
        if not isinstance(values, list) or not all(type(one) in (float, int) for one in values):
            raise Odd
        return np.array(values, np.float64)

    def free(self, name: str) -> Any:
        """Any other field."""
        text = to_json({name: self._value[name]}, inf_nan_mode="constants", bytes_mode="hex")
        if from_json(text, allow_inf_nan=False) != {name: self._value[name]}:
            raise Odd  # bytes, keys that are no strings, and what else JSON cannot say
        return self._value[name]


def _bins(rows: Any, kind: Literal["<i4", "<f4"]) -> tuple[list[int], NDArray[Any]]:
    if not isinstance(rows, list) or not all(type(row) is bytes and len(row) % 4 == 0 for row in rows):
        raise Odd
    return [len(row) // 4 for row in rows], np.frombuffer(b"".join(rows), kind)


def _trained(bits: Any, lengths: Sequence[int]) -> NDArray[np.bool_]:
    """Mask bits as one flag a token; bits behind the last token must be 0."""
    if not isinstance(bits, list) or len(bits) != len(lengths):
        raise Odd
    rows = []
    for row, length in zip(bits, lengths, strict=True):
        if type(row) is not bytes or len(row) != -(-length // 8):
            raise Odd
        flags = np.unpackbits(np.frombuffer(row, np.uint8), bitorder="little")
        if flags[length:].any():
            raise Odd
        rows.append(flags[:length])
    return np.concatenate(rows).view(np.bool_)
