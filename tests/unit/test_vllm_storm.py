"""Everything at once: swaps, restarts and faults under load. No hang, no number of another version."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import AnswerRefused, EngineError, EngineUnreachable, VersionExpired
from tests.tools.fake_vllm import FakeVLLM, weights_of
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PASSING = ("500", "503", "429", "reset", "refused", "order", "abort", "abort all", "rounded logprob")
STAYING = ("no ids", "null logprob", "short logprobs", "changed prompt", "usage", "garbage")


class Storm:
    """A run over one server: episodes that hold a version, a learner that publishes and deletes."""

    def __init__(self, fake: FakeVLLM, folder: Path, seed: int) -> None:
        self.fake = fake
        self.folder = folder
        self.random = random.Random(seed)
        self.weights = {0: "base"}
        self.sampled = 0
        self.lost: list[EngineError] = []
        self.tensors = adapter_tensors(tiny_llama())

    async def episode(self, engine: VLLMEngine, number: int) -> None:
        prompt = [number % 256, number // 256, 7]
        async with engine.hold() as held:
            for turn in range(3):
                params = SamplingParams(max_tokens=6, temperature=0.7, seed=1000 * number + turn)
                try:
                    completions = await engine.generate(
                        prompt, params, 2, version=held.version, affinity=number
                    )
                except EngineError as error:
                    self.lost.append(error)
                    return
                for completion in completions:
                    self.check(prompt, completion, held.version)
                prompt = [*prompt, *completions[0].ids]

    def check(self, prompt: list[int], completion: Any, version: int) -> None:
        assert completion.version == version and len(completion.ids) == 6
        weights = self.weights[version]
        for position, logprob in enumerate(completion.logprobs):
            right = self.fake.logprob(prompt, list(completion.ids), position, weights, 0.7)
            assert logprob in (right, 0.0), (version, position)
        self.sampled += 1

    async def learner(self, engine: VLLMEngine) -> None:
        for version in range(1, 7):
            folder = self.folder / f"v{version}"
            tensors = {key: value + version for key, value in self.tensors.items()}
            await asyncio.to_thread(write_adapter, folder, tensors)
            self.weights[version] = weights_of(folder)
            while True:
                try:
                    await engine.publish(version, folder)
                    break
                except EngineError:  # the fault was in the load: the learner tries again
                    await asyncio.sleep(0)
            for old in self.folder.iterdir():
                number = int(old.name[1:])
                if number < version and number not in engine.live_versions:
                    await asyncio.to_thread(shutil.rmtree, old)
            await asyncio.sleep(0.01)

    async def weather(self, engine: VLLMEngine, done: asyncio.Event) -> None:
        while not done.is_set():
            kind = self.random.choice((*PASSING, *STAYING, "restart", "load"))
            if kind == "restart":
                engine._thread.loop.call_soon_threadsafe(self.fake.restart)
            elif kind == "load":
                self.fake.inject(self.random.choice(("503", "reset")), path="/v1/load")
            else:
                self.fake.inject(kind)
            await asyncio.sleep(0.003)

    async def run(self, engine: VLLMEngine) -> None:
        done = asyncio.Event()
        weather = asyncio.ensure_future(self.weather(engine, done))
        learner = asyncio.ensure_future(self.learner(engine))
        number = 0
        while not learner.done():
            await asyncio.gather(*(self.episode(engine, number + i) for i in range(10)))
            number += 10
        await learner
        done.set()
        await weather


@pytest.mark.parametrize("seed", [0, 1])
def test_a_storm(tmp_path: Path, seed: int) -> None:
    fake = FakeVLLM()
    storm = Storm(fake, tmp_path, seed)
    with fake.engine(max_live_versions=2) as engine:
        asyncio.run(asyncio.wait_for(storm.run(engine), 100))
        assert engine.newest == 6 and storm.sampled > 0
        assert not fake.down, "no request ever named an adapter whose folder was gone"
        assert {type(error) for error in storm.lost} <= {AnswerRefused, EngineUnreachable, VersionExpired}
        counted = {name: n for name, n in engine.counters.items() if name.startswith("lost/")}
        assert sum(counted.values()) == len(storm.lost), counted
        assert engine.metrics()["running"] == 0 == engine.metrics()["queued"]
    assert fake.adapters == {} or engine.counters["left_loaded"]
