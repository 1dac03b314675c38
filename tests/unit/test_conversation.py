"""GroupSession: loops that call the model themselves leave the same rows as environments."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines import SamplingParams, ScriptedEngine
from atropos_gym.errors import ConfigError, EngineError, TokenizerMismatch, UnequalStarts
from atropos_gym.rollout.conversation import GroupSession
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.seeds import sampling_seed
from atropos_gym.tokenizers import BytesTokenizer
from tests.unit.rollout_cases import END, saying

USER, ASSISTANT, BOS = BytesTokenizer.USER, BytesTokenizer.ASSISTANT, BytesTokenizer.BOS
HI = [{"role": "user", "content": "hi"}]


def talk(engine: ScriptedEngine, turns: int = 2, chats: int = 2, **options: Any) -> EpisodeGroup:
    async def loop() -> EpisodeGroup:
        async with GroupSession(engine, **options) as session:
            for chat in [session.conversation(HI) for _ in range(chats)]:
                for turn in range(turns):
                    if turn:
                        chat.add({"role": "user", "content": f"and {turn}?"})
                    await chat.say()
            return session.group([float(i) for i in range(chats)])

    return asyncio.run(loop())


def test_a_conversation_is_one_row_of_exactly_what_was_sampled() -> None:
    engine = ScriptedEngine(lambda prompt, params, number: [0xF0, 0x9F] if number == 0 else [106, 97, END])
    row = talk(engine, chats=1).episodes[0].rows[0]
    bridge = [END, USER, *b"and 1?", ASSISTANT]
    assert row.ids == [BOS, USER, *b"hi", ASSISTANT, 0xF0, 0x9F, *bridge, 106, 97, END]
    assert row.mask == [-100] * 5 + [0xF0, 0x9F] + [-100] * len(bridge) + [106, 97, END]
    sampled = [outcome for call in engine.calls for outcome in call.outcome.logprobs]  # type: ignore[union-attr]
    assert [value for value in row.logprobs if value != 1.0] == sampled
    assert [call.prompt_ids for call in engine.calls] == [
        tuple(row.ids[:5]),
        tuple(row.ids[: 7 + len(bridge)]),
    ]
    assert [turn.cut for turn in row.turns] == [True, False]


def test_the_group_carries_scores_messages_and_seeds() -> None:
    engine = saying("ja")
    group = talk(engine, seed=3, number=8, name="my loop")
    wire = group.to_wire()
    assert wire.scores == [0.0, 1.0]
    assert group.env == "my loop"
    assert wire.messages is not None
    assert [message["content"] for message in wire.messages[0]] == ["hi", "ja", "and 1?", "ja"]
    wanted = [sampling_seed(3, 8, member, turn) for member in range(2) for turn in range(2)]
    assert [call.params.seed for call in engine.calls] == wanted
    assert {call.params.stop_ids for call in engine.calls} == {(END,)}


def test_a_session_keeps_the_version_it_began_with() -> None:
    engine = saying("ja")

    async def loop() -> EpisodeGroup:
        async with GroupSession(engine) as session:
            chat = session.conversation(HI)
            await chat.say()
            await engine.publish(1, Path("/adapters/r-v1"))
            chat.add(HI)
            await chat.say()
            return session.group([1.0])

    group = asyncio.run(loop())
    assert group.episodes[0].versions == [0, 0]
    assert engine.newest == 1


def test_conversations_run_side_by_side() -> None:
    engine = saying("ja", delay=lambda number: asyncio.sleep(0))

    async def loop() -> EpisodeGroup:
        async with GroupSession(engine) as session:
            chats = [session.conversation(HI) for _ in range(3)]
            await asyncio.gather(*(chat.say() for chat in chats))
            return session.group([1.0, None, 2.0])

    group = asyncio.run(loop())
    assert [episode.member for episode in group.episodes] == [0, 2]
    assert group.scores == [1.0, 2.0]


async def _unentered() -> None:
    await GroupSession(saying("ja")).conversation(HI).say()


async def _nothing_added() -> None:
    async with GroupSession(saying("ja")) as session:
        chat = session.conversation(HI)
        await chat.say()
        await chat.say()


async def _unequal() -> None:
    async with GroupSession(saying("ja")) as session:
        session.conversation(HI)
        session.conversation([{"role": "user", "content": "ho"}])


async def _scores() -> None:
    async with GroupSession(saying("ja")) as session:
        session.conversation(HI)
        session.group([])


async def _silent() -> None:
    async with GroupSession(saying("ja")) as session:
        session.conversation(HI)
        session.group([1.0])


async def _nobody() -> None:
    async with GroupSession(saying("ja")) as session:
        session.conversation(HI)
        session.group([None])


async def _aborted() -> None:
    async with GroupSession(saying("ja", faults=lambda number: "abort")) as session:
        await session.conversation(HI).say()


async def _other_tokenizer() -> None:
    class Other(BytesTokenizer):
        name = "other"
        fingerprint = "sha256:0000000000000000"

    GroupSession(saying("ja"), Other())


async def _greedy() -> None:
    GroupSession(saying("ja"), sampling=SamplingParams(max_tokens=4, temperature=0))


@pytest.mark.parametrize(
    ("attempt", "error", "problem"),
    [
        (_unentered, ConfigError, "async with GroupSession"),
        (_nothing_added, ConfigError, r"add\(\) a message before say\(\)"),
        (_unequal, UnequalStarts, "position 3 is 105 in one and 111 in the other"),
        (_scores, ConfigError, "1 conversations need as many scores, got 0"),
        (_silent, ConfigError, "conversation 0 has no reply"),
        (_nobody, ConfigError, "no conversation has a score"),
        (_aborted, EngineError, "aborted 1 of 1 replies, each 4 times"),
        (_other_tokenizer, TokenizerMismatch, "tokenizer other, engine scripted those of bytes"),
        (_greedy, ConfigError, "temperature=0 cannot be trained on"),
    ],
)
def test_misuse_is_explained(attempt: Any, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        asyncio.run(attempt())
