"""What is posted is what was sampled, position by position.

Promises:
1. Every completion of the engine stands in exactly one row, with its ids, at its turn's positions.
2. Its logprobs stand beside it, and 1.0 everywhere else.
3. The mask is the id where an id was sampled, and -100 everywhere else.
4. Before each turn the row holds exactly the prompt that the engine was given.
5. A row ends at its last sampled id.
They hold whatever was sampled: broken and cut characters, control ids, ids after an end id, none at all.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atropos_gym.engines import Completion, ScriptedEngine
from atropos_gym.errors import CollectionFailed
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.wire import ScoredDataGroup
from tests.unit.rollout_cases import END, Countdown, Restarting, exactly, saying

text_bytes = st.text(max_size=4).map(lambda text: list(text.encode("utf-8", "surrogatepass")))
cut_characters = st.sampled_from([[0xF0, 0x9F], [0xE2, 0x82], [0xC3], [0x80, 0xBF], [0xFF]])
overlong = st.sampled_from([[0xC0, 0xAF], [0xED, 0xA0, 0x80]])  # decode and encode would give other bytes
control = st.lists(st.integers(256, 263), min_size=1, max_size=2)
pieces = st.one_of(text_bytes, cut_characters, overlong, control)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = [id_ for piece in draw(st.lists(pieces, max_size=4)) for id_ in piece][:11]
    if draw(st.booleans()):
        ids.append(END)
    values = st.floats(-30.0, 0.0, allow_nan=False, width=32)
    logprobs = draw(st.lists(values, min_size=len(ids), max_size=len(ids)))
    return Completion(tuple(ids), tuple(logprobs), "stop" if ids and ids[-1] == END else "length")


TASKS = {
    "whole": (Countdown, {"history": "whole"}),
    "latest": (Countdown, {"history": "latest"}),
    "restart": (Restarting, {}),
    "cut by max_tokens": (Countdown, {"max_tokens": 64 + 12 + 64 + 3 + 12, "max_prompt_tokens": 64}),
}


def collect(engine: ScriptedEngine, task: str, seed: int) -> list[ScoredDataGroup]:
    env, kwargs = TASKS[task]
    collector = GroupCollector(env, engine, group_size=3, concurrency=7, seed=seed, env_kwargs=kwargs)
    try:
        return [group.to_wire() for group in collector.collect(2)]
    finally:
        collector.close()


def sampled_turns(wire: ScoredDataGroup) -> list[tuple[Any, ...]]:
    """Checks promises 2, 3 and 5 and returns (prompt, ids, logprobs) of every turn."""
    assert wire.overrides is not None
    assert wire.inference_logprobs is not None
    found = []
    for ids, mask, logprobs, about in zip(
        wire.tokens, wire.masks, wire.inference_logprobs, wire.overrides, strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        sampled = [position for start, end in about["turns"] for position in range(start, end)]
        assert mask == [id_ if position in set(sampled) else -100 for position, id_ in enumerate(ids)]
        assert all(logprobs[position] == 1.0 for position in range(len(ids)) if position not in set(sampled))
        assert about["turns"][-1][1] == len(ids)
        found += [(tuple(ids[:a]), tuple(ids[a:b]), tuple(logprobs[a:b])) for a, b in about["turns"]]
        assert about["cut"] == any(END not in ids[a:b] for a, b in about["turns"])
    return found


def asked_turns(engine: ScriptedEngine) -> list[tuple[Any, ...]]:
    turns = []
    for call in engine.calls:
        assert isinstance(call.outcome, Completion)
        turns.append((call.prompt_ids, call.outcome.ids, call.outcome.logprobs))
    return turns


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=40, deadline=None)
@given(said=st.lists(completions(), min_size=1, max_size=7), seed=st.integers(0, 2**40))
def test_posted_ids_are_the_sampled_ones(task: str, said: list[Completion], seed: int) -> None:
    assume(any(completion.ids for completion in said))
    engine = exactly(said)
    wires = collect(engine, task, seed)
    posted = [turn for wire in wires for turn in sampled_turns(wire)]
    # Promises 1 and 4: the same turns, each as often, with the very prompt they were sampled from. Only a
    # group in which nothing at all was said is not posted.
    asked = Counter(asked_turns(engine))
    assert Counter(posted) <= asked
    assert not any(ids for _, ids, _ in asked - Counter(posted))


@pytest.mark.parametrize("task", ["latest", "restart"])
def test_a_segment_is_a_row_of_its_own_and_shares_the_episodes_score(task: str) -> None:
    engine = exactly([Completion((104, 105, END), (-0.1, -0.2, -0.3), "stop")])
    wires = collect(engine, task, seed=3)
    rows = [about for wire in wires for about in wire.overrides or []]
    assert len(rows) > 6, "no episode had a second segment"
    for wire in wires:
        scores: dict[int, float] = {}
        returns: Counter[int] = Counter()
        for score, about in zip(wire.scores, wire.overrides or [], strict=True):
            assert scores.setdefault(about["episode"], score) == score
            returns[about["episode"]] += sum(about["turn_rewards"])
        assert {episode: math.fsum([value]) for episode, value in returns.items()} == pytest.approx(scores)


def test_messages_of_an_episodes_rows_are_its_conversation_once() -> None:
    engine = exactly([Completion((104, 105, END), (-0.1, -0.2, -0.3), "stop")])
    collector = GroupCollector(Countdown, engine, group_size=2, seed=1, env_kwargs={"history": "latest"})
    group = collector.collect(1)[0]
    collector.close()
    for episode in group.episodes:
        assert [message for row in episode.rows for message in row.messages] == episode.messages
        assert [message["role"] for message in episode.rows[0].messages][:3] == [
            "system",
            "user",
            "assistant",
        ]
        assert episode.messages[-1] == {"role": "user", "content": "Fertig 🎲"}


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        (Completion((65, 66), (-0.1,), "length"), "2 ids with 1 logprobs"),
        (Completion((65, 66), None, "length"), "2 ids with no logprobs"),
        (Completion((65,), (0.5,), "length"), "logprob above 0: 0.5"),
        (Completion((65, 66), (-0.1, float("nan")), "length"), "not finite"),
        (Completion((65,), (-float("inf"),), "length"), "not finite"),
        (Completion((65,) * 13, (-0.1,) * 13, "length"), "13 ids where at most 12"),
    ],
)
def test_completions_that_do_not_fit_together_never_get_into_a_row(
    completion: Completion, problem: str
) -> None:
    good = Completion((65, END), (-0.1, -0.2), "stop")
    engine = exactly([good, completion] + [good] * 10_000)
    collector = GroupCollector(Countdown, engine, group_size=2, options={"turns": 1})
    assert len(collector.collect(1)) == 1
    assert collector.report["failed"] == {"broken ids": 1}
    assert problem in collector.report["messages"]["broken ids"]
    collector.close()


class Meddling(Countdown):
    """Hands out observations that are not what the contract says, one way each."""

    def __init__(self, how: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.how = how

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if self.how == "rewrites" and not terminated:
            observation[4] += 1
        elif self.how == "forgets" and not terminated:
            observation = observation[:3]
        elif self.how == "adds at the end" and terminated:
            observation = np.append(observation, np.int32(END))
        elif self.how == "skips a segment" and not terminated:
            info["segment"] += 2
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("rewrites", "prompt rewrote ids of its segment: position 4 is 164 in one and 165 in the other"),
        ("forgets", "prompt rewrote ids of its segment: position 3 is in one only"),
        ("adds at the end", "the last observation has"),
        ("skips a segment", "segment went from 0 to 2"),
    ],
)
def test_an_environment_that_changes_ids_is_found_out(how: str, problem: str) -> None:
    engine = exactly([Completion((104, 105, END), (-0.1, -0.2, -0.3), "stop")])
    collector = GroupCollector(lambda: Meddling(how), engine, group_size=2, options={"turns": 2})
    with pytest.raises(CollectionFailed, match=f"broken ids .{problem}"):
        collector.collect(1)
    collector.close()


def test_rounding_above_zero_becomes_zero() -> None:
    engine = exactly([Completion((65, END), (5e-4, -0.25), "stop")])
    collector = GroupCollector(Countdown, engine, group_size=1, options={"turns": 1})
    assert collector.collect(1)[0].episodes[0].rows[0].logprobs[-2:] == [0.0, -0.25]
    collector.close()


@pytest.mark.parametrize("history", ["whole", "latest"])
def test_a_wrapper_may_end_an_episode_that_goes_on_inside(history: str) -> None:
    """The prompt that nobody answers is no part of a row: each ends at its last sampled id."""

    def limited() -> Any:
        return gymnasium.wrappers.TimeLimit(Countdown(history=history), 2)

    engine = exactly([Completion((104, 105, END), (-0.1, -0.2, -0.3), "stop")])
    collector = GroupCollector(limited, engine, group_size=2, options={"turns": 4})
    for group in collector.collect(2):
        for episode in group.episodes:
            assert (episode.truncated, episode.end_reason, len(episode.turns)) == (True, "truncated", 2)
            assert len(episode.rows) == (1 if history == "whole" else 2)
            assert all(row.ids[-3:] == [104, 105, END] for row in episode.rows)
            assert all(len(row.ids) == len(row.mask) == len(row.logprobs) for row in episode.rows)
        group.to_wire()
    assert collector.report["failed"] == {}
    collector.close()


@pytest.mark.parametrize(("task", "most"), [(Countdown, 60), (Restarting, 45), (Restarting, 31)])
def test_an_engine_with_too_small_a_context_truncates_the_episode(task: type[Countdown], most: int) -> None:
    engine = saying("ja", max_context=most)
    collector = GroupCollector(task, engine, group_size=2, options={"turns": 4})
    [group] = collector.collect(1)
    collector.close()
    for episode in group.episodes:
        assert episode.truncated and episode.end_reason == "max_tokens"
        assert 0 < len(episode.rewards) < 4
        for row in episode.rows:
            assert len(row.ids) == row.turns[-1].end == len(row.mask) == len(row.logprobs)
        assert sum(len(row.messages) for row in episode.rows) == len(episode.messages)


def test_a_first_prompt_that_does_not_fit_fails_by_name() -> None:
    collector = GroupCollector(Countdown, saying("ja", max_context=8), group_size=2)
    with pytest.raises(CollectionFailed, match="context full"):
        collector.collect(1)
    collector.close()
