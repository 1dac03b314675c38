"""Plays one group: its members from one start, their scores, and what becomes of it.

Which groups are played when is ``_schedule.py``'s; here one group is followed from its number to its outcome.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.rollout._legal import LegalReplies
from atropos_gym.rollout._play import ABORTS, EpisodeFailed, Plan, Start, play
from atropos_gym.rollout._pool import EnvPool
from atropos_gym.rollout.accounting import Accounting
from atropos_gym.rollout.curriculum import Options
from atropos_gym.rollout.episode import Episode, EpisodeGroup
from atropos_gym.rollout.seeds import chance_seed, sampling_seed, start_seed

__all__ = ["Filter", "GroupPlayer", "Lost", "OnPartial", "Score", "Version"]

Scores = Sequence[float | None]
Score = Literal["return"] | Callable[[list[Episode]], Scores | Awaitable[Scores]]
"""``"return"``, or a callable on the group, plain or async; None takes a member out."""
Filter = Callable[[EpisodeGroup], bool]
"""True keeps the group."""
OnPartial = Literal["drop", "keep", "retry"]
Version = Literal["episode", "turn"]
"""How long a version plays: an episode keeps the one it began with, or each turn takes the newest."""

#: How often an episode is played with ``on_partial="retry"`` before its group is given up.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Lost:
    """A group that is not delivered: ``kind`` says which count ``reason`` belongs to."""

    kind: Literal["filtered", "failed"]
    reason: str
    message: str = ""


@dataclass(slots=True)
class GroupPlayer:
    """Plays groups by number; see ``GroupCollector`` for the arguments."""

    pool: EnvPool
    engine: Engine
    accounting: Accounting
    group_size: int
    sampling: SamplingParams
    seed: int
    score: Score
    filters: Mapping[str, Filter]
    on_partial: OnPartial
    deadline: float | None
    common_random_numbers: bool
    options: Options
    fingerprint: str
    version: Version = "episode"
    legal: LegalReplies | None = None

    async def play(
        self, number: int, slots: asyncio.Semaphore, on_member: Callable[[], None]
    ) -> EpisodeGroup | Lost:
        """Plays group ``number``.

        Args:
            number: of the group; all its seeds follow from it.
            slots: one is taken by each member while it plays.
            on_member: called when a member is through, well or not.

        Returns:
            The scored group, or why there is none.
        """
        options = self.options(number) if callable(self.options) else self.options
        start = Start(self.pool.name, start_seed(self.seed, number), options)
        members = [
            asyncio.create_task(self._member(number, member, start, slots))
            for member in range(self.group_size)
        ]
        for task in members:
            task.add_done_callback(lambda _: on_member())
        when = asyncio.ALL_COMPLETED if self.on_partial == "keep" else asyncio.FIRST_EXCEPTION
        try:
            done, _ = await asyncio.wait(members, return_when=when)
        finally:
            for task in members:
                task.cancel()
            # Of all members: an error that nobody looks at would be reported when its task is collected.
            await asyncio.gather(*members, return_exceptions=True)
        failures: list[EpisodeFailed] = []
        # By member where several failed at once: the reason must not depend on a set's order.
        for task in members:
            if task in done and not task.cancelled() and (error := task.exception()) is not None:
                if not isinstance(error, EpisodeFailed):
                    raise error
                failures.append(error)
        if failures and self.on_partial != "keep":
            return Lost("failed", failures[0].reason, failures[0].message)
        episodes = [task.result() for task in members if task.exception() is None]
        if failures and len(episodes) < min(2, self.group_size):
            return Lost("failed", failures[0].reason, failures[0].message)
        return await self._finish(number, episodes)

    async def _member(self, number: int, member: int, start: Start, slots: asyncio.Semaphore) -> Episode:
        """Plays one member, again after a failure where ``on_partial`` says so."""
        tries = TRIES if self.on_partial == "retry" else 1
        async with slots:
            for attempt in range(tries):
                try:
                    return await self._try(number, member, start, attempt)
                except EpisodeFailed as error:
                    self.accounting.fail_episode(error.reason, error.message)
                    if attempt == tries - 1:
                        raise
        raise AssertionError("unreachable: the last try returns or raises")

    async def _try(self, number: int, member: int, start: Start, attempt: int) -> Episode:
        plan = Plan(
            start=start,
            member=member,
            chance=None if self.common_random_numbers else chance_seed(self.seed, number, member),
            sampling=self.sampling,
            # Each try of an episode, and each try of a completion in it, has a seed of its own.
            seed_of=lambda turn, abort: sampling_seed(
                self.seed, number, member, turn, attempt * (ABORTS + 1) + abort
            ),
            on_abort=self._aborted,
            trainable=self.legal is None,
            legal=self.legal,
            each_turn=self.version == "turn",
            affinity=(self.pool.name, number, member),
        )
        try:
            seat = await self.pool.seat()
        except Exception as error:
            raise EpisodeFailed(f"env: {type(error).__name__}", str(error)) from error
        try:
            async with asyncio.timeout(self.deadline):
                episode = await play(seat, self.engine, plan)
        except TimeoutError as error:
            seat.close()
            raise EpisodeFailed(
                "deadline", f"an episode took longer than deadline={self.deadline} s"
            ) from error
        except BaseException:
            # Whatever state it is in, no later episode shall begin in it.
            seat.close()
            raise
        self.pool.give_back(seat)
        self.accounting.episodes += 1
        if episode.trainable is not True:
            self.accounting.untrainable[episode.trainable] += 1
        return episode

    def _aborted(self) -> None:
        self.accounting.aborted += 1

    async def _finish(self, number: int, episodes: list[Episode]) -> EpisodeGroup | Lost:
        """Scores and filters a group whose episodes are played."""
        try:
            scores = await self._scores(episodes)
        except Exception as error:
            return Lost("failed", f"score: {type(error).__name__}", str(error))
        for episode, score in zip(episodes, scores, strict=True):
            episode.score = None if score is None else float(score)
        scored = [episode for episode in episodes if episode.score is not None]
        self.accounting.unscored += len(episodes) - len(scored)
        if len(scored) < min(2, self.group_size):
            return Lost("failed", "too few scored", f"{len(scored)} of {len(episodes)} members have a score")
        if not any(turn.end > turn.start for episode in scored for turn in episode.turns):
            return Lost("failed", "nothing sampled", "every turn of every member is empty")
        group = EpisodeGroup(
            env=self.pool.name,
            number=number,
            episodes=scored,
            policy_version=min(version for episode in scored for version in episode.versions),
            temperature=self.sampling.temperature,
            tokenizer_fingerprint=self.fingerprint,
        )
        for name, keeps in self.filters.items():
            try:
                kept = keeps(group)
            except Exception as error:
                return Lost("failed", f"filter {name}: {type(error).__name__}", str(error))
            if not kept:
                return Lost("filtered", name)
        return group

    async def _scores(self, episodes: list[Episode]) -> Scores:
        if self.score == "return":
            return [episode.episode_return for episode in episodes]
        answer = self.score(episodes)
        scores: Scores = await answer if inspect.isawaitable(answer) else answer
        if len(scores) != len(episodes):
            raise ValueError(f"score returned {len(scores)} values for {len(episodes)} episodes")
        for member, score in enumerate(scores):
            if score is not None and not isfinite(score):
                raise ValueError(f"score of episode {member} must be finite or None, got {score}")
        return scores
