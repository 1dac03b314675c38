"""One HTTP server, seen from an engine: a try at a time, told apart by what another try could change.

Knows no engine's bodies. A transport error, a 5xx and 429 may pass (``Passing``); every other status is an
answer that asking again would not change.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from atropos_gym._urls import is_loopback, without_token
from atropos_gym.errors import ConfigError

__all__ = ["Answer", "Endpoint", "Passing", "RetryPolicy", "Told"]

#: Seconds; a uvicorn server closes an idle connection after 5, and a request sent at that moment is lost.
_KEEP_IDLE = 4.0
_CONNECT_SECONDS = 10.0
_MOST_DOUBLINGS = 30


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer that another try would not change.

    Attributes:
        status: HTTP status.
        body: as it came.
    """

    status: int
    body: bytes

    @property
    def data(self) -> Any:
        """The body as JSON, or as text where it is none; NaN and Infinity are read, to be refused by name."""
        try:
            return orjson.loads(self.body)
        except ValueError:
            pass
        try:
            return json.loads(self.body)
        except ValueError:
            return self.body.decode("utf-8", "replace")

    @property
    def message(self) -> str:
        """What the server says is wrong: vLLM's ``error.message``, else the body's beginning."""
        return _said(self.data)


class Told(Answer):
    """An answer that was translated, or never was bytes."""

    __slots__ = ("_told",)

    def __init__(self, status: int, data: Any) -> None:
        super().__init__(status, b"")
        object.__setattr__(self, "_told", data)

    _told: Any

    @property
    def data(self) -> Any:
        """What is told."""
        return self._told


def _said(data: Any) -> str:
    if isinstance(data, dict):
        error = data.get("error")
        if isinstance(error, dict) and error.get("message"):
            return str(error["message"])
        if error or data.get("message"):
            return str(error or data["message"])
        return orjson.dumps(data).decode()[:300]
    return str(data)[:300]


class Passing(Exception):
    """A try failed in a way that may pass.

    Attributes:
        reason: ``connection`` or the status, as it is counted.
        after: seconds that the server asks to wait, or None.
        answer: what it said, or None.
    """

    def __init__(
        self, message: str, reason: str, *, after: float | None = None, answer: Answer | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.after = after
        self.answer = answer


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and after which pauses a failed try is repeated.

    Args:
        retries: tries after the first.
        first_pause: seconds before the second try; doubled each time, and shortened at random by up to half.
        longest_pause: seconds, also for what ``Retry-After`` asks.

    Example:
        >>> RetryPolicy(retries=2, first_pause=0.0).pause(1, None)
        0.0
    """

    retries: int = 4
    first_pause: float = 0.5
    longest_pause: float = 60.0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"retries must be >= 0, got {self.retries}")
        if not self.first_pause >= 0:
            raise ConfigError(f"retry_pause must be >= 0 seconds, got {self.first_pause}")

    def pause(self, tries: int, after: float | None) -> float:
        """Seconds to wait after ``tries`` failed ones, or what the server asked for."""
        if after is not None:
            return min(after, self.longest_pause)
        doublings = min(tries - 1, _MOST_DOUBLINGS)  # of a server that is gone for days there are many tries
        seconds = min(self.first_pause * 2.0**doublings, self.longest_pause)
        return seconds * random.uniform(0.5, 1.0)


class Endpoint:
    """A server at one URL. All its methods run on one event loop.

    Each connection has a client of its own, the one used last is used next: httpx looks at every connection
    of a shared pool for every request, which costs milliseconds where hundreds are open.

    Args:
        url: where it is, without a path; ``http://NAME:PASSWORD@host`` is asked with them.
        api_key: sent as a bearer token, in place of a name and password.
        transport: instead of the network, for tests.

    Attributes:
        url: where it is, as it can be shown.
        below: ``/v1`` where the URL ended with it, else nothing.
        running: requests on their way.
        seen: it answered before.
        down: connections fail; set by whoever notices, cleared by any answer.

    Raises:
        ConfigError: no URL.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        parts = _parts(url)
        whole = without_token(str(parts))
        self.url = whole.removesuffix("/v1")
        self.below = whole.removeprefix(self.url)
        self.running = 0
        self.seen = False
        self.down = False
        self._transport = transport
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        auth = (parts.username, parts.password) if parts.userinfo else None
        if api_key:
            self._headers["Authorization"], auth = f"Bearer {api_key}", None
        self._options: dict[str, Any] = {
            "transport": transport,
            "auth": auth,
            "trust_env": not is_loopback(parts.host),  # no proxy for this machine
            "limits": httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_IDLE),
        }
        self._urls: dict[str, httpx.URL] = {}
        self._clients: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Tries once.

        Raises:
            Passing: no connection, no whole answer, 429 or 5xx.
        """
        request = self._request(method, path, None if body is None else orjson.dumps(body))
        client = self._free.pop() if self._free else self._new_client()
        self.running += 1
        try:
            response = await client.send(request)
        except (httpx.RequestError, httpx.StreamError, OSError) as error:
            message = f"no answer from {self.url}: {error or type(error).__name__}; is the server running?"
            raise Passing(message, "connection") from error
        finally:
            self.running -= 1
            self._free.append(client)
        self.seen, self.down = True, False
        answer = Answer(response.status_code, response.content)
        if answer.status == 429 or answer.status >= 500:
            raise Passing(
                f"{self.url}{path} fails: {answer.status} {answer.message}",
                str(answer.status),
                after=_retry_after(response.headers.get("retry-after", "")),
                answer=answer,
            )
        return answer

    def _request(self, method: str, path: str, content: bytes | None) -> httpx.Request:
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = httpx.URL(self.url + path)
        timeout = {"connect": _CONNECT_SECONDS, "read": None, "write": None, "pool": None}  # callers have one
        return httpx.Request(
            method, url, headers=self._headers, content=content, extensions={"timeout": timeout}
        )

    def _new_client(self) -> httpx.AsyncClient:
        if self._transport is None and "verify" not in self._options:
            self._options["verify"] = httpx.create_ssl_context()  # slow to make, and the same for all
        client = httpx.AsyncClient(**self._options)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        clients, self._clients, self._free = self._clients, [], []
        for client in clients:
            await client.aclose()


def _parts(url: str) -> httpx.URL:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL:
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        shown = url.rpartition("@")[2]  # what stands before it may be a password
        raise ConfigError(f"an engine's URL is such as http://127.0.0.1:8000, got {shown!r}")
    return parts


def _retry_after(header: str) -> float | None:
    """Seconds of a ``Retry-After`` header; a date is not worth reading for a wait of seconds."""
    try:
        seconds = float(header)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
