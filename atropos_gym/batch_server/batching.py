"""Which queued units make a batch: pure functions over sizes and owners, without I/O and without a clock.

A *unit* is what is never split: one group, or the parts of one group that came in pieces. Units are given
oldest first. Of all sets that fit, the oldest-first one is chosen: it takes the oldest unit if any solution
does, then the next one, and so on.

A sum is a bit: bit s of an integer is 1 where some subset sums to s. Shifting by a unit's size adds the unit.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["Plan", "choose", "choose_below", "plan_batch", "shares"]


def choose(
    sizes: Sequence[int],
    total: int,
    owners: Sequence[Hashable] | None = None,
    least: Mapping[Hashable, int] | None = None,
) -> list[int] | None:
    """Chooses the oldest-first set of units whose sizes sum to ``total`` exactly.

    Args:
        sizes: sizes of the units, oldest first; each at least 1.
        total: the sum that is wanted.
        owners: whose each unit is; only needed with ``least``.
        least: what each of these owners must contribute at least, in the unit of ``sizes``.

    Returns:
        Positions in ``sizes``, ascending, or None where no set fits.

    >>> choose([3, 4, 1, 4], 8)
    [0, 1, 2]
    >>> choose([4, 4, 4], 8, owners=["a", "a", "b"], least={"b": 1})
    [0, 2]
    >>> choose([4, 4], 6)
    """
    if sum(sizes) < total:  # sums are bits: a total from outside must not decide how many there are
        return None
    if not least and (prefix := _exact_prefix(sizes, total)) is not None:
        return prefix
    kinds = _kinds(sizes, owners, least or {})
    positions = _foremost(sizes, kinds, total)
    ways = _Ways([(kinds[at], sizes[at]) for at in positions], total, dict(least or {}))
    if not ways.open():
        return None
    chosen: list[int] = []
    # Once a unit of some owner and size cannot be taken, no later one like it can: swapping the two would
    # have been a solution. So each kind of unit is refused once, however long the queue is.
    refused: set[tuple[Hashable, int]] = set()
    for position in positions:
        size, kind = sizes[position], kinds[position]
        if ways.rest == 0:
            break
        ways.pass_over(kind)
        if (kind, size) in refused:
            continue
        if ways.take(kind, size):
            chosen.append(position)
        else:
            refused.add((kind, size))
    return chosen


def choose_below(sizes: Sequence[int], total: int) -> list[int]:
    """Chooses the largest set below ``total`` that holds the oldest unit, oldest first.

    >>> choose_below([4, 4, 4, 4], 10)
    [0, 1]
    >>> choose_below([8, 8], 12)
    [0]
    """
    reachable = 1
    total = min(total, sum(sizes) + 1)
    for size in sizes[1:]:
        reachable |= (reachable << size) & ((1 << max(total - sizes[0], 1)) - 1)
    rest = choose(sizes[1:], reachable.bit_length() - 1)
    assert rest is not None, "the sum was reachable"
    return [0, *(position + 1 for position in rest)]


def shares(
    minimums: Mapping[Hashable, float], queued: Mapping[Hashable, int], batch_size: int
) -> dict[Hashable, int]:
    """Turns minimal fractions of a batch into sequences that can be asked for.

    Minimums that sum above the batch shrink in proportion, and nobody is asked for more than it has queued.

    Args:
        minimums: fraction of a batch, 0 to 1, by owner; in order of precedence.
        queued: sequences that each owner has in the queue.
        batch_size: sequences a batch.

    Returns:
        Sequences by owner, in the same order, without those that owe nothing.

    >>> shares({"a": 0.5, "b": 0.75, "c": 0.0}, {"a": 8, "b": 8}, 8)
    {'a': 3, 'b': 4}
    """
    wanted = {owner: int(batch_size * share) for owner, share in minimums.items()}
    wanted = {owner: count for owner, count in wanted.items() if count > 0}
    if (asked := sum(wanted.values())) > batch_size:
        wanted = {owner: max(1, count * batch_size // asked) for owner, count in wanted.items()}
    wanted = {owner: min(count, queued.get(owner, 0)) for owner, count in wanted.items()}
    return {owner: count for owner, count in wanted.items() if count > 0}


@dataclass(frozen=True, slots=True)
class Plan:
    """What :func:`plan_batch` found.

    Attributes:
        chosen: positions of the units that make the batch; empty where none can be made.
        short: whether they sum below the batch size.
        reason: why there is no batch, in a sentence; "" where there is one.
        stuck: enough is queued, but the oldest unit was passed over.
    """

    chosen: tuple[int, ...] = ()
    short: bool = False
    reason: str = ""
    stuck: bool = False


def plan_batch(
    sizes: Sequence[int],
    owners: Sequence[Hashable],
    batch_size: int,
    *,
    minimums: Mapping[Hashable, float] | None = None,
    exact: bool = False,
    overdue: bool = False,
    noun: str = "sequences",
) -> Plan:
    """Plans the next batch of ``batch_size`` sequences.

    Minimums that cannot all be met at once give way from the last one on; who stands first should rotate from
    batch to batch, so that everybody's turn comes.

    Args:
        sizes: sequences of each unit, oldest first.
        owners: the environment of each, None where unknown.
        batch_size: sequences wanted.
        minimums: least fraction of the batch by environment, in order of precedence.
        exact: never plan a short batch.
        overdue: the oldest unit has been passed over for too long: rather a short batch than none with it.
        noun: what is counted, for the reason.

    >>> plan_batch([4, 4, 6], [None] * 3, 8).chosen
    (0, 1)
    >>> plan_batch([6, 6], [None] * 2, 8)
    Plan(chosen=(), short=False, reason='no groups sum to 8', stuck=True)
    >>> plan_batch([6, 6], [None] * 2, 8, overdue=True)
    Plan(chosen=(0,), short=True, reason='', stuck=False)
    """
    queued = sum(sizes)
    if queued < batch_size:
        return Plan(reason=f"{queued} of {batch_size} {noun} queued")
    chosen = None
    if minimums:
        by_owner: dict[Hashable, int] = {}
        for size, owner in zip(sizes, owners, strict=True):
            by_owner[owner] = by_owner.get(owner, 0) + size
        least = list(shares(minimums, by_owner, batch_size).items())
        while least and chosen is None:
            chosen = choose(sizes, batch_size, owners, dict(least))
            least.pop()
    if chosen is None:
        chosen = choose(sizes, batch_size)
    passed_over = not chosen or chosen[0] != 0
    if passed_over and overdue and not exact:
        # An exact batch with the oldest unit is better than a short one, though a minimum gives way for it.
        with_oldest = choose(sizes, batch_size)
        if with_oldest and with_oldest[0] == 0:
            return Plan(chosen=tuple(with_oldest))
        below = choose_below(sizes, batch_size)
        return Plan(chosen=tuple(below), short=True)
    if chosen is None:
        return Plan(reason=f"no groups sum to {batch_size}", stuck=True)
    return Plan(chosen=tuple(chosen), stuck=passed_over)


def _exact_prefix(sizes: Sequence[int], total: int) -> list[int] | None:
    """The first units, where they happen to sum up: the usual case of equal groups."""
    for count, reached in enumerate(accumulate(sizes), start=1):
        if reached >= total:
            return list(range(count)) if reached == total else None
    return None


def _foremost(sizes: Sequence[int], kinds: Sequence[Hashable], total: int) -> list[int]:
    """Positions of the units that may be chosen: of each kind and size, the first as many as fit in."""
    room: dict[tuple[Hashable, int], int] = {}
    found = []
    for position, unit in enumerate(zip(kinds, sizes, strict=True)):
        left = room.get(unit)
        if left is None:
            left = total // unit[1]
        if left:
            found.append(position)
            room[unit] = left - 1
    return found


def _kinds(
    sizes: Sequence[int], owners: Sequence[Hashable] | None, least: Mapping[Hashable, int]
) -> list[Hashable]:
    """Owners that must contribute, by name; all others are one kind, ``_FREE``."""
    if not least or owners is None:
        return [_FREE] * len(sizes)
    return [owner if owner in least else _FREE for owner in owners]


_FREE = object()


class _Ways:
    """Which sums the units that are still ahead can reach, by kind, and what is still owed."""

    def __init__(self, units: Sequence[tuple[Hashable, int]], total: int, owed: dict[Hashable, int]) -> None:
        self.rest = total
        self.owed = owed
        self._limit = (1 << (total + 1)) - 1
        self._ahead: dict[Hashable, list[int]] = {kind: [1] for kind in (_FREE, *owed)}
        # What was combined before: with a long queue, nearly all.
        self._known: dict[tuple[int, int], int] = {}
        for kind, size in reversed(units):
            sums = self._ahead[kind]
            sums.append((sums[-1] | (sums[-1] << size)) & self._limit)

    def pass_over(self, kind: Hashable) -> None:
        """Leaves the next unit of this kind behind."""
        self._ahead[kind].pop()

    def take(self, kind: Hashable, size: int) -> bool:
        """Takes the unit that was just passed, if the units ahead can then complete the sum."""
        if size > self.rest:
            return False
        before = self.owed.get(kind, 0)
        self.rest -= size
        if before:
            self.owed[kind] = max(0, before - size)
        if self.open():
            return True
        self.rest += size
        if before:
            self.owed[kind] = before
        return False

    def open(self) -> bool:
        """Whether the units ahead can make up the rest, with what is owed."""
        reached = 1
        for kind, owed in self.owed.items():
            sums = self._ahead[kind][-1] >> owed << owed
            reached = self._combine(reached, sums)
        return bool(self._combine(reached, self._ahead[_FREE][-1]) >> self.rest & 1)

    def _combine(self, left: int, right: int) -> int:
        """All sums of one of the left and one of the right."""
        if left == 1:
            return right
        known = self._known.get((left, right))
        if known is None:
            known = self._known[left, right] = _sums(left, right) & self._limit
        return known


def _sums(left: int, right: int) -> int:
    """All sums of one of the left and one of the right, as bits.

    Sums that lie side by side are added as one stretch: of many sizes nearly all sums can be made.
    """
    if left.bit_count() > right.bit_count():
        left, right = right, left
    combined = at = 0
    while left:
        gap = (left & -left).bit_length() - 1
        left >>= gap
        at += gap
        length = (~left & (left + 1)).bit_length() - 1
        stretch, width = right, 1
        while 2 * width <= length:
            stretch |= stretch << width
            width *= 2
        combined |= (stretch | stretch << (length - width)) << at
        left >>= length
        at += length
    return combined
