"""The model server behind a real port: in a thread, and as the command; programs with openai's client."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.engines.hf import HFEngine
from atropos_gym.model_server import AgentCollector, ModelServer
from atropos_gym.model_server.agents import AgentGroup
from atropos_gym.model_server.outlet import Outlet
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.tiny import save_base, tiny_model
from tests.unit.rollout_cases import saying

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


async def chatter(base_url: str, api_key: str, start: str) -> float:
    """A program of three turns, the second one streamed."""
    messages: list[Any] = [{"role": "user", "content": start}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(3):
            asked = {"model": "x", "messages": messages, "max_tokens": 8}
            if turn == 1:
                stream = await client.chat.completions.create(stream=True, **asked)
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            else:
                said = (await client.chat.completions.create(**asked)).choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
    return float(len(said))


def test_a_real_model_behind_a_port_leaves_rows_of_what_it_sampled() -> None:
    model: Any = tiny_model()
    engine = HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes")
    sampled: set[Any] = set()
    generate = engine.generate

    async def recorded(prompt_ids: Any, params: Any, n: int = 1, **way: Any) -> Any:
        found = await generate(prompt_ids, params, n, **way)
        sampled.update((tuple(prompt_ids), one.ids, one.logprobs) for one in found)
        return found

    engine.generate = recorded  # type: ignore[method-assign]
    with ModelServer(engine) as server:
        collector = AgentCollector(chatter, server.url, group_size=4)
        groups = asyncio.run(collector.collect(["a", "b", "c"]))
    asyncio.run(engine.close())
    turns = 0
    for played in groups:
        assert played.failures == []
        group = played.group
        assert group is not None and group.overrides is not None and group.inference_logprobs is not None
        for row, extra in enumerate(group.overrides):
            ids, logprobs = group.tokens[row], group.inference_logprobs[row]
            for start, end in extra["turns"]:
                assert (tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs[start:end])) in sampled
                turns += 1
    assert turns == len(sampled) == 36


def test_a_connection_that_is_closed_cancels_what_was_asked() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def never(number: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def leave(server: ModelServer) -> None:
        async def agent(base_url: str, api_key: str, start: Any) -> None:
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                messages: list[Any] = [{"role": "user", "content": "hi"}]
                asked = asyncio.create_task(client.chat.completions.create(model="x", messages=messages))
                assert await asyncio.to_thread(begun.wait, 120)
                asked.cancel()
                await asyncio.wait([asked])
                assert await asyncio.to_thread(cancelled.wait, 120)

        [played] = await AgentCollector(agent, server.url, group_size=1).collect(["x"])
        assert played.failures == [] and played.report["counts"]["cancelled"] == 1

    with ModelServer(saying("ja", delay=never)) as server:
        asyncio.run(leave(server))


def test_signs_of_life_outlast_a_read_timeout_and_who_closes_a_stream_is_gone() -> None:
    cancelled = threading.Event()

    async def slow(number: int) -> None:
        try:
            await asyncio.sleep(4 if number == 0 else 1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def agent(base_url: str, api_key: str, start: Any) -> float:
        asked: Any = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
        with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=2) as client:
            with client.chat.completions.stream(**asked) as stream:
                said = [event.delta for event in stream if event.type == "content.delta"]
            assert said == ["", "j", "a"]
            client.chat.completions.create(stream=True, **asked).close()
            assert cancelled.wait(120)
        return 1.0

    with ModelServer(saying("ja", delay=slow), keep_alive=0.05) as server:
        [played] = asyncio.run(AgentCollector(agent, server.url, group_size=1).collect(["x"]))
    assert played.failures == []
    counts = played.report["counts"]
    assert (counts["requests"], counts["replies"], counts["cancelled"]) == (2, 1, 1)


def test_stopping_lets_nobody_wait() -> None:
    begun = threading.Event()

    async def never(number: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    with ModelServer(saying("ja", delay=never)) as server:
        failures: list[Exception] = []

        def ask() -> None:
            with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as http:
                opened = http.post("/sessions", json={"group_size": 1}).json()
                try:
                    http.post(f"/s/{opened['id']}/0/v1/completions", json={"prompt": "x"}).raise_for_status()
                except httpx.HTTPError as error:
                    failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(120)
    asking.join(120)
    assert len(failures) == 1


def test_the_command_serves_an_agent_and_ends_when_told(tmp_path: Path) -> None:
    save_base(tiny_model(), tmp_path / "base")
    command = [sys.executable, "-m", "atropos_gym", "serve-model", "--policy", "base", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    try:
        found = re.search(r"ready on (http://\S+)", server.stdout.readline())
        assert found is not None
        example = [sys.executable, str(ROOT / "examples" / "agent_with_tools.py"), found[1]]
        played = subprocess.run(
            example, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
        )
        assert played.returncode == 0, played.stderr
        lines = played.stdout.splitlines()
        assert len(lines) == 2 and all("4 rows" in line and "sampled ids" in line for line in lines)
        server.send_signal(signal.SIGTERM)
        assert server.stdout.read().strip() == "2 groups opened: 2 finished"
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


async def branching(base_url: str, api_key: str, start: int) -> float:
    """A program that asks for two replies, goes on from one, and then with another past."""
    messages: list[Any] = [{"role": "user", "content": f"say {start}"}]
    letters = 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(3):
            asked = client.chat.completions.create(
                model="x", messages=messages, max_tokens=6, n=2 if turn == 0 else 1
            )
            said = (await asked).choices[-1].message
            letters += sum(letter.isalpha() for letter in said.content)
            if turn == 1:
                messages = [{"role": "user", "content": "in short"}]
            messages += [said, {"role": "user", "content": "on"}]
    return float(letters)


def test_a_learner_trains_on_what_agents_said(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "group_size": 4,
        "groups_per_update": 3,
        "drop_equal": False,
        "lora": Lora(rank=2),
        "device": "cpu",
    }
    with (
        ServerProcess() as batches,
        GRPO("tiny", "atropos/Identity-v0", server=batches.url, folder=tmp_path, seed=0, **settings) as model,
    ):
        model.warm_up(3, batch_size=4)
        engine = model.engine
        outlet = Outlet(engine, AsyncBatchClient(batches.url), name="agents", group_size=4)
        played: list[AgentGroup] = []

        async def collect(url: str) -> None:
            collector = AgentCollector(branching, url, group_size=4, concurrency=2)
            played.extend([group async for group in collector.stream(itertools.count())])

        with ModelServer(engine, outlet=outlet) as front:
            agents = threading.Thread(target=lambda: asyncio.run(collect(front.url)))
            agents.start()
            model.learn(updates=3)
            agents.join(120)  # the stream ends when the trainer has finished
            assert not agents.is_alive()
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["version"] for line in lines] == [1, 2, 3]
        assert all(line["train/staleness"] == 0.0 for line in lines)
        # Four members of three rows each (the reply that was left, the one that went on, the new past).
        assert all(line["train/rows"] == 3 * 4 * 3 for line in lines)
        assert max(line["train/alignment_max"] for line in lines) < 2e-4
    assert {group.report["version"] for group in played if group.posted} >= {0, 1, 2}
