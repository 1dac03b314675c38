"""The clients: the same calls blocking and asynchronous, what they try again, and how a refusal reads."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from server_tools import LocalServer, group

from atropos_gym.batch_server import _parcels
from atropos_gym.batch_server.bodies import exact
from atropos_gym.batch_server.client import AsyncBatchClient, BatchClient
from atropos_gym.errors import ConfigError, GroupRefused, ServerError
from atropos_gym.wire import Policy, ScoredDataGroup

URL = "http://127.0.0.1:8000"


class Bridge(httpx.BaseTransport):
    """Lets the blocking client talk to an application in this process."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        content = request.read()

        async def one() -> httpx.Response:
            again = httpx.Request(request.method, request.url, headers=request.headers, content=content)
            response = await self.server.transport().handle_async_request(again)
            body = await response.aread()
            return httpx.Response(response.status_code, headers=response.headers, content=body)

        return asyncio.run(one())


@pytest.fixture
def server() -> LocalServer:
    return LocalServer()


@pytest.fixture
def client(server: LocalServer) -> BatchClient:
    return BatchClient(URL, transport=Bridge(server))


def make(sequences: int = 4, tag: float = 0.0, **fields: Any) -> ScoredDataGroup:
    return ScoredDataGroup.model_validate(group(sequences, tag=tag, **fields))


def answering(*replies: httpx.Response | Exception) -> httpx.MockTransport:
    """A server that gives these answers, one after the other."""
    waiting = list(replies)

    def answer(request: httpx.Request) -> httpx.Response:
        reply = waiting.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    return httpx.MockTransport(answer)


def test_a_whole_update(client: BatchClient) -> None:
    registered = client.register(groups_per_update=2, max_policy_lag=0)
    assert client.trainer_id == registered["trainer_id"]
    assert client.batch() is None
    env = client.register_env(desired_name="e", max_token_length=64, group_size=4)
    assert env["status"] == "success"
    client.publish_policy(run="r", version=0, model_name="base", tokenizer_fingerprint="sha256:a")
    policy = client.policy(env_id=env["env_id"], holding=[0])
    assert (policy.version, policy.held) == (0, [0])
    assert client.status_env(env["env_id"])["groups_wanted"] == 2
    posted = [make(3, 1.0, env_id=0), make(4, 2.0, inference_logprobs=[[1.0, -0.25, -0.5]] * 4)]
    assert client.post_groups(posted) == ["g-1", "g-2"]
    batch = client.batch(lease_seconds=60)
    assert batch is not None
    assert batch.groups == posted
    assert (batch.batch_id, batch.step, batch.delivery, batch.group_ids) == ("b-1", 1, 1, ["g-1", "g-2"])
    assert batch.sequences == 7
    assert client.nack("b-1", reason="test")["status"] == "requeued"
    again = client.batch(groups=2, lease_seconds=60)
    assert again is not None and again.batch_id == "b-2"
    assert client.extend("b-2", 120)["status"] == "extended"
    assert client.ack("b-2")["status"] == "acked"
    assert client.status()["current_step"] == 1
    assert client.post_group(make()) == "g-3"
    partial = client.batch(groups=5, partial=True)
    assert partial is not None and len(partial.groups) == 1 and partial.batch_id is None
    assert client.finish("r")["status"] == "finished"
    assert client.policy(after=0, wait_seconds=30).finished
    assert client.disconnect_env(0) == {"status": "success"}
    assert client.health()["status"] == "ok"
    assert client.info()["groups_per_update"] == 2
    client.close()


def test_more_groups_than_a_server_takes_at_once_go_in_parts(
    server: LocalServer, client: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "MOST_GROUPS", 3)
    monkeypatch.setattr(_parcels, "MOST_GROUPS", 3)
    server.start()
    assert client.post_groups([make(2, tag=float(n)) for n in range(8)]) == [f"g-{n}" for n in range(1, 9)]
    assert server.tags() == [0.0, 1.0, 2.0, 3.0]


def test_a_whole_update_in_an_event_loop(server: LocalServer) -> None:
    async def work() -> None:
        async with AsyncBatchClient(URL, transport=server.transport()) as client:
            await client.register(batch_size=8, max_token_len=64)
            assert await client.batch() is None
            assert (await client.register_env(max_token_length=64, group_size=4))["env_id"] == 0
            await client.publish_policy(version=0, model_name="m")
            assert (await client.policy()).version == 0
            assert await client.post_groups([make(tag=1.0)]) == ["g-1"]
            assert await client.post_group(make(tag=2.0)) == "g-2"
            assert (await client.status())["queue_size"] == 2
            batch = await client.batch(lease_seconds=60)
            assert batch is not None and [one.scores[0] for one in batch.groups] == [1.0, 2.0]
            await client.extend(str(batch.batch_id), 30)
            await client.nack(str(batch.batch_id), drop=True)
            with pytest.raises(ServerError) as conflict:
                await client.ack(str(batch.batch_id))
            assert conflict.value.status == 409
            await client.finish("")
            assert (await client.status_env(0))["finished"]
            assert (await client.info())["batch_size"] == 8
            assert (await client.disconnect_env(0))["status"] == "success"
            assert (await client.health())["warnings"]

    server.run(work())


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in vars(kind).items()
            if inspect.isfunction(member) and not name.startswith("_")
        }

    assert methods(BatchClient) == methods(AsyncBatchClient)


def test_refused_groups_are_named_and_all_others_stored(client: BatchClient) -> None:
    client.register(batch_size=8, max_token_len=0)
    groups = [make(tag=0.0), make(9), make(tag=2.0), make(10)]
    with pytest.raises(GroupRefused) as refused:
        client.post_groups(groups)
    assert refused.value.status == 422
    assert isinstance(refused.value.detail, list)
    assert [entry["loc"] for entry in refused.value.detail] == [["body", 1, "tokens"], ["body", 3, "tokens"]]
    assert "[1].tokens: group has 9 sequences, batch_size is 8" in str(refused.value)
    batch = client.batch()
    assert batch is not None and [one.scores[0] for one in batch.groups] == [0.0, 2.0]
    with pytest.raises(GroupRefused, match="tokens: group has 9 sequences"):
        client.post_group(make(9))


def test_more_refused_groups_than_one_reply_names(client: BatchClient) -> None:
    client.register(batch_size=8, max_token_len=0)
    with pytest.raises(GroupRefused, match="and 47 more") as refused:
        client.post_groups([make(9)] * 50 + [make(tag=7.0)])
    assert isinstance(refused.value.detail, list)
    assert [entry["loc"][1] for entry in refused.value.detail] == list(range(50))
    assert client.status()["queue_size"] == 1


def test_no_groups_are_no_request() -> None:
    assert BatchClient(URL, transport=answering()).post_groups([]) == []


def test_a_nan_in_a_group_made_without_checks_is_refused_not_turned_into_null(client: BatchClient) -> None:
    unchecked = ScoredDataGroup.model_construct(**{**group(1), "scores": [float("nan")]})
    with pytest.raises(GroupRefused, match=r"scores\[0\]"):
        client.post_group(unchecked)


def test_tries_again_with_growing_pauses_and_obeys_retry_after() -> None:
    pauses: list[float] = []
    transport = answering(
        httpx.ConnectError("refused"),
        httpx.Response(500, text="Internal Server Error"),
        httpx.Response(503, headers={"Retry-After": "5"}, json={"detail": "queue full"}),
        httpx.ReadError("reset"),
        httpx.Response(200, json={"current_step": 1}),
    )
    client = BatchClient(URL, transport=transport, sleep=pauses.append)
    assert client.status() == {"current_step": 1}
    assert 0.05 <= pauses[0] <= 0.1
    assert 0.1 <= pauses[1] <= 0.2
    assert pauses[2] == 5.0
    assert 0.4 <= pauses[3] <= 0.8


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            httpx.ConnectError("Connection refused"),
            "no answer from http://127.0.0.1:8000: Connection refused",
        ),
        (httpx.ReadTimeout(""), "ReadTimeout; is it running"),
    ],
)
def test_gives_up_in_the_end_and_says_why(failure: Exception, words: str) -> None:
    pauses: list[float] = []
    client = BatchClient(URL, transport=answering(*[failure] * 50), retry_seconds=60, sleep=pauses.append)
    with pytest.raises(ServerError, match=words):
        client.health()
    assert 20 < sum(pauses) <= 60
    failing = BatchClient(URL, transport=answering(httpx.Response(503, text="full")), retry_seconds=0)
    with pytest.raises(ServerError, match="fails: 503 full") as error:
        failing.health()
    assert error.value.status == 503


def test_the_asynchronous_client_tries_again_too() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def work() -> None:
        transport = answering(httpx.ConnectError("refused"), httpx.Response(200, json={"status": "ok"}))
        client = AsyncBatchClient(URL, transport=transport, sleep=sleep)
        assert await client.health() == {"status": "ok"}
        await client.close()

    asyncio.run(work())
    assert len(pauses) == 1


def test_a_post_is_sent_with_one_key_however_often() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        return httpx.Response(500 if len(keys) < 3 else 200, json={"group_ids": ["g-1"]})

    client = BatchClient(URL, transport=httpx.MockTransport(answer), sleep=lambda seconds: None)
    client.post_groups([make()])
    assert len(set(keys)) == 1
    client.post_groups([make()])
    assert len(set(keys)) == 2


def test_a_foreign_server_is_read_with_checks() -> None:
    """The original sends no counts, keeps null logprobs and stores what cannot be used."""
    item = {**group(2), "inference_logprobs": None, "overrides": []}
    client = BatchClient(URL, transport=answering(httpx.Response(200, json={"batch": [item]})))
    batch = client.batch()
    assert batch is not None
    assert (batch.groups[0].overrides, batch.batch_id) == (None, None)
    bad = {**item, "masks": [[-100, 2]]}
    client = BatchClient(URL, transport=answering(httpx.Response(200, json={"batch": [bad]})))
    with pytest.raises(ServerError, match="cannot be used: .*masks"):
        client.batch()


def test_without_a_trainer_there_is_no_batch(client: BatchClient) -> None:
    with pytest.raises(ServerError, match="Trainer not registered"):
        client.batch()


def test_what_is_no_batch_server_is_said_to_be_none() -> None:
    client = BatchClient(URL, transport=answering(httpx.Response(200, text="<html>")))
    with pytest.raises(ServerError, match="is this a batch server"):
        client.status()
    client = BatchClient(URL, transport=answering(httpx.Response(404, text="nothing here")))
    with pytest.raises(
        ServerError, match=r"GET /status was refused \(404\): 'nothing here'; is .* a batch server"
    ):
        client.status()


def test_a_mistyped_field_is_an_error_here(client: BatchClient) -> None:
    with pytest.raises(TypeError, match="Registration has no field group_per_update"):
        client.register(group_per_update=2)
    with pytest.raises(ValidationError, match="batch_size"):
        client.register(batch_size=0)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "", "ftp://127.0.0.1"])
def test_what_is_no_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="server must be a URL such as http://127.0.0.1:8000"):
        BatchClient(url)


def test_no_proxy_is_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for local in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        assert not BatchClient(local)._http.trust_env
    assert BatchClient("http://gpu-1:8000")._http.trust_env


def test_status_env_asks_in_the_originals_way_too() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    BatchClient(URL, transport=httpx.MockTransport(answer)).status_env(3)
    assert asked[0].url.query == b"env_id=3"
    assert json.loads(asked[0].content) == {"env_id": 3}


def test_policy_without_a_version_is_none() -> None:
    reply = httpx.Response(200, json={"version": None, "finished": False, "held": []})
    assert BatchClient(URL, transport=answering(reply)).policy() == Policy()
