"""How long GET /health and /status take while producers post large groups and a trainer reads batches.

    python tests/benchmarks/server_latency.py --producers 8 --seconds 20

Groups of 8 x 4096 tokens with masks and logprobs, as JSON; the store is a file. Then one group of 64 x 32768
tokens is posted and read, again and again. Producers and trainer run in a process of their own, so that the
wait for this interpreter is not counted.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess

ROWS, LENGTH, BATCH = 8, 4096, 64


def make_body(seed: int, rows: int = ROWS, length: int = LENGTH) -> bytes:
    """One group as an environment of the original sends it."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 150_000, (rows, length)).tolist()
    logprobs = (-rng.random((rows, length), np.float32)).astype(np.float64).tolist()
    group = {"tokens": ids, "masks": ids, "scores": [0.0] * rows, "inference_logprobs": logprobs}
    return json.dumps(group).encode()


def load(url: str, producers: int, stop: float) -> None:
    """Posts and reads until the time is up."""
    bodies = [make_body(seed) for seed in range(4)]

    def produce(number: int) -> None:
        with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
            while time.time() < stop:
                headers = {"Content-Type": "application/json"}
                http.post("/scored_data", content=bodies[number % len(bodies)], headers=headers)

    threads = [threading.Thread(target=produce, args=(number,), daemon=True) for number in range(producers)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        while time.time() < stop:
            http.get("/batch", params={"wait_seconds": 1})


def load_huge(url: str, stop: float) -> None:
    """Posts the largest group and reads it, in turn."""
    body = make_body(0, BATCH, 32768)
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        while time.time() < stop:
            before = time.perf_counter()
            http.post("/scored_data", content=body, headers=headers).raise_for_status()
            posted = time.perf_counter()
            size = len(http.get("/batch").content)
            read = time.perf_counter()
            print(
                f"{len(body) / 1e6:.0f} MB posted in {posted - before:.2f} s, "
                f"{size / 1e6:.0f} MB read in {read - posted:.2f} s",
                flush=True,
            )


def measure(url: str, seconds: float) -> None:
    """Asks for both routes in turn, a hundred times a second at most, and prints how long they took."""
    took: dict[str, list[float]] = {"/health": [], "/status": []}
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as http:
        steps = http.get("/status").json()["current_step"]
        started = time.time()
        while time.time() < started + seconds:
            for path, times in took.items():
                before = time.perf_counter()
                http.get(path)
                times.append(time.perf_counter() - before)
                time.sleep(0.005)
        steps = http.get("/status").json()["current_step"] - steps
    print(f"{steps} batches in {seconds:g} s")
    for path, times in took.items():
        times.sort()
        p50, p99, worst = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1))
        print(f"GET {path}: median {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms of {len(times)}")


def main() -> None:
    """Measures beside eight producers, then beside huge groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    phases: list[tuple[str, Callable[..., None], tuple[int, ...]]] = [
        (f"{options.producers} producers of {ROWS} x {LENGTH} tokens", load, (options.producers,)),
        (f"one producer of {BATCH} x 32768 tokens", load_huge, ()),
    ]
    for what, target, arguments in phases:
        print(what)
        with tempfile.TemporaryDirectory() as folder, ServerProcess(store=Path(folder) / "store") as server:
            with BatchClient(server.url) as client:
                client.register(batch_size=BATCH)
                client.batch()
                stop = time.time() + options.seconds + 5
                worker = multiprocessing.get_context("spawn").Process(
                    target=target, args=(server.url, *arguments, stop)
                )
                worker.start()
                while client.status()["current_step"] == 0 and worker.is_alive():
                    time.sleep(0.1)
                measure(server.url, options.seconds)
                worker.join()


if __name__ == "__main__":
    main()
