"""A service's place at a batch server: it registers, asks how things stand, registers again, and leaves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.errors import ServerError
from atropos_gym.rollout._follower import LOOK_AGAIN, Follower

__all__ = ["Membership"]

log = logging.getLogger(__name__)

#: Times in a row that a server may have forgotten the service right after it registered.
FORGOTTEN = 10


class Membership:
    """Keeps an environment registered at a server that may be started anew at any time.

    Args:
        name: of the environment.
        follower: knows which versions are held, and when to look again.
        **settings: further fields of ``EnvRegistration``.

    Attributes:
        env_id: the number that the server gave; None where it gave none.
        registration: what the server calls this registration; None where it does not say.
        last_step: the step at which the trainer will have finished; None where it does not say.
    """

    def __init__(self, name: str, follower: Follower, **settings: Any) -> None:
        self.env_id: int | None = None
        self.registration: str | None = None
        self.last_step: int | None = None
        self._name = name
        self._follower = follower
        self._settings = {"desired_name": name, **settings}
        self._known_as: dict[str, Any] = {}  # what the server calls us, besides the number
        self._forgotten = 0  # in a row

    async def register(self, client: AsyncBatchClient) -> None:
        """Registers as soon as the trainer has started."""
        self.env_id = self.registration = None
        while (reply := await client.register_env(**self._settings))["status"] != "success":
            await self._follower.wait(LOOK_AGAIN)
        self.env_id, self.registration = int(reply["env_id"]), reply.get("registration")
        self._known_as = {name: reply.get(name) for name in ("wandb_name", "registration")}
        self._note_end(reply)
        log.info("%s: registered as environment %s", self._name, self.env_id)

    async def status(self, client: AsyncBatchClient) -> dict[str, Any] | None:
        """Returns what the server says of its queue; None after it had forgotten this environment.

        Raises:
            ServerError: it forgets the environment each time.
        """
        status = await self.look(client)
        if status is not None and "batch_size" not in status:  # the original API says it elsewhere
            status["batch_size"] = (await client.info())["batch_size"]
        return status

    async def look(self, client: AsyncBatchClient) -> dict[str, Any] | None:
        """Asks whether we are registered still, and registers again if not; else as :meth:`status`."""
        assert self.env_id is not None
        try:
            status = await client.status_env(self.env_id)
        except ServerError as error:
            # The original API fails where it does not know a number.
            if error.status not in (404, 500) or self._forgotten == FORGOTTEN:
                raise
        else:
            if self._is_ours(status):
                self._forgotten = 0
                self._note_end(status)
                return status
        log.warning("%s: the server was started anew, registering again", self._name)
        if self._forgotten:
            await self._follower.wait(LOOK_AGAIN)
        self._forgotten += 1
        await self.register(client)
        await self._follower.look(client)
        return None

    async def leave(self, client: AsyncBatchClient) -> None:
        """Says that no version is used any more, and takes leave; not where the number is another's now."""
        if self.env_id is None:
            return
        try:
            if not self._is_ours(await client.status_env(self.env_id)):
                return
        except ServerError as error:
            if error.status not in (404, 500):
                raise
            return  # it is nobody's
        if self._follower.version is not None:
            await client.policy(env_id=self.env_id, holding=(), registration=self.registration)
        await client.disconnect_env(self.env_id)

    def _is_ours(self, status: Mapping[str, Any]) -> bool:
        """Whether the number is ours still: a server that was started anew may have given it to another."""
        return all(status.get(name, value) == value for name, value in self._known_as.items())

    def _note_end(self, reply: Mapping[str, Any]) -> None:
        """Notes when the trainer will have finished: one that registers again may say otherwise."""
        if (steps := reply.get("num_steps")) is not None:
            self.last_step = steps if steps > 0 else None
