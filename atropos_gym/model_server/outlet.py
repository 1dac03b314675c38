"""Where finished groups go, and where the engine's versions come from: a trainer behind a batch server."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.engines.base import Engine
from atropos_gym.errors import AtroposError, GroupRefused, ServerError
from atropos_gym.rollout._follower import Follower
from atropos_gym.rollout._membership import Membership
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["Outlet"]

LOOK_AGAIN = 1.0
"""Seconds between two looks whether the trainer has started."""

GOODBYE = 5.0
"""Seconds that taking leave of the server may take."""

log = logging.getLogger(__name__)


class Outlet:
    """An environment at a batch server: posts groups, and keeps the engine at the newest version.

    Args:
        engine: gets the trainer's versions; groups that are being played keep theirs.
        client: of the batch server.
        name: of the environment at the server.
        group_size: members that its groups usually have.

    Attributes:
        posted: how many groups the server has.
        refused: how many it refused.
        problem: why versions are no longer followed, where that failed; else None.
    """

    def __init__(
        self, engine: Engine, client: AsyncBatchClient, *, name: str = "agent", group_size: int = 8
    ) -> None:
        self.posted = 0
        self.refused = 0
        self.problem: str | None = None
        self._client = client
        self._follower = Follower(engine, client.url)
        self._membership = Membership(
            name, self._follower, max_token_length=engine.max_context, weight=1.0, group_size=group_size
        )
        self._turn = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """Newest version that the engine has from the trainer; None before the first."""
        return self._follower.version

    @property
    def finished(self) -> bool:
        """Whether the trainer has ended its run."""
        return self._follower.finished

    def start(self) -> None:
        """Begins to follow the trainer's versions."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def post(self, group: EpisodeGroup) -> str | None:
        """Posts a group as soon as there is a trainer; returns the name that the server gave it.

        Raises:
            GroupRefused: the server does not want it.
            ServerError: the server cannot be reached.
        """
        for again in (False, True):
            env_id = await self._registered(look=True)
            try:
                name = await self._client.post_group(group.to_wire().model_copy(update={"env_id": env_id}))
            except GroupRefused:
                self.refused += 1
                raise
            except ServerError as error:
                if error.status != 404 or again:
                    raise
                # The server was started anew, which is seen at the next look.
            else:
                break
        self.posted += 1
        return name

    async def close(self) -> None:
        """Leaves the server."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        try:
            with suppress(TimeoutError, ServerError):  # it is gone already, or will find out by itself
                async with asyncio.timeout(GOODBYE):
                    await self._membership.leave(self._client)
        finally:
            await self._client.close()

    async def _registered(self, *, look: bool = False) -> int:
        """Returns our number at the server, once its trainer has started.

        Args:
            look: whether the number is ours still; else a server that was started anew is told again.
        """
        async with self._turn:
            if self._membership.env_id is None:
                await self._membership.register(self._client)
            elif look:
                await self._membership.look(self._client)
            assert self._membership.env_id is not None
            return self._membership.env_id

    async def _follow(self) -> None:
        """Loads every newer version until the run is finished."""
        try:
            while not self._follower.finished:
                try:
                    env_id = await self._registered()
                    await self._follower.follow(self._client, env_id, self._membership.registration)
                except ServerError as error:
                    if error.status == 404:  # the original API has no policy: weights are loaded elsewhere
                        return
                    log.warning("%s", error)
                    await asyncio.sleep(LOOK_AGAIN)
        except AtroposError as error:
            self.problem = str(error)
            log.error("%s", error)
        except Exception as error:  # whatever an engine raises: without versions no group may be opened
            self.problem = f"versions are no longer followed: {type(error).__name__}: {error}"
            log.exception("versions are no longer followed")
