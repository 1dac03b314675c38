"""How long GET /health and /status take while producers post large groups and a trainer reads batches.

    python tests/benchmarks/server_latency.py --producers 8 --seconds 20

Groups of 8 x 4096 tokens with masks and logprobs, as JSON; the store is a file. Producers and trainer run
in a process of their own, so that the wait for this interpreter is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import threading
import time
from pathlib import Path

import httpx

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.wire import ScoredDataGroup

ROWS, LENGTH, BATCH = 8, 4096, 64


def make_body(seed: int) -> bytes:
    """One group as an environment of the original sends it."""
    rng = random.Random(seed)
    ids = [[rng.randrange(150_000) for _ in range(LENGTH)] for _ in range(ROWS)]
    logprobs = [[-rng.random() for _ in row] for row in ids]
    group = ScoredDataGroup(tokens=ids, masks=ids, scores=[0.0] * ROWS, inference_logprobs=logprobs)
    return group.to_json()


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


def main() -> None:
    """Measures both routes in turn, a hundred times a second at most."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--producers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    took: dict[str, list[float]] = {"/health": [], "/status": []}
    with tempfile.TemporaryDirectory() as folder, ServerProcess(store=Path(folder) / "store") as server:
        with BatchClient(server.url) as client:
            client.register(batch_size=BATCH)
            client.batch()
        stop = time.time() + options.seconds + 5
        worker = multiprocessing.get_context("spawn").Process(
            target=load, args=(server.url, options.producers, stop)
        )
        worker.start()
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
            while (steps := http.get("/status").json()["current_step"]) == 0 and worker.is_alive():
                time.sleep(0.1)
            started = time.time()
            while time.time() < started + options.seconds:
                for path, times in took.items():
                    before = time.perf_counter()
                    http.get(path)
                    times.append(time.perf_counter() - before)
                    time.sleep(0.005)
            steps = http.get("/status").json()["current_step"] - steps
        worker.join()
    print(
        f"{options.producers} producers, {steps} batches of {BATCH} x {LENGTH} tokens in {options.seconds} s"
    )
    for path, times in took.items():
        times.sort()
        p50, p99, worst = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1))
        print(f"GET {path}: median {p50:.1f} ms, p99 {p99:.1f} ms, worst {worst:.1f} ms of {len(times)}")


if __name__ == "__main__":
    main()
