"""GroupCollector: equal starts, one tokenizer, and every started group accounted for."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.engines import Completion, SamplingParams, ScriptedEngine, make_engine
from atropos_gym.errors import CollectionFailed, ConfigError, EngineError, TokenizerMismatch, UnequalStarts
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import Episode, EpisodeGroup
from atropos_gym.rollout.seeds import sampling_seed, start_seed
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import BytesTokenizer
from tests.unit.rollout_cases import Countdown, run_moved, say, saying


def adds_up(report: dict[str, Any]) -> bool:
    ended = report["delivered"] + sum(report["filtered"].values()) + sum(report["failed"].values())
    return report["started"] == ended + report["in_flight"]


def collector_of(engine: ScriptedEngine, env: Any = Countdown, **options: Any) -> GroupCollector:
    return GroupCollector(env, engine, **{"group_size": 4, "concurrency": 16, **options})


# -- groups ---------------------------------------------------------------------------------------------


def test_collect_gives_groups_by_number_and_goes_on_where_it_ended() -> None:
    collector = collector_of(saying("ja"))
    assert [group.number for group in collector.collect(3)] == [0, 1, 2]
    assert [group.number for group in collector.collect(2)] == [3, 4]
    assert [group.number for group in collector.collect(2, first_number=1)] == [1, 2]
    assert collector.collect(0) == []
    assert collector.report["delivered"] == 7
    collector.close()


def test_members_share_start_and_seed_and_each_has_chance_of_its_own() -> None:
    collector = collector_of(saying("ja"), seed=5)
    groups = collector.collect(3)
    collector.close()
    for group in groups:
        prompts = {tuple(episode.rows[0].ids[: episode.rows[0].turns[0].start]) for episode in group.episodes}
        assert len(prompts) == 1
        assert {episode.seed for episode in group.episodes} == {start_seed(5, group.number)}
        assert [episode.member for episode in group.episodes] == [0, 1, 2, 3]
        assert len({tuple(episode.rewards) for episode in group.episodes}) > 1
    assert len({group.episodes[0].seed for group in groups}) == 3


def test_common_random_numbers_make_equal_answers_equal_episodes() -> None:
    collector = collector_of(saying("ja"), common_random_numbers=True)
    group = collector.collect(1)[0]
    collector.close()
    assert len({tuple(episode.rewards) for episode in group.episodes}) == 1


def test_each_completion_has_a_seed_of_its_own_that_says_where_it_belongs() -> None:
    engine = saying("ja")
    collector = collector_of(engine, seed=9, options={"turns": 2})
    collector.collect(2)
    collector.close()
    seeds = [call.params.seed for call in engine.calls]
    assert sorted(seeds) == sorted(
        sampling_seed(9, number, member, turn)
        for number in range(2)
        for member in range(4)
        for turn in range(2)
    )


def test_the_same_seed_gives_the_same_groups_whatever_the_concurrency() -> None:
    def by_seed(prompt: tuple[int, ...], params: SamplingParams, number: int) -> list[int]:
        return say(str(params.seed % 1000))

    found = []
    for concurrency in (1, 3, 64):
        collector = collector_of(ScriptedEngine(by_seed), concurrency=concurrency, seed=2)
        found.append([group.to_dict() for group in collector.collect(4)])
        collector.close()
    assert found[0] == found[1] == found[2]


def test_turns_get_the_environments_stop_ids_and_limit() -> None:
    engine = saying("ja")
    collector = collector_of(engine, sampling=SamplingParams(max_tokens=500, temperature=0.5))
    group = collector.collect(1)[0]
    collector.close()
    assert {call.params.max_tokens for call in engine.calls} == {12}
    assert {call.params.stop_ids for call in engine.calls} == {(258,)}
    assert {call.params.temperature for call in engine.calls} == {0.5}
    assert group.temperature == 0.5


def test_a_lower_limit_of_the_sampling_counts() -> None:
    engine = saying("ja")
    collector = collector_of(engine, sampling=SamplingParams(max_tokens=2))
    group = collector.collect(1)[0]
    collector.close()
    assert all(turn.cut and turn.end - turn.start == 2 for e in group.episodes for turn in e.turns)


class Forgetful(Countdown):
    """Starts differently each time."""

    def begin(self, options: dict[str, Any]) -> str:
        self.started, self.left = getattr(self, "started", 0) + 1, 1
        return f"start {self.started}"


def test_unequal_starts_are_an_error_that_names_the_position() -> None:
    collector = collector_of(saying("ja"), Forgetful, group_size=2, concurrency=1)
    with pytest.raises(
        UnequalStarts, match=r"Forgetful: members 0 and 1 of .* position 8 is 49 in one and 50"
    ):
        collector.collect(1)
    assert collector.report["failed"] == {"error: UnequalStarts": 1}
    assert adds_up(collector.report)
    collector.close()


# -- environments and tokenizers ------------------------------------------------------------------------


class OtherTokenizer(BytesTokenizer):
    name = "other"
    fingerprint = "sha256:0000000000000000"


@pytest.fixture
def registered() -> Iterator[str]:
    gymnasium.register("atropos/Countdown-v0", entry_point=Countdown)
    yield "atropos/Countdown-v0"
    del gymnasium.registry["atropos/Countdown-v0"]


def test_an_id_is_made_with_the_engines_tokenizer(registered: str) -> None:
    collector = collector_of(saying("ja", tokenizer=BytesTokenizer(rows=300)), registered)
    assert collector.env.tokenizer.rows == 300
    assert collector.collect(1)[0].env == collector.name == registered
    collector.close()


def test_a_class_is_made_with_the_engines_tokenizer_and_the_keywords() -> None:
    collector = collector_of(saying("ja", tokenizer=BytesTokenizer(rows=300)), env_kwargs={"max_turns": 2})
    assert (collector.env.tokenizer.rows, collector.env.max_turns) == (300, 2)
    assert collector.name == "Countdown"
    collector.close()


def test_two_tokenizers_are_refused_and_both_named() -> None:
    engine = saying("ja", tokenizer=OtherTokenizer(), model="qwen")
    with pytest.raises(
        TokenizerMismatch, match="Countdown speaks the ids of tokenizer bytes .* qwen .* other"
    ):
        collector_of(engine, lambda: Countdown(tokenizer="bytes"))
    with pytest.raises(TokenizerMismatch):
        collector_of(engine, env_kwargs={"tokenizer": "bytes"})


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        pytest.param(
            Countdown(), "env must be an id, a TextEnv class or a factory, got Countdown", id="instance"
        ),
        pytest.param(
            lambda: gymnasium.make("CartPole-v1"), "is no TextEnv: wrap it in GymTextEnv", id="simulator"
        ),
        pytest.param(lambda: 7, "makes int, which is no TextEnv", id="number"),
    ],
)
def test_what_cannot_be_played_is_refused(env: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        collector_of(saying("ja"), env)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"group_size": 0}, "group_size must be >= 1, got 0"),
        ({"concurrency": 0}, "concurrency must be >= 1, got 0"),
        ({"score": "mean"}, "score must be 'return' or a callable"),
        ({"on_partial": "skip"}, "on_partial must be 'drop', 'keep' or 'retry', got 'skip'"),
        ({"deadline": 0}, "deadline must be > 0"),
        ({"filters": [lambda g: True, lambda g: True]}, "two filters are called '<lambda>'"),
        ({"sampling": SamplingParams(max_tokens=4, temperature=0)}, "cannot be trained on: temperature=0"),
        (
            {"sampling": SamplingParams(max_tokens=4, top_p=0.9)},
            "cannot be trained on: top_p=0.9 .* set top_p=1",
        ),
    ],
)
def test_arguments_that_cannot_work_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        collector_of(saying("ja"), **options)


def test_environments_are_made_once_and_used_again() -> None:
    made = []

    def factory() -> Countdown:
        made.append(Countdown())
        return made[-1]

    collector = collector_of(saying("ja", delay=lambda number: asyncio.sleep(0)), factory, concurrency=6)
    collector.collect(10)
    assert len(made) == 6
    collector.close()


class Closing(Countdown):
    open: Counter[str] = Counter()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        Closing.open["made"] += 1

    def close(self) -> None:
        Closing.open["closed"] += 1

    def respond(self, reply: Reply) -> Feedback:
        if reply.text == "crash":
            raise RuntimeError("boom")
        return super().respond(reply)


def test_every_environment_is_closed_in_the_end() -> None:
    Closing.open.clear()
    engine = ScriptedEngine(
        lambda prompt, params, number: say("crash" if number % 29 == 3 else "ja"),
        delay=lambda number: asyncio.sleep(0),
    )
    collector = collector_of(engine, Closing)
    collector.collect(6)
    collector.close()
    collector.close()
    assert Closing.open["made"] == Closing.open["closed"] > 6
    with pytest.raises(ConfigError, match="closed"):
        collector.collect(1)


# -- faults and accounting ------------------------------------------------------------------------------


def test_an_environment_that_cannot_be_made_again_costs_only_its_groups() -> None:
    made = []

    def factory() -> Countdown:
        if len(made) == 2:
            raise OSError("no more licences")
        made.append(Countdown())
        return made[-1]

    collector = collector_of(
        saying("ja", delay=lambda number: asyncio.sleep(0)),
        factory,
        group_size=2,
        on_partial="keep",
        concurrency=4,
    )
    assert len(collector.collect(3)) == 3
    assert collector.report["failed"]["env: OSError"] >= 1
    assert collector.report["messages"]["env: OSError"] == "no more licences"
    assert adds_up(collector.report)
    collector.close()


def test_one_crash_costs_one_group_and_another_takes_its_place() -> None:
    engine = ScriptedEngine(lambda prompt, params, number: say("crash" if number == 2 else "ja"))
    collector = collector_of(engine, Closing, concurrency=4)
    assert [group.number for group in collector.collect(3)] == [1, 2, 3]
    report = collector.report
    assert report["failed"] == {"env: RuntimeError": 1}
    assert report["messages"] == {"env: RuntimeError": "boom"}
    assert adds_up(report)
    collector.close()


class GivesUp(Countdown):
    """Its own asynchronous work was cancelled."""

    def respond(self, reply: Any) -> Any:
        if reply.content == "crash":
            raise asyncio.CancelledError
        return super().respond(reply)


@pytest.mark.parametrize("who", ["env", "engine", "score"])
def test_a_cancellation_from_within_costs_one_group_like_any_other_failure(who: str) -> None:
    cancelled = []

    def script(prompt: Any, params: SamplingParams, number: int) -> list[int]:
        if number == 2 and who == "engine":
            raise asyncio.CancelledError
        return say("crash" if number == 2 and who == "env" else "ja")

    def score(episodes: list[Any]) -> list[float]:
        if who == "score" and not cancelled:
            cancelled.append(True)
            raise asyncio.CancelledError
        return [episode.episode_return for episode in episodes]

    collector = collector_of(ScriptedEngine(script), GivesUp, concurrency=4, score=score)
    assert len(run_moved(collector.acollect(3))) == 3
    assert collector.report["failed"] == {f"{who}: CancelledError": 1}
    assert adds_up(collector.report)
    collector.close()


def test_who_only_ever_cancels_is_given_up() -> None:
    collector = collector_of(saying("crash"), GivesUp)
    with pytest.raises(CollectionFailed, match="env: CancelledError"):
        run_moved(collector.acollect(1))
    collector.close()


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (Completion((65,), None, "length", trainable="temperature=0"), "untrainable: temperature=0"),
        (Completion((65,), (-0.1,), "length", trainable="top_p=0.9"), "untrainable: top_p=0.9"),
        (Completion((), (), "length"), "nothing sampled"),
    ],
)
def test_completions_that_cannot_be_trained_on_are_never_delivered(
    completion: Completion, reason: str
) -> None:
    collector = collector_of(ScriptedEngine(lambda prompt, params, number: completion), concurrency=1)
    with pytest.raises(CollectionFailed, match=f"10 groups in a row were failed, the last one by {reason}"):
        collector.collect(1)
    assert collector.report["failed"] == {reason: 10}
    collector.close()


def test_aborted_completions_are_asked_for_again_under_another_seed() -> None:
    engine = saying("ja", faults={0: "abort", 1: "abort"})
    collector = collector_of(engine, group_size=1, concurrency=1, options={"turns": 1})
    group = collector.collect(1)[0]
    assert group.episodes[0].messages[-2]["content"] == "ja"
    assert collector.report["episodes"]["aborted_completions"] == 2
    assert [call.params.seed for call in engine.calls] == [
        sampling_seed(0, 0, 0, 0, again) for again in range(3)
    ]
    collector.close()


def test_an_engine_that_only_aborts_is_given_up() -> None:
    collector = collector_of(saying("ja", faults=lambda number: "abort"), concurrency=1)
    with pytest.raises(CollectionFailed, match=r"engine: abort \(scripted aborted turn 0 4 times\)"):
        collector.collect(1)
    assert adds_up(collector.report)
    collector.close()


@pytest.mark.parametrize(
    ("on_partial", "sizes", "failed"),
    [("drop", [4, 4], {"engine: EngineError": 1}), ("keep", [3, 4], {}), ("retry", [4, 4], {})],
)
def test_what_becomes_of_a_group_with_a_failed_member(
    on_partial: str, sizes: list[int], failed: dict[str, int]
) -> None:
    engine = saying("ja", faults={1: EngineError("gone")})
    collector = collector_of(engine, on_partial=on_partial, concurrency=4, options={"turns": 1})
    groups = collector.collect(2)
    assert [len(group.episodes) for group in groups] == sizes
    report = collector.report
    assert report["failed"] == failed
    assert report["episodes"]["failed"] == {"engine: EngineError": 1}
    assert adds_up(report)
    collector.close()


def test_a_kept_group_says_who_is_left_and_needs_two() -> None:
    engine = saying(
        "ja", faults={0: EngineError("gone"), 4: EngineError("x"), 5: EngineError("x"), 6: EngineError("x")}
    )
    collector = collector_of(engine, on_partial="keep", concurrency=4, options={"turns": 1})
    groups = collector.collect(2)
    assert [episode.member for episode in groups[0].episodes] == [1, 2, 3]
    assert [entry["episode"] for entry in groups[0].to_wire().overrides or []] == [0, 1, 2]
    assert [group.number for group in groups] == [0, 2]
    assert collector.report["failed"] == {"engine: EngineError": 1}
    collector.close()


def test_retry_ends_after_three_tries_with_other_seeds_each() -> None:
    engine = saying("ja", faults={n: EngineError("gone") for n in range(3)})
    collector = collector_of(engine, on_partial="retry", group_size=1, concurrency=1, options={"turns": 1})
    assert collector.collect(1)[0].number == 1
    assert collector.report["episodes"]["failed"] == {"engine: EngineError": 3}
    assert collector.report["failed"] == {"engine: EngineError": 1}
    assert len({call.params.seed for call in engine.calls}) == 4
    collector.close()


def test_an_outage_is_reported_with_its_reason_instead_of_running_for_ever() -> None:
    collector = collector_of(saying("ja", faults=lambda number: EngineError("cannot reach the engine")))
    with pytest.raises(CollectionFailed, match=r"Countdown: 16 groups in a row .*cannot reach the engine"):
        collector.collect(4)
    assert collector.report["in_flight"] == 0
    assert adds_up(collector.report)
    collector.close()


faults = st.sampled_from([None, None, None, None, "abort", "cut", EngineError("gone"), RuntimeError("bug")])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(faults, min_size=1, max_size=40),
    st.sampled_from(["drop", "keep", "retry"]),
    st.integers(1, 9),
    st.integers(1, 4),
)
def test_the_counts_add_up_under_any_faults(
    plan: list[Any], on_partial: Any, concurrency: int, group_size: int
) -> None:
    def even_score(group: EpisodeGroup) -> bool:
        return int(sum(group.scores)) % 3 > 0

    def some(episodes: list[Episode]) -> list[float | None]:
        return [None if e.episode_return % 5 < 1 else e.episode_return for e in episodes]

    engine = saying("ja", faults=lambda number: plan[number] if number < len(plan) else None)
    collector = collector_of(
        engine,
        group_size=group_size,
        concurrency=concurrency,
        on_partial=on_partial,
        filters=[even_score],
        score=some,
    )
    try:
        groups = collector.collect(3)
    except CollectionFailed:
        groups = []
    report = collector.report
    assert adds_up(report)
    assert report["in_flight"] == 0
    assert len({group.number for group in groups}) == len(groups)
    if groups:
        assert report["delivered"] == len(groups) == 3
        assert all(even_score(group) for group in groups)
        played = report["episodes"]["played"]
        assert played >= sum(len(group.episodes) for group in groups)
    collector.close()


# -- deadline -------------------------------------------------------------------------------------------


def slow_at(*numbers: int, seconds: float = 1e6) -> Callable[[int], Any]:
    return lambda number: asyncio.sleep(seconds if number in numbers else 0.5)


@pytest.mark.parametrize(("on_partial", "numbers"), [("drop", [1, 2]), ("keep", [0, 1]), ("retry", [0, 1])])
def test_the_deadline_cuts_a_hanging_episode_and_nothing_else(on_partial: str, numbers: list[int]) -> None:
    collector = collector_of(
        saying("ja", delay=slow_at(2)), on_partial=on_partial, concurrency=4, deadline=60.0
    )

    async def timed() -> tuple[list[EpisodeGroup], float]:
        groups = await collector.acollect(2)
        return groups, asyncio.get_running_loop().time()

    groups, seconds = run_moved(timed())
    assert [group.number for group in groups] == numbers
    assert 60 <= seconds < 80
    assert collector.report["episodes"]["failed"] == {"deadline": 1}
    assert "longer than deadline=60.0 s" in collector.report["messages"]["deadline"]
    assert adds_up(collector.report)
    collector.close()


def test_waiting_for_a_slot_does_not_count() -> None:
    collector = collector_of(saying("ja", delay=slow_at()), concurrency=1, deadline=4.0, options={"turns": 6})
    groups = run_moved(collector.acollect(2))
    assert len(groups) == 2
    assert collector.report["failed"] == {}
    collector.close()


# -- scores and filters ---------------------------------------------------------------------------------


def test_a_score_on_the_whole_group_replaces_the_return() -> None:
    def ranks(episodes: list[Episode]) -> list[float | None]:
        order = sorted(range(len(episodes)), key=lambda i: episodes[i].episode_return)
        return [float(order.index(i)) for i in range(len(episodes))]

    collector = collector_of(saying("ja"), score=ranks)
    assert sorted(collector.collect(1)[0].to_wire().scores) == [0.0, 1.0, 2.0, 3.0]
    collector.close()


def test_an_async_score_is_awaited() -> None:
    async def judge(episodes: list[Episode]) -> list[float | None]:
        await asyncio.sleep(0)
        return [0.25] * len(episodes)

    collector = collector_of(saying("ja"), score=judge)
    assert collector.collect(1)[0].scores == [0.25] * 4
    collector.close()


def test_none_takes_a_member_out_and_one_member_is_no_group() -> None:
    async def judge(episodes: list[Episode]) -> list[float | None]:
        keep = 1 if episodes[0].seed == start_seed(0, 0) else 3
        return [1.0 if episode.member < keep else None for episode in episodes]

    collector = collector_of(saying("ja"), score=judge, concurrency=4)
    groups = collector.collect(1)
    assert [(group.number, len(group.episodes)) for group in groups] == [(1, 3)]
    report = collector.report
    assert report["failed"] == {"too few scored": 1}
    assert report["episodes"]["unscored"] == 4
    collector.close()


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda episodes: [1.0], "score returned 1 values for 4 episodes"),
        (lambda episodes: [float("nan")] * 4, "score of episode 0 must be finite or None, got nan"),
        (lambda episodes: 1 / 0, "division by zero"),
    ],
)
def test_a_score_that_cannot_be_used_fails_the_group_by_reason(score: Any, message: str) -> None:
    collector = collector_of(saying("ja"), score=score, concurrency=1)
    with pytest.raises(CollectionFailed, match=message):
        collector.collect(1)
    assert adds_up(collector.report)
    collector.close()


def test_filters_are_counted_by_name() -> None:
    def odd(group: EpisodeGroup) -> bool:
        return group.number % 2 == 1

    def not_three(group: EpisodeGroup) -> bool:
        return group.number != 3

    collector = collector_of(saying("ja"), filters=[odd, not_three], concurrency=4)
    assert [group.number for group in collector.collect(3)] == [1, 5, 7]
    assert collector.report["filtered"] == {"odd": 4, "not_three": 1}
    assert adds_up(collector.report)
    collector.close()


def test_a_filter_that_raises_fails_the_group_by_name() -> None:
    def strict(group: EpisodeGroup) -> bool:
        raise LookupError("no such key")

    collector = collector_of(saying("ja"), filters=[strict], concurrency=1)
    with pytest.raises(CollectionFailed, match=r"filter strict: LookupError \(no such key\)"):
        collector.collect(1)
    collector.close()


# -- versions -------------------------------------------------------------------------------------------


def test_an_episode_keeps_the_version_it_began_with() -> None:
    engine = saying("ja")
    published = asyncio.Event()

    async def publish_in_the_middle(number: int) -> None:
        if number == 2:
            await engine.publish(1, Path("/adapters/r-v1"))
            published.set()

    engine._delay = publish_in_the_middle
    collector = collector_of(engine, group_size=1, concurrency=1, options={"turns": 4})
    groups = collector.collect(2)
    assert [group.episodes[0].versions for group in groups] == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert [group.policy_version for group in groups] == [0, 1]
    collector.close()


def test_the_groups_version_is_its_lowest_and_no_hold_is_left() -> None:
    engine = saying("ja")

    async def publish_early(number: int) -> None:
        if number == 1:
            await engine.publish(1, Path("/adapters/r-v1"))

    engine._delay = publish_early
    collector = collector_of(engine, concurrency=2, group_size=4, options={"turns": 1})
    group = collector.collect(1)[0]
    assert {version for episode in group.episodes for version in episode.versions} == {0, 1}
    assert group.policy_version == 0
    run_moved(engine.publish(2, Path("/adapters/r-v2")))
    run_moved(engine.retire(1))  # would wait for ever if an episode still held it
    collector.close()


# -- ways to call it ------------------------------------------------------------------------------------


def test_collect_also_works_inside_a_running_event_loop() -> None:
    collector = collector_of(saying("ja"))

    async def notebook() -> list[EpisodeGroup]:
        return collector.collect(2) + collector.collect(1)

    assert [group.number for group in asyncio.run(notebook())] == [0, 1, 2]
    assert [group.number for group in collector.collect(1)] == [3]
    collector.close()


def test_an_abandoned_collector_leaves_no_open_loop() -> None:
    """Warnings are errors here: an event loop that was not closed would be one."""
    collector_of(saying("ja")).collect(1)
    gc.collect()

    async def inside() -> None:
        collector_of(saying("ja")).collect(1)
        gc.collect()

    asyncio.run(inside())


def test_stream_goes_on_until_stopped_and_every_group_is_accounted_for() -> None:
    collector = collector_of(saying("ja"))

    async def follow() -> list[int]:
        numbers = []
        async for group in collector.stream(first_number=10):
            numbers.append(group.number)
            if len(numbers) == 20:
                await collector.stop()
        return numbers

    numbers = asyncio.run(follow())
    assert len(numbers) >= 20
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) == 10
    report = collector.report
    assert report["delivered"] == len(numbers)
    assert report["in_flight"] == 0
    assert adds_up(report)
    assert set(report["failed"]) <= {"stopped"}
    collector.close()


def test_leaving_a_stream_early_counts_what_nobody_took() -> None:
    collector = collector_of(saying("ja"))

    async def leave() -> None:
        groups = collector.stream()
        async for _ in groups:
            break
        await groups.aclose()

    asyncio.run(leave())
    assert collector.report["delivered"] == 1
    assert collector.report["in_flight"] == 0
    assert adds_up(collector.report)
    collector.close()


def test_finished_groups_that_nobody_takes_are_bounded() -> None:
    collector = collector_of(saying("ja", delay=lambda number: asyncio.sleep(1)), concurrency=16)

    async def slow_reader() -> dict[str, Any]:
        groups = collector.stream()
        await groups.__anext__()
        await asyncio.sleep(10_000)
        report = collector.report
        await groups.aclose()
        return report

    assert run_moved(slow_reader())["started"] <= 1 + 2 * (16 // 4) + 1
    collector.close()


def test_stop_from_another_event_loop_ends_a_collect() -> None:
    started = threading.Event()

    async def for_ever(number: int) -> None:
        started.set()
        await asyncio.Event().wait()

    collector = collector_of(saying("ja", delay=for_ever), deadline=None)
    found: list[list[EpisodeGroup]] = []
    thread = threading.Thread(target=lambda: found.append(collector.collect(2)))
    thread.start()
    assert started.wait(60)
    asyncio.run(collector.stop())
    thread.join(60)
    assert found == [[]]
    assert collector.report["failed"] == {"stopped": 2}
    collector.close()


class Blocking(Countdown):
    """Takes a while in each step, like a tool or a database."""

    blocking = True
    together = threading.Barrier(4, timeout=60)

    def respond(self, reply: Reply) -> Feedback:
        self.together.wait()  # passes only if four steps run at a time
        return super().respond(reply)


def test_blocking_steps_run_side_by_side_in_threads() -> None:
    collector = collector_of(saying("ja"), Blocking, concurrency=4, options={"turns": 2})
    assert len(collector.collect(2)) == 2
    collector.close()


def test_a_blocking_environment_is_left_alone_until_its_step_has_ended() -> None:
    go = threading.Event()
    said: dict[int, list[str]] = {}

    class Hanging(Countdown):
        def note(self, what: str) -> None:
            said.setdefault(id(self), []).append(f"{what} in {threading.current_thread().name}")

        def respond(self, reply: Reply) -> Feedback:
            self.note("stepping")
            go.wait(60)
            self.note("stepped")
            return super().respond(reply)

        def close(self) -> None:
            self.note("closed")

    collector = collector_of(saying("ja"), Hanging, group_size=1, concurrency=1, blocking=True, deadline=0.05)
    with pytest.raises(CollectionFailed, match="longer than deadline=0.05 s"):
        collector.collect(1)
    assert not any("closed" in line for lines in said.values() for line in lines)
    go.set()
    collector.close()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("env")]:
        thread.join(60)
    # On a slow machine an episode may be over its time before its first step.
    stories = [[line.split()[0] for line in lines] for lines in said.values()]
    assert ["stepping", "stepped", "closed"] in stories
    for story, lines in zip(stories, said.values(), strict=True):
        assert story in (["stepping", "stepped", "closed"], ["closed"])
        assert len({line.split(" in ")[1] for line in lines}) == 1, "one environment, one thread"


def test_actions_are_int32_arrays_of_the_sampled_ids() -> None:
    seen: list[Any] = []

    class Recording(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            seen.append(action)
            return super().step(action)

    collector = collector_of(saying("ja"), lambda: Recording(Countdown()), group_size=1, options={"turns": 1})
    collector.collect(1)
    collector.close()
    assert isinstance(seen[0], np.ndarray)
    assert seen[0].dtype == np.int32
    assert seen[0].tolist() == say("ja")


class _NoKeywords(TextEnv):
    def __init__(self) -> None:
        super().__init__()


@pytest.mark.parametrize("source", ["CartPole-v1", _NoKeywords])
def test_an_environment_that_takes_no_tokenizer_is_told_what_to_do(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes no tokenizer=.*GymTextEnv.*\*\*keywords"):
        GroupCollector(source, make_engine("scripted", script=lambda prompt, params, call: [258]))


def test_an_unknown_id_is_one_line_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="unknown environment 'atropos/Blackjak-v0'; nearest: atropos/Black"
    ):
        GroupCollector("atropos/Blackjak-v0", saying("x"))
    with pytest.raises(ConfigError, match="names the module 'no_such_module'"):
        GroupCollector("no_such_module:Thing-v0", saying("x"))


def test_an_engine_and_a_number_of_groups_are_what_they_are_called() -> None:
    with pytest.raises(ConfigError, match="engine must be an engine, such as make_engine"):
        GroupCollector("atropos/Blackjack-v0", "hf:x")  # type: ignore[arg-type]
    collector = GroupCollector("atropos/Blackjack-v0", saying("x"))
    for n in ("2", -1, 1.5):
        with pytest.raises(ConfigError, match=r"collect\(n\) needs a whole number n >= 0, got"):
            collector.collect(n)  # type: ignore[arg-type]
    collector.close()
