"""A store in memory: it forgets everything with its process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from uuid import uuid4

from atropos_gym.batch_server.limits import BATCHES_PER_ENV, Limits, memory_allows
from atropos_gym.batch_server.state.env_book import EnvBook, EnvRecord
from atropos_gym.batch_server.state.group_queue import StoredGroup
from atropos_gym.batch_server.state.intake import Incoming, Receipt, misfits
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.packed import PackedGroup
from atropos_gym.batch_server.state.policies import PolicyBoard
from atropos_gym.batch_server.state.readings import Readings
from atropos_gym.batch_server.state.refusals import Conflict, Refused
from atropos_gym.batch_server.state.replies import KeptReply, ReplyBook
from atropos_gym.batch_server.state.stock import Request, Stock
from atropos_gym.batch_server.state.tallies import Tallies
from atropos_gym.wire import EnvRegistration, Policy, PolicyUpdate, Registration

__all__ = ["MemoryStore"]


class MemoryStore(Readings):
    """Queue, leases, buffers, registrations and policy, in memory. See :class:`Store` for the methods."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = self._within_means(limits or Limits())
        self._marks = Marks()
        self._envs = EnvBook(self._marks)
        self._number = 0
        self._replies = ReplyBook(self._marks)
        self._now = 0.0
        self._clear()

    @property
    def limits(self) -> Limits:
        """Times and bounds that hold now."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = self._stock.limits = self._within_means(limits)

    def _within_means(self, limits: Limits) -> Limits:
        """Memory cannot hold more than there is of it."""
        return replace(limits, hard_bytes=min(limits.hard_bytes, memory_allows()))

    def _clear(self) -> None:
        self._tallies = Tallies()
        self._stock = Stock(self._envs, self._tallies, self.limits, self._marks)
        self._policies = PolicyBoard()
        self._started = False
        self._trainers: set[str] = set()
        self._replaced: set[str] = set()
        self._trainer_seen_at = 0.0
        self._trainer_heard = False  # by this process
        self._latest: PackedGroup | None = None

    def reset(self) -> None:
        """Forgets everything but the numbers of environments, which stay valid.

        Names of groups and batches go on: one from before the reset must not mean another one after it.
        """
        for env in self._envs:
            env.connected = False
            env.buffer = []
        batches, replies = self._stock.leases.number, self._replies.number
        self._clear()
        self._marks.clear(cleared=True)
        for env in self._envs:
            self._marks.env(env)
        self._stock.leases.number = batches
        self._replies = ReplyBook(self._marks)
        self._replies.number = replies

    # Keeping.

    def save(self) -> Future[None] | None:
        """Makes last what has changed; returns what to wait for, or None where all is done.

        Memory needs no saving: this only forgets what has changed.
        """
        self._marks.clear()
        return None

    def close(self) -> None:
        """Ends it; nothing is called afterwards."""

    def tick(self, now: float) -> None:
        """Does what is due: leases run out, buffers are released, silent environments leave."""
        self._now = now
        self._stock.expire(now)
        for env in list(self._envs.live.values()):
            if self._stock.queue.sequences_of[env.env_id]:
                env.had_data_at = now
            elif not env.connected and not env.buffer:
                self._envs.retire(env)
            if env.connected and now - env.last_seen > self.limits.env_timeout:
                self.disconnect_env(env.env_id)
            for part in env.release_older(now - self.limits.buffer_seconds):
                self._stock.put([part])

    # Trainers.

    def register(
        self, settings: Registration, now: float, *, takeover: bool = False, trainer_id: str | None = None
    ) -> str:
        """Registers a trainer; returns its id, 32 hex digits."""
        current = self._stock.config
        silent = now - self._trainer_seen_at
        # With the same settings it may be another process of the same trainer, while that is alive.
        beside = current == settings and self._trainer_heard and silent <= self.limits.trainer_timeout
        anew = current is not None and trainer_id not in self._trainers and not beside
        if current is not None and current != settings:
            known = trainer_id in self._trainers
            if not takeover and not known and silent <= self.limits.trainer_timeout:
                raise Conflict(
                    f"a trainer is registered with other settings: {_differences(current, settings)}; "
                    f"stop it, wait until it was silent for {self.limits.trainer_timeout:.0f} s, "
                    "or register with ?takeover=true"
                )
            self._replaced |= self._trainers
            self._trainers = set()
        trainer_id = uuid4().hex
        self._trainers.add(trainer_id)
        self._trainer_seen_at, self._trainer_heard = now, True
        self._stock.config = settings
        self._stock.step = max(self._stock.step, settings.starting_step)
        self._stock.sweep()
        self._policies.begin(anew=anew)
        return trainer_id

    def trainer_seen(self, now: float, trainer_id: str | None = None) -> None:
        """Notes a sign of life of the trainer; refuses one that another has replaced."""
        if trainer_id in self._replaced:
            raise Conflict(f"trainer {trainer_id} was replaced by another one: register again")
        self._trainer_seen_at, self._trainer_heard = now, True

    def publish(
        self, update: PolicyUpdate, now: float, *, force: bool = False, trainer_id: str | None = None
    ) -> None:
        """Takes a learner's newest version, or the end of its run."""
        if update.finished and self._policies.superseded and trainer_id not in self._trainers:
            raise Conflict(
                f"another trainer has registered since run {update.run!r} published: this ends nothing any "
                "more; the trainer that is there now names its id, ?trainer=<trainer_id>"
            )
        if self._policies.publish(update, now, force=force) and update.version is not None:
            self._stock.follow(update.version)

    def policy(self, now: float) -> Policy:
        """The newest version, and which ones are still used."""
        return self._policies.show(now, self.limits.holding_seconds)

    def hold(self, env_id: int | None, versions: Iterable[int], now: float) -> None:
        """Notes which versions a service still uses."""
        self._policies.hold(env_id, versions, now)

    # Environments.

    def register_env(self, settings: EnvRegistration, now: float) -> EnvRecord | None:
        """Registers an environment; None until the trainer has started."""
        return self._envs.register(settings, now) if self._started else None

    def env_seen(self, env_id: int | None, now: float) -> None:
        """Notes a sign of life of an environment."""
        self._envs.touch(env_id, now)

    def disconnect_env(self, env_id: int) -> None:
        """Takes an environment out of weights and minimums until its next call."""
        env = self._find_env(env_id)
        env.connected = False
        self._marks.env(env)
        for part in env.release_older(float("inf")):
            self._stock.put([part])

    def env_name(self, env_id: int) -> str | None:
        """The name that an environment wished for; None where there is no such number."""
        env = self._envs.find(env_id)
        return None if env is None else env.settings.desired_name

    # Groups.

    def add_groups(self, incoming: Sequence[Incoming], now: float) -> list[Receipt]:
        """Accepts all groups or none."""
        problems = misfits(incoming, self._stock.config, self._policies.fingerprint)
        if problems:
            raise Refused(problems)
        return [self._add(one, now) for one in incoming]

    def _add(self, incoming: Incoming, now: float) -> Receipt:
        packed, env_id = incoming.packed, incoming.env_id
        self._number += 1
        stored = StoredGroup.of(self._number, incoming, now)
        self._latest = packed
        self._marks.groups.append(stored)
        self._tallies.count_unknown_fields(incoming.unknown_fields)
        self._tallies.foreign_masks += packed.foreign_masks
        env = self._envs.touch(env_id, now)
        if env is not None:
            env.count(packed)
            self._marks.env(env)
        elif env_id is not None:
            self._tallies.unknown_env += 1
        else:
            self._tallies.no_env += 1
        if env is None or incoming.complete or not self._waits_for_parts(env, packed.size):
            self._stock.put([stored])
            return Receipt(stored.group_id)
        env.buffer.append(stored)
        if whole := env.release():
            self._stock.put(whole)
        return Receipt(stored.group_id, buffered=env.buffered_sequences)

    def _waits_for_parts(self, env: EnvRecord, sequences: int) -> bool:
        """Whether a group of this size is a part of one that could be delivered whole."""
        config, group_size = self._stock.config, env.settings.group_size
        if config is not None and (config.groups_per_update is not None or group_size > config.batch_size):
            return False
        return sequences < group_size

    @property
    def crowded(self) -> bool:
        """Whether more is queued than the soft limit allows, and a batch can be formed of it.

        While none can, more groups may be what is missing: to hold them would be a deadlock.
        """
        return self._many_queued() and not (self.registered and self._stock.why_none(self._now))

    def _many_queued(self) -> bool:
        limits, queue, config = self.limits, self._stock.queue, self._stock.config
        if limits.soft_bytes is not None and queue.bytes > limits.soft_bytes:
            return True
        if limits.soft_groups is not None:
            return queue.groups > limits.soft_groups
        if config is None:
            return False
        batches = BATCHES_PER_ENV * max(1, len(self._envs.connected))
        if config.groups_per_update is not None:
            return queue.groups > batches * config.groups_per_update
        return queue.sequences > batches * config.batch_size

    @property
    def held_bytes(self) -> int:
        """What all groups take: queued, handed out, and waiting for their other parts."""
        return self._stock.queue.bytes + self._stock.leases.bytes + sum(e.buffered_bytes for e in self._envs)

    def count_refused(self, env_id: int | None, groups: int, reason: str) -> None:
        """Counts groups that were refused, by a word for the reason."""
        self._tallies.refused[reason] += groups
        if (env := self._envs.find(env_id)) is not None:
            env.groups_refused += groups
            self._marks.env(env)

    def find_reply(self, key: str | None, digest: bytes, now: float) -> KeptReply | None:
        """Returns what the same post was answered, if that is still to be given."""
        return self._replies.find(key, digest, now)

    def keep_reply(self, key: str | None, digest: bytes, body: bytes, now: float) -> KeptReply:
        """Keeps an answer that is about to be given."""
        return self._replies.keep(key, digest, body, now)

    def reply_arrived(self, reply: KeptReply, *, arrived: bool) -> None:
        """Notes whether an answer reached its sender."""
        self._replies.arrived(reply, arrived=arrived)

    def latest_example(self) -> PackedGroup | None:
        """The group that came last."""
        return self._latest

    # Batches.

    @property
    def exact(self) -> bool:
        """Whether the trainer wants exact batches or none."""
        return self._stock.config is not None and self._stock.config.exact_batches

    def take(self, request: Request, now: float) -> Lease | None:
        """Hands out the next batch; None where there is none yet."""
        self._started = True
        return self._stock.take(request, now)

    def fetch(self, lease: Lease) -> Future[list[PackedGroup]]:
        """Gets a batch's groups, in order; to be asked as soon as it is taken."""
        found: Future[list[PackedGroup]] = Future()
        found.set_result([group.packed for group in lease.groups])
        return found

    def delivered(self, lease: Lease) -> None:
        """Notes that a batch was handed over whole."""
        self._stock.delivered(lease)

    def put_back(self, lease: Lease) -> None:
        """Takes back a batch that never arrived."""
        self._stock.put_back(lease)

    def ack(self, batch_id: str, rank: int | None = None) -> Lease:
        """Ends a lease for good, or one rank's part of it."""
        return self._stock.ack(batch_id, rank)

    def nack(self, batch_id: str, *, drop: bool, reason: str = "") -> Lease:
        """Gives a batch back, or drops it."""
        return self._stock.nack(batch_id, drop=drop, reason=reason)

    def extend(self, batch_id: str, seconds: float, now: float) -> Lease:
        """Gives a lease more time."""
        return self._stock.extend(batch_id, seconds, now)


def _differences(current: Registration, other: Registration) -> str:
    """Names every setting that differs, with both values."""
    return ", ".join(
        f"{name} {getattr(current, name)!r} there, {getattr(other, name)!r} here"
        for name in Registration.model_fields
        if getattr(current, name) != getattr(other, name)
    )
