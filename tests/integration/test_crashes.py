"""Killing the server under load: nothing that was received is lost, nothing comes twice to who acks."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tight_server import TightServer, tight_server

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.wire import ScoredDataGroup

ROUNDS = int(os.environ.get("ATROPOS_GYM_CRASHES", "5"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + 30 * ROUNDS)]

PRODUCERS = 4
MANY = 10**6  # nobody is held: what is posted does not depend on how fast the trainer is
PATIENCE = 120.0  # seconds; a machine may be slow
FOR_EVER = 1e6  # a client that waits between its tries may miss several of the times when the server is up


def group(tag: int) -> ScoredDataGroup:
    """A group that its first score names."""
    return ScoredDataGroup(
        tokens=[[1, 2, 3 + tag % 7]] * 2, masks=[[-100, 2, 3 + tag % 7]] * 2, scores=[float(tag), 0.0]
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


class Load:
    """Producers and one trainer that acks, until they are stopped; they outlive the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.received: list[int] = []
        self.used: list[int] = []
        self.stopping = threading.Event()
        self.drained = threading.Event()
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self.run, args=(self.produce, n)) for n in range(PRODUCERS)]
        self.trainer = threading.Thread(target=self.run, args=(self.train, 0))

    def run(self, work: object, number: int) -> None:
        try:
            work(number)  # type: ignore[operator]
        except BaseException as error:
            self.errors.append(error)

    def produce(self, number: int) -> None:
        with BatchClient(self.url, retry_seconds=FOR_EVER) as client:
            tag = number
            while not self.stopping.is_set():
                client.post_group(group(tag))
                self.received.append(tag)
                tag += PRODUCERS

    def train(self, _: int) -> None:
        with BatchClient(self.url, retry_seconds=FOR_EVER) as client:
            while True:
                # A batch whose answer died with the server comes again when its lease has run out.
                batch = client.batch(lease_seconds=5, wait_seconds=0.2)
                if batch is None:
                    if self.drained.is_set() and not client.status()["leased_groups"]:
                        return
                    continue
                assert batch.sequences == 4
                client.ack(str(batch.batch_id))
                for one in batch.groups:
                    tag = int(one.scores[0])
                    assert one.tokens == group(tag).tokens
                    self.used.append(tag)


def start(port: int, store: Path, held: str) -> ServerProcess | TightServer:
    if held == "on disk only":
        return tight_server(port, store, memory_bytes=0)
    return ServerProcess(port, store=store, soft_groups=MANY)


@pytest.mark.parametrize("held", ["in memory too", "on disk only"])
def test_kill_under_load(tmp_path: Path, held: str) -> None:
    store = tmp_path / "store.sqlite"
    rng = random.Random(0)
    keeper = socket.socket()  # bound, not listened on: nobody else gets the port while the server is away
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind(("127.0.0.1", 0))
    port = keeper.getsockname()[1]
    server = start(port, store, held)
    try:
        with BatchClient(server.url) as client:
            client.register(batch_size=4, max_token_len=64)
        load = Load(server.url)
        for thread in (*load.threads, load.trainer):
            thread.start()
        for _ in range(ROUNDS):
            enough = len(load.received) + rng.randint(20, 200)
            wait_for(lambda: len(load.received) >= enough or bool(load.errors), "nothing is received")  # noqa: B023
            time.sleep(rng.uniform(0.0, 0.01))  # somewhere in the midst of what goes on
            os.kill(server.pid, signal.SIGKILL)
            server.stop()
            server = start(port, store, held)
        load.stopping.set()
        for thread in load.threads:
            thread.join(PATIENCE)
        with BatchClient(server.url) as client:
            if len(load.received) % 2:  # make the last batch whole
                client.post_group(group(-1))
                load.received.append(-1)
        load.drained.set()
        load.trainer.join(PATIENCE)
        with BatchClient(server.url) as client:
            status = client.status()
    finally:
        server.stop()
        keeper.close()
    assert not load.errors
    assert not any(thread.is_alive() for thread in (*load.threads, load.trainer))
    assert (status["queue_size"], status["leased_groups"]) == (0, 0)
    assert len(load.received) >= 20 * ROUNDS
    assert sorted(load.used) == sorted(load.received)  # nothing lost, nothing twice
