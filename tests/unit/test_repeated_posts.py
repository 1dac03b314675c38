"""Posts that come twice, and the forms in which groups come and go, over HTTP (sections 6.4 and 6.7)."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from server_tools import REGISTER, LocalServer, group

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.clock import ManualClock
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state import replies
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.sqlite import SqliteStore

MSGPACK = {"Content-Type": "application/msgpack"}


@pytest.fixture
def server() -> LocalServer:
    server = LocalServer()
    server.start()
    return server


def post(
    server: LocalServer, body: Any, key: str | None = None, path: str = "/scored_data"
) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    return server.call("POST", path, json=body, headers=headers)


def queued(server: LocalServer) -> int:
    return int(server.get("/status")["queue_size"])


def test_the_same_key_and_content_count_once(server: LocalServer) -> None:
    first = post(server, group(), "k-1")
    again = post(server, group(), "k-1")
    assert again.content == first.content and "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert queued(server) == 1
    post(server, group(), "k-2")
    assert queued(server) == 2


def test_a_list_is_answered_again_too(server: LocalServer) -> None:
    body = [group(tag=1.0), group(tag=2.0)]
    first = post(server, body, "k", "/scored_data_list")
    assert post(server, body, "k", "/scored_data_list").json() == first.json()
    assert queued(server) == 2


def test_the_same_key_with_other_content_is_refused(server: LocalServer) -> None:
    post(server, group(tag=1.0), "k")
    reply = post(server, group(tag=2.0), "k")
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["header", "idempotency-key"]
    assert queued(server) == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "é"])
def test_a_key_is_visible_ascii(server: LocalServer, key: str) -> None:
    reply = server.call(
        "POST", "/scored_data", json=group(), headers={"Idempotency-Key": key.encode("latin-1")}
    )
    assert (reply.status_code, queued(server)) == (422, 0)


def test_a_refused_post_may_be_corrected_under_its_key(server: LocalServer) -> None:
    assert post(server, group(masks=[]), "k").status_code == 422
    assert post(server, group(), "k").status_code == 200


def test_where_an_older_server_kept_another_digest_the_key_counts(server: LocalServer) -> None:
    store = server.app.state.desk.store
    store.keep_reply("k", b"d" * 32, b'{"status":"received","group_id":"g-9"}', server.clock.time())
    again = post(server, group(), "k")
    assert again.json()["group_id"] == "g-9" and again.headers["idempotency-replayed"] == "true"
    assert queued(server) == 0


def test_the_newest_keys_are_kept_and_forgetting_others_early_is_told_once(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert replies.KEPT_KEYS == 400_000, "what PostUnsure and the spool say"
    monkeypatch.setattr(replies, "KEPT_KEYS", 2)
    for key in ("a", "b", "c", "d", "d", "c", "a"):
        post(server, group(), key)
    assert queued(server) == 5
    assert caplog.text.count("2 posts in 0.0 h: older ones are forgotten") == 1


def test_a_key_is_kept_for_a_day(server: LocalServer) -> None:
    post(server, group(), "k")
    server.clock.advance(24 * 3600 + 1)
    assert "idempotency-replayed" not in post(server, group(), "k").headers
    assert queued(server) == 2


def test_equal_groups_whose_answers_arrived_are_two_samples(server: LocalServer) -> None:
    assert "idempotency-replayed" not in post(server, group()).headers
    assert "idempotency-replayed" not in post(server, group()).headers
    assert queued(server) == 2


def hang_up(server: LocalServer, body: bytes) -> None:
    """Posts and leaves before the answer comes."""
    sent = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return sent.pop(0) if len(sent) > 1 else sent[0]

    async def send(message: Any) -> None:
        pass

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/scored_data",
        "raw_path": b"/scored_data",
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    app: Callable[..., Awaitable[None]] = server.app
    asyncio.run(app(scope, receive, send))


def test_a_sender_that_left_before_its_answer_may_send_again(server: LocalServer) -> None:
    hang_up(server, json.dumps(group(tag=3.0)).encode())
    assert queued(server) == 1  # what was received is kept
    again = post(server, group(tag=3.0))
    assert again.headers["idempotency-replayed"] == "true" and again.json()["status"] == "received"
    assert queued(server) == 1
    assert "idempotency-replayed" not in post(server, group(tag=3.0)).headers
    assert queued(server) == 2


def test_it_may_send_again_for_twenty_minutes(server: LocalServer) -> None:
    hang_up(server, json.dumps(group()).encode())
    server.clock.advance(1201)
    post(server, group())
    assert queued(server) == 2


def binary(sequences: int = 4) -> dict[str, Any]:
    return {
        "tokens": [np.array([1, 2, 3 + row], "<i4").tobytes() for row in range(sequences)],
        "mask_bits": [b"\x06"] * sequences,
        "scores": [0.5] * sequences,
        "inference_logprobs": [np.array([1, -0.5, -0.25], "<f4").tobytes()] * sequences,
        "env_id": None,
    }


def test_groups_come_and_go_as_msgpack(server: LocalServer) -> None:
    reply = server.call("POST", "/scored_data", content=msgpack.packb(binary()), headers=MSGPACK)
    assert reply.json()["status"] == "received"
    server.send(4)
    reply = server.call("GET", "/batch?lease_seconds=9", headers={"Accept": "application/msgpack"})
    assert reply.headers["content-type"] == "application/msgpack"
    body = msgpack.unpackb(reply.content)
    assert body["batch_id"] == "b-1" and body["delivery"] == 1 and len(body["batch"]) == 2
    first = body["batch"][0]
    assert {name: first[name] for name in binary()} == binary()
    assert "inference_logprobs" not in body["batch"][1] and body["batch"][1]["messages"] is None
    empty = server.call("GET", "/batch", headers={"Accept": "application/msgpack"})
    assert msgpack.unpackb(empty.content) == {"batch": None}


def test_json_readers_get_what_came_as_msgpack(server: LocalServer) -> None:
    for _ in range(2):
        server.call("POST", "/scored_data", content=msgpack.packb(binary()), headers=MSGPACK)
    item = server.get("/batch")["batch"][0]
    assert item["tokens"][1] == [1, 2, 4] and item["masks"][1] == [-100, 2, 4]
    assert item["inference_logprobs"] == [[1.0, -0.5, -0.25]] * 4


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [("gzip, deflate", "gzip"), ("br;q=1.0, gzip;q=0.8", "gzip"), ("identity", None), ("gzip;q=0", None)],
)
def test_batches_are_gzipped_for_who_takes_it(
    server: LocalServer, accepted: str, encoding: str | None
) -> None:
    server.send(8)

    async def read() -> tuple[httpx.Headers, bytes]:
        async with server.http() as http:
            request = http.build_request("GET", "/batch", headers={"Accept-Encoding": accepted})
            reply = await http.send(request, stream=True)
            raw = b"".join([piece async for piece in reply.aiter_raw()])
            return reply.headers, raw

    headers, raw = asyncio.run(read())
    assert headers.get("content-encoding") == encoding
    assert int(headers["content-length"]) == len(raw)
    assert len(json.loads(gzip.decompress(raw) if encoding else raw)["batch"]) == 1


class Unsafe(MemoryStore):
    """A store whose disk is full."""

    def save(self) -> Future[None] | None:
        return Future() if self._marks.groups or self._marks.leases else None

    @property
    def failing(self) -> str:
        return "cannot write x: disk is full"


def test_what_cannot_be_saved_is_not_called_received() -> None:
    server = LocalServer()
    store = Unsafe(Limits(save_seconds=0.01))
    server.app = create_app(store, clock=ManualClock())
    reply = post(server, group())
    assert reply.status_code == 503 and reply.headers["retry-after"] == "5"
    assert reply.json() == {"detail": "cannot write x: disk is full", "retry_after": 5}
    health = server.call("GET", "/health")
    assert health.status_code == 503 and health.json()["status"] == "failing"
    assert server.call("GET", "/status").json()["queue_size"] == 1
    assert post(server, group()).status_code == 503  # the same group, still not safe, and still there once
    assert server.call("GET", "/status").json()["queue_size"] == 1


def test_a_batch_that_cannot_be_saved_is_not_handed_out() -> None:
    server = LocalServer()
    server.app = create_app(Unsafe(Limits(save_seconds=0.01)), clock=ManualClock())
    server.call("POST", "/register", json=REGISTER)
    post(server, group(8))
    assert server.call("GET", "/batch?lease_seconds=60").status_code == 503
    status = server.call("GET", "/status").json()
    assert (status["queue_size"], status["leased_groups"], status["current_step"]) == (1, 0, 0)


def test_over_http_too_what_was_received_survives(tmp_path: Path) -> None:
    server = LocalServer()
    with SqliteStore(tmp_path / "a", now=server.clock.time()) as store:
        server.app = create_app(store, clock=server.clock)
        server.start()
        server.send(8, tag=5.0)
        lease = server.get("/batch", lease_seconds=60)
        server.send(8, tag=6.0)
    with SqliteStore(tmp_path / "a", now=server.clock.time()) as store:
        server.app = create_app(store, clock=server.clock)
        assert server.tags() == [6.0]
        assert server.post("/ack", {"batch_id": lease["batch_id"]})["current_step"] == 2
