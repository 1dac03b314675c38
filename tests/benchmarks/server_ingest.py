"""The batch server beside the original: CPU seconds and wall time for taking groups in and giving them out.

    python -m venv peer && peer/bin/pip install atroposlib==0.4.0
    python tests/benchmarks/server_ingest.py --original peer/bin/run-api

Groups of 8 x 4096 tokens with masks and logprobs, the first quarter prompt; bodies are made beforehand and
the client decodes nothing. All servers run side by side and are asked for the same in turn; of all rounds
the best and the median are shown. Without ``--original`` only ours is measured.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import numpy as np

from atropos_gym.batch_server.bodies.codings import zstd

ROWS, LENGTH, VOCABULARY = 8, 4096, 50_000
BATCH = 64
TOKENS = ROWS * LENGTH
PROCESS_CLOCK = 2
"""Linux's number of the clock that counts the CPU time of a process, in nanoseconds."""

CODINGS = ("identity", "gzip", "zstd")
REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": BATCH,
    "max_token_len": LENGTH + 1,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 1000,
}


def make_group(seed: int) -> dict[str, Any]:
    """Arrays of one group; logprobs are float32 values."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH), np.int32)
    logprobs = -rng.exponential(1.0, (ROWS, LENGTH)).astype(np.float32)
    logprobs[:, : LENGTH // 4] = 1.0
    return {"tokens": tokens, "logprobs": logprobs, "scores": rng.random(ROWS).tolist()}


def as_json(group: dict[str, Any]) -> bytes:
    """As any client sends it: ``json.dumps`` of lists."""
    masks = group["tokens"].copy()
    masks[:, : LENGTH // 4] = -100
    return json.dumps(
        {
            "tokens": group["tokens"].tolist(),
            "masks": masks.tolist(),
            "scores": group["scores"],
            "inference_logprobs": group["logprobs"].astype(np.float64).tolist(),
        }
    ).encode()


def as_msgpack(group: dict[str, Any]) -> bytes:
    """The binary form."""
    trained = np.ones((ROWS, LENGTH), bool)
    trained[:, : LENGTH // 4] = False
    return bytes(
        msgpack.packb(
            {
                "tokens": [row.astype("<i4").tobytes() for row in group["tokens"]],
                "mask_bits": [np.packbits(row, bitorder="little").tobytes() for row in trained],
                "scores": group["scores"],
                "inference_logprobs": [row.astype("<f4").tobytes() for row in group["logprobs"]],
            }
        )
    )


class Server:
    """A running server, spoken to over one connection."""

    def __init__(self, pid: int, port: int) -> None:
        self.pid = pid
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> bytes:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body=body, headers=names)
        reply = self.connection.getresponse()
        content = reply.read()
        assert reply.status == 200, content[:300]
        return content

    def cpu(self) -> float:
        """CPU seconds so far, of all threads (Linux)."""
        return time.clock_gettime((~self.pid << 3) | PROCESS_CLOCK)

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(command: list[str], port: int) -> Iterator[Server]:
    """Starts a server and stops it again."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(process.pid, port)
        for _ in range(300):
            try:
                server.ask("GET", "/")
                break
            except OSError:
                server.connection.close()
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


class Contest:
    """One server with one kind of bodies, and what it has cost so far."""

    def __init__(self, name: str, server: Server, bodies: list[bytes], headers: dict[str, str]) -> None:
        self.name, self.server, self.bodies = name, server, bodies
        self.headers = {"Content_Type": "application/json", **headers}
        self.cpu: dict[str, list[float]] = {what: [] for what in ("post", *CODINGS)}
        self.wall: dict[str, list[float]] = {what: [] for what in ("post", *CODINGS)}
        server.ask("POST", "/register", json.dumps(REGISTRATION).encode(), Content_Type="application/json")
        server.ask("GET", "/batch")
        self.post(warm=True)
        self.memory = server.memory()
        self.grown = self.posted = 0

    def timed(self, what: str, count: int) -> Callable[[], None]:
        """Starts a measurement; the call of what it returns ends it."""
        self.server.connection.close()  # it may have been idle for too long: the next request opens another
        cpu, wall = self.server.cpu(), time.perf_counter()

        def stop() -> None:
            self.cpu[what].append((self.server.cpu() - cpu) / count)
            self.wall[what].append((time.perf_counter() - wall) / count)

        return stop

    def post(self, *, warm: bool = False) -> None:
        """Posts every body once."""
        stop = self.timed("post", len(self.bodies))
        for body in self.bodies:
            self.server.ask("POST", "/scored_data", body, **self.headers)
        if not warm:
            self.posted += len(self.bodies)
            stop()

    def read(self, encoding: str) -> None:
        """Reads one batch."""
        stop = self.timed(encoding, 1)
        self.size = len(self.server.ask("GET", "/batch", Accept_Encoding=encoding))
        stop()

    def show(self) -> None:
        """Prints what it cost."""
        for what, cpu in self.cpu.items():
            shown = [f"{1e3 * of(times):8.2f}" for times in (cpu, self.wall[what]) for of in (min, median)]
            print(f"{self.name:16s} {what:9s} {shown[0]} {shown[1]} ms CPU {shown[2]} {shown[3]} ms wall")
        print(f"{self.name:16s} memory grew by {self.grown / self.posted / TOKENS:.2f} bytes a token")

    def compare(self, peer: Contest) -> None:
        """Prints how many times less it cost than the original."""
        for clock in ("cpu", "wall"):
            ours, theirs = getattr(self, clock), getattr(peer, clock)
            shown = []
            for what in ours:
                # The original knows no zstd: whoever asks for it gets a plain body.
                ratios = [of(theirs[what]) / of(ours[what]) for of in (min, median)]
                shown.append(f"{what} {ratios[0]:.1f}x {ratios[1]:.1f}x")
            print(f"{self.name:16s} less server {clock}: {', '.join(shown)}")


def main() -> None:
    """Runs the comparison."""
    # One round of each server after the other, so that a slow minute of the machine is everyone's.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--original", help="path of atroposlib's run-api")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--port", type=int, default=8931)
    options = parser.parse_args()
    groups = [make_group(seed) for seed in range(16)]
    bodies = [as_json(group) for group in groups]
    zipped, packed = [gzip.compress(body) for body in bodies], [as_msgpack(group) for group in groups]
    squeezed = [zstd.compress(body) for body in bodies]
    print(
        f"groups of {ROWS} x {LENGTH} tokens, {len(bodies[0]) / 1e6:.2f} MB of JSON; batches of {BATCH} rows"
    )
    binary, gzipped = {"Content_Type": "application/msgpack"}, {"Content_Encoding": "gzip"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ports = iter(range(options.port, options.port + 20))

        def enter(name: str, command: list[str], payload: list[bytes], headers: dict[str, str]) -> Contest:
            port = next(ports)
            server = stack.enter_context(running([*command, "--port", str(port)], port))
            return Contest(name, server, payload, headers)

        def ours(name: str, store: str, payload: list[bytes], headers: dict[str, str]) -> Contest:
            module = [sys.executable, "-m", "atropos_gym.batch_server"]
            command = [*module, "--store", store, "--soft-groups", "9999"]  # nobody reads while it is filled
            return enter(name, command, payload, headers)

        contests = [
            ours("JSON, memory", "memory", bodies, {}),
            ours("JSON, durable", f"{folder}/json", bodies, {}),
            ours("gzip, durable", f"{folder}/gzip", zipped, gzipped),
            ours("zstd, durable", f"{folder}/zstd", squeezed, {"Content_Encoding": "zstd"}),
            ours("msgpack, durable", f"{folder}/msgpack", packed, binary),
        ]
        originals = []
        if options.original:
            originals = [
                enter("original, JSON", [options.original], bodies, {}),
                enter("original, gzip", [options.original], zipped, gzipped),
            ]
        for _ in range(options.rounds):
            for contest in (*contests, *originals):
                contest.post()
        for contest in (*contests, *originals):
            contest.grown = contest.server.memory() - contest.memory
        for encoding in CODINGS * 3:
            for contest in (*contests, *originals):
                contest.read(encoding)
        print("best and median of all rounds: a group posted, a batch read")
        for contest in (*contests, *originals):
            contest.show()
    for contest in contests if originals else []:
        contest.compare(originals[contest.name.startswith(("gzip", "zstd"))])


if __name__ == "__main__":
    main()
