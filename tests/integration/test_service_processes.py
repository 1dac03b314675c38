"""Services in processes of their own against a server in another one: killed, stopped, and side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import READY, ServerProcess
from atropos_gym.errors import ServerError
from atropos_gym.wire import ScoredDataGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]

SERVICE = """
import asyncio, json, os, sys
import atropos_gym.rollout.service as module
from atropos_gym.batch_server.spool import Spool
from atropos_gym.cli.collect import _summary, _to_its_end
from atropos_gym.rollout.service import EnvironmentService
from tests.unit.rollout_cases import Countdown, saying

module.GOODBYE = 60.0  # this machine may be slow
options = json.loads(sys.argv[1])
log = os.open(options.pop("log", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)

class Logged(Spool):
    def keep(self, groups):
        kept = super().keep(groups)
        for group in groups:
            os.write(log, f"{group.group_overrides['number']}\\n".encode())
        return kept

if "spool" in options:
    options["spool"] = Logged(options["spool"])
service = EnvironmentService(Countdown, saying("ja"), group_size=4, concurrency=32, **options)
finished = asyncio.run(_to_its_end(service))
print(finished, _summary(service.report), flush=True)
"""


def until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Polls until something holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
    return found


@contextmanager
def service(url: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A service in a process; killed at the end unless it has ended by itself."""
    command = [sys.executable, "-c", SERVICE, json.dumps({"url": url, **options})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def number_of(group: ScoredDataGroup) -> int:
    return int((group.group_overrides or {})["number"])


def take(trainer: BatchClient, groups: int, wait_seconds: float = 60.0) -> list[int]:
    """Leases a batch, acknowledges it, and returns the numbers of its groups."""
    batch = trainer.batch(groups=groups, wait_seconds=wait_seconds, lease_seconds=600, partial=True)
    if batch is None:
        return []
    trainer.ack(str(batch.batch_id))
    return [number_of(group) for group in batch.groups]


def test_a_service_killed_again_and_again_loses_nothing_and_sends_nothing_twice(tmp_path: Path) -> None:
    """Whatever was in the spool comes, once; numbers that were in flight at a kill are never played again."""
    spool, log = tmp_path / "spool", tmp_path / "log"
    got: list[int] = []
    with ServerProcess(store=tmp_path / "server.sqlite") as server, BatchClient(server.url) as trainer:
        trainer.register(groups_per_update=5, max_policy_lag=4, batch_size=20)
        trainer.batch()
        for batches in (1, 2, 3, 1):
            with service(server.url, spool=str(spool), log=str(log)) as process:
                for _ in range(batches):
                    more: list[int] = until(lambda: take(trainer, 5))
                    got += more
                process.send_signal(signal.SIGKILL)
                process.wait()
        with BatchClient(server.url, spool=spool) as rest:
            rest.post_left()
        while more := take(trainer, 50, wait_seconds=0):
            got += more
    kept = [int(line) for line in log.read_text().splitlines()]
    assert len(got) >= 7
    assert max(Counter(got).values()) == 1, "none came twice"
    assert set(kept) <= set(got), "none was lost"
    assert list(spool.glob("*.msgpack")) == []


def test_a_server_killed_again_and_again_under_a_service(tmp_path: Path) -> None:
    """The service and the trainer wait for it, and all that was played comes, once."""
    spool, log, store = tmp_path / "spool", tmp_path / "log", tmp_path / "server.sqlite"
    got: list[int] = []
    keeper = socket.socket()  # bound, not listened on: nobody else gets the port while the server is away
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    port = int(keeper.getsockname()[1])
    server = ServerProcess(port, store=store)
    try:
        with (
            BatchClient(server.url, retry_seconds=None) as trainer,
            service(server.url, spool=str(spool), log=str(log)) as process,
        ):
            trainer.register(groups_per_update=5, max_policy_lag=4, batch_size=20)
            trainer.batch()
            for _ in range(4):
                more: list[int] = until(lambda: take(trainer, 5))
                got += more
                os.kill(server.pid, signal.SIGKILL)
                server.stop()
                server = ServerProcess(port, store=store)
            got += until(lambda: take(trainer, 5))
            process.terminate()
            assert process.wait(120) == 0
            with BatchClient(server.url, spool=spool) as rest:  # what was in flight as it stopped
                rest.post_left()
            while more := take(trainer, 50, wait_seconds=0):
                got += more
    finally:
        server.stop()
        keeper.close()
    kept = [int(line) for line in log.read_text().splitlines()]
    assert max(Counter(got).values()) == 1, "none came twice"
    assert set(kept) <= set(got), "none was lost"


def test_a_server_in_a_process_shows_pieces() -> None:
    group = ScoredDataGroup(
        tokens=[[*b"say hello", *b"hello"]], masks=[[-100] * 9 + list(b"hello")], scores=[1.0]
    )
    with ServerProcess(tokenizer="bytes") as server, BatchClient(server.url) as client:
        client.register(batch_size=1)
        client.post_group(group)
        page = client._http.get("/dashboard/trajectories").json()
        number = page["groups"][0]["number"]
        html = client._http.get(f"/dashboard/trajectories/{number}/0").json()["html"]
    assert "".join(re.findall(r">(\w)<", html)).endswith("hello")
    with pytest.raises(ServerError, match="did not start"):
        ServerProcess(tokenizer="/no/such/tokenizer")


def test_a_service_that_is_told_to_stop_takes_its_leave(tmp_path: Path) -> None:
    with ServerProcess() as server, BatchClient(server.url) as trainer:
        trainer.register(groups_per_update=5, max_policy_lag=4, batch_size=20)
        trainer.batch()
        with service(server.url, spool=str(tmp_path / "spool")) as process:
            until(lambda: trainer.status()["queue_size"] >= 5)
            process.terminate()
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0
        assert said.startswith("False ") and " groups posted" in said
        envs = trainer._http.get("/envs").json()["envs"]
        assert [env["connected"] for env in envs] == [False]


def test_services_side_by_side_keep_weights_and_minimum() -> None:
    """Weights 1 and 3, and a third one that has none but a quarter of each batch for its own."""
    batch, ahead = 8, 3
    with ServerProcess() as server, BatchClient(server.url) as trainer:
        trainer.register(batch_size=4 * batch, num_steps=-1)
        trainer.batch()
        with (
            service(server.url, name="one", weight=1.0),
            service(server.url, name="three", weight=3.0, seed=1),
            service(server.url, name="least", weight=0.0, seed=2, min_batch_allocation=0.25),
        ):

            def queued() -> dict[str, int]:
                envs = trainer._http.get("/envs").json()["envs"]
                return {env["name"]: env["queue_groups"] for env in envs}

            # Before each batch the queue is as full as it gets: so fast and slow machines see the same.
            def full() -> bool:
                found = queued()
                return len(found) == 3 and sum(found.values()) >= batch * ahead - 2 and found["least"] >= 6

            names = {
                env["env_id"]: env["name"]
                for env in until(lambda: full() and trainer._http.get("/envs").json()["envs"])
            }
            batches = []
            for _ in range(12):
                until(full)
                found = trainer.batch(wait_seconds=60)
                assert found is not None and found.sequences == 4 * batch
                batches.append(Counter(names[group.env_id or 0] for group in found.groups))
    assert all(one["least"] >= batch // 4 for one in batches), batches
    total = sum(batches[4:], Counter())
    assert 1.8 <= total["three"] / total["one"] <= 5.5, batches


def test_a_server_that_is_told_to_stop_leaves_one_whole_file_and_tells_its_supervisor(tmp_path: Path) -> None:
    store = tmp_path / "server.sqlite"
    group = ScoredDataGroup(tokens=[[1, 2]], masks=[[-100, 2]], scores=[1.0])
    with (
        tempfile.TemporaryDirectory() as short,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor,
    ):
        supervisor.bind(f"{short}/notify")
        supervisor.settimeout(120)
        process = subprocess.Popen(
            [sys.executable, "-m", "atropos_gym", "serve", "--port", "0", "--store", str(store)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "NOTIFY_SOCKET": f"{short}/notify"},
            cwd=ROOT,
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix(READY).strip()
            assert supervisor.recv(1000).decode() == f"READY=1\nSTATUS={READY}{url}"
            with BatchClient(url) as client:
                client.register(batch_size=1)
                client.post_groups([group] * 3)
            process.terminate()
            assert process.wait(120) == 0
            assert supervisor.recv(1000) == b"STOPPING=1"
        finally:
            process.kill()
            process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["server.sqlite"], "the log is in the file"
    with ServerProcess(store=store) as server, BatchClient(server.url) as client:
        assert client.status()["queue_size"] == 3
