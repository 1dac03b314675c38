"""Too much is queued: senders are slowed down, and nothing of theirs is lost.

The sender of ``atroposlib`` 0.4.0 makes three attempts at most, only after 5xx and broken connections, waits
at most 1 s and 2 s between them whatever ``Retry-After`` says, and loses its group at any 4xx.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from server_tools import LocalServer, group

from atropos_gym.batch_server.batching import Plan, plan_batch
from atropos_gym.batch_server.bodies.codings import zstd
from atropos_gym.batch_server.bodies.reading import plain_groups
from atropos_gym.batch_server.client import AsyncBatchClient, BatchClient
from atropos_gym.batch_server.http import requests
from atropos_gym.batch_server.http.asgi import BODY
from atropos_gym.batch_server.limits import Limits
from atropos_gym.wire import ScoredDataGroup


def make_server(batch_size: int = 8, **limits: Any) -> LocalServer:
    """A trainer has asked once; every limit not named here is wide."""
    server = LocalServer(Limits(**limits))
    server.start(batch_size=batch_size)
    return server


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


async def pass_time(server: LocalServer, post: asyncio.Task[Any]) -> float:
    """Moves the clock second by second until a post is answered; returns the seconds."""
    start = server.clock.time()
    while not post.done():
        await pass_a_second(server)
    return server.clock.time() - start


async def pass_a_second(server: LocalServer) -> None:
    """Lets everybody do what can be done, and moves the clock where somebody waits for it."""
    for _ in range(50):
        await asyncio.sleep(0)
    if server.clock.waiting:
        server.clock.advance(1)


class OldSender:
    """What ``atroposlib``'s environments send with; ``lost`` are the groups that it gave up."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.attempts = 0
        self.lost = 0

    async def send(self, body: dict[str, Any]) -> None:
        for pause in (1.0, 2.0, None):
            self.attempts += 1
            async with self.server.http() as http:  # a new connection for each post
                reply = await http.post("/scored_data", json=body)
            if reply.status_code < 300:
                return
            if reply.status_code < 500 or pause is None:
                self.lost += 1
                return
            self.server.clock.advance(pause)


def test_beyond_the_soft_limit_the_reply_waits_and_the_group_does_not() -> None:
    server = make_server(soft_groups=1)
    server.send(tag=1)
    sender = OldSender(server)
    store = server.app.state.desk.store

    async def story() -> None:
        post = asyncio.create_task(sender.send(group(4, tag=2)))
        await until(lambda: server.app.state.desk.held_posts == 1)
        assert store.status()["queue_size"] == 2 and not post.done()
        async with server.http() as http:
            batch = (await http.get("/batch")).json()["batch"]
        assert [one["scores"][0] for one in batch] == [1, 2]
        await post

    server.run(story())
    assert (sender.attempts, sender.lost) == (1, 0)
    assert server.app.state.desk.held_posts == 0


def test_a_hold_ends_with_its_time_and_nothing_is_lost() -> None:
    server = make_server(4, soft_groups=0, hold_seconds=60)
    sender = OldSender(server)

    async def story() -> None:
        post = asyncio.create_task(sender.send(group()))
        await pass_time(server, post)

    server.run(story())
    assert (sender.attempts, sender.lost) == (1, 0)
    assert 59 <= server.app.state.desk.hold_seconds <= 61
    assert server.get("/status")["queue_size"] == 1


def test_the_same_post_again_is_answered_at_once() -> None:
    server = make_server(4, soft_groups=0, hold_seconds=60)
    headers = {"Idempotency-Key": "k"}

    async def story() -> None:
        async with server.http() as http:
            first = asyncio.create_task(http.post("/scored_data", json=group(), headers=headers))
            await until(lambda: server.app.state.desk.held_posts == 1)
            second = await http.post("/scored_data", json=group(), headers=headers)
            assert second.headers["Idempotency-Replayed"] == "true"
            server.app.state.desk.close()
            assert (await first).json() == second.json()

    server.run(story())
    assert server.get("/status")["queue_size"] == 1


@pytest.mark.parametrize(
    ("settings", "environments", "free"),
    [
        ({}, 0, 32),  # 4 batches of 8 sequences
        ({}, 1, 32),
        ({}, 2, 64),
        ({"groups_per_update": 2}, 1, 8 * 4),  # 4 batches of 2 groups
    ],
)
def test_each_environment_may_be_four_batches_ahead(
    settings: dict[str, Any], environments: int, free: int
) -> None:
    server = LocalServer(Limits())
    server.start(**settings)
    for _ in range(environments):
        server.add_env()
    store = server.app.state.desk.store
    sent = 0
    while not store.crowded:
        server.app.state.desk.closed = True  # nobody is held while the limit is sought
        server.send(4)
        sent += 4
    assert sent == free + 4


def test_nobody_is_held_while_more_groups_are_what_is_missing() -> None:
    server = make_server(10, soft_groups=0)
    server.send(4), server.send(4), server.send(4)  # 10 is no sum of these
    assert server.get("/status")["queue_size"] == 3
    by_groups = make_server(8)
    assert by_groups.get("/batch", groups=40)["batch"] is None
    for _ in range(39):  # far more than four batches of 8 sequences, and still too few
        by_groups.send(4)
    assert by_groups.get("/status")["queue_size"] == 39
    assert not by_groups.app.state.desk.store.crowded


def test_a_post_into_a_full_queue_plans_no_batch_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(sizes: list[int], *args: Any, **settings: Any) -> Plan:
        planned.append(len(sizes))
        return plan_batch(sizes, *args, **settings)

    monkeypatch.setattr("atropos_gym.batch_server.state.seeking.plan_batch", counted)
    server = make_server(8, soft_groups=3)
    store = server.app.state.desk.store
    server.app.state.desk.closed = True  # nobody is held while posts are counted
    for _ in range(20):
        server.send(4)
        assert store.crowded == (store.status()["queue_size"] > 3)
    assert len(planned) == 1, "the first two groups stay a batch, whatever comes"
    server.app.state.desk.closed = False
    assert server.get("/batch")["batch"] is not None
    assert store.crowded
    assert planned[1:] == [20, 18], "they went out"


def test_before_a_trainer_registers_nobody_is_held() -> None:
    server = LocalServer(Limits())
    for _ in range(100):
        server.send()
    assert server.get("/status")["queue_size"] == 100


def test_soft_bytes_hold_too() -> None:
    server = make_server(4, soft_bytes=100)
    assert not server.app.state.desk.store.crowded
    server.app.state.desk.closed = True
    server.send()
    assert server.app.state.desk.store.crowded


def test_beyond_the_hard_limit_the_body_stays_unread_and_is_refused_for_now() -> None:
    server = make_server(hard_bytes=0, hold_seconds=10)
    read: list[bytes] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(b"{}")
        yield b"{}"

    async def story() -> httpx.Response:
        async with server.http() as http:
            headers = {"Content-Type": "application/json"}
            post = asyncio.create_task(http.post("/scored_data", content=body(), headers=headers))
            assert await pass_time(server, post) >= 10
            return await post

    reply = server.run(story())
    assert reply.status_code == 503
    assert reply.json() == {"detail": "queue full", "retry_after": 5}
    assert reply.headers["Retry-After"] == "5"
    assert read == []
    assert server.get("/status")["queue_size"] == 0


def test_an_old_sender_outlives_a_full_server_for_three_holds() -> None:
    server = make_server(hard_bytes=0, hold_seconds=10)
    sender = OldSender(server)

    async def story() -> float:
        return await pass_time(server, asyncio.create_task(sender.send(group())))

    assert server.run(story()) >= 30
    assert (sender.attempts, sender.lost) == (3, 1)


def test_room_that_appears_while_a_post_is_held_lets_it_in() -> None:
    server = make_server()
    server.send(4), server.send(4)
    store = server.app.state.desk.store
    store.limits = Limits(hard_bytes=store.held_bytes, soft_groups=100)
    sender = OldSender(server)

    async def story() -> None:
        post = asyncio.create_task(sender.send(group(4, tag=3)))
        await until(lambda: server.app.state.desk.held_posts == 1)
        assert store.status()["queue_size"] == 2
        async with server.http() as http:
            assert len((await http.get("/batch")).json()["batch"]) == 2
        server.clock.advance(1)
        await post

    server.run(story())
    assert (sender.attempts, sender.lost) == (1, 0)
    assert server.get("/status")["queue_size"] == 1


@pytest.mark.parametrize("coding", ["identity", "zstd"])
def test_bodies_count_as_they_come_until_they_are_read(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(soft_groups=1)
    server.send(8)  # a batch can be formed: the next post is held
    desk = server.app.state.desk
    plain = json.dumps(group(8, images="x" * 200_000)).encode()
    body = plain if coding == "identity" else zstd.compress(plain)
    while_parsed: list[int] = []

    def parsed(*arguments: Any) -> Any:
        while_parsed.append(desk.arriving)
        return plain_groups(*arguments)

    monkeypatch.setattr(requests, "plain_groups", parsed)
    scopes: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], *rest: Any) -> None:
        scopes.append(scope)
        await server.app(scope, *rest)

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-1]
        assert 100_000 < desk.arriving <= len(plain)
        yield body[-1:]

    async def story() -> None:
        transport = httpx.ASGITransport(app=app)
        headers = {"Content-Type": "application/json", "Content-Encoding": coding}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            post = asyncio.create_task(http.post("/scored_data", content=pieces(), headers=headers))
            await until(lambda: desk.held_posts == 1)
            while_held = desk.arriving, scopes[0][BODY]
            desk.close()
            assert (await post).json()["status"] == "received"
            assert while_held == (0, b"")

    server.run(story())
    assert while_parsed == [len(plain)] and desk.arriving == 0


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        ("/scored_data", b"{" * 5000, {}, 422),
        ("/scored_data", b"x" * 5000, {"Content-Encoding": "gzip"}, 400),
        ("/scored_data", b"x" * 20_000, {}, 413),
        ("/scored_data", b"5", {"Idempotency-Key": "k" * 200}, 422),
        ("/register", b"{" * 5000, {}, 422),
        ("/nowhere", b"{" * 5000, {}, 404),
    ],
)
def test_refused_bodies_count_no_longer(
    path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    server = make_server(max_body_bytes=10_000)
    form = {"Content-Type": "application/json", **headers}
    assert server.call("POST", path, content=content, headers=form).status_code == status
    assert server.app.state.desk.arriving == 0


def test_leased_and_buffered_groups_count_for_the_hard_limit() -> None:
    server = make_server()
    store = server.app.state.desk.store
    env_id = server.add_env()
    server.send(4), server.send(4)
    everything = store.held_bytes
    batch_id = server.get("/batch", lease_seconds=60)["batch_id"]
    assert store.held_bytes == everything
    server.send(1, env_id=env_id)
    assert store.held_bytes > everything
    server.post("/ack", {"batch_id": batch_id})
    assert 0 < store.held_bytes < everything


def test_our_client_waits_as_it_is_told_and_sends_the_same_key() -> None:
    keys: list[str] = []
    pauses: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 20:
            headers = {"Retry-After": "5"}
            return httpx.Response(503, json={"detail": "queue full", "retry_after": 5}, headers=headers)
        return httpx.Response(200, json={"status": "received", "group_id": "g-1"})

    sent = ScoredDataGroup.model_validate(group())
    transport = httpx.MockTransport(answer)
    with BatchClient("http://x", retry_seconds=None, transport=transport, sleep=pauses.append) as client:
        assert client.post_group(sent) == "g-1"
    assert pauses == [5.0] * 19 and len(set(keys)) == 1


def test_our_client_waits_longer_than_the_server_holds() -> None:
    timeouts: list[float] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={"status": "received", "group_id": "g-1", "group_ids": ["g-1"]})

    async def story() -> None:
        async with AsyncBatchClient("http://x", transport=httpx.MockTransport(answer)) as client:
            await client.post_group(ScoredDataGroup.model_validate(group()))
            await client.post_groups([ScoredDataGroup.model_validate(group())])

    asyncio.run(story())
    assert min(timeouts) > 240
