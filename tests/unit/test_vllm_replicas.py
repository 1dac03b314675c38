"""Several vLLM servers behind one engine: affinity, least loaded, one that is gone and back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest

from atropos_gym.engines.base import SamplingParams
from atropos_gym.engines.replicas import Router
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import ConfigError, EngineError, EngineUnreachable
from atropos_gym.rollout.collector import GroupCollector
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.text_tasks import Guess
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

PROMPT = [5, 6, 7]
PARAMS = SamplingParams(max_tokens=8, seed=7)
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class Switch(httpx.AsyncBaseTransport):
    """Leads to a fake by host."""

    def __init__(self, **fakes: FakeVLLM) -> None:
        self.transports = {host: fake.transport() for host, fake in fakes.items()}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.transports[request.url.host].handle_async_request(request)


@contextmanager
def replicas(*, restart_timeout: float = 300.0, **fakes: FakeVLLM) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(
        [f"http://{host}" for host in fakes],
        tokenizer="bytes",
        run="r0",
        transport=Switch(**fakes),
        retry_pause=0.0,
        cancel_grace=0.0,
        restart_timeout=restart_timeout,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def adapter(folder: Path, seed: int = 1) -> Path:
    return write_adapter(folder, adapter_tensors(tiny_llama(), seed=seed))


def test_turns_of_an_episode_stay_on_one_replica() -> None:
    a, b = FakeVLLM(), FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        for turn in range(1, 6):
            await asyncio.gather(
                *(engine.generate([e] * turn, PARAMS, affinity=("episode", e)) for e in range(10))
            )

    with replicas(a=a, b=b) as engine:
        run(main(engine))
    homes = [{body["prompt"][0] for body in fake.asked()} for fake in (a, b)]
    assert homes[0].isdisjoint(homes[1]) and homes[0] | homes[1] == set(range(10))
    assert homes[0] and homes[1], "both work"


def test_a_replica_that_is_gone_and_back(tmp_path: Path) -> None:
    a, b = FakeVLLM(), FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        await engine.publish(1, adapter(tmp_path / "v1"))
        assert list(a.adapters) == list(b.adapters) == ["r0-v1"], "all have it before it is announced"
        a.down = True
        answers = await asyncio.gather(*(engine.generate(PROMPT, PARAMS, affinity=i) for i in range(10)))
        assert all(len(completion.ids) == 8 for [completion] in answers)
        await engine.publish(2, adapter(tmp_path / "v2", 2))
        assert list(b.adapters) == ["r0-v1", "r0-v2"] and engine.counters["published_without_replica"] == 1
        a.restart()
        while engine._router.replicas[0].down:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(engine.generate(PROMPT, PARAMS) for i in range(10)))
        assert sorted(a.adapters) == ["r0-v1", "r0-v2"], "it got both again with its first request"

    with replicas(a=a, b=b) as engine:
        run(main(engine))


@pytest.mark.parametrize("dies", ["before", "/v1/load", "/v1/unload"])
def test_a_replica_that_dies_during_a_publish(tmp_path: Path, dies: str) -> None:
    """The others serve the version; it gets what it missed when it is back."""
    a, b = FakeVLLM(), FakeVLLM()

    async def main(engine: VLLMEngine) -> None:
        for version in range(1, 4):
            await engine.publish(version, adapter(tmp_path / f"v{version}", version))
        if dies == "before":
            a.down = True
        else:
            a.inject("dead", path=dies)
        await engine.publish(4, adapter(tmp_path / "v4", 4))
        assert engine.live_versions == (0, 2, 3, 4) and set(b.adapters) == {"r0-v2", "r0-v3", "r0-v4"}
        assert engine.counters["published_without_replica"] == (dies != "/v1/unload")
        a.restart()
        while engine._router.replicas[0].down:
            await asyncio.sleep(0.001)
        await asyncio.gather(*(engine.generate(PROMPT, PARAMS) for _ in range(10)))
        assert set(a.adapters) == {"r0-v2", "r0-v3", "r0-v4"}

    with replicas(restart_timeout=0.05, a=a, b=b) as engine:
        run(main(engine))


def test_a_publish_that_reaches_no_replica_is_no_version(tmp_path: Path) -> None:
    a, b = FakeVLLM(), FakeVLLM()
    with replicas(restart_timeout=0.05, a=a, b=b) as engine:
        a.down = b.down = True
        with pytest.raises(EngineUnreachable):
            run(engine.publish(1, adapter(tmp_path / "v1")))
        assert engine.newest == 0 and not any(replica.adapters for replica in engine._router.replicas)


def test_a_broken_connection_leaves_nothing_loaded(tmp_path: Path) -> None:
    """Taken for gone, and there: the name of a retired version does not stay."""
    fake = FakeVLLM()
    with replicas(a=fake) as engine:
        run(engine.publish(1, adapter(tmp_path / "v1")))
        run(engine.publish(2, adapter(tmp_path / "v2", 2)))
        engine._router.replicas[0].endpoint.down = True
        run(engine.retire(1))
        assert set(fake.adapters) == {"r0-v2"}
        engine._router.replicas[0].endpoint.down = True
    assert fake.adapters == {}


def test_replicas_must_serve_one_model() -> None:
    other = FakeVLLM(max_model_len=512)
    with pytest.raises(ConfigError, match="replicas must serve one model: http://a has m with 1024"):
        with replicas(a=FakeVLLM(), b=other):
            pass


def test_a_publish_that_one_replica_refuses_is_no_version(tmp_path: Path) -> None:
    a, b = FakeVLLM(), FakeVLLM(max_lora_rank=2)
    with replicas(a=a, b=b) as engine:
        with pytest.raises(EngineError, match="--max-lora-rank 8"):
            run(engine.publish(1, adapter(tmp_path / "v1")))
        assert engine.newest == 0 and a.adapters == b.adapters == {}


def test_the_least_loaded_gets_the_next() -> None:
    few, many, gone = (SimpleNamespace(running=n, down=n == 0) for n in (2, 3, 0))
    router = Router([many, few, gone])
    assert router.choose() is few
    assert router.choose("a") is few
    few.running = 9
    assert router.choose("a") is few and router.choose("b") is many
    few.down = True
    assert router.choose("a") is many, "it is gone: its cache too"
    few.down, many.running = False, 10
    assert router.choose("a") is many, "and its turns stay where they are now"
    assert Router([gone]).choose("a") is gone, "the only one"
    with pytest.raises(ConfigError, match="at least one URL"):
        Router([])


def test_turns_find_their_earlier_turns_in_the_cache() -> None:
    """A multi-turn collection: every prompt but the first is its predecessor and a little more."""
    a, b = FakeVLLM(script=digits), FakeVLLM(script=digits)
    with replicas(a=a, b=b) as engine:
        collector = GroupCollector(
            Guess, engine, group_size=2, sampling=SamplingParams(max_tokens=16), concurrency=8, seed=3
        )
        groups = collector.collect(8)
        collector.close()
        metrics = engine.metrics()
    rows = [row for group in groups for episode in group.episodes for row in episode.rows]
    blocks = sum(
        (turn.start - 1) // 32 * 32 for row in rows for turn in row.turns[:-1]
    )  # whole blocks of every prompt that another turn followed
    assert blocks > 0 and metrics["cached_tokens"] >= blocks


def digits(prompt: list[int], seed: int, request: dict[str, Any]) -> list[int]:
    return [48 + seed % 10, 258]
