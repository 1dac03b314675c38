"""Sums that units can make up together, as bits: bit s of an integer is 1 where some subset sums to s.

Units are of kinds. What each kind can contribute is a set of its own, because some owe a part of the sum.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

__all__ = ["FREE", "Far", "Near", "Reach", "Work", "combine", "meet", "stretches"]

FREE = object()
"""The kind of all units that owe nothing."""

FIRST_LOOK = 256
"""So many units are looked at first."""

STRIDES = range(1, 17)
"""Distances of sums that are looked for: a few odd units among even ones leave gaps of two."""

KEPT = 512
"""So many combinations are kept."""

PER_COMBINATION = 64
"""What goes before its steps, in these, and what it takes to say how two sets make a sum."""

MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
"""Each byte with its bits in reverse."""


@dataclass(slots=True)
class Work:
    """What a plan has cost so far: counted, because a clock would choose other units on a slow machine.

    Attributes:
        combinations: pairs of sets of sums that were combined.
        bits: that were moved for it, about.
    """

    combinations: int = 0
    bits: int = 0

    def count(self, steps: int, bits: int) -> None:
        """Counts a combination of sets of so many bits that takes so many steps."""
        self.combinations += 1
        self.bits += (steps + PER_COMBINATION) * bits


class Reach:
    """What units can contribute to a sum, kind by kind.

    It remembers what each kind contributed to the last sum that could be made. Mostly nearly the same parts
    make the next sum, and nothing needs to be combined.

    Args:
        total: no sum above it matters.
        sizes: of all units. Where these are multiples of a number, sums are counted in it: then nearly all
            of them can be made, and such sets are the easiest to combine.
        owed: what each kind must contribute at least.
        work: where it is counted.

    Attributes:
        parts: what each kind contributed to the last sum that could be made, counted in ``unit``.
        unit: what divides all sizes.
    """

    def __init__(
        self, total: int, sizes: Iterable[int], owed: Mapping[Hashable, int], work: Work | None = None
    ) -> None:
        self.unit = gcd(*sizes) or 1
        self.everything = (2 << total // self.unit) - 1
        self.parts: dict[Hashable, int] = {}
        self._work = work or Work()
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

    def completes(self, rest: int, first: Hashable = FREE, *, combining: bool = True) -> bool:
        """Whether some of these units sum to ``rest``, and each kind contributes what it owes.

        Args:
            rest: the sum.
            first: the kind that most likely contributes less than to the last sum.
            combining: otherwise only near parts are tried, and False does not mean that there are none.
        """
        if rest % self.unit or -1 in self._lowest.values():
            return False
        spare = rest // self.unit - sum(self._lowest.values())
        if spare < 0:
            return False
        parts = self._one_after_the_other(spare) or self._like_last(rest // self.unit, first)
        if not parts and combining:
            parts = self._any(rest // self.unit)
        if parts:
            self.parts = parts
        return bool(parts)

    def follow(self, other: Reach) -> None:
        """Begins with the parts that others contributed, who are counted in another unit."""
        in_unit = {kind: divmod(part * other.unit, self.unit) for kind, part in other.parts.items()}
        self.parts = {kind: -1 if odd else part for kind, (part, odd) in in_unit.items()}

    def _one_after_the_other(self, spare: int) -> dict[Hashable, int]:
        """Each kind gives the least that it owes, and one after the other as much as it can."""
        parts = self._lowest.copy()
        for kind, sums in self._sums.items():
            most = parts[kind] + spare
            if sums >> most & 1:
                parts[kind] = most
                return parts
            parts[kind] = (sums & (2 << most) - 1).bit_length() - 1
            spare = most - parts[kind]
        return {}

    def _like_last(self, rest: int, first: Hashable) -> dict[Hashable, int]:
        """The last parts, one of them less by what the sum is less; {} where that does not do."""
        if not self.parts:
            return {}
        less = sum(self.parts.values()) - rest
        missing = [kind for kind, part in self.parts.items() if not self._has(kind, part)]
        if len(missing) > 1:
            return {}
        if not missing and not less:
            return self.parts
        for kind in missing or (first, *self.parts):
            if self._has(kind, self.parts[kind] - less):
                return self.parts | {kind: self.parts[kind] - less}
        return {}

    def _has(self, kind: Hashable, part: int) -> bool:
        return part >= 0 and bool(self._sums[kind] >> part & 1)

    def _any(self, rest: int) -> dict[Hashable, int]:
        """Parts that sum to ``rest`` of whatever they are; {} where there are none.

        Sums are combined in pairs, and pairs of these: when one kind changes, few are combined anew.
        """
        levels = [list(self._sums.values())]
        while len(levels[-1]) > 2:
            last = levels[-1]
            pairs = [self._combined(*last[at : at + 2]) for at in range(0, len(last) - 1, 2)]
            levels.append(pairs + last[2 * len(pairs) :])
        found = [rest]
        for level in reversed(levels):
            split: list[int] = []
            for at, part in enumerate(found):
                pair = level[2 * at : 2 * at + 2]
                if len(pair) == 1:
                    split.append(part)
                    continue
                self._work.bits += PER_COMBINATION * part
                left = meet(pair[0], pair[1], part)
                if left < 0:
                    return {}
                split += [left, part - left]
            found = split
        parts = dict(zip(self._sums, found, strict=True))
        return parts if len(parts) > 1 or self._has(FREE, rest) else {}

    @property
    def largest(self) -> int:
        """The largest sum of units that owe nothing."""
        return (self._all[FREE].bit_length() - 1) * self.unit

    def _combined(self, left: int, right: int) -> int:
        known = self._known.get((left, right))
        if known is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._work.count(stretches(left, right)[0], self.everything.bit_length())
            known = self._known[left, right] = combine(left, right) & self.everything
        return known


class Far(Reach):
    """All units at once, in no order.

    Args:
        counts: how many units there are of each kind and size.
        total: no sum above it matters.
        owed: what each kind must contribute at least.
        work: where it is counted.
    """

    def __init__(
        self,
        counts: Mapping[tuple[Hashable, int], int],
        total: int,
        owed: Mapping[Hashable, int],
        work: Work | None = None,
    ) -> None:
        super().__init__(total, (size for _, size in counts if size <= total), owed, work)
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
        work: where it is counted.

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
        work: Work | None = None,
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
        super().__init__(total, (size for _, size in room if size <= total), owed, work)
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


def stretches(left: int, right: int) -> tuple[int, int, int, int]:
    """In how few stretches of equal distance the sums of one of two sets lie.

    Returns:
        How many there are, the distance, the set that has them, and the other one.

    >>> stretches(0b1010101, 0b11001101)[:2]
    (1, 2)
    """
    few, many = (left, right) if left.bit_count() <= right.bit_count() else (right, left)
    found = (few.bit_count(), 1, few, many)
    for stride in STRIDES:
        for one, other in ((few, many), (many, few)):
            count = (one & ~(one << stride)).bit_count()
            if count < found[0]:
                found = (count, stride, one, other)
        if found[0] < 3:
            break
    return found


def combine(left: int, right: int) -> int:
    """All sums of one of the left and one of the right.

    Sums of equal distance are added as one stretch.

    >>> bin(combine(0b101, 0b11))
    '0b1111'
    """
    _, stride, split, whole = stretches(left, right)
    starts = split & ~(split << stride)
    lasts = split & ~(split >> stride)
    ends: dict[int, list[int]] = {}  # of each remainder, the nearest last
    for at in reversed(_bits(lasts)):
        ends.setdefault(at % stride, []).append(at)
    stretched = {0: whole, 1: whole}  # by length, powers of two
    combined = 0
    for start in _bits(starts):
        length = (ends[start % stride].pop() - start) // stride + 1
        width = 1
        while 2 * width <= length:
            if 2 * width not in stretched:
                stretched[2 * width] = stretched[width] | stretched[width] << width * stride
            width *= 2
        stretch = stretched[width]
        combined |= (stretch | stretch << (length - width) * stride) << start
    return combined


def meet(left: int, right: int, total: int) -> int:
    """The least of the left with which one of the right sums to ``total``; -1 where there is none.

    >>> meet(0b1011, 0b101, 3)
    1
    """
    length = total // 8 + 1
    mirrored = (right & (2 << total) - 1).to_bytes(length, "little").translate(MIRRORED)
    both = left & int.from_bytes(mirrored, "big") >> 8 * length - 1 - total
    return (both & -both).bit_length() - 1


def _bits(numbers: int) -> list[int]:
    """Which bits are set, ascending."""
    found: list[int] = []
    at = -1
    for gap in f"{numbers:b}"[::-1].split("1")[:-1]:
        at += len(gap) + 1
        found.append(at)
    return found
