"""Which queued units make a batch: pure functions over sizes and owners, without I/O and without a clock.

A *unit* is what is never split: one group, or the parts of one group that came in pieces. Units are given
oldest first. Of all sets that fit, the oldest-first one is chosen: it takes the oldest unit if any solution
does, then the next one, and so on, up to ``ENOUGH`` work.

What sums can be made at all is computed in ``_sums.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from atropos_gym.batch_server._sums import FIRST_LOOK, FREE, Far, Near, Work

__all__ = ["ENOUGH", "Plan", "choose", "choose_below", "plan_batch", "shares"]

ENOUGH = 1 << 31
"""Bits that the search for the oldest-first set may move, once it is known that there is one: 0.1 s or so.

With one odd unit among 10,000 even ones and 16 environments, batches of 8,193 need a hundredth of it, batches
of 32,769 most. Beyond, the set is still exact and owes nobody anything, but older units may be left behind:
only those are taken that the set at hand can hold with one environment giving less.
"""


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
    least = least or {}
    kinds = [FREE] * len(sizes) if owners is None else _kinds(owners, least)
    search = _Search(sizes, kinds, Counter(zip(kinds, sizes, strict=True)), total, least)
    return search.oldest_first() if search.completes() else None


def choose_below(sizes: Sequence[int], total: int) -> list[int]:
    """Chooses the largest set below ``total`` that holds the oldest unit, oldest first.

    >>> choose_below([4, 4, 4, 4], 10)
    [0, 1]
    >>> choose_below([8, 8], 12)
    [0]
    """
    others = sizes[1:]
    room = max(0, min(total - 1 - sizes[0], sum(others)))
    rest = choose(others, Far(Counter((FREE, size) for size in others), room, {}).largest)
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
        hurried: to find the oldest-first of all exact sets was too much work; this one is exact, and minimums
            are met as they would be, but an older unit may have been left for the next batch.
    """

    chosen: tuple[int, ...] = ()
    short: bool = False
    reason: str = ""
    stuck: bool = False
    hurried: bool = False


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
    Plan(chosen=(), short=False, reason='no groups sum to 8', stuck=True, hurried=False)
    >>> plan_batch([6, 6], [None] * 2, 8, overdue=True)
    Plan(chosen=(0,), short=True, reason='', stuck=False, hurried=False)
    """
    queued = sum(sizes)
    if queued < batch_size:
        return Plan(reason=f"{queued} of {batch_size} {noun} queued")
    least: dict[Hashable, int] = {}
    if minimums:
        counts = Counter(zip(owners, sizes, strict=True))
        by_owner: dict[Hashable, int] = {}
        for (owner, size), count in counts.items():
            by_owner[owner] = by_owner.get(owner, 0) + count * size
        least = shares(minimums, by_owner, batch_size)
    hurried = False
    if least:
        search = _Search(sizes, _kinds(owners, least), counts, batch_size, least)
        chosen = search.oldest_first() if search.give_way() else None
        hurried = search.hurried
    else:
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
    return Plan(chosen=tuple(chosen), stuck=passed_over, hurried=hurried)


def _exact_prefix(sizes: Sequence[int], total: int) -> list[int] | None:
    """The first units, where they happen to sum up: the usual case of equal groups."""
    for count, reached in enumerate(accumulate(sizes), start=1):
        if reached >= total:
            return list(range(count)) if reached == total else None
    return None


def _kinds(owners: Sequence[Hashable], least: Mapping[Hashable, int]) -> list[Hashable]:
    """Owners that must contribute, by name; all others are of one kind."""
    return [owner if owner in least else FREE for owner in owners]


class _Search:
    """The search for the oldest-first set: unit by unit, each is taken if those ahead complete the sum.

    Args:
        sizes: of the units, oldest first.
        kinds: whose they are, ``FREE`` where the owner owes nothing.
        counts: how many there are of each owner and size.
        total: the sum that is wanted.
        least: what each kind owes.

    Attributes:
        hurried: whether units were passed over that might have been taken, because it was ``ENOUGH`` work.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        kinds: Sequence[Hashable],
        counts: Mapping[tuple[Hashable, int], int],
        total: int,
        least: Mapping[Hashable, int],
    ) -> None:
        self._sizes, self._kinds, self._counts, self._total = sizes, kinds, counts, total
        self._rest = total
        self._most = total  # that may be left, if what is being tried turns out wrong
        self._owed = dict(least)
        self._at = 0  # the first unit that is still ahead
        self._end = min(FIRST_LOOK, len(sizes))
        self._far: Far | None = None  # only where the first ones are not enough
        self._work = Work()
        self.hurried = False
        self._near = self._look()

    def _look(self) -> Near:
        return Near(self._sizes, self._kinds, self._at, self._end, self._most, self._owed, self._work)

    def completes(self, taken: Hashable = FREE) -> bool:
        """Whether those ahead complete the sum; looks at more of them where the nearest do not.

        Args:
            taken: whose unit was taken last.
        """
        while not self._near.completes(self._rest, taken):
            if self._end == len(self._sizes):
                return False
            self._far = self._far or Far(self._counts, self._total, self._owed, self._work)
            if not self._far.completes(self._rest, taken):  # nor would they with those that are behind
                return False
            self._end = min(len(self._sizes), 4 * self._end)
            before, self._near = self._near, self._look()
            self._near.follow(before)
        return True

    def give_way(self) -> bool:
        """Forgets the last of what is owed, until the sum can be completed; returns whether it can."""
        if self.completes():
            return True
        sizes = Counter((FREE, size) for size in self._sizes)
        if not Far(sizes, self._total, {}, self._work).completes(self._total):
            return False  # nor would they if nobody owed anything
        while not self.completes():
            owing = [kind for kind, least in self._owed.items() if least]
            self._owe(owing[-1], 0)
        return True

    def oldest_first(self) -> list[int]:
        """Positions of the set, where the sum can be completed."""
        chosen: list[int] = []
        # Once a unit of some owner and size cannot be taken, no later one like it can: swapping the two would
        # have been a solution. So each kind of unit is refused once, however long the queue is.
        refused: set[tuple[Hashable, int]] = set()
        self._work.bits = 0
        while self._rest:
            position = self._near.positions.pop()
            size, kind = self._sizes[position], self._kinds[position]
            self._at = position + 1
            self._near.pass_over(kind)
            if size > self._rest or (kind, size) in refused:
                continue
            if self._take(kind, size):
                chosen.append(position)
            elif not self.hurried:
                refused.add((kind, size))
        return chosen

    def _take(self, kind: Hashable, size: int) -> bool:
        """Takes the unit that was just passed, if those ahead can then complete the sum."""
        before = self._owed.get(kind, 0)
        self._rest -= size
        self._owe(kind, max(0, before - size))
        if self._completes_without(kind):
            self._most = self._rest
            return True
        self._rest += size
        self._owe(kind, before)
        return False

    def _completes_without(self, kind: Hashable) -> bool:
        """Whether those ahead complete the sum that a unit of this kind has left over.

        After much work only parts like the last ones are tried. They always do for a unit that cannot be left
        behind: without it, its kind can give exactly so much less.
        """
        if self._work.bits <= ENOUGH:
            return self.completes(kind)
        if self._near.completes(self._rest, kind, combining=False):
            return True
        self.hurried = True
        return False

    def _owe(self, kind: Hashable, least: int) -> None:
        if least == self._owed.get(kind, 0):
            return
        self._owed[kind] = least
        self._near.owe(kind, least)
        if self._far is not None:
            self._far.owe(kind, least)
