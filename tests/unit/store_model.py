"""What every store promises under any interleaving of calls, as a state machine for hypothesis.

1. each group reaches a trainer that acks it, or a plain reader that reads to the end, exactly once; again
   only where its lease ran out or was given back,
2. batches are whole, oldest first, and sum up exactly unless that was counted as a short one,
3. a rank gets the same part however often it asks, and the parts of a batch share no group,
4. no group is delivered that was older than the trainer's ``max_policy_lag`` when its batch was formed,
5. a plain read that did not arrive changes nothing,
6. what is not delivered in the end was dropped by a trainer or had become useless to it,
7. what is delivered is what was posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_tools import NOW, PLAIN, add_env, names, publish, registration, version

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.group_queue import StoredGroup
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.leases import Lease, LeaseState
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.parts import Part, Share
from atropos_gym.batch_server.state.refusals import Conflict, Refused
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.wire import ScoredDataGroup

LIMITS = Limits(max_deliveries=10**6, env_timeout=10**9)
RANKS = 2
LAG = 1

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {"batch_size": 6},
    "exact": {"batch_size": 4, "exact_batches": True},
    "in groups": {"batch_size": 6, "groups_per_update": 2},
    "fresh": {"batch_size": 6, "groups_per_update": 2, "max_policy_lag": LAG},
}


NAMES = st.sampled_from(("fresh", "usual", "fresh", "exact", "in groups"))


class Given:
    """One batch that somebody has under a lease."""

    def __init__(self, lease: Lease) -> None:
        whole = lease.whole if isinstance(lease, Part) else lease
        assert whole is not None
        self.batch_id = lease.batch_id
        self.groups = names(whole)
        self.ranks = None if lease.world_size is None else range(lease.world_size)
        self.parts: dict[int, list[str]] = {}


class StoreModel(RuleBasedStateMachine):
    """The rules; a subclass says which store they are tried on.

    Attributes:
        always: name of the settings that the trainer keeps; "" where it changes them.
    """

    always = ""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.newest: int | None = None
        self.posted: dict[str, ScoredDataGroup] = {}
        self.used: list[str] = []
        self.useless: set[str] = set()  # dropped by a trainer, or too old or too large for one that was there
        self.given: dict[str, Given] = {}
        self.store = self.open()

    def open(self) -> MemoryStore:
        """Makes the store."""
        raise NotImplementedError

    @initialize(name=NAMES)
    def start(self, name: str) -> None:
        self.register(self.always or name)
        self.publish(1)
        assert self.store.take(PLAIN, self.now) is None
        for size in (2, 4):
            add_env(self.store, self.now, group_size=size)

    # Trainers come and versions grow.

    @rule(name=NAMES, dice=st.integers(1, 6))
    def take_over(self, name: str, dice: int) -> None:
        if dice == 6 and not self.always:  # else no settings would hold for long
            self.register(name)

    def register(self, name: str) -> None:
        self.settings = registration(**SETTINGS[name])
        self.store.register(self.settings, self.now, takeover=True)
        self._judge()

    @rule(step=st.integers(1, 2))
    def publish(self, step: int) -> None:
        self.newest = 0 if self.newest is None else self.newest + step
        publish(self.store, self.newest)
        self._judge()

    def _judge(self) -> None:
        """Notes which groups the trainer that is there now could not use."""
        self.useless |= {name for name, group in self.posted.items() if self._too_old(group)}
        if self.settings.groups_per_update is None:
            size = self.settings.batch_size
            self.useless |= {name for name, group in self.posted.items() if group.size > size}

    def _too_old(self, group: ScoredDataGroup) -> bool:
        lag, number = self.settings.max_policy_lag, (group.group_overrides or {}).get("policy_version")
        return None not in (lag, self.newest, number) and number < self.newest - lag

    # Groups come.

    @rule(
        sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
        env_id=st.none() | st.integers(0, 2),
        behind=st.sampled_from((0, 1, 2, None)),
    )
    def post(self, sizes: list[int], env_id: int | None, behind: int | None) -> None:
        for sequences in sizes:
            self._post(sequences, env_id, behind)

    def _post(self, sequences: int, env_id: int | None, behind: int | None) -> None:
        overrides: dict[str, Any] = {}
        if env_id is None and behind is not None and self.newest is not None:
            overrides = version(max(0, self.newest - behind))
        group = ScoredDataGroup(
            tokens=[[1, 2]] * sequences,
            masks=[[-100, 2]] * sequences,
            scores=[float(len(self.posted))] * sequences,
            env_id=env_id,
            **overrides,
        )
        try:
            (receipt,) = self.store.add_groups([Incoming.of(group)], self.now)
        except Refused:
            assert sequences > self.settings.batch_size
            return
        self.posted[receipt.group_id] = group
        if self._too_old(group):
            self.useless.add(receipt.group_id)

    @rule(env_id=st.integers(0, 1))
    def leave(self, env_id: int) -> None:
        self.store.disconnect_env(env_id)

    @rule(seconds=st.integers(1, 70))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.tick(self.now)

    @rule()
    def save(self) -> None:
        self.store.save()

    # Batches go out.

    @rule(
        groups=st.none() | st.integers(1, 3),
        partial=st.booleans(),
        arrives=st.sampled_from((True, True, False)),
    )
    def read(self, groups: int | None, partial: bool, arrives: bool) -> None:
        before = self._standing()
        lease = self._take(Request(groups=groups, partial=partial))
        if lease is None:
            return
        if not arrives:
            self.store.put_back(lease)
            assert self._standing() == before
            return
        self.used += self._read(lease)
        self.store.delivered(lease)

    @rule(seconds=st.integers(5, 90), groups=st.none() | st.integers(1, 3), arrives=st.booleans())
    def lease(self, seconds: int, groups: int | None, arrives: bool) -> None:
        lease = self._take(Request(groups=groups, lease_seconds=seconds))
        if lease is None:
            return
        self._read(lease)
        if not arrives:
            self.store.put_back(lease)
            return
        self.store.delivered(lease)
        self.given[lease.batch_id] = Given(lease)

    @rule(
        ranks=st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=3),
        step=st.none() | st.integers(0, 2),
        seconds=st.integers(5, 90),
        arrives=st.booleans(),
    )
    def lease_parts(self, ranks: list[int], step: int | None, seconds: int, arrives: bool) -> None:
        for rank in ranks:
            self._lease_part(rank, step, seconds, arrives)

    def _lease_part(self, rank: int, step: int | None, seconds: int, arrives: bool) -> None:
        part = self._take(Request(lease_seconds=seconds, share=Share(rank, RANKS, step)))
        if part is None:
            return
        mine = self._read(part)
        given = self.given.setdefault(part.batch_id, Given(part))
        assert given.parts.setdefault(rank, mine) == mine
        whole = [name for found in given.parts.values() for name in found]
        assert len(set(whole)) == len(whole)
        assert sorted(whole) == sorted(given.groups) or len(given.parts) < RANKS
        if arrives:
            self.store.delivered(part)
        else:
            self.store.put_back(part)

    def _take(self, request: Request) -> Lease | None:
        """Asks for a batch and looks at what it is made of."""
        known, short = set(self.store._stock.leases._open), self.store._tallies.short_batches
        lease = self.store.take(request, self.now)
        if lease is None or lease.batch_id in known:
            return lease
        whole = lease.whole if isinstance(lease, Part) else lease
        assert whole is not None
        found = names(whole)
        assert list(whole.numbers) == sorted(whole.numbers)  # parts of a group stand where its first one does
        assert not any(self._too_old(self.posted[name]) for name in found)
        asked = request.groups or self.settings.groups_per_update
        wanted = self.settings.batch_size if asked is None else asked
        size = whole.sequences if asked is None else whole.group_count
        counted = self.store._tallies.short_batches - short
        assert 0 < size <= wanted
        assert (size < wanted) == bool(counted) or (request.partial and not counted)
        assert not (counted and self.settings.exact_batches)
        return lease

    def _read(self, lease: Lease) -> list[str]:
        """Reads a batch's groups; returns their names."""
        found = names(lease)
        for name, packed in zip(found, self.store.fetch(lease).result(20), strict=True):
            assert packed.scores.tolist() == self.posted[name].scores
        return found

    # They end.

    @precondition(lambda self: self.given)
    @rule(which=st.integers(0, 99), rank=st.integers(0, RANKS - 1))
    def ack(self, which: int, rank: int) -> None:
        given = self._one_of_given(which)
        try:
            lease = self.store.ack(given.batch_id, None if given.ranks is None else rank)
        except Conflict:
            self._is_lost(given)
            return
        if lease.state is LeaseState.ACKED:
            assert given.ranks is None or lease.acked_ranks == tuple(given.ranks)
            assert self.store.ack(given.batch_id, None if given.ranks is None else rank) is lease
            self.used += given.groups
            del self.given[given.batch_id]

    @precondition(lambda self: self.given)
    @rule(which=st.integers(0, 99), drop=st.booleans())
    def nack(self, which: int, drop: bool) -> None:
        given = self._one_of_given(which)
        try:
            self.store.nack(given.batch_id, drop=drop)
        except Conflict:
            self._is_lost(given)
            return
        if drop:
            self.useless |= set(given.groups)
        del self.given[given.batch_id]

    @precondition(lambda self: self.given)
    @rule(which=st.integers(0, 99), seconds=st.integers(5, 90))
    def extend(self, which: int, seconds: int) -> None:
        given = self._one_of_given(which)
        try:
            lease = self.store.extend(given.batch_id, seconds, self.now)
        except Conflict:
            self._is_lost(given)
            return
        assert (lease.state, lease.expires_at) == (LeaseState.OPEN, self.now + seconds)

    def _one_of_given(self, which: int) -> Given:
        return list(self.given.values())[which % len(self.given)]

    def _is_lost(self, given: Given) -> None:
        """It ran out, and its groups went to someone else or were set aside: nobody has them from it."""
        assert self.store._stock.leases.find(given.batch_id).state is LeaseState.EXPIRED
        del self.given[given.batch_id]

    # What holds all the time.

    def groups(self) -> Iterator[StoredGroup]:
        """Every group that the store has."""
        stock = self.store._stock
        units = [*stock.queue, *(unit for lease in stock.leases for unit in lease.units)]
        yield from (group for unit in units for group in unit.groups)
        yield from (part for env in self.store._envs for part in env.buffer)

    def _standing(self) -> tuple[Any, ...]:
        stock = self.store._stock
        return (
            [group.number for unit in stock.queue for group in unit.groups],
            stock.step,
            stock.leases.groups,
        )

    @invariant()
    def nothing_lost_nothing_twice(self) -> None:
        there = [group.group_id for group in self.groups()]
        assert len(set(there)) == len(there)
        assert len(set(self.used)) == len(self.used)
        assert not set(there) & set(self.used)
        assert self.posted.keys() - set(there) - set(self.used) <= self.useless

    @invariant()
    def counters_count(self) -> None:
        there, stock = list(self.groups()), self.store._stock
        buffered = sum(len(env.buffer) for env in self.store._envs)
        assert stock.queue.groups + stock.leases.groups + buffered == len(there)
        assert self.store.held_bytes == sum(group.bytes for group in there)
        assert stock.queue.sequences == sum(unit.sequences for unit in stock.queue)

    def teardown(self) -> None:
        self.now += 1000
        self.store.tick(self.now)
        for request in (Request(groups=1), Request(groups=9, partial=True)):
            while (lease := self.store.take(request, self.now)) is not None:
                self.used += self._read(lease)
                self.store.delivered(lease)
        assert not list(self.groups())
        assert len(set(self.used)) == len(self.used)
        assert self.posted.keys() - set(self.used) <= self.useless
        self.store.close()
