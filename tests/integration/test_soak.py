"""Many groups through a real server: nothing lost, nothing twice, and memory, file and latency stay flat.

``ATROPOS_GYM_SOAK=200000`` makes it the long one.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.wire import ScoredDataGroup

GROUPS = int(os.environ.get("ATROPOS_GYM_SOAK", "5000"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 + GROUPS // 50)]

PRODUCERS = 4
LIST = 10  # groups in one post
TOKENS = 16


def group(tag: int) -> ScoredDataGroup:
    """A group that its first score names."""
    ids = [1 + (tag + at) % 1000 for at in range(TOKENS)]
    return ScoredDataGroup(tokens=[ids] * 2, masks=[ids] * 2, scores=[float(tag), 0.0])


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason=f"no /proc on {sys.platform}")
def test_soak(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    used: list[int] = []
    memory: list[int] = []
    files: list[int] = []
    latencies: list[float] = []
    errors: list[BaseException] = []

    def produce(number: int) -> None:
        try:
            with BatchClient(server.url) as client:
                for first in range(number * LIST, GROUPS, PRODUCERS * LIST):
                    client.post_groups([group(tag) for tag in range(first, min(first + LIST, GROUPS))])
        except BaseException as error:
            errors.append(error)

    with ServerProcess(store=store) as server, BatchClient(server.url) as trainer:
        trainer.register(batch_size=64)
        threads = [threading.Thread(target=produce, args=(number,)) for number in range(PRODUCERS)]
        for thread in threads:
            thread.start()
        while len(used) < GROUPS and not errors:
            batch = trainer.batch(lease_seconds=600, wait_seconds=5, groups=32, partial=True)
            if batch is None:
                continue
            trainer.ack(str(batch.batch_id))
            before = len(used)
            used += [int(one.scores[0]) for one in batch.groups]
            if before * 20 // GROUPS < len(used) * 20 // GROUPS:  # at each twentieth of the way
                started = time.perf_counter()
                status = trainer.status()
                latencies.append(time.perf_counter() - started)
                memory.append(resident(server.pid))
                files.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
                assert status["queue_sequences"] <= 4 * 64 + PRODUCERS * LIST * 2  # the soft limit holds
        for thread in threads:
            thread.join(120)
        assert not errors
        assert sorted(used) == list(range(GROUPS))
        assert trainer.status()["queue_size"] == 0
    assert max(memory[10:]) < 1.1 * max(memory[4:10]) + 4 * 2**20
    assert max(files) < 100 * 2**20
    assert statistics.median(latencies[10:]) < 10 * statistics.median(latencies[:10]) + 0.1
    print(
        f"{GROUPS} groups; MiB of memory {memory[4] >> 20} at a fifth and {memory[-1] >> 20} at the end; "
        f"file at most {max(files) >> 20} MiB; /status {1000 * statistics.median(latencies):.1f} ms"
    )
