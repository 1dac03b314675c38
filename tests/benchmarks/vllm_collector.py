"""Ids a second of a multi-turn collection, beside the same prompts and lengths sent flat out to one server.

    python tests/benchmarks/vllm_collector.py --python .venv-vllm/bin/python --rounds 3

One side plays a collection: 32 episodes (4 groups of 8), two or three turns each, all in flight. The other
sends the very prompts of its turns, for as many ids each under the same seeds, with nothing between: as many
requests in flight, first turns first. The sides alternate, now one and now the other first, each with a
version of its own that has the same weights: so all say the same every time, and a side finds in the prefix
cache what it has said itself and nothing else. What counts is the median of the rounds, each a ratio: a
machine that is slower for a while is so for both.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _vllm import arguments, engine_of, learner

from atropos_gym.engines import SamplingParams, VLLMEngine
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.seeds import sampling_seed
from atropos_gym.trainers.adapters import save_adapter
from tests.tools.swap_rounds import Talk

GROUP_SIZE, SEED = 8, 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn: its place in the episode, its prompt, how many ids were sampled, and with which seed."""

    turn: int
    prompt: list[int]
    ids: int
    seed: int


class Sides:
    """Plays and sends on one engine.

    Attributes:
        asked: turns of the last collection.
    """

    def __init__(self, engine: VLLMEngine, adapter: Path, *, groups: int, turn_ids: int) -> None:
        self.engine = engine
        self.asked: list[Asked] = []
        self._adapter = adapter
        self._groups = groups
        self._collector = GroupCollector(
            lambda: Talk(tokenizer=engine.tokenizer, max_turn_tokens=turn_ids),
            engine,
            group_size=GROUP_SIZE,
            concurrency=groups * GROUP_SIZE,
            seed=SEED,
        )

    def collect(self) -> float:
        """Plays the groups; returns ids a second."""
        self._next_version()
        begin = time.perf_counter()
        played = self._collector.collect(self._groups, first_number=0)
        seconds = time.perf_counter() - begin
        self.asked = [
            Asked(
                number,
                row.ids[: turn.start],
                turn.end - turn.start,
                sampling_seed(SEED, group.number, episode.member, number),
            )
            for group in played
            for episode in group.episodes
            for row in episode.rows
            for number, turn in enumerate(row.turns)
        ]
        return self.ids / seconds

    def send(self) -> float:
        """Sends what the last collection sent, as fast as the server takes it; returns ids a second."""
        self._next_version()
        begin = time.perf_counter()
        asyncio.run(self._send(sorted(self.asked, key=lambda one: -one.turn)))
        return self.ids / (time.perf_counter() - begin)

    @property
    def ids(self) -> int:
        """Ids that were sampled in the last collection."""
        return sum(one.ids for one in self.asked)

    def close(self) -> None:
        self._collector.close()

    async def _send(self, waiting: list[Asked]) -> None:
        async def client() -> None:
            while waiting:
                one = waiting.pop()
                params = SamplingParams(max_tokens=one.ids, seed=one.seed)
                [reply] = await self.engine.generate(one.prompt, params)
                assert len(reply.ids) == one.ids

        await asyncio.gather(*(client() for _ in range(self._groups * GROUP_SIZE)))

    def _next_version(self) -> None:
        version = self.engine.newest + 1
        folder = shutil.copytree(self._adapter, self._adapter.with_name(f"v{version}"))
        asyncio.run(self.engine.publish(version, folder))
        asyncio.run(self.engine.generate([1], SamplingParams(max_tokens=1)))  # its weights are in place


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--turn-ids", type=int, default=Talk.max_turn_tokens)
    options = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder, engine_of(options) as engine:
        adapter = save_adapter(learner(options.model), Path(folder) / "adapter")
        sides = Sides(engine, adapter, groups=options.groups, turn_ids=options.turn_ids)
        sides.collect()  # so that there is something to send, and the server is warm
        for number in range(options.rounds):
            order = (sides.collect, sides.send) if number % 2 else (sides.send, sides.collect)
            rates = {side.__name__: side() for side in order}
            ratios.append(rates["collect"] / rates["send"])
            print(
                f"{len(sides.asked)} turns, {sides.ids} ids: collector {rates['collect']:.2f} ids/s, "
                f"flat out {rates['send']:.2f} ids/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
        sides.close()
    print(f"collector / flat out = {statistics.median(ratios):.3f}, median of {len(ratios)} (bar 0.9)")


if __name__ == "__main__":
    main()
