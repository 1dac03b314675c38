"""Groups in the form in which they are kept: flat arrays of 4 bytes a number, a bit a mask, one byte string.

A group of N tokens takes 4 N bytes of ids, N / 8 of masks, 4 N for each array of floats that was sent, and a
few bytes a row. It is served by handing whole arrays to the encoder: no number ever becomes a Python object.

Layout, little-endian: header, lengths (int32), scores (float64), 64-bit columns, ids, 32-bit columns, masks,
then the fields that are no arrays of numbers, as JSON text. Columns begin at multiples of 4 or 8 bytes.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from atropos_gym._wire_checks import MASKED, flatten
from atropos_gym.wire import ScoredDataGroup

__all__ = ["FLOATS", "FREE", "Columns", "Ints", "PackedGroup", "pack_group"]

FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")
"""Fields that are ``[n][len]`` floats."""

FREE_BEFORE = ("messages", "generation_params")
FREE_AFTER = (
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
)
FREE = (*FREE_BEFORE, *FREE_AFTER)
"""Fields that are kept as JSON; on the wire ``inference_logprobs`` stands between them."""

MAGIC = b"AGP1"
HEADER = struct.Struct("<4sIIII")  # magic, flags, rows, bytes of JSON before and after inference_logprobs
PRESENT, WIDE, VERBATIM_MASKS = 1, 8, 64  # flags; the first two are shifted by the field's place in FLOATS

OWN_MEMORY_BYTES = 64 * 1024
"""From so many bytes on a group lies in pages of its own; on the heap, among bodies that come and go, groups
that stay would leave holes: with eight senders, a quarter of what the groups take."""

AT_ONCE = getattr(mmap, "MAP_POPULATE", 0)
"""Linux then gives all pages in one go, in half the time."""

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Columns:
    """A group as arrays; rows lie one behind the other.

    Attributes:
        lengths: ids in each row, int32 ``[n]``.
        scores: float64 ``[n]``.
        tokens: int32 ``[N]``.
        trained: bool ``[N]``, where the mask is the id; elsewhere it is -100.
        floats: fields of :data:`FLOATS` that were sent, float32 ``[N]``; float64 where a value is too large.
        masks: int32 ``[N]`` where a mask is neither -100 nor the id, else None.
    """

    lengths: Ints
    scores: Floats
    tokens: Ints
    trained: NDArray[np.bool_]
    floats: Mapping[str, Floats] = field(default_factory=dict)
    masks: Ints | None = None

    def rows(self, column: NDArray[Any]) -> list[NDArray[Any]]:
        """Cuts a column into its rows, without a copy."""
        ends = np.cumsum(self.lengths).tolist()
        return [column[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def wire_masks(self) -> Ints:
        """Masks as they stand on the wire, int32 ``[N]``."""
        if self.masks is not None:
            return self.masks
        return np.where(self.trained, self.tokens, np.int32(MASKED))


@dataclass(frozen=True, slots=True)
class PackedGroup:
    """One group as one byte string.

    Attributes:
        data: see the module's text for the layout.
    """

    data: bytes | memoryview

    @classmethod
    def pack(cls, columns: Columns, free: Mapping[str, Any]) -> PackedGroup:
        """Packs checked columns and the fields that are no arrays.

        Args:
            columns: what was checked.
            free: values of :data:`FREE`; what is absent is null.
        """
        before, after = (_members(free, names) for names in (FREE_BEFORE, FREE_AFTER))
        flags = 0 if columns.masks is None else VERBATIM_MASKS
        wide: list[Floats] = []
        narrow: list[Floats] = []
        for place, name in enumerate(FLOATS):
            if (values := columns.floats.get(name)) is not None:
                values = _narrowed(values)
                is_wide = values.dtype == np.float64
                flags |= (PRESENT | (WIDE if is_wide else 0)) << place
                (wide if is_wide else narrow).append(values)
        rows = len(columns.lengths)
        pieces: list[bytes | memoryview] = [
            HEADER.pack(MAGIC, flags, rows, len(before), len(after)),
            _bytes(columns.lengths, "<i4"),
            b"\0" * (_scores_at(rows) - HEADER.size - 4 * rows),
            _bytes(columns.scores, "<f8"),
            *(_bytes(values, "<f8") for values in wide),
            _bytes(columns.tokens, "<i4"),
            *(_bytes(values, "<f4") for values in narrow),
            _bytes(columns.masks, "<i4")
            if columns.masks is not None
            else _bytes(np.packbits(columns.trained, bitorder="little"), "u1"),
            before,
            after,
        ]
        return cls(_joined(pieces))

    @property
    def size(self) -> int:
        """Number of sequences."""
        return int(self._header()[1])

    @property
    def foreign_masks(self) -> bool:
        """Whether a mask is neither -100 nor the id."""
        return bool(self._header()[0] & VERBATIM_MASKS)

    @property
    def lengths(self) -> Ints:
        """Ids in each sequence, ``[n]``."""
        return np.frombuffer(self.data, "<i4", self.size, HEADER.size)

    @property
    def scores(self) -> Floats:
        """Scores, ``[n]``."""
        return np.frombuffer(self.data, "<f8", self.size, _scores_at(self.size))

    @property
    def score_sum(self) -> float:
        """Sum of the scores; not finite where they are too large together, which is nobody's error."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(self.scores.sum())

    def free(self) -> dict[str, Any]:
        """The fields that are no arrays of numbers."""
        before, after = self._texts()
        return {**from_json(b"{" + before + b"}"), **from_json(b"{" + after + b"}")}

    def columns(self) -> Columns:
        """The arrays, which share this group's memory."""
        flags, rows = self._header()[:2]
        lengths, scores = self.lengths, self.scores
        total = int(lengths.sum())
        take = _Reader(self.data, _scores_at(rows) + 8 * rows)
        present = [name for place, name in enumerate(FLOATS) if flags >> place & PRESENT]
        wide = {name for place, name in enumerate(FLOATS) if flags >> place & WIDE}
        floats: dict[str, Floats] = {name: take("<f8", total) for name in present if name in wide}
        tokens = take("<i4", total)
        floats |= {name: take("<f4", total) for name in present if name not in wide}
        if flags & VERBATIM_MASKS:
            masks = take("<i4", total)
            return Columns(lengths, scores, tokens, masks != MASKED, floats, masks)
        bits = np.unpackbits(take("u1", -(-total // 8)), count=total, bitorder="little")
        return Columns(lengths, scores, tokens, bits.view(np.bool_), floats)

    def to_json(self) -> bytes:
        """The group as it is served: all 14 keys in order, null where absent, but no null logprobs.

        A float prints as the shortest decimal that reads back to the same float32.
        """
        columns = self.columns()
        before, after = self._texts()
        pieces = [b'{"tokens":', _json_rows(columns, columns.tokens)]
        pieces += [b',"masks":', _json_rows(columns, columns.wire_masks())]
        pieces += [b',"scores":', _json(columns.scores)]
        for name in FLOATS[:2]:
            pieces += [b',"', name.encode(), b'":', _json_or_null(columns, name)]
        pieces += [b",", before]
        if FLOATS[2] in columns.floats:
            pieces += [b',"inference_logprobs":', _json_or_null(columns, FLOATS[2])]
        return b"".join([*pieces, b",", after, b"}"])

    def to_map(self) -> dict[str, Any]:
        """The group for msgpack: arrays as little-endian bytes, ``mask_bits`` where they say everything."""
        columns = self.columns()
        free = self.free()
        found: dict[str, Any] = {"tokens": _bins(columns, columns.tokens)}
        if columns.masks is None:
            bits = [np.packbits(row, bitorder="little").tobytes() for row in columns.rows(columns.trained)]
            found["mask_bits"] = bits
        else:
            found["masks"] = _bins(columns, columns.masks)
        found["scores"] = columns.scores.tolist()
        for name in FLOATS:
            values = columns.floats.get(name)
            if values is None:
                if name != FLOATS[2]:
                    found[name] = None
            elif values.dtype.itemsize == 8:
                found[name] = [row.tolist() for row in columns.rows(values)]
            else:
                found[name] = _bins(columns, values)
        return found | {name: free[name] for name in FREE}

    def _header(self) -> tuple[int, int, int, int]:
        magic, *numbers = HEADER.unpack_from(self.data)
        if magic != MAGIC:
            raise ValueError(f"not a packed group: it begins with {magic!r}")
        flags, rows, before, after = numbers
        return flags, rows, before, after

    def _texts(self) -> tuple[bytes, bytes]:
        *_, before, after = self._header()
        at = len(self.data) - before - after
        return bytes(self.data[at : at + before]), bytes(self.data[at + before :])


class _Reader:
    """Takes one array after the other out of a byte string."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data = data
        self._at = at

    def __call__(self, kind: str, count: int) -> NDArray[Any]:
        values = np.frombuffer(self._data, kind, count, self._at)
        self._at += values.nbytes
        return values


def pack_group(group: ScoredDataGroup) -> PackedGroup:
    """Packs a group that passed validation.

    >>> group = ScoredDataGroup(tokens=[[5, 6]], masks=[[-100, 6]], scores=[1.0])
    >>> pack_group(group).to_json()[:76]
    b'{"tokens":[[5,6]],"masks":[[-100,6]],"scores":[1.0],"advantages":null,"ref_l'
    """
    tokens, masks = flatten(group.tokens, np.int32), flatten(group.masks, np.int32)
    trained = masks != MASKED
    columns = Columns(
        lengths=np.array([len(row) for row in group.tokens], np.int32),
        scores=np.array(group.scores, np.float64),
        tokens=tokens,
        trained=trained,
        floats={
            name: flatten(rows, np.float64) for name in FLOATS if (rows := getattr(group, name)) is not None
        },
        masks=None if bool((masks == np.where(trained, tokens, MASKED)).all()) else masks,
    )
    return PackedGroup.pack(columns, {name: getattr(group, name) for name in FREE})


def _joined(pieces: list[bytes | memoryview]) -> bytes | memoryview:
    """One byte string of several."""
    size = sum(map(len, pieces))
    if size < OWN_MEMORY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return b"".join(pieces)
    own = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | AT_ONCE)
    for piece in pieces:
        own.write(piece)
    return memoryview(own).toreadonly()


def _scores_at(rows: int) -> int:
    """Where the scores begin: behind the lengths, at a multiple of 8."""
    return -(-(HEADER.size + 4 * rows) // 8) * 8


def _narrowed(values: Floats) -> Floats:
    """The values as float32, or as float64 where one of them would become infinite."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if bool(np.isfinite(narrow).all()) else values.astype(np.float64)


def _bytes(values: NDArray[Any], kind: str) -> memoryview:
    """The bytes of an array, without a copy where it has them in this form already."""
    return np.ascontiguousarray(values, kind).data.cast("B")


def _members(values: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    """JSON members without the braces: ``"a":1,"b":null``."""
    return to_json({name: values.get(name) for name in names}, inf_nan_mode="constants")[1:-1]


def _json(values: Any) -> bytes:
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)


def _json_or_null(columns: Columns, name: str) -> bytes:
    values = columns.floats.get(name)
    return b"null" if values is None else _json_rows(columns, values)


def _json_rows(columns: Columns, column: NDArray[Any]) -> bytes:
    """A column as JSON, row by row: while the encoder writes, no other thread runs."""
    return b"[" + b",".join(map(_json, columns.rows(column))) + b"]"


def _bins(columns: Columns, column: NDArray[Any]) -> list[bytes]:
    return [row.tobytes() for row in columns.rows(column)]
