"""The spool: what lies in it is posted once, in turn, whatever is killed; what is refused is set aside."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_tools import LocalServer, group

from atropos_gym.batch_server.client import AsyncBatchClient, BatchClient
from atropos_gym.batch_server.spool import Spool
from atropos_gym.errors import ConfigError, GroupRefused, PostUnsure, ServerError
from atropos_gym.wire import ScoredDataGroup

URL = "http://127.0.0.1:8000"


class Killed(BaseException):
    """Ends a process as ``kill -9`` does, as far as this test can see."""


class Network(httpx.BaseTransport):
    """A server in this process, and what happens on the way to it.

    Attributes:
        before: called before a request reaches the server.
        after: called before its answer is handed over.
        keys: of all posts that reached it.
    """

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.keys: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        content = request.read()
        self.before()
        if "idempotency-key" in request.headers:
            self.keys.append(request.headers["idempotency-key"])

        async def one() -> httpx.Response:
            again = httpx.Request(request.method, request.url, headers=request.headers, content=content)
            response = await self.server.transport().handle_async_request(again)
            body = await response.aread()
            return httpx.Response(response.status_code, headers=response.headers, content=body)

        response = asyncio.run(one())
        self.after()
        return response

    def kill(self) -> None:
        raise Killed

    def refuse(self) -> None:
        raise httpx.ConnectError("refused")


@pytest.fixture
def server() -> LocalServer:
    server = LocalServer()
    server.start(batch_size=8)
    return server


@pytest.fixture
def network(server: LocalServer) -> Network:
    return Network(server)


def make(tag: float = 0.0, sequences: int = 4) -> ScoredDataGroup:
    return ScoredDataGroup.model_validate(group(sequences, tag=tag))


def client_of(network: httpx.BaseTransport, folder: Path | Spool, **options: Any) -> BatchClient:
    return BatchClient(URL, transport=network, spool=folder, **{"retry_seconds": 0, **options})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".msgpack", ".json", ".part"))


def tags(server: LocalServer) -> list[float]:
    """First scores of all groups that are queued, in order."""
    found = []
    while (more := server.tags(groups=1)) is not None:
        found += more
    return found


def die(client: BatchClient) -> None:
    """What the end of a process does: locks go, files stay."""
    client._http.close()
    assert client.spool is not None
    client.spool.close()


def test_what_is_posted_leaves_the_folder(network: Network, tmp_path: Path) -> None:
    with client_of(network, tmp_path / "a" / "spool") as client:
        assert client.post_group(make(1)) == "g-1"
        assert client.post_groups([make(2), make(3)]) == ["g-2", "g-3"]
        assert client.spool is not None and client.spool.report["waiting"] == 0
    assert files(tmp_path / "a" / "spool") == []
    assert len(set(network.keys)) == 3
    assert tags(network.server) == [1, 2, 3]


def test_killed_between_the_file_and_the_post(network: Network, tmp_path: Path) -> None:
    client = client_of(network, tmp_path)
    network.before = network.kill
    with pytest.raises(Killed):
        client.post_groups([make(1), make(2)])
    die(client)
    assert len(files(tmp_path)) == 2 and tags(network.server) == []
    network.before = lambda: None
    with client_of(network, tmp_path) as again:
        assert again.post_group(make(3)) == "g-3", "what was left goes first"
        assert again.spool is not None and again.spool.report["posted_late"] == 2
    assert tags(network.server) == [1, 2, 3] and files(tmp_path) == []


def test_killed_between_the_answer_and_the_removal(network: Network, tmp_path: Path) -> None:
    client = client_of(network, tmp_path)
    network.after = network.kill
    with pytest.raises(Killed):
        client.post_group(make(1))
    die(client)
    assert network.server.get("/status")["queue_size"] == 1 and len(files(tmp_path)) == 1
    network.after = lambda: None
    with client_of(network, tmp_path) as again:
        again.post_left()
        again.post_left()
    assert network.keys[0] == network.keys[1] and len(network.keys) == 2
    assert tags(network.server) == [1], "the key tells the server that it has this one"


def test_every_moment_at_which_a_process_can_end(network: Network, tmp_path: Path) -> None:
    """Killed at each request and each answer in turn; each group arrives once, in order."""
    calls = 0

    def dies(at: int) -> Callable[[], None]:
        def now() -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise Killed

        return now

    posted: list[float] = []
    for at in range(1, 9):
        calls = 0
        network.before = network.after = dies(at)
        client = client_of(network, tmp_path)
        posted += [10.0 * at, 10.0 * at + 1]
        with suppress(Killed):
            client.post_groups([make(tag) for tag in posted[-2:]])
        die(client)
    assert len(set(network.keys)) < len(network.keys), "some were posted again"
    network.before = network.after = lambda: None
    with client_of(network, tmp_path) as client:
        client.post_left()
    assert tags(network.server) == posted
    assert files(tmp_path) == []


def test_a_server_that_is_away_is_told_and_gets_it_later(network: Network, tmp_path: Path) -> None:
    network.before = network.refuse
    with client_of(network, tmp_path) as client:
        with pytest.raises(
            ServerError, match=f"no answer from .*; 2 groups are kept in {tmp_path} until then"
        ):
            client.post_groups([make(1), make(2)])
        with pytest.raises(ServerError, match="3 groups are kept"):
            client.post_group(make(3))
        network.before = lambda: None
        client.post_left()
        assert client.spool is not None
        assert client.spool.report == {
            "folder": str(tmp_path),
            "waiting": 0,
            "bytes": 0,
            "posted_late": 3,
            "refused": 0,
        }
    assert tags(network.server) == [1, 2, 3]


def test_a_client_that_retries_for_ever_keeps_its_key(network: Network, tmp_path: Path) -> None:
    tries: list[float] = []

    def often() -> None:
        if len(tries) < 50:
            raise httpx.ConnectError("refused")

    network.before = often
    with client_of(network, tmp_path, retry_seconds=None, sleep=tries.append) as client:
        assert client.post_group(make()) == "g-1"
    assert max(tries) <= 30 and len(set(tries)) > 40, "jitter, and 30 s at most"


def test_a_refused_group_is_set_aside_with_the_reason(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with client_of(network, tmp_path) as client:
        with pytest.raises(
            GroupRefused, match=r"\[1\].tokens: group has 9 sequences, batch_size is 8"
        ) as error:
            client.post_groups([make(1), make(2, 9), make(3)])
        assert isinstance(error.value.detail, list)
        assert [entry["loc"] for entry in error.value.detail] == [["body", 1, "tokens"]]
        with pytest.raises(GroupRefused, match=r"\): tokens: group has 9 sequences"):
            client.post_group(make(4, 9))
        assert client.spool is not None and client.spool.report["refused"] == 2
        assert files(tmp_path) == []
    assert tags(network.server) == [1, 3]
    kept = sorted((tmp_path / "refused").glob("*.json"))
    assert ScoredDataGroup.model_validate(json.loads(kept[0].read_text())) == make(2, 9)
    assert "group has 9 sequences" in kept[0].with_suffix(".txt").read_text()
    with client_of(network, tmp_path) as again, caplog.at_level(logging.WARNING):
        again.post_left()
        assert again.spool is not None and again.spool.report["refused"] == 2
    assert len(network.keys) == 4 and not caplog.records


def test_a_refused_group_of_an_earlier_process_stops_nobody(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = client_of(network, tmp_path)
    network.before = network.kill
    with pytest.raises(Killed):
        client.post_groups([make(1, 9), make(2)])
    die(client)
    network.before = lambda: None
    with client_of(network, tmp_path) as again, caplog.at_level(logging.WARNING):
        assert again.post_groups([make(3)]) == ["g-2"]
    assert "a group of an earlier post was refused: POST /scored_data was refused (422)" in caplog.text
    assert tags(network.server) == [2, 3]


def test_a_wrong_token_is_no_fault_of_the_group(tmp_path: Path) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json={"detail": "missing token"}))
    with client_of(transport, tmp_path) as client, pytest.raises(ServerError, match="1 groups are kept"):
        client.post_group(make())
    assert len(files(tmp_path)) == 1 and not list((tmp_path / "refused").iterdir())


def test_what_was_never_complete_is_not_posted(network: Network, tmp_path: Path) -> None:
    """A file that was being written is nothing yet; one that a power failure cut off is set aside."""
    spool = Spool(tmp_path)
    (kept,) = spool.keep([make(1)])
    spool.close()
    kept.path.write_bytes(kept.path.read_bytes()[:-7])
    (tmp_path / (kept.path.name + ".part")).write_bytes(b"\x81")
    (tmp_path / "notes.txt").write_text("mine")
    with client_of(network, tmp_path) as client:
        assert client.post_group(make(2)) == "g-1"
    assert files(tmp_path) == [] and (tmp_path / "notes.txt").exists()
    (reason,) = (tmp_path / "refused").glob("*.txt")
    assert "the file is not complete" in reason.read_text()


def test_a_file_that_somebody_removed_is_not_waited_for(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path)
    kept = spool.keep([make(1), make(2)])
    spool.close()
    with client_of(network, tmp_path) as client, caplog.at_level(logging.WARNING):
        kept[0].path.unlink()
        client.post_left()
        assert client.spool is not None and client.spool.report["waiting"] == 0
    assert f"somebody removed {kept[0].path}" in caplog.text
    assert tags(network.server) == [2]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = Spool(tmp_path)
    with pytest.raises(ConfigError, match=f"spool {tmp_path} is used by another process"):
        BatchClient(URL, spool=tmp_path)
    first.close()
    first.close()
    BatchClient(URL, spool=tmp_path).close()


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: .*; choose another folder"):
        Spool(tmp_path / "file" / "spool")


def test_a_full_spool_takes_nothing_until_the_server_has_some(network: Network, tmp_path: Path) -> None:
    network.before = network.refuse
    with client_of(network, Spool(tmp_path, max_bytes=1)) as client:
        with pytest.raises(ServerError, match="1 groups are kept"):
            client.post_group(make(1))
        with pytest.raises(ServerError, match="1 groups are kept .*: the spool is full, the newest are not"):
            client.post_group(make(2))
        network.before = lambda: None
        assert client.post_group(make(3)) == "g-2"
    assert tags(network.server) == [1, 3]


def test_a_disk_that_is_full_keeps_all_groups_of_a_post_or_none(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(network, tmp_path) as client:
        assert client.spool is not None
        write, written = client.spool._write, []

        def fills(path: Path, content: bytes) -> None:
            if len(written) == 2:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            written.append(path)
            write(path, content)

        monkeypatch.setattr(client.spool, "_write", fills)
        with pytest.raises(OSError, match="No space left"):
            client.post_groups([make(1), make(2), make(3)])
        assert files(tmp_path) == [] and client.spool.report["waiting"] == 0 and network.keys == []


def test_threads_share_a_client(network: Network, tmp_path: Path) -> None:
    with client_of(network, tmp_path) as client, ThreadPoolExecutor(4) as threads:
        names = list(threads.map(lambda tag: client.post_group(make(tag)), map(float, range(12))))
        assert client.spool is not None and client.spool.report["waiting"] == 0
    assert len(set(names)) == 12
    assert sorted(tags(network.server)) == list(range(12))


def test_fsync_waits_for_the_disk(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor))
    spool = Spool(tmp_path, fsync=True)
    spool.keep([make(1), make(2)])
    assert len(synced) == 3, "each file, and the folder once"
    spool.close()


def test_numbers_go_on_after_what_was_left(tmp_path: Path) -> None:
    for _ in range(3):
        spool = Spool(tmp_path)
        spool.keep([make()])
        spool.close()
    assert [name.partition("-")[0] for name in files(tmp_path)] == ["0000000000", "0000000001", "0000000002"]


def test_the_original_gets_json_of_what_was_kept(tmp_path: Path) -> None:
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json={"status": "received"})

    Spool(tmp_path).keep([make(1), make(2).model_copy(update={"group_overrides": {"big": 2**70}})])
    # Its lock is gone with it.
    with client_of(httpx.MockTransport(answer), tmp_path) as client:
        assert client.post_group(make(3)) is None
    assert [body["scores"][0] for body in bodies] == [1, 2, 3]
    assert bodies[1]["group_overrides"] == {"big": 2**70}


def test_in_an_event_loop(server: LocalServer, tmp_path: Path) -> None:
    async def story() -> None:
        gone = httpx.MockTransport(lambda request: httpx.Response(500))
        async with AsyncBatchClient(URL, transport=gone, spool=tmp_path, retry_seconds=0) as client:
            with pytest.raises(ServerError, match="2 groups are kept"):
                await client.post_groups([make(1), make(2)])
        async with AsyncBatchClient(URL, transport=server.transport(), spool=tmp_path) as client:
            await client.post_left()
            names = await asyncio.gather(*(client.post_group(make(3 + k)) for k in range(5)))
            assert sorted(map(str, names)) == [f"g-{k}" for k in range(3, 8)]

    server.run(story())
    assert sorted(tags(server)) == [1, 2, 3, 4, 5, 6, 7] and files(tmp_path) == []


def test_a_cancelled_post_is_kept(server: LocalServer, tmp_path: Path) -> None:
    async def hangs(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        transport = httpx.MockTransport(hangs)
        async with AsyncBatchClient(URL, transport=transport, spool=tmp_path) as client:
            posting = asyncio.create_task(client.post_group(make(1)))
            while not files(tmp_path):
                await asyncio.sleep(0)
            posting.cancel()
            await asyncio.gather(posting, return_exceptions=True)
        async with AsyncBatchClient(URL, transport=server.transport(), spool=tmp_path) as client:
            await client.post_left()

    server.run(story())
    assert tags(server) == [1]


# Servers forget keys after a day.

DAY = 24 * 3600.0


class Days:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1_767_000_000.0

    def __call__(self) -> float:
        return self.now


def lose(network: Network) -> None:
    """Answers of this network do not arrive any more, its requests do."""

    def lost() -> None:
        raise httpx.ReadTimeout("no answer")

    network.after = lost


def pass_a_day(network: Network, clock: Days, seconds: float = DAY + 1) -> None:
    clock.now += seconds
    network.server.clock.advance(seconds)


def test_what_may_have_arrived_is_not_posted_again_once_the_server_may_have_forgotten_it(
    network: Network, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Days()
    lose(network)
    with (
        client_of(network, tmp_path, clock=clock) as client,
        pytest.raises(ServerError, match="3 groups are"),
    ):
        client.post_groups([make(1), make(2), make(3)])
    assert tags(network.server) == [1], "it is there, and nobody knows"
    pass_a_day(network, clock)
    network.after = lambda: None
    with client_of(network, tmp_path, clock=clock) as again, caplog.at_level(logging.WARNING):
        assert again.post_group(make(4)) == "g-4"
        assert again.spool is not None
        assert (again.spool.report["unsure"], again.spool.report["refused"]) == (1, 0)
    assert "a group of an earlier post was set aside: posted at 2025-12-29" in caplog.text
    assert tags(network.server) == [2, 3, 4], "what was never sent goes however old it is"
    assert files(tmp_path) == []
    (kept,) = (tmp_path / "unsure").glob("*.json")
    assert ScoredDataGroup.model_validate(json.loads(kept.read_text())) == make(1)
    assert "posted again, it could come twice" in kept.with_suffix(".txt").read_text()
    kept.rename(tmp_path / kept.name)  # somebody has found that it is not there
    with client_of(network, tmp_path, clock=clock) as last:
        last.post_left()
    assert tags(network.server) == [1] and files(tmp_path) == []


def test_within_a_day_it_is_posted_under_its_key(network: Network, tmp_path: Path) -> None:
    clock = Days()
    lose(network)
    with client_of(network, tmp_path, clock=clock) as client:
        with pytest.raises(ServerError, match="1 groups are kept"):
            client.post_group(make(1))
        (name,) = files(tmp_path)
        pass_a_day(network, clock, 12 * 3600)
        with pytest.raises(ServerError, match="1 groups are kept"):
            client.post_left()
        assert files(tmp_path) == [name], "the first try counts"
        pass_a_day(network, clock, 10 * 3600)
        network.after = lambda: None
        client.post_left()
        assert client.spool is not None and client.spool.report["posted_late"] == 1
    assert tags(network.server) == [1] and len(set(network.keys)) == 1


@pytest.mark.parametrize("answer", ["none", "full", "early", "token"])
def test_what_cannot_have_arrived_is_posted_however_long_that_takes(
    network: Network, tmp_path: Path, answer: str
) -> None:
    clock, pauses = Days(), []
    refusals = {
        "full": httpx.Response(503, json={"detail": "queue full", "retry_after": 5}),
        "early": httpx.Response(429, json={"detail": "too many"}),
        "token": httpx.Response(401, json={"detail": "missing or wrong token"}),
    }

    class Away(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            if len(pauses) > 4:
                return network.handle_request(request)
            if answer == "none":
                raise httpx.ConnectError("connection refused")
            reply = refusals[answer]
            return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += DAY

    def try_again(client: BatchClient) -> None:
        while answer == "token" and len(pauses) <= 4:
            with pytest.raises(ServerError, match="1 groups are kept"):
                client.post_left()
            sleep(1.0)
        client.post_left()

    with client_of(Away(), tmp_path, retry_seconds=None, sleep=sleep, clock=clock) as client:
        assert client.spool is not None
        client.spool.release(client.spool.keep([make(1)]))
        try_again(client)
    assert tags(network.server) == [1] and len(pauses) == 5


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("spooled", [True, False])
def test_a_client_that_tries_for_days_does_not_post_twice_either(
    network: Network, tmp_path: Path, spooled: bool, alone: bool
) -> None:
    clock = Days()
    lose(network)

    def sleep(seconds: float) -> None:
        """The server goes away after the answer was lost, for more than a day."""
        pass_a_day(network, clock, 13 * 3600)
        network.after = lambda: None
        network.before = network.refuse if clock.now < Days().now + DAY else lambda: None

    spool = {"spool": tmp_path} if spooled else {}
    with BatchClient(URL, transport=network, retry_seconds=None, sleep=sleep, clock=clock, **spool) as client:
        with pytest.raises(GroupRefused, match="it could come twice") as error:
            client.post_group(make(1)) if alone else client.post_groups([make(1), make(2)])
        assert client.post_group(make(3)) is not None, "it goes on"
    assert isinstance(error.value.detail, list)
    assert {entry["type"] for entry in error.value.detail} == {"unsure"}
    doubtful = [entry["loc"] for entry in error.value.detail]
    if alone:
        assert isinstance(error.value, PostUnsure) and doubtful == [["body"]]
    else:  # one list, or one by one from a spool
        assert doubtful == ([["body", 0]] if spooled else [["body", 0], ["body", 1]])
    assert tags(network.server) == ([1, 3] if alone else [1, 2, 3])


@pytest.mark.parametrize(("age", "posted"), [(3600, True), (2 * DAY, False)])
def test_what_an_older_version_left_may_be_at_the_server_since_it_was_written(
    network: Network, tmp_path: Path, age: float, posted: bool
) -> None:
    clock = Days()
    with client_of(network, tmp_path, clock=clock) as client:
        assert client.spool is not None
        (kept,) = client.spool.keep([make(1)])
    old = tmp_path / kept.path.name.replace("-new", "")
    kept.path.rename(old)
    os.utime(old, (clock.now - age, clock.now - age))
    with client_of(network, tmp_path, clock=clock) as client:
        client.post_left()
        assert client.spool is not None
        assert client.spool.report.get("unsure", 0) == (not posted)
    assert tags(network.server) == [1] * posted and files(tmp_path) == []


def test_what_was_set_aside_is_counted_and_a_reason_goes_with_its_group(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for kept in spool.keep([make(1), make(2), make(3)]):
        spool.refuse(kept, "no", unsure=True)
    spool.close()
    first, second, third = sorted((tmp_path / "unsure").glob("*.json"))
    first.rename(tmp_path / first.name)
    second.with_suffix(".txt").unlink()
    (tmp_path / "unsure" / "notes.txt").write_text("mine")
    again = Spool(tmp_path)
    assert (again.report["unsure"], again.report["waiting"]) == (2, 1)
    again.close()
    assert [path.stem for path in sorted((tmp_path / "unsure").glob("*.txt"))] == [third.stem, "notes"]
