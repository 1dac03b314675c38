"""schemathesis takes the server's own OpenAPI page at its word.

To every route it sends what follows the page and what does not: the borders of every range, absent, doubled
and foreign members, other verbs, JSON and msgpack. The answer must always be one that the page declares, by
its status, its media type, its headers and its form; never a 5xx. The requests go in turn to a server in
memory, to one with a file, and to one that wants a token, which is asked with it and without.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import httpx
import msgpack
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.access import OPEN_PATHS, Access
from atropos_gym.batch_server.clock import SystemClock
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.store import MemoryStore, SqliteStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

URL = "http://127.0.0.1:8000"
TOKEN = "secret"  # noqa: S105
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}
EXAMPLES = 10  # of each kind for each route, besides those at the borders
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 2, "max_token_len": 0, "checkpoint_dir": "c",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10,
}  # fmt: skip
ENV = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 2}
GROUP = {"tokens": [[1, 2], [1, 3]], "masks": [[-100, 2], [-100, 3]], "scores": [1.0, 0.0], "env_id": 0}
READS = ("/batch", "/latest_example", "/status", "/health", "/envs", "/metrics", "/policy", "/dashboard/data")


class Hasty(SystemClock):
    """Whoever waits finds that the time is over."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def wait(self, event: asyncio.Event, timeout: float) -> None:
        self.ahead += timeout
        await asyncio.sleep(0)


@schemathesis.serializer("application/msgpack")
def pack(context: Any, value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    except OverflowError:  # an integer that msgpack cannot say
        return b"\xc1"
    return packed


class Relay:
    """The server that is asked at the moment: all of them have the same page."""

    def __init__(self) -> None:
        self.app = create_app()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


RELAY = Relay()
PAGE = schemathesis.openapi.from_dict(RELAY.app.openapi())
PAGE.app = RELAY


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[FastAPI]]:
    """In turn: one in memory, one with a file, and one that wants a token."""
    limits = Limits(hold_seconds=0)
    with SqliteStore(tmp_path_factory.mktemp("store") / "a.sqlite", limits) as file:
        made = [
            create_app(store, clock=Hasty(), access=access)
            for store, access in (
                (MemoryStore(limits), None),
                (file, None),
                (MemoryStore(limits), Access(TOKEN)),
            )
        ]
        for app in made:
            app.state.wants_token = app is made[-1]
        yield cycle(made)


def talk(app: FastAPI, *calls: tuple[str, str, Any]) -> list[httpx.Response]:
    """Sends requests, one after the other."""

    async def work() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=WITH_TOKEN) as http:
            return [await http.request(method, path, json=body) for method, path, body in calls]

    return asyncio.run(work())


def make_busy(app: FastAPI) -> str:
    """A trainer, an environment, groups in the queue, and a batch under a lease, whose id is returned."""
    posts = [("POST", "/register?takeover=true", TRAINER), ("GET", "/batch", None)]
    posts += [("POST", "/register-env", ENV), *(("POST", "/scored_data", GROUP) for _ in range(3))]
    *_, leased = talk(app, *posts, ("GET", "/batch?lease_seconds=1000", None))
    return str(leased.json()["batch_id"])


def made_good(body: Any) -> Any:
    """A group of such sizes and free fields as came, with rows that fit each other."""
    body = copy.deepcopy(body)
    for one in body if isinstance(body, list) else [body]:
        tokens = one["tokens"] = [[int(i) for i in row] for row in one["tokens"]]
        one |= {"masks": tokens, "scores": [0.5] * len(tokens)}
        for name in ("advantages", "ref_logprobs", "inference_logprobs", "overrides", "messages"):
            one.pop(name, None)
        for name in ("distill_token_ids", "distill_logprobs"):
            one.pop(name, None)
    return body


@PAGE.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_page_declares(case: Any, servers: Iterator[FastAPI]) -> None:
    path, follows = case.operation.path, case.meta.generation.mode.is_positive
    RELAY.app = app = next(servers)
    if follows and path.startswith("/scored_data"):
        case.body = made_good(case.body)
    if follows and path in ("/ack", "/nack", "/extend"):
        case.body["batch_id"] = make_busy(app)
    reply = case.call_and_validate(base_url=URL, headers=dict(WITH_TOKEN), checks=CHECKS)
    if reply.status_code == 200 and path.startswith("/scored_data"):
        assert {one.status_code for one in talk(app, *(("GET", read, None) for read in READS))} == {200}
    if app.state.wants_token:
        refused = case.call(base_url=URL)
        assert refused.status_code == 401 or path in OPEN_PATHS or case.method == "OPTIONS", refused.text
