"""How soon a version is served, and what swapping costs those who are being served, on a vLLM server.

    python tests/benchmarks/vllm_swaps.py --python .venv-vllm/bin/python --repeats 10 --seconds 60 --rounds 3

First, on an idle server: from the end of an optimizer step to the version being saved, loaded and announced,
and from there to its first id, beside the same request on a version that has been loaded for a while (other
prompts of the same length, so that none is in the prefix cache). Then, under load, ids a second while one
version is served and while a new one comes every few seconds, in turn: three stretches of a minute each are
three minutes a side. What is published then was saved before: the learner's own work is not the server's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _vllm import arguments, engine_of, learner, step

from atropos_gym.engines import SamplingParams, VLLMEngine
from atropos_gym.trainers.adapters import save_adapter

PROMPT, REPLY = 84, 16


class Versions:
    """Steps of a learner, published one after another."""

    def __init__(self, engine: VLLMEngine, model: Any, folder: Path) -> None:
        self.engine = engine
        self.model = model
        self.folder = folder
        self.last = 0
        self._saved = 0

    async def save(self) -> float:
        """Makes a step and saves it as the version after the last that was saved; returns seconds."""
        step(self.model)
        self._saved += 1
        begin = time.perf_counter()
        await asyncio.to_thread(save_adapter, self.model, self.folder / f"v{self._saved}")
        return time.perf_counter() - begin

    async def publish(self) -> float:
        """Loads the next version and announces it; returns seconds."""
        if self._saved == self.last:
            await self.save()
        self.last += 1
        begin = time.perf_counter()
        await self.engine.publish(self.last, self.folder / f"v{self.last}")
        return time.perf_counter() - begin


async def first_id(engine: VLLMEngine, version: int) -> float:
    """Seconds to the first id after a prompt that nothing has seen."""
    prompt = [random.randrange(100, 40_000) for _ in range(PROMPT)]
    begin = time.perf_counter()
    await engine.generate(prompt, SamplingParams(max_tokens=1), version=version)
    return time.perf_counter() - begin


async def latency(engine: VLLMEngine, versions: Versions, repeats: int) -> None:
    """Prints how soon a version is served."""
    rows = []
    for _ in range(repeats):
        saved, loaded = await versions.save(), await versions.publish()
        fresh = await first_id(engine, versions.last)
        known = statistics.median([await first_id(engine, versions.last) for _ in range(3)])
        rows.append((saved, loaded, saved + loaded, fresh, known, fresh / known))
    print("seconds              " + "".join(f"{name:>11}" for name in ("median", "best", "worst")))
    names = (
        "saved",
        "loaded, announced",
        "both (bar 1.0)",
        "first id, new",
        "first id, loaded",
        "ratio (bar 1.3)",
    )
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        values = (statistics.median(column), min(column), max(column))
        print(f"{name:<21}" + "".join(f"{value:>11.3f}" for value in values), flush=True)


async def client(engine: VLLMEngine, stop: asyncio.Event) -> None:
    """Asks one thing after another; replies differ in length, so that clients do not fall into step."""
    while not stop.is_set():
        prompt = [random.randrange(100, 40_000) for _ in range(PROMPT)]
        reply = random.randint(REPLY // 2, 3 * REPLY // 2)
        await engine.generate(prompt, SamplingParams(max_tokens=reply))


async def stretch(engine: VLLMEngine, versions: Versions, seconds: float, every: float | None) -> float:
    """Returns ids a second over a while; ``every``: seconds between swaps, None for none."""
    begin, before = time.perf_counter(), await sampled(engine)
    if every is None:
        await asyncio.sleep(seconds)
    else:
        for number in range(1, int(seconds / every) + 1):
            await asyncio.sleep(max(0.0, begin + (number - 0.5) * every - time.perf_counter()))
            await versions.publish()
        await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    return (await sampled(engine) - before) / (time.perf_counter() - begin)


async def sampled(engine: VLLMEngine) -> float:
    """Ids that the server has sampled so far, those of requests on their way too."""
    return (await engine.server_metrics())["generation_tokens_total"]


async def swapping(engine: VLLMEngine, versions: Versions, options: Any) -> None:
    """Prints ids a second with and without swaps, in turn, under one load that never stops."""
    for _ in range(options.rounds * int(options.seconds / options.every)):
        await versions.save()
    stop = asyncio.Event()
    clients = [asyncio.create_task(client(engine, stop)) for _ in range(options.clients)]
    await stretch(engine, versions, options.warm_up, None)
    found: dict[float | None, list[float]] = {None: [], options.every: []}
    for number in range(options.rounds):
        for every in (*found,) if number % 2 else (*reversed(found),):
            before = versions.last
            rate = await stretch(engine, versions, options.seconds, every)
            found[every].append(rate)
            print(
                f"{rate:7.2f} ids/s with {versions.last - before} swaps in {options.seconds:g} s", flush=True
            )
    stop.set()
    await asyncio.gather(*clients)
    still, swapped = found.values()
    ratios = [with_swaps / without for without, with_swaps in zip(still, swapped, strict=True)]
    print(
        f"swapping / not = {statistics.mean(swapped):.2f} / {statistics.mean(still):.2f} ids/s, "
        f"{statistics.median(ratios):.3f} in the median of {len(ratios)} rounds (bar 0.85)"
    )
    print({name: count for name, count in engine.counters.items() if count})


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each stretch under load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between swaps")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds of load before anything counts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, engine_of(options, publish_timeout=600) as engine:
        versions = Versions(engine, learner(options.model), Path(folder))

        async def both() -> None:
            await versions.publish()
            if options.repeats:
                await latency(engine, versions, options.repeats)
            if options.rounds:
                await swapping(engine, versions, options)

        asyncio.run(both())


if __name__ == "__main__":
    main()
