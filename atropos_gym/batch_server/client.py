"""Clients of the batch server, blocking and asynchronous, with the same method names.

They try again where the server cannot be reached or fails, with growing pauses, and raise where it refuses:
``GroupRefused`` for groups, ``ServerError`` for the rest. Nothing goes through a proxy to this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from atropos_gym.batch_server import _calls as calls
from atropos_gym.batch_server._calls import Batch, Call
from atropos_gym.batch_server._exchange import Again, Answer, Exchange, Exchanges
from atropos_gym.batch_server.hosts import without_token
from atropos_gym.batch_server.spool import Spool
from atropos_gym.wire import Policy, ScoredDataGroup

__all__ = ["AsyncBatchClient", "Batch", "BatchClient", "without_token"]

T = TypeVar("T")

LONGEST_PAUSE = 30.0


class BatchClient(Exchanges):
    """Speaks to a batch server.

    Args:
        url: where it is; ``http://x:TOKEN@host:8000`` carries a token.
        token: opens the server where it asks for one; by default the one in the URL, else what the
            environment's variable ``ATROPOS_GYM_TOKEN`` says.
        timeout: seconds until an answer must have come, besides what the server may hold the request for.
        retry_seconds: how long to try again, from the first failure, where there is no answer or a 5xx; None
            is for ever.
        longest_pause: between two tries, unless the server says how long (``Retry-After``).
        spool: folder, or :class:`Spool`, in which groups lie until the server has them: what this process
            could not post, the next one with the same folder posts first. None keeps nothing.
        transport: another way to reach it, such as ``httpx.MockTransport``.
        sleep: how to pause.
        clock: Unix seconds.
        again: called before each further try, with why there is one, how many have failed, and the seconds
            since the first did; what it raises ends the tries.

    Attributes:
        url: where the server is, without a token.
        trainer_id: who asks for batches; None before :meth:`register`.
        spool: where groups are kept; None where they are not.

    >>> with BatchClient("http://127.0.0.1:8000") as client:
    ...     client.url
    'http://127.0.0.1:8000'
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        retry_seconds: float | None = 60.0,
        longest_pause: float = LONGEST_PAUSE,
        spool: str | Path | Spool | None = None,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        again: Again | None = None,
    ) -> None:
        super().__init__(url, token, timeout, retry_seconds, longest_pause, spool, clock, again)
        self._http = httpx.Client(transport=transport, **self._options)
        self._sleep = sleep

    def _run(self, exchange: Exchange[T]) -> T:
        """Carries an exchange out."""
        answer: Answer | None = None
        try:
            while True:
                step = exchange.send(answer)
                answer = None
                if not isinstance(step, dict):
                    self._sleep(step)
                    continue
                try:
                    answer = self._http.request(**step)
                except httpx.TransportError as error:
                    answer = error
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            exchange.close()

    def _ask(self, call: Call[T]) -> T:
        return self._run(self._asking(call))

    def _post(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> list[str]:
        return self._run(self._posting(groups, alone=alone))

    def register(self, *, takeover: bool = False, **fields: Any) -> dict[str, Any]:
        """Registers as the trainer (fields of ``Registration``); later calls carry the id that it gets."""
        reply = self._ask(calls.register(takeover, self.trainer_id, fields))
        self.trainer_id = reply.get("trainer_id")
        return reply

    def register_env(self, **fields: Any) -> dict[str, Any]:
        """Registers as an environment (fields of ``EnvRegistration``); see ``status`` in the reply."""
        return self._ask(calls.register_env(fields))

    def info(self) -> dict[str, Any]:
        """What the trainer wants."""
        return self._ask(calls.get("/info"))

    def status(self) -> dict[str, Any]:
        """How far training is and how much is queued."""
        return self._ask(calls.get("/status"))

    def status_env(self, env_id: int) -> dict[str, Any]:
        """How much is queued, as this environment should see it."""
        return self._ask(calls.get("/status-env", env_id=env_id))

    def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Leaves; any later call of this environment connects it again."""
        return self._ask(calls.post("/disconnect-env", {"env_id": env_id}))

    def post_group(self, group: ScoredDataGroup) -> str | None:
        """Posts one group; returns its name. Raises ``GroupRefused`` with the first bad place."""
        names = self._post([group], alone=True)
        return names[0] if names else None

    def post_groups(self, groups: Sequence[ScoredDataGroup]) -> list[str]:
        """Posts groups; returns their names.

        Raises:
            GroupRefused: the server refused some; all others are stored. ``detail`` names the refused ones:
                ``loc`` is ``["body", index, ...]``.
        """
        return self._post(groups)

    def post_left(self) -> None:
        """Posts what lies in the spool still; returns once the server has it."""
        self._post(())

    def batch(
        self,
        *,
        groups: int | None = None,
        wait_seconds: float = 0.0,
        lease_seconds: float | None = None,
        trainer: str | None = None,
        partial: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
    ) -> Batch | None:
        """Asks for the next batch, oldest groups first; None where there is none within the time.

        Args:
            groups: so many whole groups instead of the registered number of sequences.
            wait_seconds: how long the server may wait for it, 0 to 600.
            lease_seconds: lease it until acked, instead of using it up.
            trainer: who asks; by default the id that ``register`` gave.
            partial: fewer groups will do after the wait, at least one.
            rank: only this rank's part of a batch, from 0; it needs ``lease_seconds`` and ``world_size``.
            world_size: how many ranks share each batch.
            step: which batch, as the ranks count; by default each rank's next one.
        """
        trainer = trainer or self.trainer_id
        share = {"rank": rank, "world_size": world_size, "step": step}
        return self._ask(calls.batch(groups, wait_seconds, lease_seconds, trainer, partial, share))

    def ack(self, batch_id: str, rank: int | None = None) -> dict[str, Any]:
        """Says that a leased batch, or this rank's part of one, was used."""
        return self._ask(calls.ack(batch_id, rank))

    def nack(self, batch_id: str, drop: bool = False, reason: str = "") -> dict[str, Any]:
        """Gives a leased batch back to the head of the queue, or drops it."""
        return self._ask(calls.post("/nack", {"batch_id": batch_id, "drop": drop, "reason": reason}))

    def extend(self, batch_id: str, lease_seconds: float) -> dict[str, Any]:
        """Keeps a leased batch for so many seconds from now."""
        return self._ask(calls.post("/extend", {"batch_id": batch_id, "lease_seconds": lease_seconds}))

    def policy(
        self,
        after: int | None = None,
        wait_seconds: float = 0.0,
        env_id: int | None = None,
        holding: Iterable[int] | None = None,
        registration: str | None = None,
    ) -> Policy:
        """Asks for the newest version of the policy.

        Args:
            after: wait for a version above this one.
            wait_seconds: how long the server may wait for it, 0 to 600; then it gives the current one.
            env_id: who asks.
            holding: versions that the asking service still uses; None says nothing about it.
            registration: which one the number is of; a server that gave it to another takes no ``holding``.
        """
        return self._ask(calls.policy(after, wait_seconds, env_id, holding, registration))

    def publish_policy(
        self, *, force: bool = False, trainer: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Publishes a version (fields of ``PolicyUpdate``), as this client's trainer or the one named."""
        return self._ask(calls.publish(force, trainer or self.trainer_id, fields))

    def finish(self, run: str) -> dict[str, Any]:
        """Says that this run has ended: services stop."""
        return self._ask(calls.publish(False, self.trainer_id, {"run": run, "finished": True}))

    def health(self) -> dict[str, Any]:
        """Whether all is well at the server."""
        return self._ask(calls.get("/health"))

    def close(self) -> None:
        """Closes the connections, and lets others use the spool."""
        self._http.close()
        if self.spool is not None:
            self.spool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBatchClient(Exchanges):
    """Speaks to a batch server from an event loop; see :class:`BatchClient` for arguments and methods."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        retry_seconds: float | None = 60.0,
        longest_pause: float = LONGEST_PAUSE,
        spool: str | Path | Spool | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(url, token, timeout, retry_seconds, longest_pause, spool, clock)
        self._http = httpx.AsyncClient(transport=transport, **self._options)
        self._sleep = sleep

    async def _run(self, exchange: Exchange[T]) -> T:
        answer: Answer | None = None
        try:
            while True:
                step = exchange.send(answer)
                answer = None
                if not isinstance(step, dict):
                    await self._sleep(step)
                    continue
                try:
                    answer = await self._http.request(**step)
                except httpx.TransportError as error:
                    answer = error
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            exchange.close()

    async def _ask(self, call: Call[T]) -> T:
        return await self._run(self._asking(call))

    async def _post(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> list[str]:
        return await self._run(self._posting(groups, alone=alone))

    async def register(self, *, takeover: bool = False, **fields: Any) -> dict[str, Any]:
        """Registers as the trainer."""
        reply = await self._ask(calls.register(takeover, self.trainer_id, fields))
        self.trainer_id = reply.get("trainer_id")
        return reply

    async def register_env(self, **fields: Any) -> dict[str, Any]:
        """Registers as an environment."""
        return await self._ask(calls.register_env(fields))

    async def info(self) -> dict[str, Any]:
        """What the trainer wants."""
        return await self._ask(calls.get("/info"))

    async def status(self) -> dict[str, Any]:
        """How far training is and how much is queued."""
        return await self._ask(calls.get("/status"))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """How much is queued, as this environment should see it."""
        return await self._ask(calls.get("/status-env", env_id=env_id))

    async def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Leaves."""
        return await self._ask(calls.post("/disconnect-env", {"env_id": env_id}))

    async def post_group(self, group: ScoredDataGroup) -> str | None:
        """Posts one group."""
        names = await self._post([group], alone=True)
        return names[0] if names else None

    async def post_groups(self, groups: Sequence[ScoredDataGroup]) -> list[str]:
        """Posts groups."""
        return await self._post(groups)

    async def post_left(self) -> None:
        """Posts what lies in the spool still."""
        await self._post(())

    async def batch(
        self,
        *,
        groups: int | None = None,
        wait_seconds: float = 0.0,
        lease_seconds: float | None = None,
        trainer: str | None = None,
        partial: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        step: int | None = None,
    ) -> Batch | None:
        """Asks for the next batch."""
        trainer = trainer or self.trainer_id
        share = {"rank": rank, "world_size": world_size, "step": step}
        return await self._ask(calls.batch(groups, wait_seconds, lease_seconds, trainer, partial, share))

    async def ack(self, batch_id: str, rank: int | None = None) -> dict[str, Any]:
        """Says that a leased batch, or this rank's part of one, was used."""
        return await self._ask(calls.ack(batch_id, rank))

    async def nack(self, batch_id: str, drop: bool = False, reason: str = "") -> dict[str, Any]:
        """Gives a leased batch back, or drops it."""
        return await self._ask(calls.post("/nack", {"batch_id": batch_id, "drop": drop, "reason": reason}))

    async def extend(self, batch_id: str, lease_seconds: float) -> dict[str, Any]:
        """Keeps a leased batch for so many seconds from now."""
        return await self._ask(calls.post("/extend", {"batch_id": batch_id, "lease_seconds": lease_seconds}))

    async def policy(
        self,
        after: int | None = None,
        wait_seconds: float = 0.0,
        env_id: int | None = None,
        holding: Iterable[int] | None = None,
        registration: str | None = None,
    ) -> Policy:
        """Asks for the newest version of the policy."""
        return await self._ask(calls.policy(after, wait_seconds, env_id, holding, registration))

    async def publish_policy(
        self, *, force: bool = False, trainer: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Publishes a version."""
        return await self._ask(calls.publish(force, trainer or self.trainer_id, fields))

    async def finish(self, run: str) -> dict[str, Any]:
        """Says that this run has ended."""
        return await self._ask(calls.publish(False, self.trainer_id, {"run": run, "finished": True}))

    async def health(self) -> dict[str, Any]:
        """Whether all is well at the server."""
        return await self._ask(calls.get("/health"))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()
        if self.spool is not None:
            self.spool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
