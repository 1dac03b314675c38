"""One batch for several ranks.

1. all ranks that ask for one step get disjoint parts, which together are one batch in its order,
2. the same step and rank get the same part again,
3. the batch is used once every rank has acked; one nack or the end of the lease puts all of it back,
4. all of this survives a crash.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from server_tools import LocalServer
from test_store import NOW, add, registration

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.parts import Part, Share, cuts
from atropos_gym.batch_server.state.refusals import Conflict
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.stock import Request


def make_server(groups: int = 4, batch_size: int = 16) -> LocalServer:
    server = LocalServer()
    server.start(batch_size=batch_size)
    for tag in range(groups):
        server.send(tag=tag)
    return server


def part(server: LocalServer, rank: int, world_size: int = 2, **params: Any) -> dict[str, Any]:
    query = {"rank": rank, "world_size": world_size, "lease_seconds": 60, **params}
    return dict(server.get("/batch", **query))


def tags(reply: dict[str, Any]) -> list[float]:
    return [one["scores"][0] for one in reply["batch"]]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_cuts_are_fair(tokens: list[int], count: int) -> None:
    at = cuts(tokens, count)
    assert (at[0], at[-1], len(at), at) == (0, len(tokens), count + 1, sorted(at))
    stretches = [tokens[start:end] for start, end in zip(at, at[1:], strict=False)]
    if len(tokens) >= count:
        assert all(stretches)
    # A cut is within half a unit of its fair place, unless a stretch would be empty.
    fair = sum(tokens) / count
    for stretch in stretches:
        assert sum(stretch) <= fair + max(tokens, default=0) or len(stretch) == 1


def test_ranks_share_a_batch() -> None:
    server = make_server()
    parts = [part(server, rank, step=17) for rank in (1, 0)]
    assert [tags(one) for one in parts] == [[2, 3], [0, 1]]
    assert {one["batch_id"] for one in parts} == {"b-1"}
    about = ("rank", "world_size", "batch_sequences", "batch_groups", "delivery", "step")
    assert [parts[0][name] for name in about] == [1, 2, 16, 4, 1, 1]
    assert parts[0]["group_ids"] == ["g-3", "g-4"]
    assert part(server, 1, step=17) == parts[0]
    status = server.get("/status")
    assert (status["current_step"], status["leased_groups"], status["queue_size"]) == (1, 4, 0)


def test_headers_and_msgpack_are_of_the_part() -> None:
    server = make_server()
    query = {"rank": 0, "world_size": 4, "lease_seconds": 60}
    plain = server.call("GET", "/batch", params=query)
    assert (plain.headers["x-batch-sequences"], plain.headers["x-batch-groups"]) == ("4", "1")
    packed = server.call(
        "GET", "/batch", params={**query, "step": 5}, headers={"Accept": "application/msgpack"}
    )
    assert packed.status_code == 200


def test_more_ranks_than_groups_leave_some_empty() -> None:
    server = make_server(groups=2, batch_size=8)
    parts = [part(server, rank, world_size=3, step=0) for rank in range(3)]
    assert sorted(map(tags, parts)) == [[], [0], [1]]
    for rank in range(3):
        reply = server.post("/ack", {"batch_id": "b-1", "rank": rank})
    assert reply["missing_ranks"] == []
    assert server.get("/status")["leased_groups"] == 0


def test_it_is_used_when_all_have_acked() -> None:
    server = make_server()
    part(server, 0, step=3), part(server, 1, step=3)
    first = server.post("/ack", {"batch_id": "b-1", "rank": 1})
    assert first == {"status": "acked", "batch_id": "b-1", "current_step": 1, "rank": 1, "missing_ranks": [0]}
    assert server.post("/ack", {"batch_id": "b-1", "rank": 1}) == first
    assert server.get("/status")["leased_groups"] == 4
    last = server.post("/ack", {"batch_id": "b-1", "rank": 0})
    assert last["missing_ranks"] == [] and server.get("/status")["leased_groups"] == 0
    assert server.post("/ack", {"batch_id": "b-1", "rank": 0}) == last


@pytest.mark.parametrize("how", ["nack", "expiry"])
@pytest.mark.parametrize("counted", [False, True])
def test_one_that_goes_back_takes_all_with_it(how: str, counted: bool) -> None:
    server = make_server()
    step = {} if counted else {"step": 3}
    part(server, 0, **step), part(server, 1, **step)
    server.post("/ack", {"batch_id": "b-1", "rank": 0})
    if how == "nack":
        assert server.post("/nack", {"batch_id": "b-1"}) == {"status": "requeued", "groups": 4}
    else:
        server.clock.advance(61)
    again = [part(server, rank, **step) for rank in (0, 1)]
    assert [tags(one) for one in again] == [[0, 1], [2, 3]]
    assert {(one["batch_id"], one["delivery"], one["step"]) for one in again} == {("b-2", 2, 1)}
    assert server.post("/ack", {"batch_id": "b-1", "rank": 1}, status=409)


def test_an_expired_part_still_acks_while_no_one_else_has_it() -> None:
    server = make_server()
    part(server, 0, step=3), part(server, 1, step=3)
    server.clock.advance(61)
    server.post("/ack", {"batch_id": "b-1", "rank": 0})
    assert server.post("/ack", {"batch_id": "b-1", "rank": 1})["missing_ranks"] == []
    assert server.get("/status")["queue_size"] == 0


def test_without_a_step_each_rank_counts_its_own_calls() -> None:
    server = make_server(groups=8)
    first, second = part(server, 0), part(server, 0)
    assert (tags(first), tags(second)) == ([0, 1], [4, 5])
    assert (tags(part(server, 1)), tags(part(server, 1))) == ([2, 3], [6, 7])
    assert part(server, 1)["batch"] is None
    assert server.get("/status")["current_step"] == 2


def test_a_rank_that_waits_counts_no_call() -> None:
    server = make_server(groups=0)
    assert [part(server, 0)["batch"] for _ in range(3)] == [None] * 3
    for tag in range(4):
        server.send(tag=tag)
    assert [tags(part(server, rank)) for rank in (1, 0)] == [[2, 3], [0, 1]]


def test_the_number_of_ranks_holds_while_a_step_is_open() -> None:
    server = make_server()
    part(server, 0, step=3)
    query = {"rank": 0, "world_size": 3, "lease_seconds": 60, "step": 3}
    refused = server.call("GET", "/batch", params=query)
    assert refused.status_code == 409
    assert "goes out in 2 parts, not in 3" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "in 2 parts: ack each with its rank"),
        ({"rank": 2}, "in 2 parts: ack each with its rank, got rank 2"),
    ],
)
def test_acks_that_fit_no_part(body: dict[str, Any], words: str) -> None:
    server = make_server()
    part(server, 0, step=3)
    assert words in server.post("/ack", {"batch_id": "b-1", **body}, status=409)["detail"]


def test_a_whole_batch_is_acked_without_a_rank() -> None:
    server = make_server()
    server.get("/batch", lease_seconds=60)
    refused = server.post("/ack", {"batch_id": "b-1", "rank": 0}, status=409)
    assert "goes out whole, got rank 0" in refused["detail"]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ({"rank": 0, "lease_seconds": 60}, "rank"),
        ({"world_size": 2, "lease_seconds": 60}, "rank"),
        ({"step": 2, "lease_seconds": 60}, "rank"),
        ({"rank": 2, "world_size": 2, "lease_seconds": 60}, "rank"),
        ({"rank": 0, "world_size": 2}, "lease_seconds"),
        ({"rank": -1, "world_size": 2, "lease_seconds": 60}, "rank"),
        ({"rank": 0, "world_size": 0, "lease_seconds": 60}, "world_size"),
        ({"rank": 0, "world_size": 2, "lease_seconds": 60, "step": 2**63}, "step"),
    ],
)
def test_parameters_that_do_not_go_together(query: dict[str, Any], name: str) -> None:
    reply = make_server().call("GET", "/batch", params=query)
    assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["query", name])


def test_ranks_wait_together() -> None:
    server = make_server(groups=3)

    async def rank(number: int) -> list[float]:
        async with AsyncBatchClient("http://127.0.0.1:8000", transport=server.transport()) as client:
            batch = await client.batch(rank=number, world_size=2, lease_seconds=60, wait_seconds=30)
            assert batch is not None and (batch.rank, batch.world_size) == (number, 2)
            await client.ack(str(batch.batch_id), rank=number)
            return [one.scores[0] for one in batch.groups]

    async def story() -> list[list[float]]:
        waiting = asyncio.gather(rank(0), rank(1))
        while server.clock.waiting < 2:
            await asyncio.sleep(0)
        async with server.http() as http:
            await http.post(
                "/scored_data", json={"tokens": [[1]] * 4, "masks": [[1]] * 4, "scores": [9.0] * 4}
            )
        return await waiting

    assert server.run(story()) == [[0, 1], [2, 9]]
    assert server.get("/status")["leased_groups"] == 0


WORLD = 3


class Ranks(RuleBasedStateMachine):
    """Ranks that take, ack, give back, wait and crash in any order; what they used, each group once."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.files = 0
        self.now = NOW
        self.limits = Limits(max_deliveries=1000)
        self.store = SqliteStore(Path(self.folder.name) / "0", self.limits, now=NOW)
        self.added: list[str] = []
        self.used: list[str] = []
        self.steps = [0] * WORLD
        self.parts: dict[tuple[str, int], list[str]] = {}
        self.acked: dict[str, set[int]] = {}

    @initialize(counted=st.booleans())
    def start(self, counted: bool) -> None:
        self.counted = counted
        self.store.register(registration(8), self.now)

    @rule(sequences=st.sampled_from([2, 4]), count=st.integers(1, 4))
    def post(self, sequences: int, count: int) -> None:
        self.added += [add(self.store, sequences, now=self.now) for _ in range(count)]

    @rule(rank=st.integers(0, WORLD - 1), arrives=st.booleans())
    def take(self, rank: int, arrives: bool) -> None:
        share = Share(rank, WORLD, None if self.counted else self.steps[rank])
        found = self.store.take(Request(lease_seconds=30, share=share), self.now)
        if found is None:
            return
        assert isinstance(found, Part) and found.whole is not None
        names = [group.group_id for group in found.groups]
        known = self.parts.setdefault((found.batch_id, rank), names)
        assert known == names, "the same rank got another part of the same batch"
        self.acked.setdefault(found.batch_id, set())
        (self.store.delivered if arrives else self.store.put_back)(found)

    @rule(which=st.integers(0, 999))
    def ack(self, which: int) -> None:
        if not self.parts:
            return
        batch_id, rank = sorted(self.parts)[which % len(self.parts)]
        try:
            lease = self.store.ack(batch_id, rank)
        except Conflict:
            return
        if not self.counted and rank not in self.acked[batch_id]:
            self.steps[rank] += 1
        self.acked[batch_id].add(rank)
        if len(self.acked[batch_id]) == WORLD and lease.state == "acked":
            self.acked[batch_id] = set(range(WORLD + 1))  # counted once
            self.used += [name for at in range(WORLD) for name in self.parts[batch_id, at]]

    @rule(which=st.integers(0, 999))
    def nack(self, which: int) -> None:
        open_ = sorted(lease.batch_id for lease in self.store._stock.leases.in_parts.values())
        if open_:
            self.store.nack(open_[which % len(open_)], drop=False)

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.tick(self.now)

    @rule()
    def crash(self) -> None:
        if (saved := self.store.save()) is not None:
            saved.result(20)
        self.files += 1
        old, new = (Path(self.folder.name) / str(at) for at in (self.files - 1, self.files))
        for suffix in ("", "-wal"):
            if old.with_name(old.name + suffix).exists():
                shutil.copy(old.with_name(old.name + suffix), new.with_name(new.name + suffix))
        self.store.close()
        self.store = SqliteStore(new, self.limits, now=self.now)

    @invariant()
    def parts_make_up_their_batch(self) -> None:
        assert len(set(self.used)) == len(self.used)
        for lease in self.store._stock.leases.in_parts.values():
            parts = [Part.of(lease, rank) for rank in range(WORLD)]
            whole = [group.number for group in lease.groups]
            assert [group.number for one in parts for group in one.groups] == whole
            assert lease.sequences == 8

    def teardown(self) -> None:
        self.now += 1000
        self.store.tick(self.now)
        while (lease := self.store.take(Request(groups=1), self.now)) is not None:
            self.used += [group.group_id for group in lease.groups]
            self.store.delivered(lease)
        assert sorted(self.used) == sorted(self.added)
        self.store.close()
        self.folder.cleanup()


Ranks.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=30)
TestRanks = Ranks.TestCase
