"""A store that survives its process: in memory as it runs, and in a SQLite file.

There is one set of rules, the memory store's. This class only writes down what they changed, and puts it back
together at the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from pydantic_core import from_json, to_json

from atropos_gym.batch_server._journal import Journal, Statement
from atropos_gym.batch_server.env_book import EnvRecord
from atropos_gym.batch_server.group_queue import Place, StoredGroup, Unit
from atropos_gym.batch_server.intake import Incoming
from atropos_gym.batch_server.leases import Lease, LeaseState
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.memory import MemoryStore
from atropos_gym.batch_server.packed import PackedGroup
from atropos_gym.batch_server.replies import KeptReply
from atropos_gym.batch_server.tallies import Tallies
from atropos_gym.wire import EnvRegistration

__all__ = ["SqliteStore"]

TABLES = ("groups", "units", "leases", "aside", "replies")
"""What a reset empties; environments stay."""


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
        self._written: dict[str, bytes] = {}  # rows of the table `state`
        self._journal = Journal(Path(path), fresh=fresh, fsync=fsync)
        self.recovered = self._recover(time.time() if now is None else now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self) -> Future[None] | None:
        """Hands what has changed to the writer; returns what to wait for."""
        statements = list(self._changes())
        self._marks.clear()
        return self._journal.write(statements) if statements else self._journal.unwritten

    @property
    def failing(self) -> str:
        """Why nothing can be saved; "" where all is well."""
        return self._journal.failing

    def close(self) -> None:
        """Saves what is left and closes the file."""
        self.save()
        self._journal.close()

    # Writing.

    def _changes(self) -> Iterator[Statement]:
        marks = self._marks
        if marks.cleared:
            for table in TABLES:
                yield f"DELETE FROM {table}", [()]
        gone = [unit for unit in marks.units.values() if unit.place is Place.GONE]
        there = [unit for unit in marks.units.values() if unit.place is not Place.GONE]
        numbers = {group.number for unit in gone for group in unit.groups}
        yield from _rows(
            "INSERT INTO groups VALUES (?, ?, ?)",
            [
                (group.number, group.received_at, group.packed.data)
                for group in marks.groups
                if group.number not in numbers
            ],
        )
        new = {group.number for group in marks.groups}
        yield from _rows("DELETE FROM groups WHERE number = ?", [(number,) for number in numbers - new])
        yield from _rows("DELETE FROM units WHERE number = ?", [(unit.number,) for unit in gone])
        yield from _table("units", "(?, ?)", {unit.number: (_unit_body(unit),) for unit in there})
        yield from _table("leases", "(?, ?)", self._lease_rows())
        yield from _table("envs", "(?, ?)", {env.env_id: (_env_body(env),) for env in marks.envs.values()})
        yield from _table(
            "aside", "(?, ?)", {n: None if reason is None else (reason,) for n, reason in marks.aside.items()}
        )
        yield from _table("replies", "(?, ?, ?, ?, ?)", self._reply_rows())
        state = {name: to_json(value) for name, value in self._state().items()}
        changed = [(name, body) for name, body in state.items() if self._written.get(name) != body]
        self._written = state
        yield from _rows("INSERT OR REPLACE INTO state VALUES (?, ?)", changed)

    def _lease_rows(self) -> dict[int, tuple[Any, ...] | None]:
        """Changed leases by number; None where one is forgotten."""
        known = self._stock.leases.knows
        return {
            int(lease.batch_id.removeprefix("b-")): (_lease_body(lease),) if known(lease) else None
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
            self._envs.restore(_env(from_json(body), now))
        if not state:
            return ""
        self._restore_state(
            state, {n: reason for n, reason in read("SELECT * FROM aside ORDER BY number")}, now
        )
        for number, key, digest, body, at in read("SELECT * FROM replies ORDER BY number"):
            self._replies.restore(KeptReply(number, key, digest, body, at), lost=True)
        groups = {row[0]: _stored(*row) for row in read("SELECT * FROM groups ORDER BY number")}
        if groups:
            self._latest = groups[max(groups)].packed
        units: dict[int, Unit] = {}
        for number, body in read("SELECT * FROM units ORDER BY number"):
            saved = from_json(body)
            parts = tuple(groups.pop(member) for member in saved.pop("groups"))
            units[number] = Unit(parts, **saved)
        for _, body in read("SELECT number, body FROM leases ORDER BY number"):
            self._stock.leases.restore(_lease(from_json(body), units))
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
        return self._summary(buffered=len(groups))

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


def _rows(sql: str, rows: Any) -> Iterator[Statement]:
    """The statement, if there are rows for it."""
    if rows := list(rows):
        yield sql, rows


def _table(name: str, places: str, changes: Mapping[int, tuple[Any, ...] | None]) -> Iterator[Statement]:
    """Writes or deletes the rows of a table by their number."""
    column = {"envs": "env_id"}.get(name, "number")
    yield from _rows(
        f"INSERT OR REPLACE INTO {name} VALUES {places}",
        [(number, *values) for number, values in changes.items() if values is not None],
    )
    yield from _rows(
        f"DELETE FROM {name} WHERE {column} = ?",
        [(number,) for number, values in changes.items() if values is None],
    )


def _unit_body(unit: Unit) -> bytes:
    saved = {"deliveries": unit.deliveries, "step": unit.step, "came_under": unit.came_under}
    return to_json({"groups": [group.number for group in unit.groups], **saved})


def _lease_body(lease: Lease) -> bytes:
    names = (one.name for one in fields(lease) if one.name != "units")
    saved = {name: getattr(lease, name) for name in names}
    return to_json({**saved, "expires_at": None if math.isinf(lease.expires_at) else lease.expires_at})


def _lease(saved: dict[str, Any], units: Mapping[int, Unit]) -> Lease:
    """A lease as it was; the units of an open one are marked as handed out."""
    state = LeaseState(saved["state"])
    held = [units[number] for number in saved["numbers"]] if state is LeaseState.OPEN else []
    for unit in held:
        unit.place = Place.LEASED
    expires_at = math.inf if saved["expires_at"] is None else saved["expires_at"]
    changed: dict[str, Any] = {"state": state, "expires_at": expires_at}
    for name in ("numbers", "given_ranks", "acked_ranks"):
        changed[name] = tuple(saved.get(name, ()))
    return Lease(**{**saved, **changed}, units=tuple(held))


def _env_body(env: EnvRecord) -> bytes:
    names = (
        one.name for one in fields(env) if one.name not in ("settings", "buffer", "last_seen", "had_data_at")
    )
    return to_json({"settings": env.settings.model_dump()} | {name: getattr(env, name) for name in names})


def _env(saved: dict[str, Any], now: float) -> EnvRecord:
    settings = EnvRegistration.model_validate(saved.pop("settings"))
    return EnvRecord(**saved, settings=settings, last_seen=now, had_data_at=now)


def _stored(number: int, received_at: float, data: bytes) -> StoredGroup:
    incoming = Incoming.again(PackedGroup(data))
    return StoredGroup.of(number, incoming, received_at)
