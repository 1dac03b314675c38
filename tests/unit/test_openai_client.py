"""Agent programs written against the openai package alone, run through the front.

They know nothing of ids, sessions or training; the groups that they leave hold, id for id, what the engine
sampled, with its logprobs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from atropos_gym.engines import SamplingParams, ScriptedEngine, VLLMEngine
from atropos_gym.engines.scripted import Call
from atropos_gym.errors import EngineError
from atropos_gym.model_server import AgentCollector
from atropos_gym.rendering import ChatRenderer, chat_renderer
from atropos_gym.tokenizers import load_tokenizer
from tests.tools.calculator import ADD, add
from tests.tools.fake_vllm import FakeVLLM
from tests.tools.imitation_tokenizers import tiny_tokenizer
from tests.tools.recording import Recording, check_against
from tests.unit.model_server_cases import BASE, Front, check_wire, client_of, fronted
from tests.unit.rollout_cases import saying
from tests.unit.session_cases import CALLS

openai = pytest.importorskip("openai")

HI = [{"role": "user", "content": "hi"}]


async def calculator(client: Any, question: str, *, stream: bool) -> float:
    """A tool-calling loop as anybody would write it."""
    messages: list[Any] = [
        {"role": "system", "content": "You calculate with tools."},
        {"role": "user", "content": question},
    ]
    for _ in range(6):
        asked = {"model": "gpt-4o", "messages": messages, "tools": [ADD], "temperature": 0}
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                async for _ in events:
                    pass
                answer = (await events.get_final_completion()).choices[0].message
        else:
            answer = (await client.chat.completions.create(**asked)).choices[0].message
        messages.append(answer.model_dump(exclude_none=True) if stream else answer)
        if not answer.tool_calls:
            return float(answer.content == "It is 5.")
        for call in answer.tool_calls:
            result = add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def policy(renderer: ChatRenderer, *, cut: bool) -> ScriptedEngine:
    """Calls the tool in many spellings, sometimes wrongly, sometimes twice, and then answers.

    Some replies are cut off; openai's helper for streams raises at those.
    """

    def script(prompt: tuple[int, ...], params: Any, number: int) -> list[int]:
        chance = random.Random(params.seed)
        text = renderer.tokenizer.decode(prompt)
        told = text.rpartition("<tool_response>")[2].partition("</tool_response>")[0]
        if told == "5":
            ids = renderer.say(chance.choice(["It is 5.", "It is 5.", "five", "It is  5. "]))
            return ids[: chance.choice([9, 99])] if cut else ids
        calls = [
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
            '<tool_call>{"name":"add","arguments":{"b":3,"a":2}}</tool_call>',
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
        ]
        said = "".join(chance.choice(calls) for _ in range(chance.choice([1, 1, 2])))
        ids = renderer.say(said)
        return ids[:-1] if cut and chance.random() < 0.1 else ids

    return ScriptedEngine(script, tokenizer=renderer.tokenizer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["template", "bytes"])
def test_an_agent_with_tools_leaves_what_was_sampled(family: str, stream: bool) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer(CALLS) if family == "template" else "bytes")
    engine = policy(ChatRenderer(tokenizer), cut=not stream)

    async def collect() -> Any:
        async with fronted(engine) as front:

            async def agent(base_url: str, api_key: str, start: str) -> float:
                return await calculator(client_of(front.app, base_url, api_key), start, stream=stream)

            collector = AgentCollector(agent, BASE, group_size=4, transport=front.http._transport)
            return await collector.collect(["What is 2 + 3?"])

    groups = asyncio.run(collect())
    turns = 0
    for group in groups:
        assert group.failures == []
        assert group.report["ignored"] == {
            "temperature=0": sum(m["replies"] for m in group.report["members"])
        }
        turns += len(check_wire(group.group, engine))
        # A history that only grew is one row a run, tools and all.
        assert len(group.group.tokens) == 4
    assert turns == len(engine.calls)


class Kept:
    """An engine whose calls are kept, as the scripted one keeps its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Any, params: Any, n: int = 1, *, version: Any = None, **way: Any
    ) -> Any:
        found = await self._engine.generate(prompt_ids, params, n, version=version, **way)
        for completion in found:
            self.calls.append(
                Call(len(self.calls), tuple(prompt_ids), params, completion.version, completion)
            )
        return found


def test_the_tiny_model_speaks_through_the_front() -> None:
    pytest.importorskip("torch")
    from atropos_gym.engines.hf import HFEngine
    from atropos_gym.trainers.tiny import tiny_model

    model: Any = tiny_model()
    engine = Kept(HFEngine(base=model.state_dict(), config=model.config, tokenizer="bytes"))

    async def collect() -> Any:
        async with fronted(engine) as front:

            async def agent(base_url: str, api_key: str, start: str) -> float:
                client = client_of(front.app, base_url, api_key)
                messages: list[Any] = [{"role": "user", "content": start}]
                for turn in range(3):
                    asked = client.chat.completions.create(
                        model="x",
                        messages=messages,
                        max_tokens=6,
                        tools=[ADD] if start == "tools" else openai.omit,
                    )
                    messages += [(await asked).choices[0].message, {"role": "user", "content": f"and {turn}"}]
                return float(len(messages))

            collector = AgentCollector(agent, BASE, group_size=4, transport=front.http._transport)
            return await collector.collect(["hi", "tools"])

    groups = asyncio.run(collect())
    asyncio.run(engine.close())
    assert [group.failures for group in groups] == [[], []]
    assert sum(len(check_wire(group.group, engine)) for group in groups) == len(engine.calls) == 24


@pytest.mark.parametrize("fault", [None, "500", "abort"])
def test_what_a_vllm_server_sampled_is_what_the_group_holds(fault: str | None) -> None:
    renderer = chat_renderer("bytes")
    words = policy(renderer, cut=True)

    def script(prompt: list[int], seed: int, request: dict[str, Any]) -> list[int]:
        return list(words._script(tuple(prompt), SamplingParams(max_tokens=512, seed=seed), 0))

    fake = FakeVLLM(script=script, max_model_len=4096)
    recording = Recording(fake.transport())
    if fault is not None:
        fake.inject(fault, times=2)

    async def collect() -> Any:
        engine = VLLMEngine("http://fake", transport=recording, tokenizer="bytes", retry_pause=0.0)
        async with fronted(engine) as front:

            async def agent(base_url: str, api_key: str, start: str) -> float:
                return await calculator(client_of(front.app, base_url, api_key), start, stream=False)

            collector = AgentCollector(agent, BASE, group_size=3, transport=front.http._transport)
            played = await collector.collect(["What is 2 + 3?"])
        await engine.close()
        return played

    [played] = asyncio.run(collect())
    assert played.failures == []
    replies = sum(member["replies"] for member in played.report["members"])
    assert check_against(played.group, recording) == replies >= 6


# --- the client's other ways ---


def speak(engine: ScriptedEngine, talk: Callable[[Any, Front], Awaitable[Any]], **settings: Any) -> Any:
    async def inside() -> Any:
        async with fronted(engine, **settings) as front:
            member = (await front.open())["members"][0]
            return await talk(client_of(front.app, member["base_url"], member["api_key"]), front)

    return asyncio.run(inside())


def test_completions_models_and_logprobs_are_read() -> None:
    async def talk(client: Any, front: Front) -> None:
        told = await client.completions.create(model="x", prompt="hi", n=2, logprobs=0)
        assert [choice.text for choice in told.choices] == ["ja", "ja"]
        assert len(told.choices[0].logprobs.token_logprobs) == 3
        assert [model.id async for model in client.models.list()] == ["scripted"]
        chat = await client.chat.completions.create(model="x", messages=HI, logprobs=True)
        assert [entry.token for entry in chat.choices[0].logprobs.content] == ["j", "a", "<end>"]
        pieces = await client.completions.create(model="x", prompt="hi", stream=True)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "ja"

    speak(saying("ja"), talk)


def test_errors_are_the_clients_own() -> None:
    async def talk(client: Any, front: Front) -> None:
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
            await client.chat.completions.create(model="x", messages=HI, logit_bias={"5": 1})
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x" * 99}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.InternalServerError, match="down"):
            await client.chat.completions.create(model="x", messages=HI)
        await front.finish(None)
        with pytest.raises(openai.APIStatusError, match="was finished") as ended:
            await client.chat.completions.create(model="x", messages=HI)
        assert ended.value.status_code == 410

    speak(saying("ja", max_context=60, faults={0: EngineError("down")}), talk)


def test_a_plain_key_is_enough() -> None:
    async def talk(client: Any, front: Front) -> Any:
        plain = client_of(front.app, f"{BASE}/v1", front.session["members"][0]["api_key"])
        await plain.chat.completions.create(model="x", messages=HI)
        return await front.finish(1.0)

    assert speak(saying("ja"), talk)["group"]["scores"] == [1.0]
