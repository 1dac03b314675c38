"""Equal rows become one: the same gradient for a fraction of the work.

Short answers repeat: of a thousand rows of a small task some two hundred differ. The clipped loss is linear
in the advantage as long as its sign does not change, so equal rows of one sign are one row with the sum of
their advantages. Whatever does not depend on the advantage (entropy, KL, counts) uses ``Row.count``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from atropos_gym.trainers.batches import Row

__all__ = ["OLD_LOGPROB_TOLERANCE", "merge_rows"]

#: Equal ids under one version have equal logprobs but for the rounding of another batch shape.
OLD_LOGPROB_TOLERANCE = 1e-5

_Key = tuple[bytes, bytes, bytes, float, int | None, tuple[tuple[int, int], ...]]


def merge_rows(rows: Iterable[Row]) -> tuple[list[Row], list[int]]:
    """Returns distinct rows in order of first appearance, and for each given row which of them it became.

    The given rows are left as they are.

    Rows merge, across groups too, if they are equal in ids, trained positions, turns, temperature and
    version, have advantages of one sign at every trained id (zero is a sign of its own) and old logprobs
    within 1e-5; the first row's are used.

    Example:
        >>> row = Row(np.array([1, 2]), np.array([1]), np.array([-0.5]), np.array([0.25]))
        >>> merged, became = merge_rows([row, row])
        >>> merged[0].count, merged[0].advantages.tolist(), became
        (2, [0.5], [0, 0])
    """
    found: dict[_Key, list[int]] = {}
    merged: list[Row] = []
    became: list[int] = []
    for row in rows:
        key = (
            row.ids.tobytes(),
            row.positions.tobytes(),
            np.sign(row.advantages).astype(np.int8).tobytes(),
            row.temperature,
            row.version,
            row.turns,
        )
        twins = found.setdefault(key, [])
        for number in twins:
            twin = merged[number]
            if _within(row, twin):
                twin.advantages += row.advantages
                twin.count += row.count
                became.append(number)
                break
        else:
            twins.append(len(merged))
            became.append(len(merged))
            merged.append(replace(row, advantages=row.advantages.copy()))
    return merged, became


def _within(row: Row, twin: Row) -> bool:
    """Whether the old logprobs agree but for rounding."""
    return bool((np.abs(row.logprobs - twin.logprobs) <= OLD_LOGPROB_TOLERANCE).all())
