"""What a group must satisfy beyond the types of its fields: equal lengths, masks, logprobs.

Numbers are compared as flat arrays, never one by one in Python. The first bad place is named by its path,
``("masks", 3)``, with the lengths or values that came and that were wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

__all__ = [
    "MASKED",
    "MAX_POSITIVE_LOGPROB",
    "check_lengths",
    "check_masks",
    "check_messages",
    "clean_flat_logprobs",
    "clean_logprobs",
    "flatten",
    "refuse",
]

MASKED = -100
"""The mask of a position that is not trained."""

MAX_POSITIVE_LOGPROB = 1e-3
"""Up to here a positive logprob is rounding and becomes 0; above it is refused."""

UNTRAINED_LOGPROB = 1.0
"""What stands in ``inference_logprobs`` where nothing was sampled."""


def refuse(kind: str, path: Sequence[str | int], message: str) -> NoReturn:
    """Raises pydantic's error for one place of a body.

    Args:
        kind: the error's ``type``, such as ``length_mismatch``.
        path: where, from the group's root: ``("masks", 3)``.
        message: what came and what is wanted.
    """
    # The message goes in as context, because pydantic reads braces in a template as names.
    error = PydanticCustomError(kind, "{reason}", {"reason": message})
    raise ValidationError.from_exception_data(
        "ScoredDataGroup", [InitErrorDetails(type=error, loc=tuple(path), input=None)]
    )


def flatten(rows: Sequence[Sequence[Any]], dtype: type) -> NDArray[Any]:
    """Puts rows one behind the other in one array."""
    return np.fromiter(chain.from_iterable(rows), dtype=dtype, count=sum(map(len, rows)))


def place(rows: Sequence[Sequence[Any]], position: int) -> tuple[int, int]:
    """Row and column of a position of the flattened rows.

    >>> place([[5, 6, 7], [8]], 3)
    (1, 0)
    """
    ends = np.cumsum([len(values) for values in rows])
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row] - len(rows[row]))


def check_lengths(name: str, rows: Sequence[Sequence[Any]], lengths: list[int]) -> None:
    """Refuses a field that has not one entry a row, and one a token within each row.

    Args:
        name: the field.
        rows: its values, ``[n][len]``.
        lengths: how many tokens each row has.
    """
    check_rows(name, len(rows), len(lengths))
    if list(map(len, rows)) == lengths:
        return
    for row, (values, wanted) in enumerate(zip(rows, lengths, strict=True)):
        if len(values) != wanted:
            message = f"{name} has {len(values)} entries in row {row}, tokens {wanted}"
            refuse("length_mismatch", (name, row), message)


def check_rows(name: str, came: int, wanted: int) -> None:
    """Refuses a field that has not one entry a row."""
    if came != wanted:
        refuse("length_mismatch", (name,), f"{name} has {came} rows, tokens {wanted}")


def check_masks(
    tokens: Sequence[Sequence[int]], masks: Sequence[Sequence[int]], *, keep_foreign: bool = False
) -> NDArray[np.bool_] | None:
    """Refuses masks that are neither -100 nor the id itself, and a group without a trained id.

    Args:
        tokens: ids, ``[n][len]``.
        masks: of the same shape.
        keep_foreign: take masks of any other form, such as 0 and 1, as they are.

    Returns:
        Which positions of the flattened rows are trained; None where that is unknown because of such masks.
    """
    ids, mask = flatten(tokens, np.int64), flatten(masks, np.int64)
    trained: NDArray[np.bool_] = mask != MASKED
    wrong = trained & (mask != ids)
    if keep_foreign and wrong.any():
        return None
    if wrong.any():
        row, column = place(tokens, int(wrong.argmax()))
        refuse(
            "mask_mismatch",
            ("masks", row, column),
            f"mask is {masks[row][column]}, wanted -100 (not trained) or the token id {tokens[row][column]}",
        )
    if not trained.any():
        refuse("nothing_trained", ("masks",), "every mask is -100: the group has no trained token")
    return trained


def clean_logprobs(rows: list[list[float]], trained: NDArray[np.bool_]) -> list[list[float]]:
    """Brings the sampled logprobs into the one form that is stored and served.

    Untrained positions become 1.0 whatever was sent. At trained ones a tiny positive value is rounding and
    becomes 0; a larger one is refused.

    Args:
        rows: logprobs, ``[n][len]``, all finite.
        trained: which positions of the flattened rows are trained.

    Returns:
        The same rows, or changed copies where something had to change.
    """
    values = flatten(rows, np.float64)
    cleaned = clean_flat_logprobs(values, trained)
    if isinstance(cleaned, int):
        row, column = place(rows, cleaned)
        refuse(
            "positive_logprob",
            ("inference_logprobs", row, column),
            f"logprob of a trained token is {rows[row][column]!r}, wanted at most 0",
        )
    if cleaned is values:
        return rows
    flat = cleaned.tolist()
    ends = np.cumsum([len(row) for row in rows]).tolist()
    return [flat[end - len(row) : end] for row, end in zip(rows, ends, strict=True)]


def clean_flat_logprobs(
    values: NDArray[np.floating[Any]], trained: NDArray[np.bool_]
) -> NDArray[np.floating[Any]] | int:
    """:func:`clean_logprobs` on flattened rows.

    Returns:
        The same array where nothing had to change, a changed copy, or the position of the first value that
        cannot be a logprob.

    >>> clean_flat_logprobs(np.array([0.7, -0.5, 1e-6]), np.array([False, True, True]))
    array([ 1. , -0.5,  0. ])
    """
    positive = trained & (values > 0.0)
    foreign = ~trained & (values != UNTRAINED_LOGPROB)
    if not positive.any() and not foreign.any():
        return values
    wrong = positive & (values.astype(np.float64) > MAX_POSITIVE_LOGPROB)
    if wrong.any():
        return int(wrong.argmax())
    cleaned = np.where(positive, 0.0, values)
    cleaned[foreign] = UNTRAINED_LOGPROB
    return cleaned


def check_messages(messages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Refuses a message without ``role`` or ``content``."""
    for row, turns in enumerate(messages):
        for turn, message in enumerate(turns):
            for key in ("role", "content"):
                if key not in message:
                    refuse("missing", ("messages", row, turn, key), f"message has no {key!r}")


def check_teacher(
    ids: Sequence[Sequence[Sequence[int]]] | None,
    logprobs: Sequence[Sequence[Sequence[float]]] | None,
    lengths: list[int],
) -> None:
    """Refuses teacher arrays that are not aligned with the tokens, or with each other."""
    if ids is not None:
        check_lengths("distill_token_ids", ids, lengths)
    if logprobs is not None:
        check_lengths("distill_logprobs", logprobs, lengths)
    if ids is None or logprobs is None:
        return
    for row, (ids_T, logprobs_T) in enumerate(zip(ids, logprobs, strict=True)):
        wanted = list(map(len, ids_T))
        if list(map(len, logprobs_T)) != wanted:
            at = next(i for i, values in enumerate(logprobs_T) if len(values) != wanted[i])
            refuse(
                "length_mismatch",
                ("distill_logprobs", row, at),
                f"{len(logprobs_T[at])} logprobs, distill_token_ids has {wanted[at]}",
            )
