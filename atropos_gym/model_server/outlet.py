"""Where finished groups go: a batch server, at which this one registers as an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.errors import ServerError
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["Outlet"]

LOOK_AGAIN = 1.0
"""Seconds between two looks whether the trainer has started."""


class Outlet:
    """Posts groups; one post at a time, in the order in which they are finished.

    Args:
        client: of the batch server.
        name: under which groups are posted.
        max_length: longest row that can come.
        sleep: how to pause.

    Attributes:
        posted: how many groups the server has.
    """

    def __init__(
        self,
        client: AsyncBatchClient,
        *,
        name: str,
        max_length: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.posted = 0
        self._client = client
        self._name = name
        self._max_length = max_length
        self._sleep = sleep
        self._env_id: int | None = None
        self._turn = asyncio.Lock()

    async def post(self, group: EpisodeGroup) -> str | None:
        """Posts a group as soon as there is a trainer; returns the name that the server gave it.

        Raises:
            ServerError: the server cannot be reached, or refuses the group.
        """
        async with self._turn:
            for again in (False, True):
                if self._env_id is None:
                    self._env_id = await self._register(len(group.episodes))
                try:
                    wire = group.to_wire().model_copy(update={"env_id": self._env_id})
                    name = await self._client.post_group(wire)
                except ServerError as error:
                    if error.status != 404 or again:
                        raise
                    self._env_id = None  # the server was started anew and knows nobody
                else:
                    break
            self.posted += 1
            return name

    async def close(self) -> None:
        """Leaves the server."""
        try:
            if self._env_id is not None:
                await self._client.disconnect_env(self._env_id)
        finally:
            await self._client.close()

    async def _register(self, group_size: int) -> int:
        while True:
            reply = await self._client.register_env(
                max_token_length=self._max_length, desired_name=self._name, weight=1.0, group_size=group_size
            )
            if reply["status"] == "success":
                return int(reply["env_id"])
            await self._sleep(LOOK_AGAIN)
