"""The rules of a group, checked in whole arrays.

This is the fast way in: it takes what is plainly right and gives up on everything else. Whatever it gives up
on, ``exact.py`` reads again with the exact validator, which takes the unusual and words the refusals; both
ways lead to the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from atropos_gym._wire_checks import MASKED, check_messages, clean_flat_logprobs
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.packed import FLOATS, FREE, Columns, PackedGroup
from atropos_gym.wire import MAX_TOKEN_ID

__all__ = ["Odd", "Source", "read", "trained_by"]

KNOWN = frozenset(("tokens", "masks", "scores", *FLOATS, *FREE))


class Odd(Exception):
    """Something that is not plainly right."""


class Source(Protocol):
    """One group of a body; what it cannot give as asked for is :class:`Odd`, or a Key-, Type- or ValueError.

    Attributes:
        names: its fields.
    """

    names: list[str]

    def ids(self, name: str) -> tuple[list[int], NDArray[np.integer[Any]]]:
        """Lengths of the rows, and all their integers."""
        ...

    def trained(self, ids: NDArray[np.integer[Any]]) -> tuple[list[int], NDArray[np.bool_]]:
        """Lengths of the masks' rows, and where the mask is the id of the token."""
        ...

    def floats(self, name: str) -> tuple[list[int], NDArray[np.floating[Any]]] | None:
        """Lengths of the rows and all their numbers; None where the field is absent or empty."""
        ...

    def scores(self) -> NDArray[np.float64]:
        """The scores."""
        ...

    def free(self, name: str) -> Any:
        """Any other field, as Python objects."""
        ...


def trained_by(masks: NDArray[np.integer[Any]], ids: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
    """Where masks are the ids of the tokens, if elsewhere they are -100."""
    if len(masks) != len(ids):
        raise Odd
    trained: NDArray[np.bool_] = masks != MASKED
    if (trained & (masks != ids)).any():
        raise Odd
    return trained


def read(source: Source) -> Incoming:
    """Checks a group as ``ScoredDataGroup`` does, in whole arrays."""
    lengths, ids = source.ids("tokens")
    mask_lengths, trained = source.trained(ids)
    scores = source.scores()
    if not lengths or min(lengths) < 1 or sum(lengths) != len(ids):
        raise Odd
    if mask_lengths != lengths or len(trained) != len(ids) or len(scores) != len(lengths):
        raise Odd
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID or not np.isfinite(scores).all():
        raise Odd
    if not trained.any():
        raise Odd
    floats = _floats(source, lengths, trained)
    columns = Columns(np.array(lengths, np.int32), scores, ids.astype(np.int32, copy=False), trained, floats)
    free = {name: source.free(name) for name in source.names if name in FREE}
    unknown = tuple(name for name in source.names if name not in KNOWN)
    for name in unknown:
        source.free(name)
    kept = _checked(free, len(lengths))
    return Incoming(PackedGroup.pack(columns, kept), kept, unknown)


def _floats(source: Source, lengths: list[int], trained: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    for name in FLOATS:
        if (rows := source.floats(name)) is None:
            continue
        if rows[0] != lengths or len(rows[1]) != len(trained) or not np.isfinite(rows[1]).all():
            raise Odd
        found[name] = rows[1]
    if (logprobs := found.get("inference_logprobs")) is not None:
        cleaned = clean_flat_logprobs(logprobs, trained)
        if isinstance(cleaned, int):
            raise Odd
        found["inference_logprobs"] = cleaned
    return found


def _checked(free: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The free fields, empty ones as None, if each has its plain form."""
    kept = {name: None if (value := free.get(name)) == [] or value == {} else value for name in FREE}
    messages, overrides, env_id = kept["messages"], kept["overrides"], free.get("env_id")
    if messages is not None:
        if not _is_rows(messages, rows, list) or not all(_is_rows(turns, None, dict) for turns in messages):
            raise Odd
        try:
            check_messages(messages)
        except ValidationError:
            raise Odd from None
    if overrides is not None and not _is_rows(overrides, rows, dict):
        raise Odd
    for name in ("generation_params", "group_overrides"):
        if kept[name] is not None and not isinstance(kept[name], dict):
            raise Odd
    if env_id is not None and (type(env_id) is not int or env_id < 0):
        raise Odd
    if kept["distill_token_ids"] is not None or kept["distill_logprobs"] is not None:
        raise Odd
    return kept


def _is_rows(value: Any, rows: int | None, kind: type) -> bool:
    """Whether a value is a list of so many objects of one kind."""
    return (
        isinstance(value, list)
        and (rows is None or len(value) == rows)
        and all(isinstance(one, kind) for one in value)
    )
