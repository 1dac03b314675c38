"""The batch server beside the original: CPU seconds and wall time for taking groups in and giving them out.

    python -m venv peer && peer/bin/pip install atroposlib==0.4.0
    python tests/benchmarks/server_ingest.py --original peer/bin/run-api

Groups of 8 x 4096 tokens with masks and logprobs, the first quarter prompt; bodies are made beforehand and
the client decodes nothing. Both servers are asked for the same in the same run, ours with its durable store
too. Without ``--original`` only ours is measured.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

ROWS, LENGTH, VOCABULARY = 8, 4096, 50_000
BATCH = 64
TOKENS = ROWS * LENGTH
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
        """CPU seconds so far (Linux)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(command: list[str], port: int) -> Iterator[Server]:
    """Starts a server and stops it again."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
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


def measure(name: str, server: Server, bodies: list[bytes], rounds: int, **headers: str) -> dict[str, float]:
    """Posts all bodies some times over, then reads batches; prints and returns CPU seconds."""
    kind = {"Content_Type": "application/json", **headers}
    server.ask("POST", "/register", json.dumps(REGISTRATION).encode(), Content_Type="application/json")
    server.ask("GET", "/batch")
    for body in bodies[: BATCH // ROWS]:  # warm
        server.ask("POST", "/scored_data", body, **kind)
    server.ask("GET", "/batch")
    memory, cpu, wall = server.memory(), server.cpu(), time.perf_counter()
    count = rounds * len(bodies)
    for _ in range(rounds):
        for body in bodies:
            server.ask("POST", "/scored_data", body, **kind)
    found = {"post": (server.cpu() - cpu) / count}
    wall = (time.perf_counter() - wall) / count
    grown = (server.memory() - memory) / (count * TOKENS)
    print(
        f"{name:28s} post {found['post'] * 1e3:7.2f} ms CPU, {wall * 1e3:7.2f} ms wall a group, "
        f"memory {grown:6.1f} bytes a token"
    )
    for encoding in ("identity", "gzip"):
        reads = min(3, count * ROWS // BATCH // 2)
        cpu, wall = server.cpu(), time.perf_counter()
        for _ in range(reads):
            size = len(server.ask("GET", "/batch", Accept_Encoding=encoding))
        found[encoding] = (server.cpu() - cpu) / reads
        print(
            f"{'':28s} /batch {encoding:8s} {found[encoding]:7.3f} s CPU, "
            f"{(time.perf_counter() - wall) / reads:6.3f} s wall, {size / 1e6:.2f} MB"
        )
    return found


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--original", help="path of atroposlib's run-api")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8931)
    options = parser.parse_args()
    groups = [make_group(seed) for seed in range(16)]
    bodies = [as_json(group) for group in groups]
    print(f"{len(bodies)} groups of {ROWS} x {LENGTH} tokens, {len(bodies[0]) / 1e6:.2f} MB of JSON each")
    results: dict[str, dict[str, float]] = {}
    port = options.port
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, "-m", "atropos_gym.batch_server", "--port"]
        ways: list[tuple[str, list[str], list[bytes], dict[str, str]]] = [
            ("JSON, memory", ["--store", "memory"], bodies, {}),
            ("JSON, durable", ["--store", f"{folder}/json.sqlite"], bodies, {}),
            (
                "JSON gzipped, durable",
                ["--store", f"{folder}/gzip.sqlite"],
                [gzip.compress(body) for body in bodies],
                {"Content_Encoding": "gzip"},
            ),
            (
                "msgpack, durable",
                ["--store", f"{folder}/msgpack.sqlite"],
                [as_msgpack(group) for group in groups],
                {"Content_Type": "application/msgpack"},
            ),
        ]
        for name, arguments, payload, headers in ways:
            port += 1
            with running([*ours, str(port), *arguments], port) as server:
                results[name] = measure(name, server, payload, options.rounds, **headers)
    if options.original is None:
        return
    with running([options.original, "--port", str(port + 1)], port + 1) as server:
        original = measure("original", server, bodies, options.rounds)
    for name, found in results.items():
        ratios = ", ".join(f"{what} {original[what] / max(found[what], 1e-9):.1f}x" for what in found)
        print(f"{name:28s} less server CPU than the original: {ratios}")


if __name__ == "__main__":
    main()
