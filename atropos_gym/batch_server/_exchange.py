"""What clients say to a server and hear from it, as generators: nothing here sends, waits or knows how.

An exchange yields what is to be done next, a request (keywords of httpx's ``request``) or a pause in seconds,
and is sent the answer to the request: a response, or the error that came in its place. The blocking client
and the asynchronous one both do what the same exchange says::

    step = exchange.send(None)
    ...  # carry it out
    step = exchange.send(answer)  # until StopIteration, which carries the result
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from atropos_gym.batch_server._calls import Call
from atropos_gym.batch_server._doubt import may_have_arrived
from atropos_gym.batch_server._group_bodies import MSGPACK
from atropos_gym.batch_server._parcels import ListParcel, OneParcel, Parcel, SpooledParcel
from atropos_gym.batch_server.hosts import TOKEN_VARIABLE, is_loopback, without_token
from atropos_gym.batch_server.spool import Spool
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.wire import ScoredDataGroup

__all__ = ["Again", "Answer", "Exchange", "Exchanges", "Step"]

T = TypeVar("T")

Step = dict[str, Any] | float
Answer = httpx.Response | httpx.TransportError
Again = Callable[[ServerError, int, float], None]
Exchange = Generator[Step, Answer | None, T]

FIRST_PAUSE = 0.1

RETRIED = (408, 425, 429)
"""Statuses below 500 that are worth another try: too slow, too early, too often."""


class Exchanges:
    """What both clients share: where the server is, how requests look, and where groups are kept."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout: float,
        retry_seconds: float | None,
        longest_pause: float,
        spool: str | Path | Spool | None,
        clock: Callable[[], float],
        again: Again | None = None,
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
        self._clock = clock
        self._again = again
        self._packed = False  # whether the server reads msgpack: it says so in its answers to environments
        # Replies are not compressed: on one machine that costs more than it saves.
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "trust_env": not is_loopback(parts.host),
            "headers": headers,
            "auth": auth,
        }

    def _asking(self, call: Call[T]) -> Exchange[T]:
        """One request, again and again until it is answered."""
        attempts = _Attempts(self.url, self._retry_seconds, self._longest_pause, self._clock)
        while True:
            if call.doubt is not None:
                call.doubt.begin(self._clock())
            answer = yield self._request(call)
            assert answer is not None, "a request is answered by a response or an error"
            fails = self._failed(call, answer)
            if call.doubt is not None and (fails or not _succeeds(answer)):
                call.doubt.failed(maybe=may_have_arrived(answer))
            if not fails and isinstance(answer, httpx.Response):
                return call.result(answer)
            yield attempts.pause(answer)
            if self._again is not None:
                self._again(attempts.error(answer), attempts.failed, attempts.waited)

    def _posting(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> Exchange[list[str]]:
        """All requests that bring groups to the server, and those that were left before."""
        if groups and self.spool is not None and self.spool.full:
            try:
                yield from self._posting(())
            except ServerError as error:
                raise _too_full(error) from error
        with self._parcel(groups, alone=alone) as parcel:
            while not parcel.empty:
                try:
                    if (call := parcel.next(packed=self._packed)) is not None:
                        parcel.accepted((yield from self._asking(call)))
                except ServerError as error:
                    parcel.refused(error)
        return parcel.close()

    def _parcel(self, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> Parcel:
        if self.spool is not None:
            return SpooledParcel(self.spool, groups, alone=alone)
        return OneParcel(groups) if alone else ListParcel(groups)

    def _failed(self, call: Call[Any], answer: Answer) -> bool:
        """Whether another try is worth it; notes what the answer says of the server."""
        if not isinstance(answer, httpx.Response):
            self._packed = False  # who answers next may be another server
            return True
        if forms := answer.headers.get("accept-post"):
            self._packed = MSGPACK in forms
        status = answer.status_code
        if status == 415:  # it says otherwise now
            self._packed = False
        return (status >= 500 or status in RETRIED) and status not in call.final

    def _request(self, call: Call[Any]) -> dict[str, Any]:
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


class _Attempts:
    """Decides after each failed try whether and when there is another one.

    Attributes:
        failed: how many tries have failed.
        waited: seconds from the first failure to the end of the last pause; a try that hangs counts too.
    """

    def __init__(
        self, url: str, retry_seconds: float | None, longest_pause: float, clock: Callable[[], float]
    ) -> None:
        self._url = url
        self._retry_seconds = retry_seconds
        self._longest_pause = longest_pause
        self._clock = clock
        self._next_pause = min(FIRST_PAUSE, longest_pause)
        self._paused = 0.0  # after the failure before
        self._failed_at = 0.0
        self.failed = 0
        self.waited = 0.0

    def pause(self, failure: Answer) -> float:
        """Seconds until the next try; raises ``ServerError`` where there has been enough of it."""
        now = self._clock()
        if self.failed:
            self.waited += max(0.0, now - self._failed_at - self._paused)
        self.failed, self._failed_at = self.failed + 1, now
        seconds = self._next_pause * random.uniform(0.5, 1.0)
        self._next_pause = min(2 * self._next_pause, self._longest_pause)
        if isinstance(failure, httpx.Response) and failure.headers.get("retry-after", "").isdigit():
            seconds = float(failure.headers["retry-after"])
        self._paused = seconds
        self.waited += seconds
        if self._retry_seconds is not None and self.waited > self._retry_seconds:
            raise self.error(failure)
        return seconds

    def error(self, failure: Answer) -> ServerError:
        """What a failure is, in words."""
        if isinstance(failure, httpx.Response):
            message = f"batch server at {self._url} fails: {failure.status_code} {failure.text[:200]}"
            return ServerError(message, status=failure.status_code)
        reason = str(failure) or type(failure).__name__
        return ServerError(f"no answer from {self._url}: {reason}; is it running (`atropos-gym serve`)?")


def _succeeds(answer: Answer) -> bool:
    return isinstance(answer, httpx.Response) and answer.is_success


def _too_full(error: ServerError) -> ServerError:
    message = f"{error}: the spool is full, the newest are not"
    return ServerError(message, status=error.status, detail=error.detail)
