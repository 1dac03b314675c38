"""Ids a second of a multi-turn collection, beside the same prompts and lengths sent flat out to one server.

    python tests/benchmarks/vllm_collector.py --python .venv-vllm/bin/python --rounds 3

A collection of 32 episodes (4 groups of 8, two or three turns each) is played. Then the very prompts of its
turns are sent again, for as many ids each, with nothing between: once with as many in flight as there were
episodes, first turns first, and once all at a time. Each side has a version of its own, so that none finds
the other's prompts in the prefix cache.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _vllm import arguments, engine_of, learner, step

from atropos_gym.engines import SamplingParams, VLLMEngine
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.trainers.adapters import save_adapter
from tests.tools.swap_rounds import Talk


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn: its place in the episode, its prompt, and how many ids were sampled."""

    turn: int
    prompt: list[int]
    ids: int


def collected(collector: GroupCollector, groups: int) -> tuple[list[Asked], float]:
    """Plays groups; returns their turns and the seconds that it took."""
    begin = time.perf_counter()
    played = collector.collect(groups)
    seconds = time.perf_counter() - begin
    asked = [
        Asked(number, row.ids[: turn.start], turn.end - turn.start)
        for group in played
        for episode in group.episodes
        for row in episode.rows
        for number, turn in enumerate(row.turns)
    ]
    return asked, seconds


def flat_out(engine: VLLMEngine, asked: list[Asked], in_flight: int) -> float:
    """Sends the same prompts for the same numbers of ids; returns seconds."""
    waiting = sorted(asked, key=lambda one: -one.turn)

    async def client() -> None:
        while waiting:
            one = waiting.pop()
            [reply] = await engine.generate(one.prompt, SamplingParams(max_tokens=one.ids))
            assert len(reply.ids) == one.ids

    async def all_of_them() -> None:
        await asyncio.gather(*(client() for _ in range(in_flight)))

    begin = time.perf_counter()
    asyncio.run(all_of_them())
    return time.perf_counter() - begin


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--turn-ids", type=int, default=Talk.max_turn_tokens)
    options = parser.parse_args()
    episodes = options.groups * 8
    rates: dict[str, list[float]] = {"collector": [], "as many in flight": [], "all at a time": []}
    with tempfile.TemporaryDirectory() as folder, engine_of(options) as engine:
        model, version = learner(options.model), 0

        def swap() -> None:
            nonlocal version
            version += 1
            step(model)
            asyncio.run(engine.publish(version, save_adapter(model, Path(folder) / f"v{version}")))

        collector = GroupCollector(
            lambda: Talk(tokenizer=engine.tokenizer, max_turn_tokens=options.turn_ids),
            engine,
            group_size=8,
            concurrency=episodes,
            seed=1,
        )
        for _ in range(options.rounds):
            swap()
            asked, seconds = collected(collector, options.groups)
            ids = sum(one.ids for one in asked)
            rates["collector"].append(ids / seconds)
            for name, in_flight in (("as many in flight", episodes), ("all at a time", len(asked))):
                swap()
                rates[name].append(ids / flat_out(engine, asked, in_flight))
            print(
                f"{len(asked)} turns, {ids} ids: "
                + ", ".join(f"{name} {values[-1]:.2f} ids/s" for name, values in rates.items()),
                flush=True,
            )
        collector.close()
    means = {name: statistics.mean(values) for name, values in rates.items()}
    for name in list(means)[1:]:
        print(f"collector / {name} = {means['collector'] / means[name]:.3f} (bar 0.9)")


if __name__ == "__main__":
    main()
