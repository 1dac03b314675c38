"""Accepted groups from the queue to a trainer: forming batches, leasing them, taking them back.

The rules of what fits with what are in ``batching.py``, and ``seeking.py`` looks for a batch; this keeps the
state that they are applied to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_gym.batch_server.batching import Plan, choose_below
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.env_book import EnvBook
from atropos_gym.batch_server.state.group_queue import GroupQueue, Place, StoredGroup, Unit
from atropos_gym.batch_server.state.leases import Lease, LeaseBook, LeaseState
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.parts import Part, RankCalls, Share
from atropos_gym.batch_server.state.refusals import Conflict
from atropos_gym.batch_server.state.seeking import Sought, seek
from atropos_gym.batch_server.state.tallies import Tallies
from atropos_gym.wire import Registration

__all__ = ["Request", "Stock"]

REMEMBERED = 10_000
"""How many units that were set aside are remembered by number, for acks that come late."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a trainer asks of GET ``/batch``.

    Attributes:
        groups: so many whole groups instead of ``batch_size`` sequences.
        partial: fewer groups will do, at least one.
        lease_seconds: lease instead of use up.
        share: only one rank's part of a batch; it needs a lease.
    """

    groups: int | None = None
    partial: bool = False
    lease_seconds: float | None = None
    share: Share | None = None


class Stock:
    """Queue and leases, and the number of batches so far.

    Attributes:
        queue: what waits.
        leases: what was handed out.
        step: number of batches that were handed out for the first time.
        config: the trainer's settings; None before it registered.
        policy_version: the newest version; None before the first.
        groups_of_version: groups that came for the newest version and were not lost since.
        reason: why the last request got no batch.
        tallies: what did not go the usual way.
        limits: times and bounds that hold now.
    """

    def __init__(self, envs: EnvBook, tallies: Tallies, limits: Limits, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self.queue = GroupQueue(self._marks)
        self.leases = LeaseBook(self._marks)
        self.step = 0
        self.config: Registration | None = None
        self.policy_version: int | None = None
        self.groups_of_version = 0
        self.reason = ""
        self._envs = envs
        self.tallies = tallies
        self.limits = limits
        self._turn = 0
        self._rank_calls = RankCalls()
        self._asked: int | None = None  # groups that the last request named
        self._why: tuple[object, str] = None, ""
        self._ready: tuple[Unit, ...] = ()  # a batch that could be formed when that was asked last
        self._aside: dict[int, str] = {}  # numbers of the units set aside last, with the reason

    def restore(self, state: Mapping[str, Any], aside: Mapping[int, str]) -> None:
        """Goes on from what :meth:`state` said; units and leases are put back one by one."""
        config = state["config"]
        self.config = None if config is None else Registration.model_validate(config)
        self.step, self._turn = state["step"], state["turn"]
        self.policy_version, self.groups_of_version = state["policy_version"], state["groups_of_version"]
        self.leases.number = state["batches"]
        self._rank_calls = RankCalls(state.get("rank_calls"))
        self._aside = dict(aside)

    def state(self) -> dict[str, Any]:
        """What is to be saved besides units and leases."""
        return {
            "config": None if self.config is None else self.config.model_dump(),
            "step": self.step,
            "turn": self._turn,
            "policy_version": self.policy_version,
            "groups_of_version": self.groups_of_version,
            "batches": self.leases.number,
            "rank_calls": self._rank_calls.state(),
        }

    # What comes in.

    def put(self, groups: Iterable[StoredGroup]) -> None:
        """Queues the groups as one unit: they will be delivered together."""
        unit = Unit(tuple(groups), came_under=self.policy_version)
        self.groups_of_version += self._of_version(unit)
        self._enqueue(unit)

    def _enqueue(self, unit: Unit) -> None:
        misfit = self._misfit(unit)
        if misfit:
            self._set_aside(unit, misfit)
        else:
            self.queue.add(unit)

    def _misfit(self, unit: Unit) -> str:
        """Why no batch can ever hold this unit; "" where one can."""
        if unit.deliveries >= self.limits.max_deliveries:
            return f"handed out {self.limits.max_deliveries} times without an ack"
        config = self.config
        if config is None:
            return ""
        if config.groups_per_update is None and unit.sequences > config.batch_size:
            return "more sequences than batch_size"
        if 0 < config.max_token_len < unit.longest:
            return "a sequence longer than max_token_len"
        lag, newest, version = config.max_policy_lag, self.policy_version, unit.policy_version
        if lag is not None and newest is not None and version is not None and version < newest - lag:
            return "older than max_policy_lag"
        return ""

    def _set_aside(self, unit: Unit, reason: str) -> None:
        unit.place = Place.GONE
        self.tallies.count_set_aside(reason, len(unit.groups))
        self.groups_of_version -= self._of_version(unit)
        self._aside[unit.number] = self._marks.aside[unit.number] = reason
        self._marks.unit(unit)
        while len(self._aside) > REMEMBERED:
            oldest = next(iter(self._aside))
            del self._aside[oldest]
            self._marks.aside[oldest] = None

    def _of_version(self, unit: Unit) -> int:
        """How many of its groups count for the newest version; who does not say, counts."""
        if self.policy_version is None:
            return len(unit.groups)
        return sum(
            (unit.came_under if group.policy_version is None else group.policy_version) == self.policy_version
            for group in unit.groups
        )

    def sweep(self) -> None:
        """Sets aside what no longer fits, after settings or version have changed."""
        misfits = [(unit, reason) for unit in self.queue if (reason := self._misfit(unit))]
        self.queue.remove([unit for unit, _ in misfits], Place.GONE)
        for unit, reason in misfits:
            self._set_aside(unit, reason)

    def follow(self, version: int) -> None:
        """Goes on to a newer version of the policy."""
        self.policy_version = version
        for unit in self.queue:
            unit.came_under = version
            self._marks.unit(unit)
        self.groups_of_version = sum(map(self._of_version, self.queue))
        self.sweep()

    @property
    def groups_wanted(self) -> int | None:
        """What the newest version still lacks; None where the trainer does not count in groups."""
        if self.config is None or self.config.groups_per_update is None:
            return None
        return max(0, self.config.groups_per_update - self.groups_of_version)

    # What goes out.

    def take(self, request: Request, now: float) -> Lease | None:
        """Hands out the next batch, or one rank's part of it, or notes in ``reason`` why there is none."""
        if (share := request.share) is None:
            return self._take(request, now)
        name = self._rank_calls.name(share, self.leases.in_parts)
        lease = self.leases.in_parts.get(name)
        if lease is not None and lease.world_size != share.world_size:
            raise Conflict(
                f"batch {lease.batch_id} goes out in {lease.world_size} parts, not in {share.world_size}: "
                "ack it, or give it back, before the number of ranks changes"
            )
        if lease is None and (lease := self._take(request, now)) is not None:
            self.leases.divide(lease, share.world_size, name)
        return None if lease is None else Part.of(lease, share.rank)

    def _take(self, request: Request, now: float) -> Lease | None:
        assert self.config is not None, "asked before a trainer registered"
        self._asked = request.groups
        count = request.groups or self.config.groups_per_update
        if request.partial and count is not None:
            units, short = self._some(count), False
        else:
            plan, units = self._plan(count, now)
            short, self.reason = plan.short, plan.reason
        if not units:
            return None
        self.reason = ""
        self.queue.remove(units, Place.LEASED)
        self._ready = ()  # it would keep what was used up in memory
        if short:
            self.tallies.short_batches += 1
        first = any(unit.step is None for unit in units)
        if first:
            self.step += 1
        for unit in units:
            unit.deliveries += 1
            unit.step = unit.step if unit.step is not None else self.step
        step = max(unit.step for unit in units if unit.step is not None)
        return self.leases.open(units, step=step, first=first, seconds=request.lease_seconds, now=now)

    def _some(self, count: int) -> list[Unit]:
        """As many whole groups as there are, up to ``count``, oldest first."""
        units = [unit for unit in self.queue if len(unit.groups) <= count]
        if not units:
            return []
        return [units[i] for i in choose_below([len(unit.groups) for unit in units], count + 1)]

    def why_none(self, now: float) -> str:
        """Why no batch can be formed now, as the trainer last asked for one; "" where one can."""
        assert self.config is not None
        asked = (self.queue.revision, int(now), self._asked)
        if self._why[0] != asked:
            count = self._asked or self.config.groups_per_update
            sought = self._seek(count, now, known=self._ready)
            self._why, self._ready = (asked, sought.plan.reason), sought.units
        return self._why[1]

    def _plan(self, count: int | None, now: float) -> tuple[Plan, list[Unit]]:
        """Plans a batch, and notes who was passed over for it."""
        sought = self._seek(count, now)
        if sought.plan.stuck and self.queue[0].passed_at is None:
            self.queue[0].passed_at = now
        if sought.plan.chosen:
            self._turn += 1
            self.tallies.hurried += sought.plan.hurried
            self.tallies.waived.update(env.wandb_name for env in sought.silent)
        return sought.plan, list(sought.units)

    def _seek(self, count: int | None, now: float, known: tuple[Unit, ...] = ()) -> Sought:
        assert self.config is not None, "asked before a trainer registered"
        config, turn = self.config, self._turn
        return seek(self.queue, self._envs, config, self.limits, count=count, turn=turn, now=now, known=known)

    # What becomes of it.

    def delivered(self, lease: Lease) -> None:
        """Notes that the whole batch was handed over: a plain read is used up by that."""
        first = lease.whole is None or not lease.whole.given_ranks if isinstance(lease, Part) else True
        again = isinstance(lease, Part) and lease.whole is not None and lease.rank in lease.whole.given_ranks
        self.tallies.batches += first
        self.tallies.redelivered += first and lease.delivery > 1
        for group in lease.groups if lease.delivery == 1 and not again else ():
            self.tallies.count_lag(self._lag(group))
        if isinstance(lease, Part):
            self._given(lease)
        if lease.seconds is None and lease in self.leases:
            self._use(lease)

    def _given(self, part: Part) -> None:
        """Notes that a rank has its part, unless the batch has ended meanwhile."""
        assert part.whole is not None
        if part.whole in self.leases:
            self.leases.give(part.whole, part.rank)
            self._rank_calls.given(part)

    def _lag(self, group: StoredGroup) -> int | None:
        """How many versions a group is behind the newest one; None where that is unknown."""
        if self.policy_version is None or group.policy_version is None:
            return None
        return self.policy_version - group.policy_version

    def put_back(self, lease: Lease) -> None:
        """Takes a batch back that never arrived, as if it had not been formed."""
        if lease not in self.leases:  # it ran out on the way, or everything was reset
            return  # or it is one rank's part: the others keep theirs, and it gets the same one again
        undo_step = lease.first and lease.step == self.step
        for unit in lease.units:
            unit.deliveries -= 1
            if undo_step and unit.step == lease.step:
                unit.step = None
            self._enqueue(unit)
        if undo_step:
            self.step -= 1
        self.leases.forget(lease)

    def ack(self, batch_id: str, rank: int | None = None) -> Lease:
        """Ends a lease for good: its groups were used. One in parts ends when every rank has acked."""
        lease = self.leases.find(batch_id)
        if (rank is None) != (lease.world_size is None) or (rank or 0) not in range(lease.world_size or 1):
            parts = f"in {lease.world_size} parts: ack each with its rank" if lease.world_size else "whole"
            raise Conflict(f"batch {batch_id} goes out {parts}, got rank {rank}")
        if rank is not None and lease.state in (LeaseState.OPEN, LeaseState.EXPIRED):
            return self._ack_part(lease, rank)
        if lease.state is LeaseState.EXPIRED:
            self._recover(lease, used=True)
        if lease.state is LeaseState.OPEN:
            self._use(lease)
        if lease.state is not LeaseState.ACKED:
            raise Conflict(f"batch {batch_id} was {lease.state}: it cannot be acked")
        return lease

    def _ack_part(self, lease: Lease, rank: int) -> Lease:
        if lease.state is LeaseState.EXPIRED:
            self._recover(lease)
        if self.leases.ack(lease, rank):
            self._use(lease)
        return lease

    def nack(self, batch_id: str, *, drop: bool, reason: str = "") -> Lease:
        """Gives a batch back to the head of the queue, or drops it."""
        lease = self.leases.find(batch_id)
        wanted = LeaseState.DROPPED if drop else LeaseState.REQUEUED
        if lease.state is LeaseState.EXPIRED and not drop:
            self.leases.end(lease, wanted)  # it went back by itself
        elif lease.state is LeaseState.EXPIRED:
            self._recover(lease)
        if lease.state is LeaseState.OPEN:
            units = lease.units
            self.leases.end(lease, wanted)
            self._rank_calls.undone(lease)
            for unit in units:
                if drop:
                    self._set_aside(unit, f"dropped by the trainer{': ' if reason else ''}{reason[:100]}")
                else:
                    self._enqueue(unit)
        if lease.state is not wanted:
            raise Conflict(f"batch {batch_id} was {lease.state}: it cannot be given back")
        return lease

    def extend(self, batch_id: str, seconds: float, now: float) -> Lease:
        """Gives a lease more time, counted from now."""
        lease = self.leases.find(batch_id)
        if lease.state is LeaseState.EXPIRED:
            self._recover(lease)
        if lease.state is not LeaseState.OPEN:
            raise Conflict(f"batch {batch_id} was {lease.state}: it cannot be extended")
        self.leases.extend(lease, seconds, now)
        return lease

    def expire(self, now: float) -> None:
        """Takes back every batch whose lease ran out."""
        for lease in self.leases.expired(now):
            units = lease.units
            self.leases.end(lease, LeaseState.EXPIRED)
            self._rank_calls.undone(lease)
            for unit in units:
                self._enqueue(unit)

    def _use(self, lease: Lease) -> None:
        for unit in lease.units:
            unit.place = Place.GONE
            self._marks.unit(unit)
        lease.step_at_end = self.step
        self.leases.end(lease, LeaseState.ACKED)

    def _recover(self, lease: Lease, *, used: bool = False) -> None:
        """Opens an expired lease again, if nobody else got any of its groups.

        Args:
            lease: an expired one.
            used: they have served their purpose, so that it does not matter which were set aside since.
        """
        present: list[Unit] = []
        lost = 0
        for number in lease.numbers:
            if (unit := self.queue.find(number)) is not None:
                present.append(unit)
            elif not (used and number in self._aside):
                lost += 1
        if lost or lease.asked_as in self.leases.in_parts:
            raise Conflict(f"the lease of batch {lease.batch_id} ran out and its groups went to someone else")
        self.queue.remove(present, Place.LEASED)
        self.leases.reopen(lease, present)
