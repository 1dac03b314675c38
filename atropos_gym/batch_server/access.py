"""Who may ask: a ``Host`` that is ours, no page of another site, and a token where one is set."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atropos_gym.batch_server.hosts import TOKEN_VARIABLE, is_loopback
from atropos_gym.errors import ConfigError

__all__ = ["ENV_TOKEN_VARIABLE", "Access", "Guard"]

ENV_TOKEN_VARIABLE = "ATROPOS_GYM_ENV_TOKEN"  # noqa: S105  # the name of a variable, not a token

OPEN_PATHS = ("/", "/health")
"""What anyone may read: that this is a batch server, and whether it works."""

PAGE = "/dashboard"
"""What a link on any page may lead to: it only reads, and shows itself to nobody but the one who looks."""

ENV_CALLS = frozenset(
    (
        *(
            ("POST", path)
            for path in ("/register-env", "/disconnect-env", "/scored_data", "/scored_data_list")
        ),
        *(("GET", path) for path in ("/status-env", "/info", "/wandb_info", "/policy")),
    )
)
"""What an environment's own token is good for."""

CORS_SECONDS = 600
"""How long a browser may remember that an origin is allowed."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask what.

    Attributes:
        token: opens everything; None asks for no token at all.
        env_token: opens only what environments call; needs ``token``.
        cors_origins: pages of these origins, such as ``https://board.example``, may ask too; ``"*"`` is any.

    Raises:
        ConfigError: a token or an origin that no header could carry.
    """

    token: str | None = None
    env_token: str | None = None
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("token", self.token), ("env_token", self.env_token)):
            if value is not None and not (value and all("!" <= one <= "~" for one in value)):
                raise ConfigError(f"{name} must be one word of visible ASCII characters, without blanks")
        if self.env_token is not None and self.token is None:
            raise ConfigError(
                "env_token is set but token is not: the routes of trainers would be open; set both"
            )
        if self.env_token is not None and self.env_token == self.token:
            raise ConfigError("env_token equals token: leave it out, or choose another one")
        for origin in self.cors_origins:
            netloc = _netloc(origin)
            if origin != "*" and not (netloc and origin.partition("://")[2].lower() == netloc):
                raise ConfigError(f"cors_origin must be such as https://board.example, got {origin!r}")

    @classmethod
    def find(
        cls, token: str | None = None, env_token: str | None = None, cors_origins: Sequence[str] = ()
    ) -> Self:
        """Takes the tokens that are given, else those of the environment's variables."""
        return cls(
            token if token is not None else os.environ.get(TOKEN_VARIABLE) or None,
            env_token if env_token is not None else os.environ.get(ENV_TOKEN_VARIABLE) or None,
            tuple(cors_origins),
        )

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may ask."""
        return "*" in self.cors_origins or origin.lower() in map(str.lower, self.cors_origins)


class Guard:
    """Lets in who may ask.

    A page can make a browser send requests to loopback, and after DNS rebinding only the ``Host`` header
    shows where they came from. A token, which no foreign page knows, makes up for that header. There is no
    CORS but for origins that were named.

    Args:
        app: what is protected.
        hosts: names besides loopback's that ``Host`` may carry; ``"*"`` is any.
        access: tokens and origins.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...] = (), access: Access | None = None) -> None:
        self.app = app
        self.access = access or Access()
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers 400, 401 or 403, or passes the request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        foreign = _foreign(headers) and not _follows_link(scope, headers)
        welcome = origin if foreign and origin is not None and self.access.allows(origin) else None
        if welcome is not None:
            send = _with_cors(send, welcome)
        if (refusal := self._refusal(scope, headers, foreign=foreign and welcome is None)) is not None:
            await refusal(scope, receive, send)
        elif welcome is not None and scope["method"] == "OPTIONS":
            await Response(status_code=204)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers, *, foreign: bool) -> Response | None:
        """The answer to who may not ask; None where one may."""
        if len(headers.getlist("host")) > 1:  # whoever stands before us may have looked at another one
            return JSONResponse({"detail": "more than one Host header"}, 400)
        host = headers.get("host", "")
        if self.access.token is None and not self._known(_name(host)):
            return JSONResponse({"detail": f"host {host[:100]!r} is not served here"}, 400)
        if foreign:
            origin = str(headers.get("origin"))[:100]
            return JSONResponse({"detail": f"origin {origin!r} is not allowed here"}, 403)
        if self.access.token is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        said = _token(headers.get("authorization", ""))
        if _same(said, self.access.token):
            return None
        if not _same(said, self.access.env_token):
            refusal = JSONResponse({"detail": "missing or wrong token"}, 401)
            for challenge in ("Bearer", 'Basic realm="rollouts"'):  # browsers read only one from each line
                refusal.headers.append("WWW-Authenticate", challenge)
            return refusal
        if (scope["method"], scope["path"]) in ENV_CALLS:
            return None
        call = f"{scope['method']} {scope['path']}"[:100]
        return JSONResponse({"detail": f"an environment's token is not good for {call}"}, 403)

    def _known(self, name: str) -> bool:
        return "*" in self.hosts or name in self.hosts or is_loopback(name)


def _foreign(headers: Headers) -> bool:
    """Whether a browser says that a page of another site asks."""
    origin = headers.get("origin")
    return headers.get("sec-fetch-site") == "cross-site" or (
        origin is not None and _netloc(origin) != headers.get("host", "").lower()
    )


def _follows_link(scope: Scope, headers: Headers) -> bool:
    """Whether a browser opens the page in a tab, which no script of the other site can read."""
    return (
        scope["method"] == "GET"
        and scope["path"] == PAGE
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and "origin" not in headers
    )


def _with_cors(send: Send, origin: str) -> Send:
    """Adds what a browser wants to read before it shows an answer to a page of this origin."""

    async def send_with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Allow-Methods"] = "GET, POST"
            headers["Access-Control-Allow-Headers"] = "Authorization, Content-Type, Idempotency-Key"
            headers["Access-Control-Expose-Headers"] = "X-Batch-Sequences, X-Batch-Groups, Retry-After"
            headers["Access-Control-Max-Age"] = str(CORS_SECONDS)
            headers.add_vary_header("Origin")
        await send(message)

    return send_with_cors


def _token(authorization: str) -> str:
    """What an ``Authorization`` header says: a bearer token, or the password of Basic; "" where neither."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, ValueError):
        return ""


def _same(said: str, token: str | None) -> bool:
    """Compares in a time that tells nothing of the token."""
    return token is not None and hmac.compare_digest(said.encode(), token.encode())


def _netloc(origin: str) -> str | None:
    """Host and port of an origin; None where it is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


@lru_cache(256)
def _name(host: str) -> str:
    """The name in a ``Host`` header, without port and brackets."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
