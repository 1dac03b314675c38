"""A learner's batches from an engine whose weights are swapped while episodes are in flight.

Each update learns from two groups, one at each of two temperatures. The first of the next two is begun before
a version is published, and plays on under the version that it holds. The last version is published while a
group plays whose turns take the newest one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atropos_gym.engines import SamplingParams, VLLMEngine
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.text_env import TextEnv
from atropos_gym.wire import ScoredDataGroup

__all__ = ["COLD", "WARM", "SwapRounds", "Talk"]

COLD, WARM = 0.7, 1.0
#: Seconds that anything may take on a machine however loaded.
PATIENCE = 600.0


class Talk(TextEnv):
    """Two or three turns of a few ids; long words pay. After the first reply it waits for ``gate``."""

    max_turns = 3
    max_turn_tokens = 8
    max_prompt_tokens = 96
    max_feedback_tokens = 32

    def __init__(self, gate: threading.Event | None = None, **keywords: Any) -> None:
        keywords.setdefault("system_prompt", "You talk about what you are asked, in few and long words.")
        super().__init__(**keywords)
        self.gate = gate

    def begin(self, options: dict[str, Any]) -> str:
        self.left = None
        thing = self.np_random.choice(["the sea", "a forest", "a city", "winter", "music", "bread"])
        return f"Tell me something about {thing}."

    def respond(self, reply: Reply) -> Feedback:
        if self.left is None:
            self.left = 1 + int(self.np_random.integers(2))
            if self.gate is not None:
                assert self.gate.wait(PATIENCE)
        words = reply.content.split()
        reward = sum(map(len, words)) / max(1, len(words))
        self.left -= 1
        return Feedback("And what else?", reward=reward, terminated=self.left < 0)

    def sample_reply(self) -> str:
        return " ".join(self.np_random.choice(["blue", "large", "wonderful", "extraordinary"], 3))


class SwapRounds:
    """A ``GroupSource`` for ``GRPO.learn``: plays on one engine, and swaps there.

    Args:
        engine: who speaks.
        group_size: episodes of a group.
        last: the version after which nothing is learned.

    Attributes:
        groups: all that was played.
        running: requests on their way at the moment of each swap under load, by version.
        hits: prompt ids that the server found in its prefix cache while each update's groups were played.
        reports: what became of the groups, by collector.
    """

    def __init__(self, engine: VLLMEngine, *, group_size: int, last: int) -> None:
        self.engine = engine
        self.groups: list[EpisodeGroup] = []
        self.running: dict[int, float] = {}
        self.hits: list[float] = []
        self._last = last
        self._gate = threading.Event()
        self._gate.set()
        self._threads = ThreadPoolExecutor(2)
        self._begun: Future[list[EpisodeGroup]] | None = None
        self._cold = self.collector(COLD, group_size, seed=1)
        self._warm = self.collector(WARM, group_size, seed=2)
        self._crossing = self.collector(WARM, group_size, seed=3, version="turn")

    def collector(self, temperature: float, group_size: int, **settings: Any) -> GroupCollector:
        return GroupCollector(
            lambda: Talk(gate=self._gate, tokenizer=self.engine.tokenizer),
            self.engine,
            group_size=group_size,
            sampling=SamplingParams(max_tokens=Talk.max_turn_tokens, temperature=temperature),
            blocking=True,  # an episode that waits does so in a thread of its own
            deadline=PATIENCE,
            **settings,
        )

    @property
    def reports(self) -> list[dict[str, Any]]:
        return [collector.report for collector in (self._cold, self._warm, self._crossing)]

    def next(self, update: int) -> list[ScoredDataGroup]:
        hits = self._hits()
        cold = self._begun or self._threads.submit(self._cold.collect, 1)
        self._begun = None
        warm = self._threads.submit(self._warm.collect, 1)
        groups = [*cold.result(PATIENCE), *warm.result(PATIENCE)]
        self.groups += groups
        self.hits.append(self._hits() - hits)
        return [group.to_wire() for group in groups]

    def announce(self, version: int, adapter: Path | None) -> None:
        assert adapter is not None
        if version < self._last:
            self._begun = self._swap_under(self._cold, version, adapter)
        else:
            self.groups += self._swap_under(self._crossing, version, adapter).result(PATIENCE)

    def _swap_under(
        self, collector: GroupCollector, version: int, adapter: Path
    ) -> Future[list[EpisodeGroup]]:
        """Publishes once all first turns of a new group are sent or answered, then lets it play on."""
        self._gate.clear()
        try:
            before = self._started()[0]
            group = self._threads.submit(collector.collect, 1)
            deadline = time.monotonic() + PATIENCE
            while True:
                started, running = self._started()
                if started - before >= collector.group_size:
                    break
                assert time.monotonic() < deadline and not group.done()
                time.sleep(0.005)
            self.running[version] = running
            asyncio.run(self.engine.publish(version, adapter))
        finally:
            self._gate.set()
        return group

    def _started(self) -> tuple[float, float]:
        metrics = self.engine.metrics()
        return metrics["requests"] + metrics["running"] + metrics["queued"], metrics["running"]

    def _hits(self) -> float:
        return asyncio.run(self.engine.server_metrics())["prefix_cache_hits_total"]

    def moved_on(self) -> None:
        pass

    def done(self, *, durable: bool) -> None:
        pass

    def give_back(self) -> None:
        pass

    def held(self) -> set[int]:
        """Every version: all ids are scored at the end, each under its own."""
        return set(range(self._last + 1))

    def close(self, *, finished: bool) -> None:
        self._gate.set()
        self._threads.shutdown()
        for collector in (self._cold, self._warm, self._crossing):
            collector.close()
