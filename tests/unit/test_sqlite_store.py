"""The store that survives its process: whatever was saved is there again after a crash, as it was.

A crash is a copy of the file and its log in mid-flight: what a killed process leaves behind.

1. after any interleaving, and any number of crashes, the rules of the memory store hold,
2. nothing that can be read changes by a crash, but clocks of who was seen when,
3. the file is one server's at a time, and stays small.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_store import LEASE, NOW, PLAIN, add, add_env, names, publish, registration, taken, version

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.memory import MemoryStore
from atropos_gym.batch_server.refusals import Conflict, Refused
from atropos_gym.batch_server.sqlite import SqliteStore
from atropos_gym.batch_server.stock import Request
from atropos_gym.errors import ConfigError

LIMITS = Limits(max_deliveries=10**6, env_timeout=10**9)


def saved(store: MemoryStore) -> None:
    """Waits until everything is in the file."""
    if (future := store.save()) is not None:
        future.result(20)


def crash(store: SqliteStore, copy: Path, limits: Limits | None = None, now: float = NOW) -> SqliteStore:
    """A new process on what a killed one leaves behind."""
    path = store._journal.path
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    store.close()
    return SqliteStore(copy, limits, now=now)


def readable(store: MemoryStore, now: float) -> dict[str, Any]:
    """All that can be read from outside, without clocks."""
    envs = [{name: value for name, value in env.items() if name != "last_seen"} for env in store.envs()]
    return {
        "status": {**store.status(), "reason": ""},  # it tells of silence, which a restart ends
        "envs": envs,
        "info": store.info(),
        "wandb": store.wandb_info(),
        "policy": store.policy(now).model_dump(),
        "health": {**store.health(), "warnings": store._tallies.warnings()},
        "queue": [
            ([group.group_id for group in unit.groups], unit.deliveries) for unit in store._stock.queue
        ],
        "wanted": store._stock.groups_wanted,
    }


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        store.register(registration(8), NOW)
        assert store.take(PLAIN, NOW) is None
        yield store


def test_all_comes_back_as_it_was(store: SqliteStore, tmp_path: Path) -> None:
    env = add_env(store, group_size=4)
    add_env(store, desired_name="other")
    for _ in range(5):
        add(store, env_id=env, **version(7))
    add(store, 3, env_id=env)  # waits for its missing part
    publish(store, 2**40, tokenizer_fingerprint="sha256:a")
    store.hold(env, [1, 2], NOW)
    store.count_refused(env, 2, "missing")
    used, open_, gone = (store.take(Request(lease_seconds=30, groups=1), NOW) for _ in range(3))
    assert used and open_ and gone
    store.ack(used.batch_id)
    store.nack(gone.batch_id, drop=True, reason="oom")
    store.disconnect_env(1)
    before = readable(store, NOW)
    saved(store)
    again = crash(store, tmp_path / "copy.sqlite")
    assert again.recovered == (
        "2 groups queued, 1 groups under a lease, 1 parts of groups, 2 environments, step 3, "
        f"policy version {2**40}"
    )
    assert readable(again, NOW) == before
    assert again.ack(used.batch_id).step_at_end == 3
    assert names(again._stock.leases.find(open_.batch_id)) == ["g-2"]
    again.tick(NOW + 29)
    assert again.status()["queue_size"] == 2
    again.tick(NOW + 30)
    assert [unit.number for unit in again._stock.queue] == [2, 4, 5]
    with pytest.raises(Conflict, match="does not follow"):
        publish(again, 3)
    assert add(again, 1, env_id=env) == "g-7"  # the missing part, and no number is used twice
    assert [group.group_id for group in list(again._stock.queue)[-1].groups] == ["g-6", "g-7"]
    again.close()


def test_a_plain_read_that_was_under_way_goes_back(store: SqliteStore, tmp_path: Path) -> None:
    added = [add(store) for _ in range(4)]
    lease = store.take(PLAIN, NOW)
    saved(store)
    again = crash(store, tmp_path / "copy.sqlite")
    assert again.status()["current_step"] == 0
    assert taken(again) == names(lease) == added[:2]
    again.close()


def test_what_was_read_or_reset_leaves_the_file(store: SqliteStore, tmp_path: Path) -> None:
    for _ in range(4):
        add(store)
    saved(store)
    taken(store)
    saved(store)
    again = crash(store, tmp_path / "copy.sqlite")
    assert [row[0] for row in again._journal.read("SELECT number FROM groups")] == [3, 4]
    again.reset()
    saved(again)
    last = crash(again, tmp_path / "third.sqlite")
    assert last.status()["queue_size"] == 0 and not last.registered
    assert add(last) == "g-5"
    last.close()


def test_answers_are_given_again_after_a_crash(store: SqliteStore, tmp_path: Path) -> None:
    named = store.keep_reply("key", b"a", b"named", NOW)
    arrived = store.keep_reply(None, b"b", b"arrived", NOW)
    store.keep_reply(None, b"c", b"under way", NOW)
    store.reply_arrived(arrived, arrived=True)
    saved(store)
    assert store.find_reply(None, b"c", NOW) is None  # nobody knows yet that it will not arrive
    again = crash(store, tmp_path / "copy.sqlite")
    assert again.find_reply("key", b"a", NOW) == named
    with pytest.raises(Refused, match="'key' was used for a post with other content"):
        again.find_reply("key", b"x", NOW)
    assert again.find_reply(None, b"b", NOW) is None
    lost = again.find_reply(None, b"c", NOW)
    assert lost is not None and lost.body == b"under way"
    assert again.find_reply(None, b"c", NOW + 1201) is None
    assert again.find_reply("key", b"x", NOW + 86401) is None
    again.close()


def test_one_server_at_a_time(store: SqliteStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.sqlite is used by another server: stop that one"):
        SqliteStore(tmp_path / "store.sqlite")


def test_fresh_starts_anew(store: SqliteStore, tmp_path: Path) -> None:
    add(store)
    store.close()
    with SqliteStore(tmp_path / "store.sqlite") as again:
        assert again.recovered == "1 groups queued, step 0"
    with SqliteStore(tmp_path / "store.sqlite", fresh=True) as again:
        assert (again.recovered, again.registered) == ("", False)
        assert add(again) == "g-1"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b"hello" * 1000), "is not a database"),
        (lambda path: path.mkdir(), "unable to open"),
        (
            lambda path: sqlite3.connect(path).execute("CREATE TABLE x (y)").connection.commit(),
            "not of a batch",
        ),
    ],
)
def test_something_else_is_left_alone(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "other")
    with pytest.raises(ConfigError, match=words):
        SqliteStore(tmp_path / "other", fresh=True)


def test_what_cannot_be_written_is_told_and_written_later(store: SqliteStore, tmp_path: Path) -> None:
    journal = store._journal
    ((pages,),) = journal._connection.execute("PRAGMA page_count").fetchall()
    journal._connection.execute(f"PRAGMA max_page_count={pages}").fetchall()
    for _ in range(200):
        add(store, 8, messages=[[{"role": "user", "content": "x" * 2000}]] * 8)
    future = store.save()
    assert future is not None
    with pytest.raises(TimeoutError):
        future.result(0.3)
    assert store.health()["status"] == "failing"
    assert "database or disk is full" in store.health()["warnings"][0]
    journal._connection.execute("PRAGMA max_page_count=1000000").fetchall()
    future.result(20)
    assert store.health()["status"] == "ok"
    again = crash(store, tmp_path / "copy.sqlite")
    assert again.status()["queue_size"] == 200
    again.close()


def test_the_file_stays_small(store: SqliteStore) -> None:
    for _ in range(300):
        add(store, 8, messages=[[{"role": "user", "content": "x" * 2000}]] * 8)
        saved(store)
        lease = store.take(LEASE, NOW)
        assert lease is not None
        store.ack(lease.batch_id)
        saved(store)
    ((pages,),) = store._journal.read("PRAGMA page_count")
    assert pages < 150  # of 16 KiB: a thousand ended leases, and a few groups


class Crashes(RuleBasedStateMachine):
    """Any interleaving with crashes in between delivers what a store without a crash would deliver."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.files = 0
        self.store = SqliteStore(Path(self.folder.name) / "0", LIMITS, now=NOW)
        self.now = NOW
        self.added: list[str] = []
        self.used: list[str] = []
        self.leases: list[tuple[str, list[str]]] = []

    @initialize(exact=st.booleans())
    def start(self, exact: bool) -> None:
        self.store.register(registration(6, exact_batches=exact), self.now)
        assert self.store.take(PLAIN, self.now) is None
        for size in (2, 4):
            add_env(self.store, self.now, group_size=size)

    @rule(sequences=st.integers(1, 6), env_id=st.none() | st.integers(0, 2))
    def post(self, sequences: int, env_id: int | None) -> None:
        self.added.append(add(self.store, sequences, now=self.now, env_id=env_id))

    @rule(env_id=st.integers(0, 1))
    def leave(self, env_id: int) -> None:
        self.store.disconnect_env(env_id)

    @rule(seconds=st.integers(1, 70))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.tick(self.now)

    @rule(seconds=st.none() | st.integers(5, 90), arrives=st.booleans(), groups=st.none() | st.integers(1, 3))
    def read(self, seconds: int | None, arrives: bool, groups: int | None) -> None:
        lease = self.store.take(Request(lease_seconds=seconds, groups=groups), self.now)
        if lease is None:
            return
        if groups is None:
            assert lease.sequences == 6 or (lease.sequences < 6 and not self.store.exact)
        found = names(lease)
        if not arrives:
            self.store.put_back(lease)
            return
        self.store.delivered(lease)
        if seconds is None:
            self.used += found
        else:
            self.leases.append((lease.batch_id, found))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 99), used=st.booleans())
    def end(self, which: int, used: bool) -> None:
        batch_id, groups = self.leases.pop(which % len(self.leases))
        try:
            if used:
                self.store.ack(batch_id)
                self.used += groups
            else:
                self.store.nack(batch_id, drop=False)
        except Conflict:
            pass  # it ran out and its groups are with someone else, or used up by them

    @rule(asked=st.booleans())
    def crash(self, asked: bool) -> None:
        """The process is killed, between two requests or while a batch is on its way to a plain reader."""
        before = readable(self.store, self.now)
        if asked:
            self.store.take(PLAIN, self.now)
        saved(self.store)
        self.files += 1
        copy = Path(self.folder.name) / str(self.files)
        self.store = crash(self.store, copy, LIMITS, self.now)
        after = readable(self.store, self.now)
        assert {**after, "health": None} == {**before, "health": None}
        self.store.tick(self.now)

    @invariant()
    def nothing_twice(self) -> None:
        assert len(set(self.used)) == len(self.used)

    def teardown(self) -> None:
        self.now += 1000
        self.store.tick(self.now)
        while (lease := self.store.take(Request(groups=1), self.now)) is not None:
            self.used += names(lease)
            self.store.delivered(lease)
        while (lease := self.store.take(Request(groups=9, partial=True), self.now)) is not None:
            self.used += names(lease)
            self.store.delivered(lease)
        assert sorted(self.used) == sorted(self.added)
        self.store.close()
        self.folder.cleanup()


Crashes.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)
TestCrashes = Crashes.TestCase
