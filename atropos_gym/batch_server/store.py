"""What the server knows: queue, leases, buffers, registrations, policy.

A store is told the time with each call and knows no HTTP. What it refuses, it refuses before it changes
anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.metrics import Metric
from atropos_gym.batch_server.state.env_book import EnvRecord
from atropos_gym.batch_server.state.intake import Incoming, Receipt
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.packed import PackedGroup
from atropos_gym.batch_server.state.replies import KeptReply
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.wire import EnvRegistration, Policy, PolicyUpdate, Registration

__all__ = ["MemoryStore", "SqliteStore", "Store"]


class Store(Protocol):
    """What the HTTP layer needs. All times are Unix seconds.

    A refusal is :class:`Refused`, :class:`Conflict` or :class:`Unknown`; it changes nothing.
    """

    @property
    def limits(self) -> Limits:
        """Times and bounds that hold now."""
        ...

    @limits.setter
    def limits(self, limits: Limits) -> None: ...

    @property
    def registered(self) -> bool:
        """Whether a trainer has registered."""
        ...

    @property
    def reason(self) -> str:
        """Why the last request got no batch; "" where it got one."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the trainer wants exact batches or none."""
        ...

    def tick(self, now: float) -> None:
        """Does what is due: leases run out, buffers are released, silent environments leave."""
        ...

    def register(
        self, settings: Registration, now: float, *, takeover: bool = False, trainer_id: str | None = None
    ) -> str:
        """Registers a trainer; returns its id, 32 hex digits. One that names its id comes again."""
        ...

    def trainer_seen(self, now: float, trainer_id: str | None = None) -> None:
        """Notes a sign of life of the trainer; refuses one that another has replaced."""
        ...

    def register_env(self, settings: EnvRegistration, now: float) -> EnvRecord | None:
        """Registers an environment; None until the trainer has started."""
        ...

    def env_seen(self, env_id: int | None, now: float) -> None:
        """Notes a sign of life of an environment."""
        ...

    def disconnect_env(self, env_id: int) -> None:
        """Takes an environment out of weights and minimums until its next call."""
        ...

    def env_name(self, env_id: int) -> str | None:
        """The name that an environment wished for; None where there is no such number."""
        ...

    def add_groups(self, incoming: Sequence[Incoming], now: float) -> list[Receipt]:
        """Accepts all groups or none."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether more is queued than the soft limit allows."""
        ...

    @property
    def held_bytes(self) -> int:
        """What all groups take."""
        ...

    def count_refused(self, env_id: int | None, groups: int, reason: str) -> None:
        """Counts groups that were refused, by a word for the reason."""
        ...

    def take(self, request: Request, now: float) -> Lease | None:
        """Hands out the next batch; None where there is none yet."""
        ...

    def fetch(self, lease: Lease) -> Future[list[PackedGroup]]:
        """Gets a batch's groups, in order; to be asked as soon as it is taken.

        What is not in memory is read in a thread; where all of it is, the result is there at once.
        """
        ...

    def delivered(self, lease: Lease) -> None:
        """Notes that a batch was handed over whole."""
        ...

    def put_back(self, lease: Lease) -> None:
        """Takes back a batch that never arrived."""
        ...

    def ack(self, batch_id: str, rank: int | None = None) -> Lease:
        """Ends a lease for good, or one rank's part of it."""
        ...

    def nack(self, batch_id: str, *, drop: bool, reason: str = "") -> Lease:
        """Gives a batch back, or drops it."""
        ...

    def extend(self, batch_id: str, seconds: float, now: float) -> Lease:
        """Gives a lease more time."""
        ...

    def publish(
        self, update: PolicyUpdate, now: float, *, force: bool = False, trainer_id: str | None = None
    ) -> None:
        """Takes a learner's newest version, or the end of its run."""
        ...

    def hold(self, env_id: int | None, versions: Iterable[int], now: float) -> None:
        """Notes which versions a service still uses."""
        ...

    def policy(self, now: float) -> Policy:
        """The newest version, and which ones are still used."""
        ...

    def wandb_info(self) -> dict[str, Any]:
        """Body of GET ``/wandb_info``."""
        ...

    def info(self) -> dict[str, Any]:
        """Body of GET ``/info``."""
        ...

    def env_reply(self, env: EnvRecord) -> dict[str, Any]:
        """Body of POST ``/register-env`` for a registered environment."""
        ...

    def gauges(self) -> dict[str, Any]:
        """What of ``/status`` costs nothing to read."""
        ...

    def status(self) -> dict[str, Any]:
        """Body of GET ``/status``."""
        ...

    def registration(self, env_id: int) -> str:
        """A name that no other registration has, at this server or one that was started anew."""
        ...

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Body of GET ``/status-env``."""
        ...

    def envs(self) -> list[dict[str, Any]]:
        """Items of GET ``/envs``."""
        ...

    def trainer(self) -> dict[str, Any]:
        """Whether a trainer has registered, with what, and when it was last heard of."""
        ...

    def leases(self) -> list[dict[str, Any]]:
        """The batches that are handed out and not acked, oldest first."""
        ...

    def health(self) -> dict[str, Any]:
        """Body of GET ``/health``."""
        ...

    def metrics(self) -> list[Metric]:
        """What GET ``/metrics`` shows of a store."""
        ...

    def find_reply(self, key: str | None, digest: bytes, now: float) -> KeptReply | None:
        """Returns what the same post was answered, if that is still to be given."""
        ...

    def keep_reply(self, key: str | None, digest: bytes, body: bytes, now: float) -> KeptReply:
        """Keeps an answer that is about to be given."""
        ...

    def reply_arrived(self, reply: KeptReply, *, arrived: bool) -> None:
        """Notes whether an answer reached its sender."""
        ...

    def save(self) -> Future[None] | None:
        """Makes last what has changed; returns what to wait for, or None where all is done."""
        ...

    @property
    def failing(self) -> str:
        """Why nothing can be saved; "" where all is well."""
        ...

    def close(self) -> None:
        """Saves what is left and ends; nothing is called afterwards."""
        ...

    def latest_example(self) -> PackedGroup | None:
        """The group that came last."""
        ...

    def reset(self) -> None:
        """Forgets everything but the numbers of environments, which stay valid."""
        ...
