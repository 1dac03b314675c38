"""EnvironmentService: a collector that posts to a batch server, for as long as a trainer learns.

It waits for the server and the trainer, registers, loads each version that appears at ``/policy`` into its
engine and confirms it, collects what is wanted, posts it, and leaves when the run is finished; one that was
finished before it came was another's, and it waits for the next. A server that goes away is waited for; one
that has forgotten the service is told again. With a state file it goes on where it was, and with a spool no
group that was to be posted is lost, whatever is killed; those in flight, and those that wait until the server
has room, are left out.

Two ways of working, as the trainer registered: with ``max_policy_lag=0`` exactly the groups that the newest
version still lacks are played; otherwise groups are played ahead, a few batches at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import httpx

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.batch_server.spool import Spool
from atropos_gym.engines.base import Engine
from atropos_gym.errors import CollectionFailed, ConfigError, ServerError
from atropos_gym.rollout._follower import LOOK_AGAIN, Follower
from atropos_gym.rollout._membership import Membership
from atropos_gym.rollout._outbox import Outbox
from atropos_gym.rollout._pool import EnvSource
from atropos_gym.rollout._position import Position
from atropos_gym.rollout._room import room_of
from atropos_gym.rollout._service_evaluation import Evaluation, Evaluator
from atropos_gym.rollout._service_thread import ServiceThread
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.curriculum import Curriculum, Lessons, Options
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["EnvironmentService", "Evaluation", "ServiceThread"]

log = logging.getLogger(__name__)

#: Longest pause between two tries to reach the server, so that a restart is noticed soon.
LONGEST_PAUSE = 2.0
#: Seconds for taking leave of a server.
GOODBYE = 1.0
#: Seconds for the last look at a server whose run has ended: it may be gone by now.
LAST_LOOK = 10.0
#: Collections that may fail in a row, with growing pauses between them, before the service gives up.
OUTAGES = 5


class EnvironmentService:
    """Plays an environment for a trainer behind a batch server.

    Args:
        env: as for ``GroupCollector``.
        engine: who speaks; this service publishes to it.
        url: of the batch server.
        name: of the environment at the server; the environment's id or class name if None.
        weight: wish for a share of a batch, relative to other services.
        min_batch_allocation: least share of a batch, 0 to 1.
        max_batches_ahead: most batches that wait at the server; less where the trainer's lag is less.
        first_number: of the first group; its seeds follow from it.
        state: file that says how far the service is; where it exists, the service goes on from there. With a
            spool it is ``service.json`` in that folder unless another one is named.
        spool: folder in which groups lie until the server has them; what is left there at the end, the next
            service with this folder posts first. None keeps nothing.
        curriculum: asked at each new step of the trainer for the options of ``reset`` from then on.
        options: of ``reset``, or a function from a group's number to them.
        evaluation: when and how to evaluate; None for not at all.
        on_post: told of groups that the server has taken.
        transport: how to reach the server, for tests.
        **collector: further keywords of ``GroupCollector``.

    Attributes:
        collector: what plays.
        version: newest version that the engine has from the trainer; None before the first.

    Example:
        >>> service = EnvironmentService("atropos/Blackjack-v0", engine, url)  # doctest: +SKIP
        >>> asyncio.run(service.run())  # doctest: +SKIP
    """

    def __init__(
        self,
        env: EnvSource,
        engine: Engine,
        url: str,
        *,
        name: str | None = None,
        weight: float = 1.0,
        min_batch_allocation: float | None = None,
        max_batches_ahead: int = 3,
        first_number: int = 0,
        state: str | Path | None = None,
        spool: str | Path | Spool | None = None,
        curriculum: Curriculum | None = None,
        options: Options = None,
        evaluation: Evaluation | None = None,
        on_post: Callable[[list[EpisodeGroup]], None] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        **collector: Any,
    ) -> None:
        if max_batches_ahead < 1:
            raise ConfigError(f"max_batches_ahead must be >= 1, got {max_batches_ahead}")
        self.collector = GroupCollector(env, engine, options=self._options, **collector)
        if state is None and spool is not None:
            state = Path(spool.folder if isinstance(spool, Spool) else spool) / "service.json"
        self._position = Position(
            state, self.collector.name, seed=collector.get("seed", 0), next_number=first_number
        )
        self.collector.next_number = self._position.next_number
        self._lessons = Lessons(curriculum, options, state=self._position.curriculum, what=str(state))
        self.engine = engine
        self.url = url
        self.name = name or self.collector.name
        self._follower = Follower(engine, url)
        self._membership = Membership(
            self.name,
            self._follower,
            max_token_length=self.collector.env.max_tokens,
            weight=weight,
            group_size=self.collector.group_size,
            min_batch_allocation=min_batch_allocation,
        )
        self._outbox = Outbox(self.name, self._position, self._taken)
        self._evaluation = evaluation
        self._evaluator = Evaluator(
            self.name,
            env,
            engine,
            evaluation,
            self._position,
            concurrency=self.collector.concurrency,
            env_kwargs=dict(collector.get("env_kwargs") or {}),
        )
        self._room = partial(
            room_of,
            group_size=self.collector.group_size,
            most_batches=max_batches_ahead,
            minimum=min_batch_allocation or 0.0,
        )
        self._on_post = on_post
        self._transport = transport
        self._spool = spool
        self._kept: dict[str, Any] | None = None  # what the spool says at the end
        self._client: AsyncBatchClient | None = None
        self._unposted = 0  # played, and then no longer wanted
        self._outages = 0  # in a row
        self._shared: int | None = None  # the version of which this service has played its share
        self._finished = False

    @property
    def version(self) -> int | None:
        """Newest version that the engine has from the trainer; None before the first."""
        return self._follower.version

    @property
    def report(self) -> dict[str, Any]:
        """Groups posted, left over, refused, in the spool; versions; evaluations; the collector's own."""
        spool = None if self._client is None else self._client.spool
        return {
            "posted": self._outbox.posted,
            "unposted": self._unposted,
            "refused": dict(self._outbox.refused),
            "spool": self._kept if spool is None else spool.report,
            "versions": list(self._follower.published),
            "evaluations": list(self._evaluator.results),
            "collector": self.collector.report,
        }

    def in_thread(self) -> ServiceThread:
        """Returns this service as a thread with ``start`` and ``stop``, also as a context manager."""
        return ServiceThread(self.run, name=f"service {self.name}")

    async def run(self) -> None:
        """Serves until the trainer's run is finished; cancel it to end it sooner.

        Raises:
            TokenizerMismatch: the trainer's tokenizer is not the engine's.
            CollectionFailed: again and again; the message says to what the groups were lost.
            GroupRefused: the server refused every group of several posts.
            EngineError: a version could not be loaded.
        """
        async with self._connected() as client:
            follower = asyncio.create_task(self._follow(client))
            worker = asyncio.create_task(self._work(client))
            try:
                await asyncio.wait((follower, worker), return_when=asyncio.FIRST_COMPLETED)
                if self._follower.finished:
                    await self._end(client, worker)
                elif follower.done() and follower.exception() is None:
                    await asyncio.wait((worker,))  # there is nothing to follow at this server
            finally:
                follower.cancel()
                worker.cancel()
                results = await asyncio.gather(follower, worker, return_exceptions=True)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncBatchClient]:
        """Yields a client of a server at which this environment is registered, and takes leave of it."""
        client = AsyncBatchClient(
            self.url,
            retry_seconds=None,
            longest_pause=LONGEST_PAUSE,
            spool=self._spool,
            transport=self._transport,
        )
        self._client = client
        if client.spool is not None:
            self._outbox.follow_spool(client.spool)
            self.collector.next_number = self._position.next_number
        try:
            await self._follower.begin(client)
            await self._membership.register(client)
            await client.post_left()
            yield client
        finally:
            try:
                async with asyncio.timeout(GOODBYE):
                    await self._membership.leave(client)
            except (TimeoutError, ServerError) as error:
                log.info("%s: left without a goodbye: %s", self.name, error or "no answer")
            finally:
                self._kept = None if client.spool is None else client.spool.report
                self._client = None
                await client.close()
                self.collector.close()

    @property
    def _env_id(self) -> int | None:
        return self._membership.env_id

    @property
    def _over(self) -> bool:
        return self._finished or self._follower.finished

    def _options(self, number: int) -> dict[str, Any] | None:
        """What the group of this number begins with."""
        return self._lessons.options(number)

    async def _follow(self, client: AsyncBatchClient) -> None:
        """Loads every newer version into the engine until the run is finished."""
        while not self._follower.finished:
            try:
                await self._follower.follow(client, self._membership.env_id, self._membership.registration)
            except ServerError as error:
                if error.status == 404:  # the original API has no policy: its trainers load weights elsewhere
                    return
                raise

    # -- groups ----------------------------------------------------------------------------------------

    async def _work(self, client: AsyncBatchClient) -> None:
        """Plays and posts until the run is finished."""
        while not self._over:
            await self._patiently(partial(self._make, client))

    async def _patiently(self, work: Callable[[], Awaitable[object]]) -> None:
        """Does something again where it failed, with growing pauses, unless it failed often in a row."""
        while True:
            try:
                await work()
                return
            except CollectionFailed as error:
                self._outages += 1
                if self._outages == OUTAGES:
                    raise
                log.warning("%s; trying again in %d s", error, 2**self._outages)
                await self._follower.wait(2.0**self._outages)

    async def _end(self, client: AsyncBatchClient, worker: asyncio.Task[None]) -> None:
        """Ends what is played for a finished run, and evaluates where that is due at its last step."""
        async with self._evaluator.busy:  # what is being evaluated comes to its end
            worker.cancel()
        await asyncio.wait((worker,))
        if self._evaluation is None or not (worker.cancelled() or worker.exception() is None):
            return
        try:
            async with asyncio.timeout(LAST_LOOK):
                status = await self._membership.status(client)
        except (TimeoutError, ServerError) as error:
            log.warning("%s: ended without a last evaluation: %s", self.name, error or "no answer")
            return
        if status is not None:
            await self._patiently(partial(self._evaluate_due, status))

    async def _make(self, client: AsyncBatchClient) -> None:
        """Plays what is wanted now; ahead, until the trainer wants it otherwise."""
        status = await self._look(client)
        if status is None or self._over:
            return
        if status.get("finished") or self._follower.lacks(status):
            await self._follower.wait(LOOK_AGAIN)
        elif _exact(status):
            await self._make_exactly(client, status)
        else:
            await self._make_ahead(client)

    async def _make_exactly(self, client: AsyncBatchClient, status: dict[str, Any]) -> None:
        """Plays what the newest version still lacks, or waits for a newer one."""
        wanted = status["groups_wanted"] if status["policy_version"] == self.version is not None else 0
        if not wanted:
            await self._follower.wait(LOOK_AGAIN)
            return
        # Several services together make one batch: each plays its share, and only when the others have had
        # time for theirs does it help with the rest.
        share = ceil(wanted * status.get("env_weight", 1.0))
        if share < wanted and self._shared == self.version:
            self._shared = None
            await self._follower.wait(LOOK_AGAIN)
            return
        self._shared = self.version
        at_once = max(1, self.collector.concurrency // self.collector.group_size)
        await self._post(client, await self.collector.acollect(min(share, at_once)))

    async def _make_ahead(self, client: AsyncBatchClient) -> None:
        """Plays on, and waits while enough batches are queued, until the trainer wants it otherwise."""
        async with aclosing(self.collector.bursts()) as bursts:
            async for groups in bursts:
                try:
                    while groups:
                        status = await self._look(client)
                        if self._over:
                            return
                        if status is None:  # another server has us now
                            continue
                        if status.get("finished") or _exact(status) or self._follower.lacks(status):
                            return
                        if room := self._room(status):
                            await self._post(client, groups[:room])
                            groups = groups[room:]
                        else:
                            await self._follower.wait(LOOK_AGAIN)
                finally:
                    self._unposted += len(groups)

    async def _look(self, client: AsyncBatchClient) -> dict[str, Any] | None:
        """Asks for the state of the queue, evaluates where that is due, and sees whether the run has ended.

        Raises:
            CollectionFailed: the evaluation failed.
        """
        status = await self._membership.status(client)
        if status is None:
            return None
        step, last_step = status["current_step"], self._membership.last_step
        if self._lessons.reached(step):
            self._position.taught(self._lessons.state)
        # A trainer that publishes no policy cannot say that it has finished.
        if last_step is not None and self.version is None:
            self._finished = step >= last_step
        return await self._membership.status(client) if await self._evaluate_due(status) else status

    async def _evaluate_due(self, status: Mapping[str, Any]) -> bool:
        """Evaluates if that is due, and if the engine has the version that is to be played now."""
        shown = None if self.version is None and status.get("superseded") else status.get("policy_version")
        if self._follower.lacks(status) or shown != self.version or (_exact(status) and self.version is None):
            return False
        evaluated = await self._evaluator.evaluate(status["current_step"])
        if evaluated:
            self._outages = 0
        return evaluated

    async def _post(self, client: AsyncBatchClient, groups: list[EpisodeGroup]) -> None:
        if await self._outbox.post(client, groups, self._membership.env_id):
            self._outages = 0

    def _taken(self, groups: list[EpisodeGroup]) -> None:
        """These groups are the trainer's now."""
        self._lessons.posted(groups)
        if self._on_post is not None:
            self._on_post(groups)


def _exact(status: Mapping[str, Any]) -> bool:
    """Whether the trainer learns only from what the newest version said."""
    return status.get("max_policy_lag") == 0 and bool(status.get("groups_per_update"))
