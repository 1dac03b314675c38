"""Programs that ask the front in any order and way: groups hold what was sampled, each id trained once."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.engines import ScriptedEngine
from atropos_gym.errors import EngineError
from atropos_gym.model_server import create_app
from tests.unit.model_server_cases import BASE, Front, check_wire
from tests.unit.rollout_cases import run_moved
from tests.unit.session_cases import babbling

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


class Program:
    """One member's program; remembers what it was told."""

    def __init__(self, front: Front, member: int, seed: int) -> None:
        self.front = front
        self.member = member
        self.chance = random.Random(seed)
        self.histories: list[list[Any]] = [[{"role": "user", "content": "go"}]]
        self.texts = ["Q"]
        self.told: list[list[int]] = []

    async def act(self) -> None:
        """Asks once; sometimes it does not wait for the answer."""
        try:
            async with asyncio.timeout(self.chance.choice([None, None, None, 0.5, 1.5])):
                await (self.complete() if self.chance.random() < 0.3 else self.chat())
        except TimeoutError:
            pass

    async def chat(self) -> None:
        chance = self.chance
        history = list(chance.choice(self.histories[-5:]))
        if len(history) > 2 and chance.random() < 0.2:
            history = history[2:]
        body: dict[str, Any] = {"messages": history, "n": chance.choice([1, 1, 2]), "return_token_ids": True}
        if chance.random() < 0.2:
            body["stop"] = "b "
        if chance.random() < 0.2:
            body["tools"] = [TOOL]
        if chance.random() < 0.2:
            body |= {"temperature": 0, "seed": 1}
        response = await self.front.post("/chat/completions", body, self.member)
        for choice in await self.choices(response):
            message = choice["message"]
            if chance.random() < 0.4:
                message = {"role": "assistant", "content": f"\n{message['content'].strip()} "}
            self.histories.append([*history, message, {"role": "user", "content": chance.choice("xyz")}])

    async def complete(self) -> None:
        chance = self.chance
        text = chance.choice(self.texts[-5:])
        prompt = list(text.encode("utf-8", "replace")) if chance.random() < 0.5 else text
        body = {"prompt": prompt, "n": chance.choice([1, 2]), "return_token_ids": True}
        response = await self.front.post("/completions", body, self.member)
        for choice in await self.choices(response):
            self.texts.append(text + choice["text"] + chance.choice(["", " and"]))

    async def choices(self, response: httpx.Response) -> list[Any]:
        if response.status_code != 200:
            assert response.status_code == 503, response.text  # what the engine's faults are answered with
            return []
        choices: list[Any] = response.json()["choices"]
        self.told += [choice["token_ids"] for choice in choices]
        return choices


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), members=st.integers(2, 3), rounds=st.integers(1, 8))
def test_any_interleaving(seed: int, members: int, rounds: int) -> None:
    chance = random.Random(seed)
    delays = [chance.choice([0, 0, 1, 2]) for _ in range(300)]
    faults: dict[int, Any] = {
        i: chance.choice(["abort", EngineError("no")]) for i in range(200) if chance.random() < 0.1
    }
    engine = babbling(
        seed, longest=3, delay=lambda number: asyncio.sleep(delays[number % 300]), faults=faults
    )

    async def play() -> Any:
        app = create_app(engine, seed=seed)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE) as http:
            front = Front(app, http)
            await front.open(members)
            programs = [Program(front, member, seed + member) for member in range(members)]
            for _ in range(rounds):
                await asyncio.gather(*(chance.choice(programs).act() for _ in range(chance.randint(1, 4))))
            told = await front.finish(*map(float, range(members)))
        return told, [ids for one in programs for ids in one.told]

    told, answered = run_moved(play())
    if told["group"] is not None and not told["left_out"]:
        check(told["group"], engine, answered)


def check(group: Any, engine: ScriptedEngine, answered: list[list[int]]) -> None:
    """Holds a group against the engine's samples and against what programs were told."""
    trained = [list(ids) for _, ids, _ in check_wire(group, engine, cut=True)]
    # All that a program was told is trained; and what it had stopped to wait for may be.
    missing = Counter(map(json.dumps, filter(None, answered))) - Counter(map(json.dumps, trained))
    assert not missing
