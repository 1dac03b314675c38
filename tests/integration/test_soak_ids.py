"""Many bytes of ids through a real server: memory, file and latency stay flat, with a trainer or without.

``ATROPOS_GYM_SOAK_BYTES=2e9`` makes it the long one.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgpack
import numpy as np
import pytest
from tight_server import TightServer, running

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason=f"no /proc on {sys.platform}"),
]

BYTES = int(float(os.environ.get("ATROPOS_GYM_SOAK_BYTES", "96e6")))
ROWS, LENGTH = 8, 4096
GROUP_BYTES = ROWS * LENGTH * 65 // 8  # 4 of ids, 4 of logprobs, a bit of masks
GROUPS = BYTES // GROUP_BYTES
MIB = 2**20
ROOM = 48 * MIB  # the dashboard's latest groups, 32 MiB, and buffers
MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
IDS = [np.random.default_rng(row).integers(0, 50_000, LENGTH, np.int32).tobytes() for row in range(ROWS)]


def body(tag: int) -> bytes:
    """A group that its first score names."""
    logprobs = np.full(LENGTH, -0.5, np.float32).tobytes()
    group = {
        "tokens": IDS,
        "mask_bits": [b"\xff" * (LENGTH // 8)] * ROWS,
        "scores": [float(tag)] + [0.0] * (ROWS - 1),
        "inference_logprobs": [logprobs] * ROWS,
    }
    return bytes(msgpack.packb(group))


def client(server: ServerProcess | TightServer) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=600, trust_env=False)


def produce(http: httpx.Client, tags: range, done: Callable[[int], None]) -> None:
    for tag in tags:
        headers = {**MSGPACK, "Idempotency-Key": uuid4().hex}
        http.post("/scored_data", content=body(tag), headers=headers).raise_for_status()
        done(tag)


class Trainer:
    """Takes batches under a lease, looks at them, and acks."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.used: list[int] = []

    def step(self) -> None:
        params = {"lease_seconds": 600, "wait_seconds": 5, "groups": 8, "partial": True}
        reply: dict[str, Any] = msgpack.unpackb(
            self.http.get("/batch", params=params, headers=MSGPACK).raise_for_status().content
        )
        if reply["batch"] is None:
            return
        for group in reply["batch"]:
            assert group["tokens"] == IDS
            self.used.append(int(group["scores"][0]))
        self.http.post("/ack", json={"batch_id": reply["batch_id"]}).raise_for_status()


class Gauge:
    """What the server takes, at each twentieth of the way."""

    def __init__(self, pid: int, http: httpx.Client, folder: Path) -> None:
        self.pid, self.http, self.folder = pid, http, folder
        self.memory: list[int] = []
        self.files: list[int] = []
        self.seconds: list[float] = []

    def look(self, done: int) -> None:
        if done * 20 // GROUPS < len(self.memory):
            return
        started = time.perf_counter()
        self.http.get("/status").raise_for_status()
        self.seconds.append(time.perf_counter() - started)
        self.memory.append(resident(self.pid))
        self.files.append(taken(self.folder))

    def __str__(self) -> str:
        memory, files = ([one >> 20 for one in some] for some in (self.memory, self.files))
        latency = 1e3 * statistics.median(self.seconds)
        return f"MiB of memory {memory}, of files {files}; /status {latency:.1f} ms"


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def taken(folder: Path) -> int:
    """Bytes of its files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def flat(values: list[float], most: float) -> bool:
    """Whether the second half is like the first."""
    half = len(values) // 2
    return statistics.median(values[half:]) <= 10 * statistics.median(values[:half]) + most


def test_a_trainer_that_keeps_up(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def run(first: int) -> None:
        try:
            with client(server) as http:
                produce(http, range(first, GROUPS, 2), lambda tag: None)
        except BaseException as error:
            errors.append(error)

    with ServerProcess(store=tmp_path / "store.sqlite") as server:
        with BatchClient(server.url) as registrar:
            registrar.register(batch_size=64, max_token_len=LENGTH)
        threads = [threading.Thread(target=run, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        with client(server) as http:
            trainer, gauge = Trainer(http), Gauge(server.pid, http, tmp_path)
            while len(trainer.used) < GROUPS and not errors:
                trainer.step()
                gauge.look(len(trainer.used))
        for thread in threads:
            thread.join(600)
        assert not errors
    assert sorted(trainer.used) == list(range(GROUPS))
    print(f"\n{GROUPS} groups, {BYTES / 1e9:g} GB, beside each other: {gauge}")
    assert max(gauge.memory[10:]) < 1.1 * max(gauge.memory[4:10]) + 16 * MIB
    assert max(gauge.files) < 250 * MIB
    assert flat(gauge.seconds, 0.1)


def test_a_trainer_that_comes_late(tmp_path: Path) -> None:
    """All of it waits on disk, the server is killed, and then it goes out; memory holds a sixteenth of it."""
    store, limit = tmp_path / "store.sqlite", BYTES // 16
    with running(0, store, limit) as server:
        with BatchClient(server.url) as registrar:
            registrar.register(batch_size=64, max_token_len=LENGTH)
        with client(server) as http:
            start, filling = resident(server.pid), Gauge(server.pid, http, tmp_path)
            produce(http, range(GROUPS), filling.look)
            full = taken(tmp_path)
    with running(0, store, limit) as server, client(server) as http:
        trainer, draining = Trainer(http), Gauge(server.pid, http, tmp_path)
        while len(trainer.used) < GROUPS:
            trainer.step()
            draining.look(len(trainer.used))
        deadline = time.monotonic() + 120
        while taken(tmp_path) > 8 * MIB:
            assert time.monotonic() < deadline, "the file does not shrink"
            time.sleep(0.1)
    assert trainer.used == list(range(GROUPS))
    print(f"\n{GROUPS} groups, {BYTES / 1e9:g} GB, in: {filling}\nout: {draining}")
    assert max(filling.memory + draining.memory) - start < 1.25 * limit + ROOM
    assert full > GROUPS * GROUP_BYTES
    assert max(full, *draining.files) < 9 * GROUPS * ROWS * LENGTH + 80 * MIB  # and the log
    assert flat(filling.seconds, 0.1) and flat(draining.seconds, 0.1)
