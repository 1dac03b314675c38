"""A durable batch server in a process of its own that holds little in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAM = """
import sys
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.serve import serve
from atropos_gym.batch_server.store import SqliteStore
port, path, memory_bytes = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limits = Limits(memory_bytes=memory_bytes, soft_groups=10**6)
serve(port=port, store=SqliteStore(path, limits), ready=lambda url: print(url, flush=True))
"""


@dataclass
class TightServer:
    """Where it answers, and its process."""

    url: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Ends it at once; more than once is no mistake."""
        self.process.kill()
        self.process.communicate()


def tight_server(port: int, store: Path, memory_bytes: int) -> TightServer:
    """Starts it; whoever calls this stops it."""
    command = [sys.executable, "-c", PROGRAM, str(port), str(store), str(memory_bytes)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    if not url:
        process.communicate()
        raise RuntimeError(f"the server did not start: exit {process.returncode}")
    return TightServer(url, process)


@contextmanager
def running(port: int, store: Path, memory_bytes: int) -> Iterator[TightServer]:
    """The same, stopped at the end."""
    server = tight_server(port, store, memory_bytes)
    try:
        yield server
    finally:
        server.stop()
