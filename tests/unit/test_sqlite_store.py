"""The store that survives its process: whatever was saved is there again after a crash, as it was.

A crash is a copy of the file and its log in mid-flight: what a killed process leaves behind.

1. after any interleaving, and any number of crashes, the rules of the memory store hold,
2. nothing that can be read changes by a crash, but clocks of who was seen when,
3. the file is one server's at a time, and stays small.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from server_tools import REGISTER, group
from store_model import LIMITS, StoreModel
from store_tools import (
    LEASE,
    NOW,
    PLAIN,
    add,
    add_env,
    crash,
    leased,
    names,
    publish,
    readable,
    registration,
    saved,
    taken,
    version,
)

from atropos_gym.batch_server.app import create_app
from atropos_gym.batch_server.limits import Limits, memory_allows
from atropos_gym.batch_server.state import journal, sqlite
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.refusals import Conflict, Refused
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.wire import ScoredDataGroup


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        store.register(registration(8), NOW)
        assert store.take(PLAIN, NOW) is None
        yield store


@pytest.mark.parametrize("knows_it", [False, True])
def test_after_a_restart_a_trainer_of_the_same_settings_is_another_one_unless_it_says_who_it_is(
    store: SqliteStore, tmp_path: Path, knows_it: bool
) -> None:
    known = store.register(registration(8), NOW)
    publish(store, 3)
    saved(store)
    with crash(store, tmp_path / "copy.sqlite") as again:
        assert not again.policy(NOW).superseded
        again.register(registration(8), NOW + 1, trainer_id=known if knows_it else None)
        assert again.policy(NOW).superseded == (not knows_it)
        saved(again)
        with crash(again, tmp_path / "copy2.sqlite") as third:
            assert third.policy(NOW).superseded == (not knows_it), "nor does a restart make it current"
            publish(third, 4, "s")
            assert not third.policy(NOW).superseded


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
    assert again.registration(env) == store.registration(env) != store.registration(1)
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


def test_the_time_without_a_server_counts_against_no_lease(store: SqliteStore, tmp_path: Path) -> None:
    store.register(registration(4), NOW, takeover=True)
    for _ in range(3):
        add(store)
    short, long = leased(store, seconds=60), leased(store, seconds=5000)
    ended = leased(store, seconds=30)
    store.tick(NOW + 30)
    saved(store)
    away = NOW + 1000
    with crash(store, tmp_path / "copy.sqlite", now=away) as again:
        again.tick(away + 59)
        find = again._stock.leases.find
        assert [find(one.batch_id).expires_at for one in (short, long)] == [away + 60, away + 5000]
        assert find(ended.batch_id).state == "expired"
        again.extend(short.batch_id, 60, away + 59)
        again.tick(away + 100)
        assert names(leased(again, now=away + 100)) == ["g-3"], "the others are still at work"
        again.tick(away + 119)
        assert again.status()["queue_size"] == 1


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
    deadline = time.monotonic() + 60
    while store.health()["status"] == "ok":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.health()["status"] == "failing" and not future.done()
    assert "database or disk is full" in store.health()["warnings"][0]
    journal._connection.execute("PRAGMA max_page_count=1000000").fetchall()
    future.result(60)
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
    assert pages < 600  # of 4 KiB: a thousand ended leases, and a few groups


def test_the_file_gives_back_what_a_long_queue_took(store: SqliteStore, tmp_path: Path) -> None:
    for _ in range(40):
        add(store, 1, messages=[[{"role": "user", "content": "x" * 500_000}]])
    saved(store)
    while (lease := store.take(Request(groups=1), NOW)) is not None:
        store.delivered(lease)
    saved(store)
    deadline = time.monotonic() + 60
    while sum(path.stat().st_size for path in tmp_path.iterdir()) > 6 * 2**20:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("sequences", "length"), [(8, 128), (4, 1000), (8, 4096)])
def test_nine_bytes_an_id(store: SqliteStore, sequences: int, length: int) -> None:
    """Ids, masks and logprobs; beside them, a group and each of its rows have a header."""
    ids = [list(range(length))] * sequences
    group = ScoredDataGroup(
        tokens=ids,
        masks=ids,
        scores=[0.5] * sequences,
        inference_logprobs=[[-0.1] * length] * sequences,
        env_id=0,
        **version(3),
    )
    store.register(registration(8, max_token_len=4096), NOW, takeover=True)
    saved(store)
    ((before,),) = store._journal.read("PRAGMA page_count")
    count = 1 + 2**18 // (sequences * length)
    for _ in range(count):
        store.add_groups([Incoming.of(group)], NOW)
        saved(store)
    ((after,),) = store._journal.read("PRAGMA page_count")
    ids_in_all, headers = count * sequences * length, count * (700 + 12 * sequences)
    assert store.held_bytes <= 8.2 * ids_in_all + headers
    assert 4096 * (after - before) <= 9 * ids_in_all + headers


# What lies on disk only.


def test_what_memory_does_not_hold_is_read_when_it_goes_out(tmp_path: Path) -> None:
    limits = Limits(memory_bytes=1000)
    with SqliteStore(tmp_path / "store.sqlite", limits, now=NOW) as store:
        store.register(registration(4), NOW)
        for tag in range(12):
            add(store, 4, scores=[float(tag)] * 4)
            store.save()
        queued = [group for unit in store._stock.queue for group in unit.groups]
        there = [group.data is not None for group in queued]
        assert there == sorted(there, reverse=True), "what came first, and goes out first, is in memory"
        assert 0 < sum(group.bytes for group in queued if group.data) <= 1000
        for tag in range(12):
            lease = store.take(PLAIN, NOW)
            assert lease is not None
            (packed,) = store.fetch(lease).result(20)
            assert packed.scores.tolist() == [tag] * 4
            store.delivered(lease)
            store.save()
        assert store.held_bytes == store._on_disk == 0
        add(store, 4)
        store.save()
        assert store._stock.queue[0].groups[0].data is not None, "there is room again"


def test_nothing_is_read_back_to_count_or_to_plan(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.limits = Limits(memory_bytes=0)
    env = add_env(store, group_size=4)
    for _ in range(4):
        add(store, env_id=env)
    saved(store)
    monkeypatch.setattr(store._journal, "ask", lambda look: pytest.fail("read the file"))
    readable(store, NOW)
    assert store.status_env(env)["self_queue_size"] == 4
    assert store.metrics() and store.latest_example() is not None
    lease = store.take(LEASE, NOW)
    assert lease is not None and store.leases()[0]["sequences"] == lease.sequences == 8
    store.nack(lease.batch_id, drop=False)
    publish(store, 1)
    store.disconnect_env(env)
    store.tick(NOW + 1)


def test_a_group_can_be_read_before_it_is_committed(store: SqliteStore) -> None:
    store.limits = Limits(memory_bytes=0)
    busy = threading.Event()
    store._journal.ask(lambda connection: busy.wait(20))  # whoever writes has something else to do
    add(store), add(store)
    committed = store.save()
    lease = store.take(PLAIN, NOW)
    assert lease is not None and lease.groups[0].data is None
    found = store.fetch(lease)
    store.delivered(lease)
    store.save()  # deletes them
    assert committed is not None and not committed.done() and not found.done()
    busy.set()
    assert [packed.size for packed in found.result(20)] == [4, 4]
    assert store._journal.ask(lambda c: c.execute("SELECT count(*) FROM data").fetchall()).result(20) == [
        (0,)
    ]


def test_what_cannot_be_read_is_an_error_for_who_asked(store: SqliteStore) -> None:
    store.limits = Limits(memory_bytes=0)
    add(store), add(store)
    saved(store)
    store._journal.write([("DELETE FROM data WHERE number = ?", [(1,)])]).result(20)
    lease = store.take(PLAIN, NOW)
    assert lease is not None
    with pytest.raises(ServerError, match="cannot read what was stored"):
        store.fetch(lease).result(20)
    add(store)
    saved(store)
    assert store.failing == ""


def test_memory_that_is_short_for_a_read_is_an_error_for_who_asked(store: SqliteStore) -> None:
    def short(connection: sqlite3.Connection) -> None:
        raise MemoryError

    with pytest.raises(ServerError, match="cannot read what was stored: MemoryError"):
        store._journal.ask(short).result(20)
    add(store)
    saved(store)
    assert store.failing == ""


def test_memory_that_is_short_for_a_write_is_waited_for(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, carry_out = iter([True, False]), journal._carry_out

    def carried_out(*arguments: Any) -> None:
        if next(short):
            raise MemoryError
        carry_out(*arguments)

    monkeypatch.setattr(journal, "_carry_out", carried_out)
    monkeypatch.setattr(journal, "IDLE_SECONDS", 0.01)
    add(store)
    saved(store)
    assert store.failing == "" and next(short, "both were tried") == "both were tried"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_after_the_end_of_the_writer_nothing_is_said_to_be_saved(store: SqliteStore) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        raise IndexError("of ours")

    store.limits = Limits(memory_bytes=0)
    store._journal._add(broken)
    add(store)
    for again in range(3):  # also where nothing has changed since, as when a post is repeated
        future = store.save()
        assert future is not None
        with pytest.raises(ServerError, match="IndexError.*nothing is saved until a restart"):
            future.result(20)
        if again:
            add(store)
    store._journal._thread.join(20)
    assert store.health()["status"] == "failing" and "IndexError" in store.health()["warnings"][0]
    with pytest.raises(ServerError, match="IndexError"):
        store._journal.ask(lambda connection: None).result(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_repeated_post_is_not_answered_when_the_first_was_never_saved(tmp_path: Path) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        raise IndexError("of ours")

    with SqliteStore(tmp_path / "store.sqlite") as store:
        app = create_app(store)

        async def story() -> list[int]:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                await http.post("/register", json=REGISTER)
                store._journal._add(broken)
                store._journal._thread.join(20)
                key = {"Idempotency-Key": "k"}
                posts = [await http.post("/scored_data", json=group(), headers=key) for _ in range(3)]
                health = await http.get("/health")
            return [reply.status_code for reply in (*posts, health)]

        assert asyncio.run(story()) == [503] * 4


def test_no_more_comes_in_while_too_much_waits_for_a_disk_that_fails(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "WRITE_BEHIND", 5000)
    busy = threading.Event()
    store._journal.ask(lambda connection: busy.wait(20))
    add(store)
    store.save()
    assert store.held_bytes < 1000
    for _ in range(40):
        add(store)
    store.save()
    assert store.held_bytes == store.limits.hard_bytes
    busy.set()
    saved(store)
    assert store.held_bytes == sum(unit.bytes for unit in store._stock.queue) < store.limits.hard_bytes


def test_disk_holds_16_gib_and_memory_what_it_can(store: SqliteStore) -> None:
    assert Limits().hard_bytes == store.limits.hard_bytes == 16 * 2**30
    assert MemoryStore().limits.hard_bytes == min(16 * 2**30, memory_allows())
    assert MemoryStore(Limits(hard_bytes=2**60)).limits.hard_bytes == memory_allows()
    store.limits = Limits(hard_bytes=2**60)
    assert store.limits.hard_bytes == 2**60


class Crashes(StoreModel):
    """Any interleaving with crashes in between delivers what a store without a crash would deliver."""

    limits = LIMITS

    def open(self) -> MemoryStore:
        self.folder = tempfile.TemporaryDirectory()
        self.files = 0
        return SqliteStore(Path(self.folder.name) / "0", self.limits, now=self.now)

    @rule(asked=st.booleans())
    def crash(self, asked: bool) -> None:
        """The process is killed, between two requests or while a batch is on its way to a plain reader."""
        assert isinstance(self.store, SqliteStore)
        before = readable(self.store, self.now)
        if asked:
            self.store.take(PLAIN, self.now)
        saved(self.store)
        self.files += 1
        self.store = crash(self.store, Path(self.folder.name) / str(self.files), self.limits, self.now)
        after = readable(self.store, self.now)
        assert {**after, "health": None} == {**before, "health": None}
        self.store.tick(self.now)

    @invariant()
    def what_is_in_memory_is_counted(self) -> None:
        assert isinstance(self.store, SqliteStore)
        if self.store.save() is not None:  # what is not handed over stays in memory
            in_memory = sum(group.bytes for group in self.groups() if group.data is not None)
            assert in_memory == self.store.held_bytes - self.store._on_disk <= self.limits.memory_bytes

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


class CrashesOnDisk(Crashes):
    """The same where two or three groups fill the memory."""

    limits = replace(LIMITS, memory_bytes=500)


for machine, examples in ((Crashes, 12), (CrashesOnDisk, 12)):
    machine.TestCase.settings = settings(deadline=None, max_examples=examples, stateful_step_count=25)
TestCrashes = Crashes.TestCase
TestCrashesOnDisk = CrashesOnDisk.TestCase
