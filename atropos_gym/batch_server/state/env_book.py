"""The environments: who registered, who is alive, which share each wants, and parts of groups that wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from uuid import uuid4

from atropos_gym.batch_server.batching import choose
from atropos_gym.batch_server.state.group_queue import StoredGroup
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.packed import PackedGroup
from atropos_gym.wire import EnvRegistration

__all__ = ["EnvBook", "EnvRecord"]

LEAST_WEIGHT = 0.01
"""What ``env_weight`` never falls below, so that no environment starves."""


@dataclass(slots=True)
class EnvRecord:
    """One registration of an environment; it is valid for ever.

    Attributes:
        env_id: its number.
        settings: what it registered with.
        wandb_name: its name, unique among the environments.
        last_seen: Unix seconds of its last call.
        had_data_at: Unix seconds when it last had something in the queue.
        connected: whether it counts for weights and minimums.
        groups_received: groups that were accepted from it.
        groups_refused: groups that were refused.
        score_sum: of all its sequences.
        score_count: number of its sequences.
        buffer: parts of groups that wait for the missing ones.
        registration: a name that no other registration has, at this server or one that was started anew; ""
            in stores of old.
    """

    env_id: int
    settings: EnvRegistration
    wandb_name: str
    last_seen: float
    had_data_at: float
    connected: bool = True
    groups_received: int = 0
    groups_refused: int = 0
    score_sum: float = 0.0
    score_count: int = 0
    buffer: list[StoredGroup] = field(default_factory=list)
    registration: str = ""

    @property
    def minimum(self) -> float:
        """Least share of a batch that it asks for."""
        return self.settings.min_batch_allocation or 0.0

    @property
    def buffered_sequences(self) -> int:
        """Sequences in its buffer."""
        return sum(group.sequences for group in self.buffer)

    @property
    def buffered_bytes(self) -> int:
        """What its buffer takes."""
        return sum(group.bytes for group in self.buffer)

    @property
    def score_mean(self) -> float | None:
        """Mean over all its sequences; None where there are none, or their sum is not finite."""
        if not self.score_count or not math.isfinite(self.score_sum):
            return None
        return self.score_sum / self.score_count

    def count(self, group: PackedGroup) -> None:
        """Counts an accepted group."""
        self.groups_received += 1
        self.score_sum += group.score_sum
        self.score_count += group.size

    def release(self) -> list[StoredGroup]:
        """Takes out of the buffer the oldest parts that make up a whole group; [] where none do."""
        sizes = [group.sequences for group in self.buffer]
        chosen = choose(sizes, self.settings.group_size) or []
        parts = [self.buffer[position] for position in chosen]
        self.buffer = [group for position, group in enumerate(self.buffer) if position not in set(chosen)]
        return parts

    def release_older(self, moment: float) -> list[StoredGroup]:
        """Takes out of the buffer what came at or before a moment."""
        old = [group for group in self.buffer if group.received_at <= moment]
        if old:
            self.buffer = [group for group in self.buffer if group.received_at > moment]
        return old


class EnvBook:
    """All environments that ever registered, by number.

    Attributes:
        live: those that time matters to, by number: all that are connected, and others until :meth:`retire`.
    """

    def __init__(self, marks: Marks | None = None) -> None:
        self._marks = marks or Marks()
        self._records: list[EnvRecord] = []
        self.live: dict[int, EnvRecord] = {}
        self._names: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[EnvRecord]:
        return iter(self._records)

    def register(self, settings: EnvRegistration, now: float) -> EnvRecord:
        """Adds an environment; two of one name are told apart by a number behind it."""
        name = settings.desired_name
        record = EnvRecord(
            env_id=len(self._records),
            settings=settings,
            wandb_name=f"{name}_{self._names[name]}",
            last_seen=now,
            had_data_at=now,
            registration=uuid4().hex,
        )
        self._marks.env(record)
        self.restore(record)
        return record

    def restore(self, record: EnvRecord) -> None:
        """Adds a record; they come in the order of their numbers."""
        self._names[record.settings.desired_name] += 1
        self._records.append(record)
        self.live[record.env_id] = record

    def find(self, env_id: int | None) -> EnvRecord | None:
        """Returns the environment of this number; None where there is none."""
        if env_id is None or not 0 <= env_id < len(self._records):
            return None
        return self._records[env_id]

    def touch(self, env_id: int | None, now: float) -> EnvRecord | None:
        """Notes a sign of life: it also connects an environment again."""
        record = self.find(env_id)
        if record is not None:
            if not record.connected:
                self._marks.env(record)
                self.live[record.env_id] = record
            record.last_seen = now
            record.connected = True
        return record

    def retire(self, record: EnvRecord) -> None:
        """Notes that nothing happens to an environment any more until its next call."""
        del self.live[record.env_id]

    @property
    def connected(self) -> list[EnvRecord]:
        """Environments that count for weights and minimums."""
        return [record for record in self._records if record.connected]

    def weight(self, record: EnvRecord) -> float:
        """This environment's share of the inference capacity."""
        wishes = {
            other.env_id: other.settings.max_token_length * other.settings.weight for other in self.connected
        }
        total = sum(max(0.0, wish) for wish in wishes.values())
        if total <= 0:
            return LEAST_WEIGHT
        return max(LEAST_WEIGHT, wishes.get(record.env_id, 0.0) / total)

    @property
    def unallocated_fraction(self) -> float:
        """What the connected environments' minimums leave of a batch."""
        return 1.0 - min(1.0, sum(record.minimum for record in self.connected))
