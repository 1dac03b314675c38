"""The HTTP API: the original's routes with their right answers, and what our server adds to them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from server_tools import REGISTER, REGISTER_ENV, LocalServer, group

from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.app import create_app
from atropos_gym.batch_server.bodies.msgpack import pack
from atropos_gym.batch_server.clock import ManualClock, SystemClock
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.packed import PackedGroup


@pytest.fixture
def server() -> LocalServer:
    return LocalServer()


@pytest.fixture
def started() -> LocalServer:
    """A trainer has registered (batch_size 8) and asked once."""
    server = LocalServer()
    server.start()
    return server


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks run until something holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


# The original's routes.


def test_before_registration_every_route_answers(server: LocalServer) -> None:
    assert server.get("/") == {"message": "AtroposLib API"}
    assert server.get("/wandb_info") == {"group": None, "project": None}
    assert server.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert server.get("/batch") == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }
    assert server.get("/status").items() >= {"current_step": 0, "queue_size": 0}.items()
    assert set(server.get("/latest_example")) == {
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    }
    assert server.post("/register-env", REGISTER_ENV) == {"status": "wait for trainer to start"}
    assert server.post("/disconnect-env", {"env_id": 0})["status"] == "failure"
    assert server.call("GET", "/status-env", params={"env_id": 0}).status_code == 404
    assert server.send()["status"] == "received"
    assert server.call("GET", "/reset_data").text == "Reset successful"


def test_a_trainer_registers_and_environments_follow(server: LocalServer) -> None:
    reply = server.register()
    assert reply["uuid"] == int(reply["trainer_id"], 16)
    assert server.get("/wandb_info") == {"group": "g", "project": "p"}
    assert server.get("/info") == {"batch_size": 8, "max_token_len": 64}
    assert server.post("/register-env", REGISTER_ENV) == {"status": "wait for trainer to start"}
    assert server.get("/batch") == {"batch": None}
    assert server.post("/register-env", REGISTER_ENV) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "e_0",
        "checkpoint_dir": "ckpt",
        "starting_step": 0,
        "checkpoint_interval": 0,
        "num_steps": 10,
    }
    assert server.add_env() == 1
    assert server.post("/disconnect-env", {"env_id": 1}) == {"status": "success"}
    assert server.post("/disconnect-env", {"env_id": -1})["status"] == "failure"
    assert [env["connected"] for env in server.get("/envs")["envs"]] == [True, False]


def test_a_batch_item_has_all_keys(started: LocalServer) -> None:
    started.send(generation_params={"temperature": 1.0}, inference_logprobs=[[9.0, -0.5, -1.0]] * 4, env_id=0)
    started.send(tag=1.0)
    response = started.call("GET", "/batch")
    with_logprobs, without = response.json()["batch"]
    assert response.headers["content-type"] == "application/json"
    assert (response.headers["x-batch-sequences"], response.headers["x-batch-groups"]) == ("8", "2")
    assert with_logprobs["inference_logprobs"] == [[1.0, -0.5, -1.0]] * 4
    assert len(with_logprobs) == 14
    assert "inference_logprobs" not in without
    assert without == {**dict.fromkeys(with_logprobs.keys() - {"inference_logprobs"}), **group(4, tag=1.0)}
    assert started.get("/latest_example") == {**without, "inference_logprobs": None}
    assert started.get("/batch") == {"batch": None}


def test_lists_report_what_was_buffered(started: LocalServer) -> None:
    env_id = started.add_env()
    groups = [group(4, env_id=env_id), group(2, env_id=env_id), group(1, env_id=env_id)]
    assert started.post("/scored_data_list", groups) == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 3,
        "group_ids": ["g-1", "g-2", "g-3"],
    }
    assert started.post("/scored_data_list", []) == {
        "status": "received",
        "groups_processed": 0,
        "group_ids": [],
    }
    reply = started.send(1, env_id=env_id)
    assert reply == {"status": "buffered", "buffer_size": 0, "group_id": "g-4"}
    assert started.sizes() == [4, 2, 1, 1]


def test_status_env_takes_its_number_as_a_query_or_as_a_body(started: LocalServer) -> None:
    env_id = started.add_env(min_batch_allocation=0.25)
    started.send(env_id=env_id), started.send()
    expected = {
        "current_step": 0,
        "queue_size": 2,
        "unallocated_fraction": 0.75,
        "self_queue_size": 1,
        "max_group_size": 4,
        "env_weight": 1.0,
        "queue_groups": 2,
        "self_queue_groups": 1,
        "policy_version": None,
        "finished": False,
        "num_steps": 10,
        "batch_size": 8,
        "wandb_name": started.get("/envs")["envs"][env_id]["wandb_name"],
    }
    assert started.get("/status-env", env_id=env_id) == expected
    assert started.call("GET", "/status-env", json={"env_id": env_id}).json() == expected
    missing = started.call("GET", "/status-env", json={})
    assert missing.status_code == 422
    assert missing.json()["detail"][0]["loc"] == ["body", "env_id"]
    for headers in ({}, {"Content-Type": "application/json"}):
        neither = started.call("GET", "/status-env", headers=headers)
        assert neither.status_code == 422
        (entry,) = neither.json()["detail"]
        assert (entry["type"], entry["loc"]) == ("missing", ["query", "env_id"])


def test_verbs_and_paths(server: LocalServer) -> None:
    assert server.call("GET", "/nothing").json() == {"detail": "Not Found"}
    wrong_verb = server.call("GET", "/scored_data")
    assert (wrong_verb.status_code, wrong_verb.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong_verb.headers["allow"] == "POST"
    assert server.call("HEAD", "/status").status_code == 405
    assert server.call("POST", "/register/").status_code == 307
    schema = server.get("/openapi.json")
    assert "ScoredDataGroup" in json.dumps(schema["paths"]["/scored_data"]["post"]["requestBody"])


def test_numbers_in_settings_are_read_leniently_and_extras_ignored(server: LocalServer) -> None:
    server.register(batch_size="8", num_steps=3.0, extra=[1])
    assert server.get("/info", unknown="parameter") == {"batch_size": 8, "max_token_len": 64}
    refused = server.post("/register", {**REGISTER, "batch_size": 1.5}, status=422)
    assert refused["detail"][0]["loc"] == ["body", "batch_size"]


def test_a_second_trainer_with_other_settings_needs_takeover(server: LocalServer) -> None:
    first = server.register()["trainer_id"]
    assert server.register()["trainer_id"] != first
    refused = server.post("/register", {**REGISTER, "batch_size": 4}, status=409)
    assert "batch_size 8 there, 4 here" in refused["detail"]
    server.post("/register", {**REGISTER, "batch_size": 4}, takeover=True)
    replaced = server.call("GET", "/batch", params={"trainer": first})
    assert replaced.status_code == 409
    assert server.get("/batch") == {"batch": None}


# Errors.


def test_errors_name_the_place_and_never_echo_what_is_long(started: LocalServer) -> None:
    good, bad = group(), group(scores=[None, 0, 0, 0])
    refused = started.post("/scored_data_list", [good, bad], status=422)
    assert refused["detail"][0]["loc"] == ["body", 1, "scores", 0]
    body = {**group(), "messages": "x" * 10_000, "masks": [[-100, 2]] * 4, "env_id": -3}
    reply = started.call("POST", "/scored_data", json=body)
    assert reply.status_code == 422
    assert len(reply.content) < 1000
    by_field = {entry["loc"][1]: entry for entry in reply.json()["detail"]}
    assert by_field["env_id"]["input"] == -3
    assert "input" not in by_field["messages"]
    many = started.post("/scored_data_list", [bad] * 50, status=422)
    assert len(many["detail"]) == 20
    assert started.get("/status")["queue_size"] == 0
    assert "53 groups refused: their senders were told why" in started.get("/health")["warnings"]


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"group_overrides": {"a": [0, {"b": float("nan")}]}}, ["group_overrides", "a", 1, "b"]),
        ({"images": [float("inf")]}, ["images", 0]),
        ({"messages": [[{"role": "user", "content": "\ud800"}]]}, ["messages", 0, 0, "content"]),
        ({"overrides": [{"\ud800": 1}]}, ["overrides", 0]),
    ],
)
def test_what_could_not_be_served_again_is_refused_at_any_depth(
    started: LocalServer, fields: dict[str, Any], loc: list[object]
) -> None:
    refused = started.post("/scored_data", group(1, **fields), status=422)
    assert refused["detail"][0]["loc"] == ["body", *loc]


@pytest.mark.parametrize("depth", [197, 220, 260, 400, 900])
@pytest.mark.parametrize("field", ["messages", "generation_params", "overrides", "group_overrides", "images"])
def test_what_msgpack_nests_too_deeply_for_json_is_refused(
    started: LocalServer, field: str, depth: int
) -> None:
    deep: Any = 0
    for _ in range(depth + 3):
        deep = [deep]
    of = {"messages": [[{"role": "user", "content": deep}]], "overrides": [{"a": deep}], "images": deep}
    bad = pack(group(1, **{field: of.get(field, {"a": deep})}))
    refused = started.call(
        "POST", "/scored_data", content=bad, headers={"Content-Type": "application/msgpack"}
    )
    (entry,) = refused.json()["detail"]
    assert (refused.status_code, entry["type"], entry["loc"]) == (422, "recursion", ["body", field])
    assert "nested too deeply" in entry["msg"]


def test_infinity_by_a_large_exponent_is_refused(started: LocalServer) -> None:
    for body, loc in (
        ('{"tokens":[[1]],"masks":[[1]],"scores":[1e999]}', ["body", "scores", 0]),
        ('{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":{"x":-1e999}}', ["body", "images", "x"]),
    ):
        refused = started.call(
            "POST", "/scored_data", content=body, headers={"Content-Type": "application/json"}
        )
        assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, loc)
    word = started.post("/scored_data", group(1, images="Infinity and NaN are words here"))
    assert word["status"] == "received"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 422),
        (b'{"a": "\xff"}', {}, 400),
        (b"[" * 900, {}, 422),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Type": ""}, 415),
        (b"{}", {"Content-Encoding": "deflate"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"{}", mtime=0)[:-4], {"Content-Encoding": "gzip"}, 400),
        (gzip.compress(b"x" * 2000, mtime=0), {"Content-Encoding": "gzip"}, 413),
        (b"x" * 2000, {}, 413),
        (b"5", {"Content-Type": "application/xml"}, 415),
        (b"\xc1", {"Content-Type": "application/msgpack"}, 422),
        (b"5", {}, 422),
        (b"null", {}, 422),
    ],
)
@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register", "/policy", "/ack"])
def test_bodies_that_cannot_be_read(path: str, content: bytes, headers: dict[str, str], status: int) -> None:
    server = LocalServer(Limits(max_body_bytes=1000))
    reply = server.call(
        "POST", path, content=content, headers={"Content-Type": "application/json", **headers}
    )
    assert reply.status_code == status, reply.text
    assert "detail" in reply.json()
    assert server.get("/status")["queue_size"] == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xc1", "0xc1"),
        (b"\x91\xc1", "0xc1"),
        (b"\x91" * 2000, "nested too deeply"),
        (b"\x91", "incomplete"),
        (b"\xa1\xff", "utf-8"),
        (b"\x01\x01", "extra data"),
    ],
)
def test_what_is_wrong_with_msgpack_is_said(server: LocalServer, content: bytes, words: str) -> None:
    reply = server.call(
        "POST", "/scored_data", content=content, headers={"Content-Type": "application/msgpack"}
    )
    assert reply.status_code == 422
    (entry,) = reply.json()["detail"]
    assert entry["msg"].startswith("body is not valid msgpack: ") and words in entry["msg"]


def test_a_sequence_longer_than_the_trainers_limit_is_named(started: LocalServer) -> None:
    long = {"tokens": [[1], [1] * 65], "masks": [[1], [1] * 65], "scores": [0.0, 0.0]}
    refused = started.post("/scored_data", long, status=422)
    assert refused["detail"] == [
        {
            "type": "too_long",
            "loc": ["body", "tokens", 1],
            "msg": "sequence has 65 tokens, max_token_len is 64",
        }
    ]


def test_a_body_where_none_is_wanted_is_ignored(started: LocalServer) -> None:
    assert started.call("GET", "/batch", content=b"{}").json() == {"batch": None}


def test_a_body_that_never_arrives_is_given_up() -> None:
    server = LocalServer(Limits(receive_seconds=0.01))

    async def stuck() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    headers = {"Content-Type": "application/json"}
    reply = server.call("POST", "/scored_data", content=stuck(), headers=headers)
    assert reply.status_code == 408
    assert "0.01 s" in reply.json()["detail"]


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(started: LocalServer) -> None:
    sent: list[Any] = []

    async def talk() -> None:
        messages = iter(
            [
                {"type": "http.request", "body": b'{"tokens":', "more_body": True},
                {"type": "http.disconnect"},
            ]
        )

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message)

        await started.app(scope("POST", "/scored_data", length=100), receive, send)

    asyncio.run(talk())
    assert sent == []
    assert started.get("/status")["queue_size"] == 0


def scope(method: str, path: str, query: bytes = b"", length: int | None = None) -> dict[str, Any]:
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", b"%d" % length))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "headers": headers,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }


@pytest.mark.parametrize(
    ("headers", "status", "word"),
    [
        ({"Host": "other.example"}, 400, "host"),
        ({"Host": "localhost.other.example"}, 400, "host"),
        ({"Host": "["}, 400, "host"),
        ({"Origin": "https://other.example"}, 403, "origin"),
        ({"Origin": "null"}, 403, "origin"),
        ({"Origin": "http://["}, 403, "origin"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "origin"),
    ],
)
def test_pages_of_other_sites_get_nothing(
    started: LocalServer, headers: dict[str, str], status: int, word: str
) -> None:
    started.send()
    reply = started.call("GET", "/reset_data", headers=headers)
    assert (reply.status_code, word in reply.json()["detail"]) == (status, True)
    assert not any(name.startswith("access-control") for name in reply.headers)
    assert started.get("/status")["queue_size"] == 1


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("hosts", [("127.0.0.1", "evil.example"), ("127.0.0.1", "127.0.0.1")])
def test_of_two_hosts_neither_counts(hosts: tuple[str, str], token: str | None) -> None:
    server = LocalServer()
    server.app = create_app(clock=server.clock, access=Access(token))
    headers = [("Host", host) for host in hosts] + [("Authorization", f"Bearer {token}")]
    reply = server.call("GET", "/status", headers=headers)
    assert (reply.status_code, reply.json()) == (400, {"detail": "more than one Host header"})


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000"},
        {"Host": "[::1]:8000"},
        {"Host": "gpu-1:8000"},
        {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_our_own_names_and_pages_are_served(headers: dict[str, str]) -> None:
    server = LocalServer(Limits(allowed_hosts=("GPU-1",)))
    assert server.call("GET", "/status", headers=headers).status_code == 200


def test_an_error_of_ours_is_json_too(monkeypatch: pytest.MonkeyPatch, server: LocalServer) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.app.state.desk.store, "info", broken)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.get("/info")

    # The server's own log gets the error: routes are made before the patch, so it is asked through the store.
    reply = asyncio.run(ask())
    assert (reply.status_code, reply.json()) == (500, {"detail": "internal error: see the server's log"})


# Waiting.


def test_a_long_poll_is_answered_by_the_post_that_completes_the_batch(started: LocalServer) -> None:
    async def work() -> tuple[Any, Any]:
        async with started.http() as http:
            held = asyncio.ensure_future(http.get("/batch", params={"wait_seconds": 30}))
            await until(lambda: started.clock.waiting == 1)
            await http.post("/scored_data", json=group(tag=1.0))
            await until(lambda: started.clock.waiting == 1)
            assert not held.done()
            await http.post("/scored_data", json=group(tag=2.0))
            return (await held).json(), (await http.get("/status")).json()

    batch, status = started.run(work())
    assert [item["scores"][0] for item in batch["batch"]] == [1.0, 2.0]
    assert status["current_step"] == 1


def test_a_long_poll_ends_with_null_when_its_time_is_up(started: LocalServer) -> None:
    async def work() -> Any:
        async with started.http() as http:
            held = asyncio.ensure_future(http.get("/batch", params={"wait_seconds": 30}))
            for _ in range(30):
                await until(lambda: started.clock.waiting == 1)
                assert not held.done()
                started.clock.advance(1)
                await asyncio.sleep(0)
                await until(lambda: started.clock.waiting == 1 or held.done())
            return (await held).json()

    assert started.run(work()) == {"batch": None}


def test_a_long_poll_sees_a_lease_run_out(started: LocalServer) -> None:
    started.send(), started.send()
    assert started.sizes(lease_seconds=5) == [4, 4]

    async def work() -> Any:
        async with started.http() as http:
            held = asyncio.ensure_future(http.get("/batch", params={"wait_seconds": 30}))
            await until(lambda: started.clock.waiting == 1)
            started.clock.advance(5)
            return (await held).json()

    assert len(started.run(work())["batch"]) == 2


def test_closing_the_desk_answers_everyone_who_waits(started: LocalServer) -> None:
    async def work() -> list[Any]:
        async with started.http() as http:
            paths = ("/batch?wait_seconds=600", "/policy?after=0&wait_seconds=600")
            held = [asyncio.ensure_future(http.get(path)) for path in paths]
            await until(lambda: started.clock.waiting == 2)
            started.app.state.desk.close()
            return [(await one).json() for one in held]

    assert started.run(work()) == [{"batch": None}, {"version": None, "finished": False, "held": []}]


@pytest.mark.parametrize(
    "query",
    [
        {"wait_seconds": 601},
        {"wait_seconds": -1},
        {"wait_seconds": "nan"},
        {"lease_seconds": 0},
        {"lease_seconds": 86401},
        {"groups": 0},
        {"groups": "many"},
    ],
)
def test_parameters_out_of_range_are_named(started: LocalServer, query: dict[str, Any]) -> None:
    reply = started.call("GET", "/batch", params=query)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["query", next(iter(query))]


def read_and_leave(server: LocalServer, after_bytes: int, query: bytes = b"") -> list[bytes]:
    """Asks for a batch and closes the connection once so many bytes have come."""
    pieces: list[bytes] = []

    async def talk() -> None:
        left, asked = asyncio.Event(), False
        if after_bytes == 0:
            left.set()

        async def receive() -> Any:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if left.is_set():
                return
            pieces.append(message.get("body", b""))
            if sum(map(len, pieces)) >= after_bytes:
                left.set()

        await server.app(scope("GET", "/batch", query), receive, send)

    asyncio.run(talk())
    return pieces


@pytest.mark.parametrize("query", [b"", b"lease_seconds=60"])
@pytest.mark.parametrize("after_bytes", [0, 10, 300])
def test_a_batch_that_was_not_handed_over_goes_back(
    started: LocalServer, after_bytes: int, query: bytes
) -> None:
    started.send(tag=1.0), started.send(tag=2.0)
    read_and_leave(started, after_bytes, query)
    status = started.get("/status")
    assert (status["queue_size"], status["current_step"], status["leased_groups"]) == (2, 0, 0)
    assert started.tags() == [1.0, 2.0]


def test_a_client_that_leaves_with_the_last_byte_has_had_its_batch(started: LocalServer) -> None:
    started.send(), started.send()
    body = b"".join(read_and_leave(started, after_bytes=10**9))
    assert len(json.loads(body)["batch"]) == 2
    assert started.get("/status")["queue_size"] == 0


@pytest.mark.parametrize("query", [b"", b"lease_seconds=60"])
def test_a_client_that_reads_no_further_does_not_withhold_its_batch(query: bytes) -> None:
    server = LocalServer(Limits(receive_seconds=0.2, soft_groups=1000))
    server.start(batch_size=4)
    server.send(tag=1.0)
    bodies = 0

    async def talk() -> None:
        async def receive() -> Any:
            if first:
                return first.pop()
            await asyncio.Event().wait()  # it stays connected

        async def send(message: Any) -> None:
            nonlocal bodies
            if message["type"] == "http.response.body":
                bodies += 1
                if bodies == 2:
                    await asyncio.Event().wait()  # its side of the connection is full

        first = [{"type": "http.request", "body": b"", "more_body": False}]
        await asyncio.wait_for(server.app(scope("GET", "/batch", query), receive, send), 30)

    asyncio.run(talk())
    assert bodies == 2
    assert server.get("/status")["leased_groups"] == 0
    assert server.tags() == [1.0]
    assert server.get("/status")["current_step"] == 1


def test_the_systems_clock_waits_for_the_event_or_the_time() -> None:
    async def work() -> None:
        clock, event = SystemClock(), asyncio.Event()
        before = clock.time()
        await clock.wait(event, 0.001)
        assert clock.time() >= before
        event.set()
        await clock.wait(event, 3600)

    asyncio.run(work())


# Leases.


def test_lease_ack_nack_extend(started: LocalServer) -> None:
    started.send(tag=1.0), started.send(tag=2.0)
    leased = started.get("/batch", lease_seconds=60)
    now = started.clock.time()
    assert len(leased.pop("batch")) == 2
    assert leased == {
        "batch_id": "b-1",
        "expires_at": now + 60,
        "lease_seconds": 60.0,
        "step": 1,
        "group_ids": ["g-1", "g-2"],
        "delivery": 1,
    }
    assert started.get("/status")["leased_groups"] == 2
    nacked = started.post("/nack", {"batch_id": "b-1", "reason": "oom"})
    assert nacked == {"status": "requeued", "groups": 2}
    again = started.get("/batch", lease_seconds=60)
    assert (again["batch_id"], again["delivery"], again["step"]) == ("b-2", 2, 1)
    extended = started.post("/extend", {"batch_id": "b-2", "lease_seconds": 120})
    assert extended == {"status": "extended", "batch_id": "b-2", "expires_at": now + 120}
    started.clock.advance(119)
    acked = {"status": "acked", "batch_id": "b-2", "current_step": 1}
    assert started.post("/ack", {"batch_id": "b-2"}) == acked
    assert started.post("/ack", {"batch_id": "b-2"}) == acked
    assert "b-1" in started.post("/ack", {"batch_id": "b-1"}, status=409)["detail"]
    assert "b-7" in started.post("/ack", {"batch_id": "b-7"}, status=404)["detail"]
    assert started.post("/extend", {"batch_id": "b-2", "lease_seconds": 0}, status=422)


def test_groups_and_partial(started: LocalServer) -> None:
    for tag in (1.0, 2.0, 3.0):
        started.send(3, tag=tag)
    assert started.tags(groups=2) == [1.0, 2.0]
    assert started.tags(groups=2) is None
    assert started.tags(groups=2, partial=True) == [3.0]
    assert started.tags(groups=2, partial=True) is None
    started.send(3)
    assert started.tags(partial=True) is None, "partial counts groups, and nobody said how many"


def test_groups_per_update_shows_in_info_and_status_env(server: LocalServer) -> None:
    server.start(groups_per_update=2, max_policy_lag=0)
    env_id = server.add_env()
    wanted = {"groups_per_update": 2, "max_policy_lag": 0, "groups_wanted": 2}
    assert server.get("/info").items() >= wanted.items()
    assert server.get("/status-env", env_id=env_id).items() >= wanted.items()
    server.send(30, env_id=env_id)
    assert server.get("/info")["groups_wanted"] == 1
    server.send(1, env_id=env_id)
    assert server.sizes() == [30, 1]


def test_exact_batches_say_why_there_is_none(server: LocalServer) -> None:
    server.start(batch_size=10, exact_batches=True)
    for _ in range(3):
        server.send()
    assert server.get("/batch") == {"batch": None, "reason": "no groups sum to 10"}
    assert "no batch: no groups sum to 10" in server.get("/health")["warnings"]


def test_health(started: LocalServer) -> None:
    assert started.get("/health") == {
        "status": "ok",
        "registered": True,
        "started": True,
        "current_step": 0,
        "queue_groups": 0,
        "warnings": ["no batch: 0 of 8 sequences queued"],
    }


def test_unknown_fields_are_reported(started: LocalServer) -> None:
    assert started.send(inference_logprob=[[0.1]])["unknown_fields"] == ["inference_logprob"]
    listed = started.post("/scored_data_list", [group(a=1), group(b=1)])
    assert listed["unknown_fields"] == ["a", "b"]
    warning = "field 'inference_logprob' is not part of a group: ignored in 1 groups"
    assert warning in started.get("/health")["warnings"]


# Policy.


def test_a_registration_has_a_name_that_its_number_has_not(started: LocalServer) -> None:
    """At a server that was started anew another environment may have number and wandb_name."""
    names = []
    for _ in range(2):
        reply = started.call("POST", "/register-env", json=REGISTER_ENV)
        names.append(reply.headers["X-Registration"])
        status = started.call("GET", "/status-env", params={"env_id": reply.json()["env_id"]})
        assert status.headers["X-Registration"] == names[-1]
    other = LocalServer()
    other.start()
    again = other.call("POST", "/register-env", json=REGISTER_ENV)
    assert again.json()["wandb_name"] == "e_0"
    assert len({*names, again.headers["X-Registration"]}) == 3


def test_policy_is_published_shown_and_held(started: LocalServer) -> None:
    assert started.get("/policy") == {"version": None, "finished": False, "held": []}
    body = {"run": "r", "version": 0, "model_name": "tiny", "tokenizer_fingerprint": "sha256:a"}
    assert started.post("/policy", body) == {"status": "published", "version": 0}
    assert started.post("/policy", body) == {"status": "published", "version": 0}
    shown = started.get("/policy", env_id=3, holding="0,1")
    assert shown.items() >= {**body, "adapter_path": None, "held": [0, 1], "finished": False}.items()
    assert shown["published_at"] == started.clock.time()
    started.clock.advance(121)
    assert started.get("/policy")["held"] == []
    assert started.get("/status")["policy_version"] == 0
    refused = started.post("/policy", {**body, "version": 1, "tokenizer_fingerprint": "sha256:b"}, status=409)
    assert "sha256:a" in refused["detail"]
    started.post("/policy", {**body, "version": 1, "tokenizer_fingerprint": "sha256:b"}, force=True)
    assert started.post("/policy", {**body, "version": 0}, status=409)
    assert started.post("/policy", {"run": "r"}, status=422)["detail"][0]["loc"] == ["body", "version"]
    assert started.call("GET", "/policy", params={"holding": "x"}).status_code == 422
    other = group(1, group_overrides={"tokenizer_fingerprint": "sha256:c"})
    refused = started.post("/scored_data", other, status=422)
    assert refused["detail"][0]["loc"] == ["body", "group_overrides", "tokenizer_fingerprint"]
    refused = started.post("/scored_data_list", [group(), other], status=422)
    assert refused["detail"][0]["loc"] == ["body", 1, "group_overrides", "tokenizer_fingerprint"]
    assert started.post("/policy", {"run": "r", "finished": True}) == {"status": "finished", "version": 1}
    assert started.get("/status")["finished"]


def test_services_wait_for_a_newer_version(started: LocalServer) -> None:
    async def work() -> list[Any]:
        async with started.http() as http:
            found = []
            for version, after in ((0, -1), (1, 0)):
                asked = http.get("/policy", params={"after": after, "wait_seconds": 30})
                held = asyncio.ensure_future(asked)
                await until(lambda: started.clock.waiting == 1)
                await http.post("/policy", json={"version": version, "model_name": f"v{version}"})
                found.append((await held).json()["version"])
            held = asyncio.ensure_future(http.get("/policy", params={"after": 1, "wait_seconds": 30}))
            await until(lambda: started.clock.waiting == 1)
            await http.post("/policy", json={"finished": True})
            found.append((await held).json()["finished"])
            return found

    assert started.run(work()) == [0, 1, True]


# Rows of the original's failures that are not yet covered above.


def test_an_environment_that_outlives_a_reset_goes_on(started: LocalServer) -> None:
    env_id = started.add_env()
    started.call("GET", "/reset_data")
    assert started.get("/batch")["status"] == "error"
    assert started.send(env_id=env_id)["status"] == "received"
    started.start()
    assert started.get("/info")["batch_size"] == 8
    started.send(env_id=env_id)
    assert started.sizes() == [4, 4]
    assert started.get("/status-env", env_id=env_id)["queue_size"] == 0


def test_a_silent_environment_with_a_minimum_holds_nobody_up(started: LocalServer) -> None:
    env_id = started.add_env()
    started.add_env(min_batch_allocation=0.5)
    for _ in range(2):
        started.send(env_id=env_id)
    assert started.sizes() is None
    started.clock.advance(31)
    assert started.sizes() == [4, 4]


def test_a_short_batch_says_its_size(started: LocalServer) -> None:
    started.send(6), started.send(6)
    assert started.sizes() is None
    started.clock.advance(30)
    reply = started.call("GET", "/batch")
    assert (reply.headers["x-batch-sequences"], len(reply.json()["batch"])) == ("6", 1)


# -- numbers beyond all measure ------------------------------------------------------------------------


@pytest.mark.parametrize("value", [10**400, 2**63, -(2**70)])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *(
            ("/register", {**REGISTER, "groups_per_update": 1, "max_policy_lag": 1}, field)
            for field in ("batch_size", "max_token_len", "starting_step", "num_steps", "groups_per_update")
        ),
        *(("/register-env", REGISTER_ENV, field) for field in ("max_token_length", "group_size", "weight")),
    ],
)
def test_settings_beyond_64_bits_are_refused_and_hurt_nobody(
    started: LocalServer, path: str, body: dict[str, Any], field: str, value: int
) -> None:
    env_id = started.add_env()
    if field != "weight" or value in (10**400, -(2**70)):
        detail = started.post(path, {**body, field: value}, status=422, takeover=True)["detail"]
        assert detail[0]["loc"] == ["body", field]
    assert started.get("/status-env", env_id=env_id)["env_weight"] == 1.0


def test_huge_wishes_that_are_legal_are_answered_at_once(started: LocalServer) -> None:
    started.send(4), started.send(4)
    wanted = {"groups": 10**12, "partial": True, "lease_seconds": 5}
    assert started.sizes(**wanted) == [4, 4]
    env_id = started.add_env(group_size=10**12)
    assert started.call("GET", "/reset_data").status_code == 200
    assert started.send(4, env_id=env_id)["status"] == "buffered"


def test_a_batch_that_the_disk_does_not_give_in_time_goes_back() -> None:
    class Slow(MemoryStore):
        stuck = True

        def fetch(self, lease: Lease) -> Future[list[PackedGroup]]:
            return Future() if self.stuck else super().fetch(lease)

    server, store = LocalServer(), Slow(Limits(save_seconds=0.01))
    server.app = create_app(store, clock=ManualClock())
    server.start()
    for _ in range(2):
        server.send()
    reply = server.call("GET", "/batch")
    assert reply.status_code == 503 and "disk is too slow" in reply.json()["detail"]
    assert reply.headers["retry-after"] == "5" and server.get("/status")["queue_size"] == 2
    store.stuck = False
    assert len(server.get("/batch")["batch"]) == 2
