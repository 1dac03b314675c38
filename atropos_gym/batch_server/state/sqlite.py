"""A store that survives its process: in memory as it runs, and in a SQLite file.

There is one set of rules, the memory store's. This class only writes down what they changed, and puts it back
together at the start. What is known of a group is always in memory; its ids are there only up to a limit, and
the rest is read from the file when it goes out. The time without a server counts against no lease: when the
file is opened, each open one gets its whole time again.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json, to_json

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.group_queue import Place, StoredGroup
from atropos_gym.batch_server.state.journal import Journal, Statement
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.packed import PackedGroup
from atropos_gym.batch_server.state.replies import KeptReply
from atropos_gym.batch_server.state.saved import (
    env_body,
    group_body,
    lease_body,
    read_env,
    read_group,
    read_lease,
    read_unit,
    unit_body,
)
from atropos_gym.batch_server.state.tallies import Tallies

__all__ = ["SqliteStore"]

TABLES = ("groups", "data", "units", "leases", "aside", "replies")
"""What a reset empties; environments stay."""

WRITE_BEHIND = 256 * 2**20
"""So many bytes of groups may wait in memory for the disk; then no more bodies are read."""


class SqliteStore(MemoryStore):
    """What :class:`MemoryStore` is, kept in a file.

    Args:
        path: the file; one server at a time uses it.
        limits: times and bounds.
        fresh: forget what is in the file.
        fsync: survive a power failure too.
        now: Unix seconds.

    Attributes:
        recovered: what was found in the file, in words; "" where that was nothing.

    Raises:
        ConfigError: the file cannot be used; one line that says why and what to do.
    """

    def __init__(
        self,
        path: str | Path,
        limits: Limits | None = None,
        *,
        fresh: bool = False,
        fsync: bool = False,
        now: float | None = None,
    ) -> None:
        super().__init__(limits)
        self._written: dict[str, Any] = {}  # what the table `state` holds
        self._journal = Journal(Path(path), fresh=fresh, fsync=fsync)
        self.recovered = self._recover(time.time() if now is None else now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _within_means(self, limits: Limits) -> Limits:
        return limits  # what memory does not hold lies on disk

    def _clear(self) -> None:
        super()._clear()
        self._on_disk = 0  # bytes of the groups that are not in memory

    def save(self) -> Future[None] | None:
        """Hands what has changed to the writer; returns what to wait for."""
        if self._journal.dead is not None:
            return self._journal.dead
        came, left = self._moves()
        statements = list(self._changes(came, left))
        self._marks.clear()
        if not statements:
            return self._journal.unwritten
        saved = self._journal.write(statements, sum(group.bytes for group in came))
        self._on_disk -= sum(group.bytes for group in left if group.data is None)
        self._let_go(came)
        return saved

    def _let_go(self, new: list[StoredGroup]) -> None:
        """Leaves the newest groups to the file alone, where memory holds enough without them."""
        surplus = super().held_bytes - self._on_disk - self.limits.memory_bytes
        for group in reversed(new):
            if surplus <= 0:
                return
            group.data = None
            self._on_disk += group.bytes
            surplus -= group.bytes

    @property
    def held_bytes(self) -> int:
        """What all groups take; no more may come while too much waits in memory for a disk that fails."""
        held = super().held_bytes
        return held if self._journal.waiting_bytes < WRITE_BEHIND else max(held, self.limits.hard_bytes)

    def fetch(self, lease: Lease) -> Future[list[PackedGroup]]:
        """Gets a batch's groups, in order; to be asked as soon as it is taken."""
        groups = [(group.number, group.data) for group in lease.groups]
        if all(data is not None for _, data in groups):
            return super().fetch(lease)
        return self._journal.ask(partial(_packed, groups))

    def _read(self, number: int) -> PackedGroup:
        (packed,) = self._journal.ask(partial(_packed, [(number, None)])).result()
        return packed

    @property
    def failing(self) -> str:
        """Why nothing can be saved; "" where all is well."""
        return self._journal.failing

    def close(self) -> None:
        """Saves what is left and closes the file."""
        self.save()
        self._journal.close()

    # Writing.

    def _moves(self) -> tuple[list[StoredGroup], list[StoredGroup]]:
        """Groups that come into the file, and groups that leave it."""
        came = {group.number: group for group in self._marks.groups}
        units = self._marks.units.values()
        gone = (group for unit in units if unit.place is Place.GONE for group in unit.groups)
        left = [group for group in gone if came.pop(group.number, None) is None]
        return list(came.values()), left

    def _changes(self, came: list[StoredGroup], left: list[StoredGroup]) -> Iterator[Statement]:
        marks = self._marks
        if marks.cleared:
            for table in TABLES:
                yield f"DELETE FROM {table}", [()]
        if came:
            yield "INSERT INTO groups VALUES (?, ?)", [(one.number, group_body(one)) for one in came]
            yield "INSERT INTO data VALUES (?, ?)", [(one.number, one.packed.data) for one in came]
        if left:
            yield "DELETE FROM groups WHERE number = ?", [(one.number,) for one in left]
            yield "DELETE FROM data WHERE number = ?", [(one.number,) for one in left]
        if marks.units:
            gone = [(unit.number,) for unit in marks.units.values() if unit.place is Place.GONE]
            if gone:
                yield "DELETE FROM units WHERE number = ?", gone
            there = [unit for unit in marks.units.values() if unit.place is not Place.GONE]
            yield from _table("units", "(?, ?)", {unit.number: (unit_body(unit),) for unit in there})
        if marks.leases:
            yield from _table("leases", "(?, ?)", self._lease_rows())
        if marks.envs:
            yield from _table("envs", "(?, ?)", {env.env_id: (env_body(env),) for env in marks.envs.values()})
        if marks.aside:
            reasons = {n: None if reason is None else (reason,) for n, reason in marks.aside.items()}
            yield from _table("aside", "(?, ?)", reasons)
        if marks.replies:
            yield from _table("replies", "(?, ?, ?, ?, ?)", self._reply_rows())
        state = self._state()
        changed = [(name, value) for name, value in state.items() if self._written.get(name) != value]
        if changed:
            self._written = state
            rows = [(name, to_json(value)) for name, value in changed]
            yield "INSERT OR REPLACE INTO state VALUES (?, ?)", rows

    def _lease_rows(self) -> dict[int, tuple[Any, ...] | None]:
        """Changed leases by number; None where one is forgotten."""
        known = self._stock.leases.knows
        return {
            int(lease.batch_id.removeprefix("b-")): (lease_body(lease),) if known(lease) else None
            for lease in self._marks.leases.values()
        }

    def _reply_rows(self) -> dict[int, tuple[Any, ...] | None]:
        return {
            number: (one.key, one.digest, one.body, one.at) if one in self._replies else None
            for number, one in self._marks.replies.items()
        }

    def _state(self) -> dict[str, Any]:
        """All that is neither group, unit, lease, environment nor answer."""
        return {
            "counters": {
                "groups": self._number,
                "replies": self._replies.number,
                "started": self._started,
                "trainers": sorted(self._trainers),
                "replaced": sorted(self._replaced),
                "tallies": self._tallies.state(),
            },
            "stock": self._stock.state(),
            "policy": self._policies.state(),
        }

    # Reading.

    def _recover(self, now: float) -> str:
        """Puts everything back where it was; returns what that was, in words."""
        read = self._journal.read
        state = {name: from_json(body) for name, body in read("SELECT name, body FROM state")}
        for _, body in read("SELECT env_id, body FROM envs ORDER BY env_id"):
            self._envs.restore(read_env(body, now))
        if not state:
            return ""
        self._restore_state(
            state, {n: reason for n, reason in read("SELECT * FROM aside ORDER BY number")}, now
        )
        for number, key, digest, body, at in read("SELECT * FROM replies ORDER BY number"):
            self._replies.restore(KeptReply(number, key, digest, body, at), lost=True)
        groups = {
            number: self._found(read_group(number, body))
            for number, body in read("SELECT * FROM groups ORDER BY number")
        }
        if groups:
            self._latest = self._read(max(groups))
        units = {
            number: read_unit(body, groups) for number, body in read("SELECT * FROM units ORDER BY number")
        }
        for _, body in read("SELECT * FROM leases ORDER BY number"):
            self._stock.leases.restore(read_lease(body, units))
        for unit in units.values():
            if unit.place is not Place.LEASED:
                self._stock.queue.add(unit)
        for group in groups.values():  # in no unit: parts that wait for the others
            env = self._envs.find(group.env_id)
            assert env is not None, "only groups of known environments are buffered"
            env.buffer.append(group)
        self._marks.clear()  # all of this came from the file
        for lease in self._stock.leases.unread:
            self._stock.put_back(lease)
        self._stock.leases.renew(now)
        return self._summary(buffered=len(groups))

    def _found(self, group: StoredGroup) -> StoredGroup:
        """A group that stays where it was found: in the file."""
        self._on_disk += group.bytes
        return group

    def _restore_state(self, state: Mapping[str, Any], aside: Mapping[int, str], now: float) -> None:
        self._now = now
        counters = state["counters"]
        self._number, self._replies.number = counters["groups"], counters["replies"]
        self._started = counters["started"]
        self._trainers, self._replaced = set(counters["trainers"]), set(counters["replaced"])
        self._trainer_seen_at = now
        self._tallies = self._stock.tallies = Tallies.restore(counters["tallies"])
        self._stock.restore(state["stock"], aside)
        self._policies.restore(state["policy"])

    def _summary(self, buffered: int) -> str:
        stock = self._stock
        counts = {
            "groups queued": stock.queue.groups,
            "groups under a lease": stock.leases.groups,
            "parts of groups": buffered,
            "environments": len(self._envs),
        }
        found = [f"{count} {what}" for what, count in counts.items() if count]
        found.append(f"step {stock.step}")
        if self._policies.version is not None:
            found.append(f"policy version {self._policies.version}")
        return ", ".join(found)


def _table(name: str, places: str, changes: Mapping[int, tuple[Any, ...] | None]) -> Iterator[Statement]:
    """Writes or deletes the rows of a table by their number."""
    column = {"envs": "env_id"}.get(name, "number")
    kept = [(number, *values) for number, values in changes.items() if values is not None]
    if kept:
        yield f"INSERT OR REPLACE INTO {name} VALUES {places}", kept
    gone = [(number,) for number, values in changes.items() if values is None]
    if gone:
        yield f"DELETE FROM {name} WHERE {column} = ?", gone


def _packed(
    groups: Sequence[tuple[int, PackedGroup | None]], connection: sqlite3.Connection
) -> list[PackedGroup]:
    """The groups, read from the file where they are not at hand; IndexError where one is missing."""

    def read(number: int) -> PackedGroup:
        rows = connection.execute("SELECT data FROM data WHERE number = ?", (number,)).fetchall()
        return PackedGroup(rows[0][0])

    return [read(number) if data is None else data for number, data in groups]
