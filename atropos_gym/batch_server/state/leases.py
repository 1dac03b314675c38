"""Batches that were handed out and are not yet used: who has them, until when, and how they end."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from atropos_gym.batch_server.state.group_queue import StoredGroup, Unit
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.refusals import Unknown

__all__ = ["Lease", "LeaseBook", "LeaseState"]

REMEMBERED = 1000
"""How many ended leases are remembered, so that a repeated ack gets its answer again."""


class LeaseState(StrEnum):
    """What became of a lease. All but ``OPEN`` are ends."""

    OPEN = "open"
    ACKED = "acked"
    REQUEUED = "requeued"
    DROPPED = "dropped"
    EXPIRED = "expired"


@dataclass(slots=True)
class Lease:
    """One delivery of one batch.

    Attributes:
        batch_id: its name; each delivery has its own.
        units: what is in it, oldest first; empty once the lease has ended.
        numbers: of these units; they stay.
        group_count: number of groups; it stays.
        step: number of the batch, the same at every delivery.
        first: whether this delivery counted the step.
        delivery: 1 for the first delivery.
        seconds: how long it lasts; None for a plain read, which is used up once handed over.
        expires_at: Unix seconds.
        state: whether and how it has ended.
        step_at_end: the server's step when it was acked.
        world_size: in how many parts it goes out; None where it goes out whole.
        asked_as: what the ranks call it.
        given_ranks: who has had a part.
        acked_ranks: who has acked one.
    """

    batch_id: str
    units: tuple[Unit, ...]
    numbers: tuple[int, ...]
    group_count: int
    step: int
    first: bool
    delivery: int
    seconds: float | None
    expires_at: float
    state: LeaseState = LeaseState.OPEN
    step_at_end: int = 0
    world_size: int | None = None
    asked_as: str | None = None
    given_ranks: tuple[int, ...] = ()
    acked_ranks: tuple[int, ...] = ()

    @property
    def groups(self) -> list[StoredGroup]:
        """All groups, in order."""
        return [group for unit in self.units for group in unit.groups]

    @property
    def sequences(self) -> int:
        """Sequences of all groups."""
        return sum(group.sequences for group in self.groups)


class LeaseBook:
    """The open leases, and the last ones that ended.

    Attributes:
        number: how many leases there have been.
        groups: groups under an open lease.
        bytes: what these take.
        in_parts: open leases that go out in parts, by what the ranks call them.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self._open: dict[str, Lease] = {}
        self.in_parts: dict[str, Lease] = {}
        self._ended: OrderedDict[str, Lease] = OrderedDict()
        self.number = 0
        self.groups = 0
        self.bytes = 0

    def __iter__(self) -> Iterator[Lease]:
        """The open leases, oldest first."""
        return iter(self._open.values())

    def __contains__(self, lease: Lease) -> bool:
        return self._open.get(lease.batch_id) is lease

    def open(self, units: list[Unit], *, step: int, first: bool, seconds: float | None, now: float) -> Lease:
        """Opens a lease on these units."""
        self.number += 1
        lease = Lease(
            batch_id=f"b-{self.number}",
            units=tuple(units),
            numbers=tuple(unit.number for unit in units),
            group_count=sum(len(unit.groups) for unit in units),
            step=step,
            first=first,
            delivery=max(unit.deliveries for unit in units),
            seconds=seconds,
            expires_at=math.inf if seconds is None else now + seconds,
        )
        self._add(lease)
        self._marks.lease(lease)
        return lease

    def find(self, batch_id: str) -> Lease:
        """Returns a lease, open or ended; raises ``Unknown``."""
        lease = self._open.get(batch_id) or self._ended.get(batch_id)
        if lease is None:
            raise Unknown(f"unknown batch_id {batch_id!r}")
        return lease

    def end(self, lease: Lease, state: LeaseState) -> None:
        """Ends a lease, or changes how an expired one has ended."""
        lease.state = state
        self._take_out(lease)
        lease.units = ()  # an ended lease must not keep its groups in memory
        self._ended[lease.batch_id] = lease
        self._marks.lease(lease)
        while len(self._ended) > REMEMBERED:
            self._marks.lease(self._ended.popitem(last=False)[1])

    def divide(self, lease: Lease, world_size: int, asked_as: str) -> None:
        """Makes a new lease one that goes out in parts."""
        lease.world_size, lease.asked_as = world_size, asked_as
        self.in_parts[asked_as] = lease

    def give(self, lease: Lease, rank: int) -> None:
        """Notes that a rank has its part."""
        lease.given_ranks = tuple(sorted({*lease.given_ranks, rank}))
        self._marks.lease(lease)

    def ack(self, lease: Lease, rank: int) -> bool:
        """Notes that a rank has used its part; returns whether all have."""
        lease.acked_ranks = tuple(sorted({*lease.acked_ranks, rank}))
        self._marks.lease(lease)
        return len(lease.acked_ranks) == lease.world_size

    def extend(self, lease: Lease, seconds: float, now: float) -> None:
        """Gives an open lease more time, counted from now."""
        lease.seconds, lease.expires_at = seconds, now + seconds
        self._marks.lease(lease)

    def renew(self, now: float) -> None:
        """Gives every open lease its whole time from now: without a server nobody could extend it."""
        for lease in self._open.values():
            if lease.seconds is not None and lease.expires_at < now + lease.seconds:
                self.extend(lease, lease.seconds, now)

    def reopen(self, lease: Lease, units: list[Unit]) -> None:
        """Opens an expired lease again, with its old units."""
        del self._ended[lease.batch_id]
        lease.state = LeaseState.OPEN
        lease.units = tuple(units)
        self._add(lease)
        self._marks.lease(lease)

    def restore(self, lease: Lease) -> None:
        """Puts a saved lease into the book."""
        if lease.state is LeaseState.OPEN:
            self._add(lease)
        else:
            self._ended[lease.batch_id] = lease

    def knows(self, lease: Lease) -> bool:
        """Whether a lease is open, or has ended and is remembered."""
        return lease in self or self._ended.get(lease.batch_id) is lease

    def forget(self, lease: Lease) -> None:
        """Removes a lease that never reached anyone."""
        self._take_out(lease)
        self._marks.lease(lease)

    def _add(self, lease: Lease) -> None:
        self._open[lease.batch_id] = lease
        if lease.asked_as is not None:
            self.in_parts[lease.asked_as] = lease
        self._count(lease, 1)

    def _take_out(self, lease: Lease) -> None:
        if self._open.pop(lease.batch_id, None) is not None:
            self._count(lease, -1)
            if lease.asked_as is not None and self.in_parts.get(lease.asked_as) is lease:
                del self.in_parts[lease.asked_as]

    def _count(self, lease: Lease, sign: int) -> None:
        self.groups += sign * sum(len(unit.groups) for unit in lease.units)
        self.bytes += sign * sum(unit.bytes for unit in lease.units)

    @property
    def unread(self) -> list[Lease]:
        """Open leases of plain reads: nobody knows yet whether they arrive."""
        return [lease for lease in self._open.values() if lease.seconds is None]

    def expired(self, now: float) -> list[Lease]:
        """Open leases whose time is up."""
        return [lease for lease in self._open.values() if lease.expires_at <= now]
