"""Whatever a program does with its conversations, the group holds what was sampled, each id trained once."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import EngineError
from atropos_gym.messages import Message
from atropos_gym.rollout.conversation import Conversation, GroupSession
from tests.unit.rollout_cases import run_moved
from tests.unit.session_cases import babbling, check_group

USER: Message = {"role": "user", "content": "go"}


class Program:
    """Sends histories: ones that it knows, made longer, forked, rewritten or spelt otherwise."""

    def __init__(self, chat: Conversation, seed: int) -> None:
        self.chat = chat
        self.chance = random.Random(seed)
        self.histories: list[list[Message]] = [[USER]]

    async def act(self) -> None:
        chance = self.chance
        history = [self.spelt(message) for message in chance.choice(self.histories[-6:])]
        if len(history) > 2 and chance.random() < 0.2:
            history = history[2:] if chance.random() < 0.5 else [*history[:-2], *history[-1:]]
        if chance.random() < 0.1:
            history[-1] = {**history[-1], "content": "otherwise"}
        asking = self.chat.ask(
            history, n=chance.choice([1, 1, 1, 2, 3]), stop=chance.choice([(), (), ("b ",)])
        )
        wait = asyncio.timeout(chance.choice([None, None, None, 1.5]))
        try:
            async with wait:
                replies = await asking
        except (TimeoutError, EngineError):
            return
        for said in replies:
            message = json.loads(json.dumps(said.message))
            said_next = {"role": "user", "content": chance.choice(["go", "on", "é"])}
            self.histories.append([*history, message, said_next])

    def spelt(self, message: Message) -> Message:
        if message["role"] != "assistant" or self.chance.random() < 0.6:
            return message
        return {**message, "content": f" {message['content'].strip()}\n"}


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), members=st.integers(1, 3), acts=st.integers(1, 14))
def test_any_interleaving(seed: int, members: int, acts: int) -> None:
    chance = random.Random(seed)
    delays = [chance.choice([0, 0, 1, 2, 3]) for _ in range(1000)]
    faults: dict[int, Any] = {
        i: chance.choice(["abort", EngineError("no")]) for i in range(200) if chance.random() < 0.1
    }
    engine = babbling(
        seed, longest=3, delay=lambda number: asyncio.sleep(delays[number % 1000]), faults=faults
    )

    async def play() -> Any:
        async with GroupSession(engine, seed=seed) as session:
            programs = [Program(session.conversation([USER]), seed + member) for member in range(members)]
            await asyncio.gather(*(one.act() for one in programs))
            for _ in range(acts):
                await asyncio.gather(*(chance.choice(programs).act() for _ in range(chance.randint(1, 3))))
            scores = [1.0 if one.chat.trainable else None for one in programs]
            if not any(scores):
                return None
            # Every reply of at least one id that a program got is trained, once.
            return session.group(scores), sum(
                len(ids) > 0 for one in programs for ids in one.chat.sampled_ids
            )

    played = run_moved(play())
    if played is not None:
        group, replies = played
        assert check_group(group, engine.calls, cut=True) == replies
        group.to_wire()
