"""Large bodies, and those that only the exact validator can read, keep nobody waiting (row F26)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import httpx
import pytest
from server_tools import LocalServer, group

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.bodies import reading
from atropos_gym.batch_server.bodies.fast_json import MOST_CONTAINERS, read_json_groups
from atropos_gym.batch_server.bodies.msgpack import MOST_MEMBERS, pack, unpack, unpack_plain
from atropos_gym.batch_server.bodies.reader_process import reader
from atropos_gym.batch_server.bodies.reading import answer
from atropos_gym.batch_server.clock import ManualClock
from atropos_gym.batch_server.http import requests
from atropos_gym.batch_server.http.asgi import SETTINGS_BYTES
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.limits import MOST_GROUPS
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.packed import PackedGroup

JSON, MSGPACK = "application/json", "application/msgpack"
ONE = {"media_type": JSON, "many": False, "foreign_masks": "refuse"}


@pytest.fixture(scope="module")
def child() -> Iterator[None]:
    """One other process for all tests here."""
    yield
    reader().close()


@pytest.fixture
def server(child: None, monkeypatch: pytest.MonkeyPatch) -> LocalServer:
    """A server for which every body is large."""
    monkeypatch.setattr(requests, "HUGE_BYTES", 0)
    server = LocalServer()
    server.start()
    return server


def post(
    server: LocalServer, body: Any, path: str = "/scored_data", media_type: str = JSON
) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return server.call("POST", path, content=content, headers={"Content-Type": media_type})


DEEP: Any = 0
for _ in range(300):
    DEEP = [DEEP]

BODIES: list[tuple[bytes, str, bool]] = [
    (json.dumps(group(tag=0.5)).encode(), JSON, False),
    (json.dumps(group(note="unknown", images="\u00e4")).encode(), JSON, False),
    (json.dumps([group(2), group(3, unknown=1)]).encode(), JSON, True),
    (b"[]", JSON, True),
    (json.dumps(group(distill_logprobs=[[[0.5]] * 3] * 4)).encode(), JSON, False),
    (pack(group(5)), MSGPACK, False),
    (pack({"tokens": [b"\5\0\0\0"], "masks": [b"\5\0\0\0"], "scores": [1.0]}), MSGPACK, False),
    (b"{", JSON, False),
    (b'{"a": "\xff"}', JSON, False),
    (b"{}", "text/plain", False),
    (b"\xc1", MSGPACK, False),
    (pack(group(1, images={"a": DEEP})), MSGPACK, False),
    (json.dumps(group(scores=[float("nan")] * 4)).encode(), JSON, False),
    (
        json.dumps([group(env_id=1), group(env_id=1), {**group(env_id=2), "masks": [[1]]}, 7]).encode(),
        JSON,
        True,
    ),
]


@pytest.mark.parametrize(("body", "media_type", "many"), BODIES, ids=range(len(BODIES)))
def test_the_other_process_reads_as_this_one_does(
    server: LocalServer, body: bytes, media_type: str, many: bool
) -> None:
    question = {"media_type": media_type, "many": many, "foreign_masks": "refuse"}
    theirs = asyncio.run(reader().read(body, question))
    ours = answer(body, question)
    if isinstance(ours, dict):
        assert isinstance(theirs, dict)
        ours, theirs = reading.GroupsRefused(**ours), reading.GroupsRefused(**theirs)
        assert (ours.detail, ours.senders, ours.reason) == (theirs.detail, theirs.senders, theirs.reason)
    else:
        assert theirs == ours


def test_its_groups_are_served_and_its_refusals_are_said(server: LocalServer) -> None:
    assert post(server, group(4, tag=2.0)).json()["status"] == "received"
    refused = post(server, group(4, scores=[1.0]))
    assert refused.status_code == 422 and refused.json()["detail"][0]["loc"] == ["body", "scores"]
    assert post(server, [group(4, tag=3.0)], "/scored_data_list").json()["groups_processed"] == 1
    assert server.tags() == [2.0, 3.0]


def test_masks_of_other_kinds_are_kept_there_too(server: LocalServer) -> None:
    store = server.app.state.desk.store
    store.limits = replace(store.limits, foreign_masks="keep")
    body = group(4, masks=[[0, 1, 1]] * 4)
    assert post(server, body).status_code == 200
    assert server.get("/latest_example")["masks"] == [[0, 1, 1]] * 4


def test_an_error_there_is_a_refusal_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise IndexError("of ours")

    monkeypatch.setattr(reading, "plain_groups", broken)
    refusal = answer(b"{}", ONE)
    assert isinstance(refusal, dict) and refusal["status"] == 500
    assert "IndexError: of ours" in caplog.text


def test_one_that_is_lost_is_started_again(server: LocalServer) -> None:
    assert post(server, group()).status_code == 200
    first = reader().pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert post(server, group()).status_code == 200
    assert reader().pid not in (None, first)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not tell")
def test_a_process_is_not_blamed_for_the_memory_of_its_server() -> None:
    asks = "from atropos_gym.batch_server.bodies import reader_process as r; print(r._taken_bytes())"
    large = (
        f"import subprocess, sys; kept = b'x' * 300_000_000; subprocess.run([sys.executable, '-c', {asks!r}])"
    )
    said = subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, check=True).stdout
    assert 5e6 < int(said) < 2.5e8


def test_one_that_dies_over_a_body_is_the_servers_trouble(server: LocalServer) -> None:
    """It stops in the middle; whoever posted may try again."""
    assert post(server, group()).status_code == 200
    pid = reader().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    async def story() -> httpx.Response:
        async with server.http() as http:
            content = json.dumps(group()).encode()
            reply = asyncio.create_task(
                http.post("/scored_data", content=content, headers={"Content-Type": JSON})
            )
            await asyncio.sleep(0)
            assert (await http.get("/health")).status_code == 200  # nobody waits for it
            os.kill(pid, signal.SIGKILL)
            return await reply

    reply = asyncio.run(story())
    assert reply.status_code in (200, 503)  # 200 where it was gone before the body was sent
    if reply.status_code == 503:
        assert "memory" in reply.json()["detail"]
    assert post(server, group()).status_code == 200


def test_a_server_that_stops_does_not_wait_for_a_body(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader().close()
    with monkeypatch.context() as patch:
        patch.setattr(
            "atropos_gym.batch_server.bodies.reader_process.PROGRAM", "import time; time.sleep(3600)"
        )

        async def story() -> httpx.Response:
            async with server.http() as http:
                content, headers = json.dumps(group()).encode(), {"Content-Type": JSON}
                reply = asyncio.create_task(http.post("/scored_data", content=content, headers=headers))
                while reader().pid is None:
                    await asyncio.sleep(0.001)
                server.app.state.desk.close()
                return await reply

        assert asyncio.run(story()).status_code == 503
    assert post(server, group()).status_code == 200


def test_only_long_bodies_that_are_odd_are_read_elsewhere(
    child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def read(body: bytes, question: dict[str, Any]) -> Any:
        asked.append(len(body))
        return answer(body, question)

    monkeypatch.setattr(reader(), "read", read)
    server = LocalServer()
    server.start()
    odd = group(4, distill_logprobs=[[[0.5]] * 3] * 4)
    assert post(server, odd).status_code == 200 and asked == []
    long = json.dumps(odd).encode().ljust(requests.ODD_BYTES + 1)
    assert post(server, long).status_code == 200 and asked == [len(long)]
    plain = json.dumps(group()).encode().ljust(requests.ODD_BYTES + 1)
    assert post(server, plain).status_code == 200 and len(asked) == 1


@pytest.mark.parametrize("where", ["the group", "each override"])
def test_a_hundred_thousand_fields_cost_time_in_proportion(server: LocalServer, where: str) -> None:
    """Each field of a plain group was once searched for from the first one on."""
    many: dict[str, Any] = {f"k{index}": index for index in range(100_000)}
    odd = group(**many) if where == "the group" else group(overrides=[many] * 4)
    begun = time.process_time()
    assert isinstance(answer(json.dumps(odd).encode(), ONE), list)  # here, so that its time counts
    assert post(server, odd).json()["status"] == "received"
    assert time.process_time() - begun < 20, "seconds of CPU; it was minutes"


def test_many_lists_or_maps_are_odd() -> None:
    nested = group(images=[[]] * MOST_CONTAINERS)
    assert read_json_groups(json.dumps(nested).encode(), many=False) is None
    for members in (
        [[]] * MOST_MEMBERS,
        [1] * (MOST_MEMBERS + 1),
        {str(i): 1 for i in range(MOST_MEMBERS + 1)},
    ):
        body = pack({"images": members})
        assert unpack(body)["images"] == members
        with pytest.raises(ValueError, match="exceeds|too many"):
            unpack_plain(body)


def test_of_many_long_pieces_of_work_one_is_done_in_a_turn_of_the_loop() -> None:
    async def story() -> list[tuple[int, int]]:
        desk = Desk(MemoryStore(), ManualClock())
        turns = 0
        done: list[tuple[int, int]] = []

        async def count() -> None:
            nonlocal turns
            while len(done) < 12:
                turns += 1
                await asyncio.sleep(0)

        async def work(number: int, later: int = 0) -> None:
            for _ in range(later):
                await asyncio.sleep(0)
            await desk.turn()
            done.append((number, turns))

        early = [work(number) for number in range(8)]
        await asyncio.gather(count(), *early, *(work(number, later=number - 4) for number in range(8, 12)))
        return done

    done = asyncio.run(story())
    assert [number for number, _ in done] == list(range(12))
    turns = [turn for _, turn in done]
    assert turns == sorted(set(turns))


def test_only_groups_may_be_large(child: None) -> None:
    server = LocalServer()
    body = b'{"batch_id": "b-1"}'.ljust(SETTINGS_BYTES + 1)
    for path in ("/ack", "/register", "/policy", "/disconnect-env"):
        reply = post(server, body, path)
        assert reply.status_code == 413 and str(SETTINGS_BYTES) in reply.json()["detail"]
    assert post(server, json.dumps(group()).encode().ljust(len(body))).status_code == 200


@pytest.mark.parametrize("media_type", [JSON, MSGPACK])
def test_the_groups_of_one_post_have_an_end(child: None, media_type: str) -> None:
    """All or none are stored, in one go on the loop: tens of thousands would keep everyone waiting."""
    server = LocalServer()
    server.start()
    small = {"tokens": [[5]], "masks": [[5]], "scores": [1.0]}
    content = (json.dumps if media_type == JSON else pack)([small] * (MOST_GROUPS + 1))
    headers = {"Content-Type": media_type}
    refused = server.call("POST", "/scored_data_list", content=content, headers=headers)
    assert refused.status_code == 413
    assert f"has {MOST_GROUPS + 1} groups" in refused.json()["detail"]
    assert str(MOST_GROUPS) in refused.json()["detail"].partition(",")[2]
    assert server.get("/status")["queue_size"] == 0
    content = (json.dumps if media_type == JSON else pack)([small] * MOST_GROUPS)
    taken = server.call("POST", "/scored_data_list", content=content, headers=headers)
    assert taken.json()["groups_processed"] == server.get("/status")["queue_size"] == MOST_GROUPS


class OnDisk(MemoryStore):
    """A store that has to look for its groups."""

    found: Future[list[PackedGroup]] | None = None

    def fetch(self, lease: Lease) -> Future[list[PackedGroup]]:
        self.groups = [group.packed for group in lease.groups]
        self.found = Future()
        return self.found


def test_a_batch_that_has_to_be_fetched_keeps_only_its_reader_waiting() -> None:
    server, store = LocalServer(), OnDisk()
    server.app = create_app(store, clock=server.clock)
    server.start()
    server.send(8)

    async def story() -> httpx.Response:
        async with server.http() as http:
            reply = asyncio.create_task(http.get("/batch"))
            while store.found is None:
                await asyncio.sleep(0)
            assert (await http.get("/health")).status_code == 200 and not reply.done()
            store.found.set_result(store.groups)
            return await reply

    assert len(asyncio.run(story()).json()["batch"][0]["tokens"]) == 8
