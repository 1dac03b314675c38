"""The groups that wait for a trainer: in the order they came, with counters that cost nothing to read."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Self

from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.packed import PackedGroup

__all__ = ["GroupQueue", "Place", "StoredGroup", "Unit"]


@dataclass(slots=True, eq=False)
class StoredGroup:
    """One accepted group: what is known of it, and its ids where these are in memory.

    Attributes:
        number: its place in the order of arrival.
        sequences: how many sequences it has.
        longest: tokens of its longest sequence.
        tokens: ids of all its sequences.
        bytes: what it takes, wherever it lies.
        env_id: the sender; None where it did not say.
        policy_version: lowest version that sampled in it; None where unknown.
        received_at: Unix seconds.
        data: the group as it is kept; None where it lies on disk only.
    """

    number: int
    sequences: int
    longest: int
    tokens: int
    bytes: int
    env_id: int | None
    policy_version: int | None
    received_at: float
    data: PackedGroup | None = None

    @classmethod
    def of(cls, number: int, incoming: Incoming, now: float) -> Self:
        """Gives an accepted group its number."""
        packed = incoming.packed
        lengths = packed.lengths
        return cls(
            number=number,
            sequences=len(lengths),
            longest=int(lengths.max()),
            tokens=int(lengths.sum()),
            bytes=len(packed.data),
            env_id=incoming.env_id,
            policy_version=incoming.policy_version,
            received_at=now,
            data=packed,
        )

    @property
    def packed(self) -> PackedGroup:
        """The group as it is kept, where it is known to be in memory."""
        assert self.data is not None, "it lies on disk only"
        return self.data

    @property
    def group_id(self) -> str:
        """Its name on the wire."""
        return f"g-{self.number}"


class Place(StrEnum):
    """Where a unit is."""

    QUEUED = "queued"
    LEASED = "leased"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Unit:
    """What is delivered whole: one group, or the parts of one that came in pieces.

    Attributes:
        groups: in the order of arrival.
        deliveries: how often it was handed out.
        step: number of the batch that it was first handed out in.
        passed_at: when a batch was first formed, or sought, without it though it was the oldest.
        came_under: newest version of the policy when it came, or to which that moved on while it was queued;
            groups that name no version count for this one.
        place: where it is now.
        number: its place in the queue.
        env_id: whose it is.
        sequences: sequences of all its groups.
    """

    groups: tuple[StoredGroup, ...]
    deliveries: int = 0
    step: int | None = None
    passed_at: float | None = None
    came_under: int | None = None
    place: Place = Place.GONE
    number: int = field(init=False)
    env_id: int | None = field(init=False)
    sequences: int = field(init=False)

    def __post_init__(self) -> None:
        # Looked at for every unit of the queue whenever a batch is formed.
        self.number = self.groups[0].number
        self.env_id = self.groups[0].env_id
        self.sequences = sum(group.sequences for group in self.groups)

    @property
    def tokens(self) -> int:
        """Ids of all its sequences."""
        return sum(group.tokens for group in self.groups)

    @property
    def bytes(self) -> int:
        """What it takes, wherever it lies."""
        return sum(group.bytes for group in self.groups)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(group.longest for group in self.groups)

    @property
    def policy_version(self) -> int | None:
        """The lowest version that is known of its groups."""
        versions = [group.policy_version for group in self.groups if group.policy_version is not None]
        return min(versions, default=None)


class GroupQueue:
    """Units in the order of arrival. One that comes back takes its old place again.

    Attributes:
        groups: number of groups.
        sequences: number of sequences.
        tokens: number of ids.
        bytes: what all of it takes.
        revision: grows whenever something comes or goes.
        groups_of: number of groups by environment.
        sequences_of: number of sequences by environment.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self._units: list[Unit] = []
        self.groups = 0
        self.sequences = 0
        self.tokens = 0
        self.bytes = 0
        self.revision = 0
        self.groups_of: Counter[int | None] = Counter()
        self.sequences_of: Counter[int | None] = Counter()
        self._sizes: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Unit]:
        return iter(self._units)

    def __getitem__(self, position: int) -> Unit:
        return self._units[position]

    @property
    def largest_group(self) -> int:
        """Sequences of the largest group; 0 where the queue is empty."""
        return max(self._sizes, default=0)

    def find(self, number: int) -> Unit | None:
        """Returns the unit of this number, if it is queued."""
        position = bisect_left(self._units, number, key=attrgetter("number"))
        if position < len(self._units) and self._units[position].number == number:
            return self._units[position]
        return None

    def add(self, unit: Unit) -> None:
        """Puts a unit where its number belongs."""
        unit.place = Place.QUEUED
        self._marks.unit(unit)
        insort(self._units, unit, key=attrgetter("number"))
        self._count(unit, 1)

    def remove(self, units: Iterable[Unit], place: Place) -> None:
        """Takes units out, to another place."""
        leaving = set(units)
        for unit in leaving:
            if unit.place is not Place.QUEUED:
                raise ValueError(f"unit {unit.number} is {unit.place}, not in the queue")
            unit.place = place
            self._marks.unit(unit)
            self._count(unit, -1)
        self._units = [unit for unit in self._units if unit not in leaving]

    def _count(self, unit: Unit, sign: int) -> None:
        self.revision += 1
        self.groups += sign * len(unit.groups)
        for group in unit.groups:
            self.sequences += sign * group.sequences
            self.tokens += sign * group.tokens
            self.bytes += sign * group.bytes
            self.groups_of[group.env_id] += sign
            self.sequences_of[group.env_id] += sign * group.sequences
            self._sizes[group.sequences] += sign
            if not self._sizes[group.sequences]:
                del self._sizes[group.sequences]
