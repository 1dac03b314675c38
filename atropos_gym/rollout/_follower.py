"""Follows the trainer's policy: loads each version into the engine, and says which ones are still used.

A run that had ended before the first look was somebody else's: its last version is not loaded, for its folder
may be gone, and its end is not the end of what follows. Nor is a version loaded, or played on with, after
another trainer has registered, which is yet to publish its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_gym.batch_server.client import AsyncBatchClient, without_token
from atropos_gym.engines.base import Engine
from atropos_gym.errors import ConfigError, ServerError, TokenizerMismatch
from atropos_gym.wire import Policy

__all__ = ["Follower"]

#: Seconds that a request for a newer version waits at the server.
FOLLOW = 30.0
#: Seconds between two looks at a server that has nothing for us.
LOOK_AGAIN = 0.5


class Follower:
    """Keeps an engine at the newest version.

    Args:
        engine: gets the versions.
        url: of the batch server, for errors.

    Attributes:
        version: newest one that the engine has from the trainer; None before the first.
        published: all that it was given, in order.
        finished: the trainer has ended its run, which had not ended when we came.
        news: set whenever something was heard.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self.version: int | None = None
        self.published: list[int] = []
        self.finished = False
        self.news = asyncio.Event()
        self._engine = engine
        self._url = without_token(url)
        self._run = ""  # of the newest version
        self._before: object = None  # the run that had ended before the first look; None before that look

    async def begin(self, client: AsyncBatchClient) -> None:
        """Looks for the first time; ``follow`` does that too, if nobody did before."""
        try:
            self._note(await client.policy())
        except ServerError as error:
            if error.status != 404:  # the original API has no policy
                raise

    async def follow(
        self, client: AsyncBatchClient, env_id: int | None, registration: str | None = None
    ) -> None:
        """Asks once for what is newer, which waits at the server; loads it.

        Args:
            client: of the server.
            env_id: our number there.
            registration: that the number is of: a server that was started anew may give it to another.

        Raises:
            TokenizerMismatch: the trainer's tokenizer is not the engine's.
            ConfigError: the version's number means other weights here.
            EngineError: it could not be loaded.
            ServerError: 404 where the server has no policy at all.
        """
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        after = -1 if self.version is None else self.version
        policy = await client.policy(after, FOLLOW, env_id, self._held(), registration)
        self._note(policy)
        ours = self._is_ours(policy)
        finished = policy.finished and ours
        if policy.version is not None and ours and self.is_new(policy):
            await self._take_over(policy, client, env_id, registration)
        elif loop.time() - asked_at < LOOK_AGAIN and not finished:
            await asyncio.sleep(LOOK_AGAIN)
        self.finished = finished
        self.news.set()

    async def look(self, client: AsyncBatchClient) -> None:
        """Looks once, after the server was started anew: a number may mean another run's weights now.

        Raises:
            ConfigError: it does.
        """
        if self.version is None:
            return
        policy = await client.policy()
        if policy.version is not None and self._is_ours(policy):
            self.is_new(policy)

    def lacks(self, status: Mapping[str, Any]) -> bool:
        """Whether the engine has nothing to play for the trainer yet, as the server's status has it.

        One that counts the lag publishes versions, and wants no other trainer's. One that does not may load
        its weights elsewhere, and what was published before it says nothing of it.
        """
        if status.get("max_policy_lag") is None or status.get("policy_version") is None:
            return False
        return self.version is None or bool(status.get("superseded"))

    def _is_ours(self, policy: Policy) -> bool:
        """Whether it is what the trainer of now wants to be played, or says."""
        return _mark(policy) != self._before and not policy.superseded

    def _note(self, policy: Policy) -> None:
        if self._before is None:
            self._before = _mark(policy) if policy.finished else ()

    def is_new(self, policy: Policy) -> bool:
        """Whether a version is still to be loaded.

        Raises:
            ConfigError: another run counts from below: a version number means one set of weights per engine.
        """
        assert policy.version is not None
        if self.version is None or policy.version > self.version:
            return True
        if policy.run != self._run and policy.version | self.version:  # 0 is the base in every run
            raise ConfigError(
                f"the trainer at {self._url} published version {policy.version} of run "
                f"{policy.run!r}, but this service has version {self.version} "
                f"of run {self._run!r} already: start it anew"
            )
        return False

    async def wait(self, seconds: float) -> None:
        """Waits, no longer than until something was heard."""
        self.news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.news.wait()
        except TimeoutError:
            pass

    async def _take_over(
        self, policy: Policy, client: AsyncBatchClient, env_id: int | None, registration: str | None
    ) -> None:
        own = self._engine.tokenizer
        if policy.tokenizer_fingerprint not in (None, own.fingerprint):
            raise TokenizerMismatch(
                f"the trainer at {self._url} trains ids of tokenizer "
                f"{policy.tokenizer_fingerprint}, engine {self._engine.model} samples those of "
                f"{own.name} ({own.fingerprint}): use the same"
            )
        assert policy.version is not None
        if policy.adapter_path is not None:
            loading = asyncio.ensure_future(self._engine.publish(policy.version, Path(policy.adapter_path)))
            try:
                # It may wait for long until an older version is free. Who says nothing meanwhile is
                # forgotten by the server, and then the learner deletes what is still used.
                while not (await asyncio.wait((loading,), timeout=FOLLOW))[0]:
                    held = [*self._held(), policy.version]
                    await client.policy(env_id=env_id, holding=held, registration=registration)
                await loading
            finally:
                if not loading.done():
                    loading.cancel()
                    await asyncio.wait((loading,))
        elif policy.version > 0:
            raise ConfigError(
                f"the trainer published version {policy.version} without an adapter: the base model is "
                "version 0 in every engine; publish it as 0, or with an adapter"
            )
        self.version, self._run = policy.version, policy.run
        self.published.append(policy.version)

    def _held(self) -> list[int]:
        """Versions whose folders the learner must leave alone."""
        live = getattr(self._engine, "live_versions", None)
        return [version for version in live if version > 0] if live is not None else self.published[-3:]


def _mark(policy: Policy) -> tuple[object, ...]:
    """What tells one publication from another, also where both are of the same version."""
    return (policy.run, policy.version, policy.published_at)
