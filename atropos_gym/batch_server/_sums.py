"""Sums that units can make up together, as bits: bit s of an integer is 1 where some subset sums to s.

Units are of kinds. What each kind can contribute is a set of its own, because some owe a part of the sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import gcd

__all__ = ["FREE", "Far", "Near", "Reach", "combine"]

FREE = object()
"""The kind of all units that owe nothing."""

FIRST_LOOK = 256
"""So many units are looked at first."""


class Reach:
    """What units can contribute to a sum, kind by kind.

    Args:
        total: no sum above it matters.
        sizes: of all units. Where these are multiples of a number, sums are counted in it: then nearly all
            of them can be made, and such sets are the easiest to combine.
        owed: what each kind must contribute at least.
    """

    def __init__(self, total: int, sizes: Iterable[int], owed: Mapping[Hashable, int]) -> None:
        self.unit = gcd(*sizes) or 1
        self.everything = (2 << total // self.unit) - 1
        self._owed = {kind: -(-least // self.unit) for kind, least in owed.items()}
        self._all: dict[Hashable, int] = {}  # sums by kind
        self._sums: dict[Hashable, int] = {FREE: 1}  # those of them that meet what is owed
        self._lowest: dict[Hashable, int] = {}  # of these sums; -1 where there is none
        self._known: dict[tuple[int, int], int] = {}  # what was combined before: nearly all

    def put(self, kind: Hashable, sums: int) -> None:
        """Says which sums a kind can contribute."""
        if self._all.get(kind) == sums:
            return
        self._all[kind] = sums
        least = self._owed.get(kind, 0)
        sums = self._sums[kind] = sums >> least << least
        self._lowest[kind] = (sums & -sums).bit_length() - 1

    def owe(self, kind: Hashable, least: int) -> None:
        """Says what a kind must contribute at least."""
        self._owed[kind] = -(-least // self.unit)
        self.put(kind, self._all.pop(kind))

    def completes(self, rest: int) -> bool:
        """Whether some of these units sum to ``rest``, and each kind contributes what it owes."""
        if rest % self.unit or -1 in self._lowest.values():
            return False
        spare = rest // self.unit - sum(self._lowest.values())
        if spare < 0:
            return False
        # Mostly this is enough: each gives the least that it owes, and one after the other as much as it can.
        for kind, sums in self._sums.items():
            most = self._lowest[kind] + spare
            if sums >> most & 1:
                return True
            spare = most - (sums & (2 << most) - 1).bit_length() + 1
        reached = 1
        for sums in self._sums.values():
            reached = self._combined(reached, sums)
        return bool(reached >> rest // self.unit & 1)

    @property
    def largest(self) -> int:
        """The largest sum of units that owe nothing."""
        return (self._all[FREE].bit_length() - 1) * self.unit

    def _combined(self, left: int, right: int) -> int:
        if left == 1:
            return right
        known = self._known.get((left, right))
        if known is None:
            known = self._known[left, right] = combine(left, right) & self.everything
        return known


class Far(Reach):
    """All units at once, in no order.

    Args:
        counts: how many units there are of each kind and size.
        total: no sum above it matters.
        owed: what each kind must contribute at least.
    """

    def __init__(
        self, counts: Mapping[tuple[Hashable, int], int], total: int, owed: Mapping[Hashable, int]
    ) -> None:
        super().__init__(total, (size for _, size in counts if size <= total), owed)
        found = dict.fromkeys((FREE, *owed), 1)
        for (kind, size), count in counts.items():
            kind = kind if kind in owed else FREE
            sums, left, times = found[kind], min(count, total // size), 1
            while left and sums != self.everything:  # one, two, four, ... at once
                times = min(times, left)
                sums = (sums | sums << times * (size // self.unit)) & self.everything
                left, times = left - times, 2 * times
            found[kind] = sums
        for kind, sums in found.items():
            self.put(kind, sums)


class Near(Reach):
    """The units ahead, oldest first: each can be left behind. Only so many are looked at as are needed.

    Args:
        sizes: of all units of the queue.
        kinds: of each, ``FREE`` where it owes nothing.
        start: the first one to look at.
        end: the first one not to look at.
        total: no sum above it matters.
        owed: what each kind must contribute at least.

    Attributes:
        positions: of the units that matter, oldest last: of each kind and size the first as many as fit in.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        start: int,
        end: int,
        total: int,
        owed: Mapping[Hashable, int],
    ) -> None:
        room: dict[tuple[Hashable, int], int] = {}
        self.positions: list[int] = []
        for position in range(start, end):
            size = sizes[position]
            unit = kinds[position], size
            left = room.get(unit)
            if left is None:
                left = total // size
            if left:
                self.positions.append(position)
                room[unit] = left - 1
        self.positions.reverse()
        super().__init__(total, (size for _, size in room if size <= total), owed)
        self._stacks = {kind: [1] for kind in (FREE, *owed)}
        for position in self.positions:
            stack = self._stacks[kinds[position]]
            last = stack[-1]
            if last != self.everything:
                last = (last | last << sizes[position] // self.unit) & self.everything
            stack.append(last)
        for kind, stack in self._stacks.items():
            self.put(kind, stack[-1])

    def pass_over(self, kind: Hashable) -> None:
        """Leaves the next unit of this kind behind."""
        stack = self._stacks[kind]
        stack.pop()
        self.put(kind, stack[-1])


def combine(left: int, right: int) -> int:
    """All sums of one of the left and one of the right.

    Sums that lie side by side are added as one stretch.

    >>> bin(combine(0b101, 0b11))
    '0b1111'
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
