"""The form in which a client takes its answers: JSON or msgpack; plain, gzip or zstd."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_gym.batch_server.bodies.codings import squeezer
from atropos_gym.batch_server.bodies.msgpack import MSGPACK, pack

__all__ = ["LARGE_BYTES", "Form", "Formed"]

SMALL_BYTES = 1000
"""Shorter answers are not worth a coding."""

LARGE_BYTES = 2**20
"""Longer ones, and larger groups, are put into their form in a thread."""

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Form:
    """What a client asks for.

    Attributes:
        coding: ``zstd``, ``gzip``, or None for neither.
        packed: msgpack in place of JSON.
    """

    coding: str | None = None
    packed: bool = False

    @classmethod
    def of(cls, headers: Headers) -> Self:
        """Reads ``Accept-Encoding`` and ``Accept``."""
        encodings, types = (",".join(headers.getlist(name)) for name in ("accept-encoding", "accept"))
        return cls(_coding(encodings), _packed(types))

    @property
    def headers(self) -> dict[str, str]:
        """What the answer says of its type."""
        return {"content-type": MSGPACK if self.packed else JSON, "vary": "accept, accept-encoding"}


class Formed:
    """Puts every answer that comes whole into the form that its client asks for.

    Answers that are sent in pieces, or are in a coding already, go out as they are.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on and changes its answer."""
        form = Form.of(Headers(scope=scope)) if scope["type"] == "http" else Form()
        if form != Form():
            send = _Formed(form, send)
        await self.app(scope, receive, send)


class _Formed:
    """One answer on its way: its head waits for its body, whose length it says."""

    def __init__(self, form: Form, send: Send) -> None:
        self.form = form
        self.send = send
        self._head: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if (head := self._head) is not None:
            self._head = None
            headers = MutableHeaders(raw=list(head["headers"]))
            if not message.get("more_body", False) and "content-encoding" not in headers:
                message = {**message, "body": await self._body(message.get("body", b""), headers)}
                head = {**head, "headers": headers.raw}
            await self.send(head)
        await self.send(message)

    async def _body(self, body: bytes, headers: MutableHeaders) -> bytes:
        packed = self.form.packed and headers.get("content-type", "") == JSON
        coding = self.form.coding if len(body) >= SMALL_BYTES else None
        if not packed and coding is None:
            return body
        if len(body) > LARGE_BYTES:
            formed = await asyncio.to_thread(_in_form, body, coding, packed=packed)
        else:
            formed = _in_form(body, coding, packed=packed)
        headers["content-length"] = str(len(formed))
        headers.add_vary_header("accept, accept-encoding")
        if packed:
            headers["content-type"] = MSGPACK
        if coding is not None:
            headers["content-encoding"] = coding
        return formed


def _in_form(body: bytes, coding: str | None, *, packed: bool) -> bytes:
    if packed:
        body = pack(from_json(body))
    if coding is None:
        return body
    stream = squeezer(coding)
    return stream.compress(body) + stream.flush()


@lru_cache(256)
def _coding(accepted: str) -> str | None:
    """The best coding of an ``Accept-Encoding``; where it is indifferent, the one that is smaller sooner.

    >>> _coding("gzip, deflate, br, zstd"), _coding("gzip;q=1, zstd;q=0.5"), _coding("br, zstd;q=0")
    ('zstd', 'gzip', None)
    """
    weights = _weights(accepted)
    # Whoever takes anything may not know zstd: gzip is what everyone reads.
    gzip = max(weights.get("gzip", weights.get("*", 0.0)), weights.get("x-gzip", 0.0))
    offers = {"zstd": weights.get("zstd", 0.0), "gzip": gzip}
    best = max(offers, key=lambda name: offers[name])
    return best if offers[best] > 0.0 and offers[best] >= weights.get("identity", 0.0) else None


@lru_cache(256)
def _packed(accepted: str) -> bool:
    """Whether an ``Accept`` names msgpack, and does not like JSON better.

    >>> _packed("application/msgpack, */*;q=0.1"), _packed("application/json, application/msgpack;q=0.5")
    (True, False)
    """
    weights = _weights(accepted)
    json = weights.get(JSON, weights.get("application/*", weights.get("*/*", 0.0)))
    return (weight := weights.get(MSGPACK, 0.0)) > 0.0 and weight >= json


def _weights(header: str) -> dict[str, float]:
    """Names of a header with their weights; one whose weight cannot be read counts as refused."""
    weights: dict[str, float] = {}
    for part in header.lower().split(","):
        name, *parameters = (word.strip() for word in part.split(";"))
        weights[name] = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                weights[name] = _weight(value.strip())
    return weights


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0.0 <= weight <= 1.0 else 0.0
