"""Where batches come from and versions go: a collector of one's own, or a batch server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atropos_gym.batch_server.client import Batch, BatchClient, without_token
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import ServerError
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.trainers._leases import OVER, Leases, server_of, settle
from atropos_gym.trainers._waiting import SERVER_SECONDS, Waiting
from atropos_gym.wire import ScoredDataGroup

if TYPE_CHECKING:
    from atropos_gym.trainers.grpo import GRPO

__all__ = ["GroupSource", "LocalSource", "ServerSource", "open_local", "open_server"]

log = logging.getLogger(__name__)

#: Seconds that one request for a batch waits at the server.
WAIT_SECONDS = 20.0

#: Seconds for one try to extend a lease; there are more before it ends.
EXTEND_SECONDS = 10.0

#: Seconds for taking leave of a server.
GOODBYE_SECONDS = 1.0


class GroupSource(Protocol):
    """Where a learner's batches come from."""

    def next(self, update: int) -> list[ScoredDataGroup]:
        """Returns the groups of one update, whose number this is; blocks."""
        ...

    def moved_on(self) -> None:
        """The last batch is learned: the position is that of the next one."""
        ...

    def done(self, *, durable: bool) -> None:
        """The last batch is done with; ``durable``: the learner's state after it is on disk."""
        ...

    def give_back(self) -> None:
        """The last batch was not learned."""
        ...

    def announce(self, version: int, adapter: Path | None) -> None:
        """A new version is complete."""
        ...

    def held(self) -> set[int]:
        """Versions whose folders are still in use."""
        ...

    def close(self, *, finished: bool) -> None:
        """No more batches; ``finished``: the run came to its end."""
        ...


class LocalSource:
    """Plays groups in this process, each update with the newest version.

    Args:
        collectors: one an environment.
        weights: share of the groups of each.
        groups: groups of an update.
        numbers: number of the next group of each collector; moved on in place, so that a checkpoint knows it.
        publish: hands a version to the engine.
        live: versions that the engine has loaded.
    """

    def __init__(
        self,
        collectors: Sequence[Any],
        weights: Sequence[float],
        groups: int,
        numbers: list[int],
        publish: Callable[[int, Path], None],
        live: Callable[[], set[int]],
    ) -> None:
        self._collectors = collectors
        self._weights = [weight / sum(weights) for weight in weights]
        self._groups = groups
        self._numbers = numbers
        self._publish = publish
        self._live = live
        self._ahead = list(numbers)

    def next(self, update: int) -> list[ScoredDataGroup]:
        """Collects each environment's share, in order of group numbers."""
        bodies: list[ScoredDataGroup] = []
        self._ahead = list(self._numbers)
        for k, share in enumerate(self._shares()):
            if not share:
                continue
            collector = self._collectors[k]
            played = collector.collect(share, first_number=self._numbers[k])
            self._ahead[k] = collector.next_number
            bodies.extend(group.to_wire() for group in played)
        return bodies

    def _shares(self) -> list[int]:
        """How many groups each environment plays now: the one farthest behind its weight goes first."""
        counts = list(self._numbers)
        for _ in range(self._groups):
            behind = [w * (sum(counts) + 1) - n for w, n in zip(self._weights, counts, strict=True)]
            counts[behind.index(max(behind))] += 1
        return [after - before for after, before in zip(counts, self._numbers, strict=True)]

    def moved_on(self) -> None:
        """Moves on to the next groups."""
        self._numbers[:] = self._ahead

    def done(self, *, durable: bool) -> None:
        """Does nothing: what was played here is nobody else's."""

    def give_back(self) -> None:
        """Leaves the position: the same groups are played again."""

    def announce(self, version: int, adapter: Path | None) -> None:
        """Hot-swaps the adapter in the engine."""
        if adapter is not None:
            self._publish(version, adapter)

    def held(self) -> set[int]:
        """Versions that the engine has loaded."""
        return self._live()

    def close(self, *, finished: bool) -> None:
        """Closes the environments; the engine stays."""
        for collector in self._collectors:
            collector.close()


class ServerSource:
    """Leases batches from a batch server and posts versions to it. Whoever owns the engine publishes there.

    Args:
        client: a ``BatchClient`` that has registered.
        url: of its server, with the token if it has one.
        groups: groups of an update.
        lease_seconds: a lease is extended at a third of it, as long as the batch is being worked on.
        announcement: what each post to ``/policy`` says besides version and adapter.
        leases: batches that are leased and not yet acknowledged.
        checkpointing: acknowledge only what a checkpoint on disk contains.

    Attributes:
        lost: batches that were learned from, whose lease was over before they could be acknowledged.
        repeated: groups that came again although they were learned from, and were not learned from twice.
    """

    def __init__(
        self,
        client: Any,
        url: str,
        *,
        groups: int,
        lease_seconds: float,
        announcement: dict[str, Any],
        leases: Leases,
        checkpointing: bool = False,
    ) -> None:
        self._client = client
        self._url = url
        self._groups = groups
        self._lease_seconds = lease_seconds
        self._announcement = announcement
        self._checkpointing = checkpointing
        self._leases = leases
        self._used: dict[str, frozenset[str]] = {}  # names of the groups under each open lease
        self.lost = 0
        self.repeated = 0
        self._lock = threading.Lock()
        self._quick = self._hasty(min(EXTEND_SECONDS, lease_seconds / 3))
        self._stop = threading.Event()
        self._extender = threading.Thread(target=self._keep_leases, name="leases", daemon=True)
        self._extender.start()

    def next(self, update: int) -> list[ScoredDataGroup]:
        """Waits for exactly one update's groups and leases them.

        A server that was away may have let leases run out that are still being worked under, so they are
        extended first. What comes again nevertheless is left out: an update may have fewer groups then.
        """
        while True:
            self.extend()
            batch = self._client.batch(
                groups=self._groups,
                wait_seconds=WAIT_SECONDS,
                lease_seconds=self._lease_seconds,
            )
            if batch is not None and (groups := self._taken(batch, update)):
                return groups

    def _taken(self, batch: Batch, update: int) -> list[ScoredDataGroup]:
        """Notes a batch as leased; returns its groups but those that this learner has learned from."""
        batch_id, names = str(batch.batch_id), frozenset(batch.group_ids)
        with self._lock:
            used = names.intersection(chain.from_iterable(self._used.values()))
            # A batch of such groups alone needs no learning: it is acknowledged with what was learned before.
            self._leases.add(batch_id, update - 1 if names and names == used else update)
            for other, theirs in list(self._used.items()):
                if theirs and theirs <= names:  # this lease has taken the other's place
                    self._forget(other)
            self._used[batch_id] = names
        if not used:
            return list(batch.groups)
        self.repeated += len(used)
        log.warning(
            "%d groups of batch %s were learned from under a lease that ran out: left out (%d so far)",
            len(used),
            batch_id,
            self.repeated,
        )
        return [group for group, name in zip(batch.groups, batch.group_ids, strict=True) if name not in used]

    def moved_on(self) -> None:
        """Does nothing: the server keeps the position."""

    def done(self, *, durable: bool) -> None:
        """Acknowledges every batch that the state on disk contains; a lease that is over is counted."""
        if self._checkpointing and not durable:
            return
        for batch_id in self._open():
            try:
                self._client.ack(batch_id)
            except ServerError as error:
                if error.status not in OVER:
                    raise
                self.lost += 1
                log.warning("batch %s was learned from, yet %s (%d so far)", batch_id, error, self.lost)
            self._over(batch_id)

    def give_back(self) -> None:
        """Puts the last batch back to the head of the queue, unless it went back by itself."""
        for batch_id in self._open()[-1:]:
            self._nack(self._client, batch_id, reason="the learner stopped before this update")

    def announce(self, version: int, adapter: Path | None) -> None:
        """Posts the version; services load it and confirm."""
        run = self._announcement["run"]
        self._client.publish_policy(
            version=version,
            model_name=f"{run}-v{version}" if adapter is not None else str(self._announcement["base_model"]),
            adapter_path=str(adapter) if adapter is not None else None,
            step=version,
            **self._announcement,
        )

    def held(self) -> set[int]:
        """Versions that a service still uses."""
        return set(getattr(self._client.policy(), "held", None) or ())

    def close(self, *, finished: bool) -> None:
        """Stops extending; gives back what is neither learned nor durable; ends the run if it is finished."""
        self._stop.set()
        self._extender.join(GOODBYE_SECONDS)  # it may wait for a server that hangs, and ends by itself
        with self._client:
            if left := self._open():
                self._give_back_soon(left)
            if finished:
                self._client.finish(self._announcement["run"])
                self._leases.finish()

    def _give_back_soon(self, batch_ids: list[str]) -> None:
        """Gives leases back without waiting for a server that may be what failed: they end anyway."""
        with self._hasty(GOODBYE_SECONDS) as client:
            try:
                for batch_id in batch_ids:
                    self._nack(client, batch_id, reason="the learner stopped")
            except ServerError as error:
                log.warning("could not give %d batches back: %s", len(batch_ids), error)

    def _nack(self, client: BatchClient, batch_id: str, reason: str) -> None:
        try:
            client.nack(batch_id, reason=reason)
        except ServerError as error:
            if error.status not in OVER:
                raise
            log.info("batch %s was over: %s", batch_id, error)
        self._over(batch_id)

    def _keep_leases(self) -> None:
        """Extends all open leases until the source is closed."""
        away = False
        with self._quick:  # nobody uses it after the stop
            while not self._stop.wait(self._lease_seconds / 3):
                error = self.extend()
                if error is not None and not away:
                    log.warning("leases are not extended, trying again: %s", error)
                away = error is not None

    def extend(self) -> ServerError | None:
        """Extends all open leases, up to the first try without an answer, which is returned.

        One that is over is left to its ack: acknowledged meanwhile, or somebody else has the batch.
        """
        for batch_id in self._open():
            if self._stop.is_set():
                break
            try:
                self._quick.extend(batch_id, self._lease_seconds)
            except ServerError as error:
                if error.status not in OVER:
                    return error
        return None

    def _hasty(self, timeout: float) -> BatchClient:
        """A client that tries once: whoever uses it goes on without an answer."""
        return BatchClient(self._url, timeout=timeout, retry_seconds=0.0)

    def _open(self) -> list[str]:
        with self._lock:
            return list(self._leases)

    def _over(self, batch_id: str) -> None:
        with self._lock:
            self._forget(batch_id)

    def _forget(self, batch_id: str) -> None:
        self._leases.remove(batch_id)
        self._used.pop(batch_id, None)


def open_local(model: GRPO) -> LocalSource:
    """A collector per task that plays with the learner's own engine."""
    parts, engine = model._parts, model.engine
    if len(model.group_numbers) != len(parts.tasks):
        model.group_numbers = [0] * len(parts.tasks)
    sampling = SamplingParams(max_tokens=model.action_space.max_length, temperature=model.temperature)
    collectors = [
        GroupCollector(
            task.source,
            engine,
            group_size=model.group_size,
            concurrency=model.concurrency,
            sampling=sampling,
            seed=(model.seed or 0) + k,
            common_random_numbers=model.common_random_numbers,
            env_kwargs=task.env_kwargs,
            **model.collector_kwargs,
        )
        for k, task in enumerate(parts.tasks)
    ]
    return LocalSource(
        collectors,
        [task.weight for task in parts.tasks],
        model.groups_per_update,
        model.group_numbers,
        publish=lambda version, folder: parts.sync(engine.publish(version, folder)),
        live=lambda: set(getattr(engine, "live_versions", ())),
    )


def open_server(model: GRPO, updates: int | None) -> ServerSource:
    """Registers with the batch server and posts the first version there."""
    assert model.server is not None
    if model._run_over:  # the server has closed that run: whoever goes on is another one
        model._new_run()
    leases, server = model.run_folder / "leases.json", without_token(model.server)
    left_at = server_of(leases)
    # Whoever goes on with a run takes it over, also from a predecessor that was killed a moment ago; but a
    # server that the run was not at has another trainer.
    goes_on = model._n_updates > 0 if left_at is None else left_at == server
    waiting = Waiting(server, model._parts.server_ended)
    client = BatchClient(model.server, retry_seconds=SERVER_SECONDS, again=waiting)
    try:
        client.trainer_id = _register(
            model,
            waiting,
            takeover=goes_on or model._parts.registered_at == model.server,
            wandb_group=model.run,
            wandb_project="atropos-gym",
            batch_size=model.groups_per_update * model.group_size,
            max_token_len=model.observation_space.max_length,
            checkpoint_dir=str(model.run_folder),
            save_checkpoint_interval=model.checkpoint_every or 0,
            starting_step=model._n_updates,
            num_steps=0 if updates is None else model._n_updates + updates,
            groups_per_update=model.groups_per_update,
            max_policy_lag=model.max_staleness,
        )
        settle(client, leases, model._n_updates)
    except BaseException:
        client.close()
        raise
    model._parts.registered_at = model.server
    source = ServerSource(
        client,
        model.server,
        groups=model.groups_per_update,
        lease_seconds=model.lease_seconds,
        announcement={
            "run": model.run,
            "base_model": model.model_name,
            "tokenizer_fingerprint": model.tokenizer.fingerprint,
        },
        leases=Leases(None if model.checkpoint_every is None else leases, model.run, server),
        checkpointing=model.checkpoint_every is not None,
    )
    waiting.first = source.extend
    try:
        published = client.policy().version
        if published is not None or model.version > 0:
            model.version = max(model.version, published or 0) + 1
        source.announce(model.version, model.save_version() if model.version > 0 else None)
    except BaseException:
        source.close(finished=False)
        raise
    return source


def _register(model: GRPO, waiting: Waiting, **fields: Any) -> str | None:
    """Registers as the trainer; returns its id. A server that is away at the start is mostly a mistake."""
    assert model.server is not None
    with BatchClient(model.server, again=waiting) as client:
        client.register(**fields)
        return client.trainer_id
