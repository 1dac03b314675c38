"""Plays one episode: reset, sample, step, until it is over.

Everything that can go wrong in it ends as ``EpisodeFailed`` with a reason that can be counted; what is wrong
with the set-up as a whole (``UnequalStarts``) is raised as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from atropos_gym.engines.base import Completion, Engine, Lane, SamplingParams
from atropos_gym.errors import ContextFull, EngineError, UnequalStarts, VersionExpired
from atropos_gym.rollout._legal import LegalReplies
from atropos_gym.rollout._pool import Seat
from atropos_gym.rollout._rows import BrokenIds, RowBuilder, difference, ids_of
from atropos_gym.rollout.episode import Episode
from atropos_gym.text_env import TextEnv

__all__ = ["ABORTS", "EpisodeFailed", "Plan", "Start", "complete", "play", "sampling_for"]

#: How often a completion is asked for again when the engine aborts it.
ABORTS = 3

_Answer = TypeVar("_Answer")


class EpisodeFailed(Exception):
    """An episode that could not be finished.

    Attributes:
        reason: what it is counted under; few different values.
        message: one line for people.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.message = message


@dataclass(slots=True)
class Start:
    """The common start of a group's members; the first one that is reset sets the prompt.

    Attributes:
        env: the environment's name, for errors.
        seed: with which all members are reset.
        options: handed to ``reset``.
        prompt: first prompt, once known.
        member: who set it.
        remedy: what to do where they differ.
    """

    env: str
    seed: int
    options: Mapping[str, Any] | None = None
    prompt: list[int] | None = None
    member: int = 0
    remedy: str = "reset(seed=) must take all its chance from np_random"

    def check(self, prompt: list[int], member: int) -> None:
        """Compares a member's first prompt with the others'.

        Raises:
            UnequalStarts: they differ; the message names the position.
        """
        if self.prompt is None:
            self.prompt, self.member = prompt, member
        elif self.prompt != prompt:
            raise UnequalStarts(
                f"{self.env}: members {self.member} and {member} of a group start differently for seed "
                f"{self.seed}: {difference(self.prompt, prompt)}; {self.remedy}"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """What one episode is to be.

    Attributes:
        start: where it begins.
        member: its number in the group.
        chance: seed of what happens after the start; None goes on with the start's.
        sampling: of every turn, from ``sampling_for``.
        seed_of: turn and attempt to the seed of one completion.
        on_abort: told of every completion that is asked for again.
        trainable: refuse completions that cannot be trained on.
        legal: samples nothing but legal replies (which cannot be trained on).
        version: that plays, held by the caller; None holds the one that is newest when the episode begins.
        each_turn: play each turn with what is newest then, instead of holding one version.
        lane: what the requests are for.
        affinity: whose turns they are.
    """

    start: Start
    member: int
    chance: int | None
    sampling: SamplingParams
    seed_of: Callable[[int, int], int]
    on_abort: Callable[[], None] = lambda: None
    trainable: bool = True
    legal: LegalReplies | None = None
    version: int | None = None
    each_turn: bool = False
    lane: Lane = "train"
    affinity: Hashable = None


def sampling_for(env: TextEnv, sampling: SamplingParams) -> SamplingParams:
    """Returns ``sampling`` with the environment's stop ids and most ids of a turn."""
    return sampling.with_(
        stop_ids=tuple(dict.fromkeys([*sampling.stop_ids, *env.stop_ids])),
        max_tokens=min(sampling.max_tokens, env.max_turn_tokens),
    )


async def play(seat: Seat, engine: Engine, plan: Plan) -> Episode:
    """Plays one episode, under one version or each turn under the newest.

    Args:
        seat: the environment.
        engine: who speaks.
        plan: seeds, start and sampling.

    Raises:
        EpisodeFailed: environment or engine failed, or what they said does not fit together.
        UnequalStarts: the first prompt is not that of the group.
        ConfigError: ``plan.legal`` and an environment that does not say what is legal.
    """
    start = plan.start
    observation, info = await _in_env(seat.reset(start.seed, start.options, plan.chance))
    start.check(ids_of(observation), plan.member)
    env = seat.text_env
    sampling = plan.sampling
    stop_ids = frozenset(env.stop_ids)
    rows = RowBuilder(observation, info["segment"])
    rewards: list[float] = []
    invalid_turns = 0
    trainable: Literal[True] | str = True
    ended = False
    try:
        async with _version_of(engine, plan) as version:
            while not ended:
                limit = min(plan.sampling.max_tokens, info["max_new_tokens"])
                if limit != sampling.max_tokens:
                    sampling = sampling.with_(max_tokens=limit)
                if plan.legal is not None:
                    replies = await _in_env(seat.legal_replies())
                    if replies is not None and not replies:
                        told = f"{start.env} has no legal reply in turn {len(rewards)}"
                        raise EpisodeFailed("nothing legal", told)
                    sampling = plan.legal.narrowed(sampling, replies, env.say)
                try:
                    completion = await complete(engine, rows.prompt, sampling, version, plan, len(rewards))
                except ContextFull as error:  # the engine's context is smaller than the environment's
                    if not rewards:
                        raise EpisodeFailed("context full", str(error)) from error
                    rows.end_here()
                    rows.hear(env.messages)
                    truncated, info = True, {**info, "end_reason": "max_tokens"}
                    break
                if trainable is True:
                    trainable = completion.trainable
                rows.sample(completion, stop_ids, info.get("legal_actions"))
                said = len(env.messages) + 1
                action = np.array(completion.ids, dtype=np.int32)
                observation, reward, terminated, truncated, info = await _in_env(seat.step(action))
                ended = terminated or truncated
                rows.hear(env.messages, None if ended else said)
                rows.observe(
                    observation,
                    info["segment"],
                    reward=reward,
                    ended=ended,
                    cut_short=ended and env.playing,  # a time limit around it, say
                    info=info,
                )
                rewards.append(reward)
                invalid_turns += bool(info.get("invalid"))
    except BrokenIds as error:
        raise EpisodeFailed("broken ids", str(error)) from error
    except VersionExpired as error:
        raise EpisodeFailed("version expired", str(error)) from error
    except EngineError as error:
        raise EpisodeFailed(f"engine: {type(error).__name__}", str(error)) from error
    return Episode(
        rows=rows.rows,
        rewards=rewards,
        messages=list(env.messages),
        end_reason=str(info.get("end_reason", "terminated" if terminated else "truncated")),
        success=info.get("success"),
        truncated=bool(truncated),
        invalid_turns=invalid_turns,
        seed=start.seed,
        member=plan.member,
        info=info,
        trainable=trainable,
    )


@asynccontextmanager
async def _version_of(engine: Engine, plan: Plan) -> AsyncIterator[int | None]:
    """Yields the version that plays, held to the end; None is whichever is newest at each turn."""
    if plan.each_turn or plan.version is not None:
        yield plan.version
        return
    async with engine.hold() as held:
        yield held.version


async def complete(
    engine: Engine,
    prompt: list[int],
    sampling: SamplingParams,
    version: int | None,
    plan: Plan,
    turn: int,
) -> Completion:
    """Samples one turn; a completion that the engine aborts is asked for again under another seed."""
    for attempt in range(ABORTS + 1):
        params = sampling.with_(seed=plan.seed_of(turn, attempt))
        try:
            [completion] = await engine.generate(
                prompt, params, version=version, lane=plan.lane, affinity=plan.affinity
            )
        except EngineError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            _let_through(error)
            raise EpisodeFailed(f"engine: {type(error).__name__}", str(error)) from error
        if completion.finish_reason != "abort":
            break
        plan.on_abort()
    else:
        raise EpisodeFailed("engine: abort", f"{engine.model} aborted turn {turn} {ABORTS + 1} times")
    if plan.trainable and completion.trainable is not True:
        raise EpisodeFailed(f"untrainable: {completion.trainable}", "its ids cannot be trained on")
    if len(completion.ids) > sampling.max_tokens:
        raise BrokenIds(
            f"engine returned {len(completion.ids)} ids where at most {sampling.max_tokens} were asked for"
        )
    return completion


async def _in_env(call: Awaitable[_Answer]) -> _Answer:
    """Awaits the environment; what it raises ends this episode only."""
    try:
        return await call
    except (Exception, asyncio.CancelledError) as error:
        _let_through(error)
        raise EpisodeFailed(f"env: {type(error).__name__}", str(error)) from error


def _let_through(error: BaseException) -> None:
    """Raises a cancellation of this episode again; one that came from within is a failure like any other."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
