"""A learner's batches from a server that goes away: leases that ran out, waiting, taking leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from store_tools import NOW, add, crash, leased, registration, saved

from atropos_gym.batch_server._calls import Batch
from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.refusals import Conflict, Unknown
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.errors import ServerError
from atropos_gym.trainers import _sources
from atropos_gym.trainers._leases import Leases
from atropos_gym.trainers._sources import ServerSource, open_server
from atropos_gym.trainers._waiting import Waiting

URL = "http://127.0.0.1:8000"


class Server:
    """A client whose server is a store in this process; it gives names in place of groups."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.now = NOW
        self.tries = 0
        self.unanswered: tuple[str, ...] = ()  # calls that get no answer

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batch(self, groups: int, wait_seconds: float, lease_seconds: float) -> Batch | None:
        self.store.tick(self.now)
        lease = self.store.take(Request(lease_seconds=lease_seconds, groups=groups), self.now)
        if lease is None:
            return None
        self.store.delivered(lease)
        names: Any = [group.group_id for group in lease.groups]
        return Batch(groups=names, batch_id=lease.batch_id, group_ids=names)

    def ack(self, batch_id: str) -> None:
        self._say("ack", lambda: self.store.ack(batch_id))

    def nack(self, batch_id: str, reason: str) -> None:
        self._say("nack", lambda: self.store.nack(batch_id, drop=False, reason=reason))

    def extend(self, batch_id: str, lease_seconds: float) -> None:
        self._say("extend", lambda: self.store.extend(batch_id, lease_seconds, self.now))

    def _say(self, what: str, call: Any) -> None:
        self.tries += 1
        if what in self.unanswered:
            raise ServerError("no answer")
        try:
            call()
        except (Conflict, Unknown) as error:
            raise ServerError(str(error), status=409) from error


@pytest.fixture
def server() -> Server:
    store = MemoryStore()
    store.register(registration(8, groups_per_update=2), NOW)
    for _ in range(6):
        add(store)
    return Server(store)


@pytest.fixture
def source(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerSource]:
    monkeypatch.setattr(ServerSource, "_hasty", lambda self, timeout: server)
    options: dict[str, Any] = {"groups": 2, "lease_seconds": 600.0, "announcement": {"run": "r"}}
    source = ServerSource(server, URL, leases=Leases(None, "r"), checkpointing=True, **options)
    yield source
    server.unanswered = ()
    source.close(finished=False)


def step(source: ServerSource, update: int, *, durable: bool = False) -> list[Any]:
    groups = source.next(update)
    source.done(durable=durable)
    return groups


def test_leases_are_extended_before_a_batch_is_asked_for(server: Server, source: ServerSource) -> None:
    assert step(source, 1) == ["g-1", "g-2"]
    server.now += 10_000
    assert step(source, 2, durable=True) == ["g-3", "g-4"]
    assert (source.repeated, source.lost, server.store.status()["leased_groups"]) == (0, 0, 0)


def test_a_server_away_for_longer_than_a_lease_gives_no_group_twice(
    server: Server, source: ServerSource, tmp_path: Path
) -> None:
    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        store.register(registration(8, groups_per_update=2), NOW)
        for _ in range(4):
            add(store)
        server.store, server.unanswered = store, ("extend",)
        assert step(source, 1) == ["g-1", "g-2"]
        saved(store)
        server.now += 10_000
        with crash(store, tmp_path / "copy.sqlite", now=server.now) as server.store:
            assert step(source, 2, durable=True) == ["g-3", "g-4"]
            assert (source.repeated, source.lost, server.store.status()["leased_groups"]) == (0, 0, 0)


def test_what_comes_again_is_acknowledged_but_not_learned_again(
    server: Server, source: ServerSource, caplog: pytest.LogCaptureFixture
) -> None:
    server.unanswered = ("extend",)
    assert step(source, 1) == ["g-1", "g-2"]
    server.now += 10_000
    assert step(source, 2) == ["g-3", "g-4"]
    assert source.repeated == 2 and "2 groups of batch b-2 were learned from under" in caplog.text
    server.unanswered = ()
    assert step(source, 3, durable=True) == ["g-5", "g-6"]
    assert source.lost == 0 and server.store.status()["leased_groups"] == 0
    server.store.tick(server.now + 10_000)
    assert server.store.status()["queue_size"] == 0, "all of it was used once"


def test_a_batch_in_part_of_what_was_learned_before_is_learned_for_the_rest(
    server: Server, source: ServerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(source, 1)
    mixed: Any = ["g-2", "g-9"]
    monkeypatch.setattr(server, "batch", lambda **_: Batch(groups=mixed, batch_id="b-9", group_ids=mixed))
    assert source.next(2) == ["g-9"] and source.repeated == 1
    assert list(source._leases) == ["b-1", "b-9"]


@pytest.mark.parametrize("count", [2, 0])
def test_a_batch_that_went_to_someone_else_is_counted_and_the_learner_goes_on(
    server: Server, source: ServerSource, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    step(source, 1)
    if count == 0:  # the server knows nothing of it any more
        server.store.ack("b-1")
    else:
        server.store.tick(server.now + 10_000)
        leased(server.store, now=server.now + 10_000)
    source.done(durable=True)
    assert source.lost == (count > 0) == ("went to someone else" in caplog.text)
    assert list(source._leases) == []
    source.next(2)
    source.done(durable=True)
    assert source.lost == (count > 0)


def test_a_server_that_fails_at_an_ack_is_a_fault(server: Server, source: ServerSource) -> None:
    step(source, 1)
    server.unanswered = ("ack",)
    with pytest.raises(ServerError, match="no answer"):
        source.done(durable=True)
    assert list(source._leases) == ["b-1"]


def test_a_batch_that_went_back_by_itself_need_not_be_given_back(
    server: Server, source: ServerSource
) -> None:
    source.next(1)
    server.store.tick(server.now + 10_000)
    leased(server.store, now=server.now + 10_000)
    source.give_back()
    assert list(source._leases) == []


def test_a_round_ends_at_the_first_try_without_an_answer(server: Server, source: ServerSource) -> None:
    for number in range(3):
        step(source, 1 + number)
    server.unanswered, server.tries = ("extend", "nack"), 0
    assert "no answer" in str(source.extend()) and server.tries == 1
    source.close(finished=False)
    assert server.tries == 2, "one try to give them back"
    assert source.extend() is None and server.tries == 2, "none after the stop"


def hanging(seconds: float, **options: Any) -> tuple[BatchClient, list[float]]:
    """A client whose every try takes so long and gets no answer, and when these tries began."""
    began: list[float] = []
    clock = [0.0]

    def answer(request: httpx.Request) -> httpx.Response:
        began.append(clock[0])
        clock[0] += seconds
        raise httpx.ReadTimeout("")

    def sleep(pause: float) -> None:
        clock[0] += pause

    transport = httpx.MockTransport(answer)
    return BatchClient(URL, transport=transport, sleep=sleep, clock=lambda: clock[0], **options), began


@pytest.mark.parametrize("seconds", [0.0, 80.0])
def test_waiting_is_measured_from_the_first_failure_and_said_once_a_minute(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    client, began = hanging(seconds, retry_seconds=600.0, again=Waiting(URL))
    with caplog.at_level(logging.WARNING), pytest.raises(ServerError, match="ReadTimeout"):
        client.batch(groups=2)
    assert 500 < began[-1] <= seconds + 600
    assert 5 < len(caplog.records) < 12
    assert "no answer from http://127.0.0.1:8000" in caplog.messages[0]
    again = len(caplog.records)
    with pytest.raises(ServerError):
        client.policy()
    assert len(caplog.records) > again, "another time that it is away"


def test_nobody_waits_for_a_child_that_has_ended() -> None:
    client, began = hanging(1.0, retry_seconds=600.0, again=Waiting(URL, lambda: len(began) == 2))
    with pytest.raises(ServerError, match="a part of this run, has ended: no answer"):
        client.policy()
    assert len(began) == 2


@pytest.mark.parametrize("left_at", [None, URL, "http://127.0.0.1:9000"])
@pytest.mark.parametrize("updates", [0, 7])
def test_a_run_takes_over_the_server_that_it_was_at_and_no_other(
    left_at: str | None, updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def register(client: BatchClient, *, takeover: bool, **fields: Any) -> None:
        asked.append(takeover)
        assert client._retry_seconds == 60.0
        raise ServerError("that is all")

    monkeypatch.setattr(_sources.BatchClient, "register", register)
    if left_at is not None:
        Leases(tmp_path / "leases.json", "r", left_at)
    model: Any = SimpleNamespace(
        server="http://x:secret@127.0.0.1:8000/",
        run="r",
        run_folder=tmp_path,
        groups_per_update=2,
        group_size=4,
        observation_space=SimpleNamespace(max_length=64),
        checkpoint_every=1,
        max_staleness=1,
        _n_updates=updates,
        _run_over=False,
        _parts=SimpleNamespace(registered_at=None, server_ended=None),
    )
    with pytest.raises(ServerError, match="that is all"):
        open_server(model, 1)
    assert asked == [updates > 0 if left_at is None else left_at == URL]
