"""An agent written against the openai package alone, through the front, over a real vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from atropos_gym.engines import VLLMEngine, VLLMServer
from atropos_gym.model_server import AgentCollector, ModelServer
from tests.tools.calculator import ADD
from tests.tools.recording import Recording, check_against

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


async def agent(base_url: str, api_key: str, start: str) -> float:
    """Three turns with tools; whatever is called is answered, and half of the turns are streamed."""
    messages: list[Any] = [{"role": "user", "content": start}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(3):
            asked = {"model": "x", "messages": messages, "tools": [ADD], "max_tokens": 12, "temperature": 0.2}
            if turn % 2:
                stream = await client.chat.completions.create(stream=True, **asked)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                messages.append({"role": "assistant", "content": text})
                calls = []
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
                messages.append(message)
                calls = message.tool_calls or []
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            messages.append({"role": "user", "content": "Go on."})
    return float(len(str(messages)))


def test_the_posted_groups_are_what_vllm_sampled(server: VLLMServer) -> None:
    recording = Recording(httpx.AsyncHTTPTransport())
    engine = VLLMEngine(
        server.url, model=server.model, api_key=server.api_key, run="agent", transport=recording
    )
    with ModelServer(engine) as front:
        collector = AgentCollector(agent, front.url, group_size=4, temperature=0.7)
        groups = asyncio.run(collector.collect(["What is 2 + 3?", "Add 4 and 1."]))
    engine.shutdown()
    turns = 0
    for played in groups:
        assert played.failures == []
        assert played.report["ignored"] == {"temperature=0.2": 12}
        turns += check_against(played.group, recording)
    assert turns == sum(recording.sampled.values()) == 24
