"""Clients of the batch server, blocking and asynchronous, with the same method names.

They try again where the server cannot be reached or fails, with growing pauses, and raise where it refuses:
``GroupRefused`` for groups, ``ServerError`` for the rest. Nothing goes through a proxy to this machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from atropos_gym.batch_server import _calls as calls
from atropos_gym.batch_server._calls import Batch, Call
from atropos_gym.batch_server._group_bodies import MSGPACK
from atropos_gym.batch_server._parcels import ListParcel, OneParcel, Parcel, SpooledParcel
from atropos_gym.batch_server.hosts import TOKEN_VARIABLE, is_loopback, without_token
from atropos_gym.batch_server.spool import Spool
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.wire import Policy, ScoredDataGroup

__all__ = ["AsyncBatchClient", "Batch", "BatchClient", "without_token"]

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 30.0

RETRIED = (408, 425, 429)
"""Statuses below 500 that are worth another try: too slow, too early, too often."""


def _too_full(error: ServerError) -> ServerError:
    message = f"{error}: the spool is full, the newest are not"
    return ServerError(message, status=error.status, detail=error.detail)


class _Attempts:
    """Decides after each failed try whether and when there is another one."""

    def __init__(self, url: str, retry_seconds: float | None, longest_pause: float) -> None:
        self._url = url
        self._retry_seconds = retry_seconds
        self._longest_pause = longest_pause
        self._waited = 0.0
        self._pause = min(FIRST_PAUSE, longest_pause)

    def pause(self, failure: httpx.TransportError | httpx.Response) -> float:
        """Seconds until the next try; raises ``ServerError`` where there has been enough of it."""
        seconds = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(2 * self._pause, self._longest_pause)
        if isinstance(failure, httpx.Response) and failure.headers.get("retry-after", "").isdigit():
            seconds = float(failure.headers["retry-after"])
        self._waited += seconds
        if self._retry_seconds is not None and self._waited > self._retry_seconds:
            raise self._error(failure)
        return seconds

    def _error(self, failure: httpx.TransportError | httpx.Response) -> ServerError:
        if isinstance(failure, httpx.Response):
            message = f"batch server at {self._url} fails: {failure.status_code} {failure.text[:200]}"
            return ServerError(message, status=failure.status_code)
        reason = str(failure) or type(failure).__name__
        return ServerError(f"no answer from {self._url}: {reason}; is it running (`atropos-gym serve`)?")


class _Client:
    """What both clients share: where the server is, how requests look, and where groups are kept."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float,
        retry_seconds: float | None,
        longest_pause: float,
        spool: str | Path | Spool | None,
    ) -> None:
        parts = httpx.URL(url)
        if parts.scheme not in ("http", "https") or not parts.host:
            shown = url.rpartition("@")[2]  # what stands before it may be a token
            raise ConfigError(f"server must be a URL such as http://127.0.0.1:8000, got {shown!r}")
        headers = {"Accept-Encoding": "identity"}
        auth = (parts.username, parts.password) if parts.userinfo else None
        token = token or (os.environ.get(TOKEN_VARIABLE) if auth is None else None)
        if token:
            headers["Authorization"], auth = f"Bearer {token}", None
        self.url = without_token(url)
        self.trainer_id: str | None = None
        self.spool = spool if isinstance(spool, Spool | None) else Spool(spool)
        self._timeout = timeout
        self._retry_seconds = retry_seconds
        self._longest_pause = longest_pause
        self._packed = False  # whether the server reads msgpack: it says so in its answers to environments
        # Replies are not compressed: on one machine that costs more than it saves.
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "trust_env": not is_loopback(parts.host),
            "headers": headers,
            "auth": auth,
        }

    def _attempts(self) -> _Attempts:
        return _Attempts(self.url, self._retry_seconds, self._longest_pause)

    def _parcel(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> Parcel:
        if self.spool is not None:
            return SpooledParcel(self.spool, groups, alone=alone)
        return OneParcel(groups) if alone else ListParcel(groups)

    def _failed(self, call: Call[Any], response: httpx.Response) -> bool:
        """Whether an answer is worth another try; notes what it says of the server."""
        if forms := response.headers.get("accept-post"):
            self._packed = MSGPACK in forms
        status = response.status_code
        if status == 415:  # it says otherwise now
            self._packed = False
        return (status >= 500 or status in RETRIED) and status not in call.final

    def _request(self, call: Call[T]) -> dict[str, Any]:
        headers = dict(call.headers)
        if call.content is not None:
            headers["Content-Type"] = call.media_type
        return {
            "method": call.method,
            "url": call.path,
            "params": call.query(),
            "content": call.content,
            "headers": headers,
            "timeout": self._timeout + call.wait_seconds,
        }


class BatchClient(_Client):
    """Speaks to a batch server.

    Args:
        url: where it is; ``http://x:TOKEN@host:8000`` carries a token.
        token: opens the server where it asks for one; by default the one in the URL, else what the
            environment's variable ``ATROPOS_GYM_TOKEN`` says.
        timeout: seconds until an answer must have come, besides what the server may hold the request for.
        retry_seconds: how long to try again in all where there is no answer or a 5xx; None is for ever.
        longest_pause: between two tries, unless the server says how long (``Retry-After``).
        spool: folder, or :class:`Spool`, in which groups lie until the server has them: what this process
            could not post, the next one with the same folder posts first. None keeps nothing.
        transport: another way to reach it, such as ``httpx.MockTransport``.
        sleep: how to pause.

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
    ) -> None:
        super().__init__(url, token, timeout, retry_seconds, longest_pause, spool)
        self._http = httpx.Client(transport=transport, **self._options)
        self._sleep = sleep

    def _run(self, call: Call[T]) -> T:
        attempts = self._attempts()
        failure: httpx.TransportError | httpx.Response
        while True:
            try:
                response = self._http.request(**self._request(call))
                if not self._failed(call, response):
                    return call.result(response)
                failure = response
            except httpx.TransportError as error:
                failure = error
                self._packed = False  # who answers next may be another server
            self._sleep(attempts.pause(failure))

    def register(self, *, takeover: bool = False, **fields: Any) -> dict[str, Any]:
        """Registers as the trainer (fields of ``Registration``); later calls carry the id that it gets."""
        reply = self._run(calls.register(takeover, self.trainer_id, fields))
        self.trainer_id = reply.get("trainer_id")
        return reply

    def register_env(self, **fields: Any) -> dict[str, Any]:
        """Registers as an environment (fields of ``EnvRegistration``); see ``status`` in the reply."""
        return self._run(calls.register_env(fields))

    def info(self) -> dict[str, Any]:
        """What the trainer wants."""
        return self._run(calls.get("/info"))

    def status(self) -> dict[str, Any]:
        """How far training is and how much is queued."""
        return self._run(calls.get("/status"))

    def status_env(self, env_id: int) -> dict[str, Any]:
        """How much is queued, as this environment should see it."""
        return self._run(calls.get("/status-env", env_id=env_id))

    def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Leaves; any later call of this environment connects it again."""
        return self._run(calls.post("/disconnect-env", {"env_id": env_id}))

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

    def _post(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> list[str]:
        if groups and self.spool is not None and self.spool.full:
            try:
                self.post_left()
            except ServerError as error:
                raise _too_full(error) from error
        with self._parcel(groups, alone=alone) as parcel:
            while not parcel.empty:
                try:
                    if (call := parcel.next(packed=self._packed)) is not None:
                        parcel.accepted(self._run(call))
                except ServerError as error:
                    parcel.refused(error)
        return parcel.close()

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
        return self._run(calls.batch(groups, wait_seconds, lease_seconds, trainer, partial, share))

    def ack(self, batch_id: str, rank: int | None = None) -> dict[str, Any]:
        """Says that a leased batch, or this rank's part of one, was used."""
        return self._run(calls.ack(batch_id, rank))

    def nack(self, batch_id: str, drop: bool = False, reason: str = "") -> dict[str, Any]:
        """Gives a leased batch back to the head of the queue, or drops it."""
        return self._run(calls.post("/nack", {"batch_id": batch_id, "drop": drop, "reason": reason}))

    def extend(self, batch_id: str, lease_seconds: float) -> dict[str, Any]:
        """Keeps a leased batch for so many seconds from now."""
        return self._run(calls.post("/extend", {"batch_id": batch_id, "lease_seconds": lease_seconds}))

    def policy(
        self,
        after: int | None = None,
        wait_seconds: float = 0.0,
        env_id: int | None = None,
        holding: Iterable[int] | None = None,
    ) -> Policy:
        """Asks for the newest version of the policy.

        Args:
            after: wait for a version above this one.
            wait_seconds: how long the server may wait for it, 0 to 600; then it gives the current one.
            env_id: who asks.
            holding: versions that the asking service still uses; None says nothing about it.
        """
        return self._run(calls.policy(after, wait_seconds, env_id, holding))

    def publish_policy(self, *, force: bool = False, **fields: Any) -> dict[str, Any]:
        """Publishes a version (fields of ``PolicyUpdate``)."""
        return self._run(calls.publish(force, fields))

    def finish(self, run: str) -> dict[str, Any]:
        """Says that this run has ended: services stop."""
        return self._run(calls.publish(False, {"run": run, "finished": True}))

    def health(self) -> dict[str, Any]:
        """Whether all is well at the server."""
        return self._run(calls.get("/health"))

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


class AsyncBatchClient(_Client):
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
    ) -> None:
        super().__init__(url, token, timeout, retry_seconds, longest_pause, spool)
        self._http = httpx.AsyncClient(transport=transport, **self._options)
        self._sleep = sleep

    async def _run(self, call: Call[T]) -> T:
        attempts = self._attempts()
        failure: httpx.TransportError | httpx.Response
        while True:
            try:
                response = await self._http.request(**self._request(call))
                if not self._failed(call, response):
                    return call.result(response)
                failure = response
            except httpx.TransportError as error:
                failure = error
                self._packed = False  # who answers next may be another server
            await self._sleep(attempts.pause(failure))

    async def register(self, *, takeover: bool = False, **fields: Any) -> dict[str, Any]:
        """Registers as the trainer."""
        reply = await self._run(calls.register(takeover, self.trainer_id, fields))
        self.trainer_id = reply.get("trainer_id")
        return reply

    async def register_env(self, **fields: Any) -> dict[str, Any]:
        """Registers as an environment."""
        return await self._run(calls.register_env(fields))

    async def info(self) -> dict[str, Any]:
        """What the trainer wants."""
        return await self._run(calls.get("/info"))

    async def status(self) -> dict[str, Any]:
        """How far training is and how much is queued."""
        return await self._run(calls.get("/status"))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """How much is queued, as this environment should see it."""
        return await self._run(calls.get("/status-env", env_id=env_id))

    async def disconnect_env(self, env_id: int) -> dict[str, Any]:
        """Leaves."""
        return await self._run(calls.post("/disconnect-env", {"env_id": env_id}))

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

    async def _post(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> list[str]:
        if groups and self.spool is not None and self.spool.full:
            try:
                await self.post_left()
            except ServerError as error:
                raise _too_full(error) from error
        with self._parcel(groups, alone=alone) as parcel:
            while not parcel.empty:
                try:
                    if (call := parcel.next(packed=self._packed)) is not None:
                        parcel.accepted(await self._run(call))
                except ServerError as error:
                    parcel.refused(error)
        return parcel.close()

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
        return await self._run(calls.batch(groups, wait_seconds, lease_seconds, trainer, partial, share))

    async def ack(self, batch_id: str, rank: int | None = None) -> dict[str, Any]:
        """Says that a leased batch, or this rank's part of one, was used."""
        return await self._run(calls.ack(batch_id, rank))

    async def nack(self, batch_id: str, drop: bool = False, reason: str = "") -> dict[str, Any]:
        """Gives a leased batch back, or drops it."""
        return await self._run(calls.post("/nack", {"batch_id": batch_id, "drop": drop, "reason": reason}))

    async def extend(self, batch_id: str, lease_seconds: float) -> dict[str, Any]:
        """Keeps a leased batch for so many seconds from now."""
        return await self._run(calls.post("/extend", {"batch_id": batch_id, "lease_seconds": lease_seconds}))

    async def policy(
        self,
        after: int | None = None,
        wait_seconds: float = 0.0,
        env_id: int | None = None,
        holding: Iterable[int] | None = None,
    ) -> Policy:
        """Asks for the newest version of the policy."""
        return await self._run(calls.policy(after, wait_seconds, env_id, holding))

    async def publish_policy(self, *, force: bool = False, **fields: Any) -> dict[str, Any]:
        """Publishes a version."""
        return await self._run(calls.publish(force, fields))

    async def finish(self, run: str) -> dict[str, Any]:
        """Says that this run has ended."""
        return await self._run(calls.publish(False, {"run": run, "finished": True}))

    async def health(self) -> dict[str, Any]:
        """Whether all is well at the server."""
        return await self._run(calls.get("/health"))

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
