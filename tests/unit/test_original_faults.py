"""Where ``atroposlib`` 0.4.0 fails, row by row (F1 to F39), and what this server does there.

Each docstring says what the original did with the same requests. R(8) is a trainer with batch_size 8 that has
asked once, E an environment with group_size 4, P(4) a post of four sequences, B a GET ``/batch``.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from server_tools import REGISTER, REGISTER_ENV, LocalServer, group

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.batch_server.http import requests
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.group_queue import GroupQueue
from atropos_gym.batch_server.state.packed import pack_group
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.errors import GroupRefused
from atropos_gym.wire import ScoredDataGroup

JSON = {"Content-Type": "application/json"}


def started(batch_size: int = 8, **fields: Any) -> LocalServer:
    """R(batch_size)."""
    server = LocalServer()
    server.start(batch_size=batch_size, **fields)
    return server


def queued(server: LocalServer) -> int:
    return int(server.get("/status")["queue_size"])


def test_f1_a_crash_forgets_nothing(tmp_path: Path) -> None:
    """Queue 0 and the configuration gone; /status-env 500."""
    server = LocalServer()
    with SqliteStore(tmp_path / "a.sqlite", now=server.clock.time()) as store:
        server.app = create_app(store, clock=server.clock)
        server.start()
        env_id = server.add_env()
        for tag in (5, 6, 7):
            server.send(tag=tag, env_id=env_id)
        leased = server.get("/batch", lease_seconds=600)
        copies = [path for path in tmp_path.iterdir() if path.name.startswith("a.sqlite")]
        for path in copies:  # the files as a kill -9 would leave them
            (tmp_path / path.name.replace("a.", "b.")).write_bytes(path.read_bytes())
    with SqliteStore(tmp_path / "b.sqlite", now=server.clock.time()) as store:
        server.app = create_app(store, clock=server.clock)
        assert "1 groups queued" in store.recovered
        assert server.get("/info")["batch_size"] == 8
        assert server.get("/status-env", env_id=env_id)["self_queue_size"] >= 1
        status = server.get("/status")
        assert (status["current_step"], status["leased_groups"]) == (1, 2)
        assert server.post("/ack", {"batch_id": leased["batch_id"]})["status"] == "acked"
        assert server.tags(groups=1) == [7]


def test_f2_groups_may_come_before_the_trainer() -> None:
    """/register hands out a uuid and sets nothing: "Trainer not registered" for ever, until /reset_data."""
    server = LocalServer()
    server.send(env_id=0), server.send(env_id=0)
    server.register()
    assert server.sizes() == [4, 4]
    assert server.add_env() == 0


def test_f3_groups_may_come_between_reset_and_registration() -> None:
    """/info says batch_size -1; a batch never comes."""
    server = started()
    env_id = server.add_env()
    server.call("GET", "/reset_data")
    server.send(env_id=env_id)
    server.register()
    for _ in range(4):
        server.send(env_id=env_id)
    assert server.get("/info")["batch_size"] == 8
    assert server.sizes() == [4, 4]


def test_f4_an_environments_number_is_good_for_ever() -> None:
    """A restart makes /status-env fail, and the environment's process ends after 2.35 s."""
    server = started()
    env_id = server.add_env()
    server.call("GET", "/reset_data")
    assert server.call("GET", "/status-env", params={"env_id": env_id}).status_code == 200


def test_f5_oldest_first_and_one_step_a_batch() -> None:
    """Served 4, 3, 2, 1, 0; after the first batch the step is 5 and the queue 0 while four batches wait."""
    server = started(4)
    for tag in range(5):
        server.send(tag=tag)
    for tag in range(5):
        assert server.tags() == [tag]
        status = server.get("/status")
        assert (status["current_step"], status["queue_size"]) == (tag + 1, 4 - tag)


def test_f7_a_token_takes_nine_bytes_at_most() -> None:
    """121 bytes of memory a token, and 25 s of CPU for a batch; clients give up, and each retry loses one."""
    rows, length = 8, 4096
    ids = np.arange(length).tolist()
    logprobs = (np.arange(length) * -0.001).tolist()
    whole = ScoredDataGroup(
        tokens=[ids] * rows,
        masks=[ids] * rows,
        scores=[0.5] * rows,
        inference_logprobs=[logprobs] * rows,
    )
    assert len(pack_group(whole).data) <= 9 * rows * length


def test_f8_a_second_trainer_with_other_settings_is_refused() -> None:
    """Ignored, and given a uuid; both trainers then split the stream."""
    server = started()
    server.send()
    other = {**REGISTER, "batch_size": 4, "starting_step": 500}
    refused = server.post("/register", other, status=409)
    assert "batch_size 8 there, 4 here" in refused["detail"]
    server.post("/register", REGISTER)
    server.post("/register", other, takeover="true")
    status = server.get("/status")
    assert (status["queue_size"], status["current_step"]) == (1, 500)
    server.post("/register", REGISTER, status=409)
    server.clock.advance(61)  # that one has gone, it seems
    server.post("/register", {**REGISTER, "starting_step": 3})
    status = server.get("/status")
    assert (status["queue_size"], status["current_step"]) == (1, 500)


def test_f9_a_group_that_fits_no_batch_is_refused_at_the_post() -> None:
    """Accepted, and null for ever."""
    server = started(4)
    refused = server.post("/scored_data", group(8), status=422)
    assert refused["detail"][0]["loc"] == ["body", "tokens"]
    early = LocalServer()
    early.send(8)
    early.start(batch_size=4)
    assert any("more sequences than batch_size" in one for one in early.get("/health")["warnings"])


@pytest.mark.parametrize(
    ("batch_size", "sizes", "served"),
    [
        (8, [4] * 6 + [6], [4, 4]),
        (8, [3, 3, 2] * 3, [3, 3, 2]),
        (8, [16] + [4] * 8, [4, 4]),
        (12, [4, 4, 8, 8, 4], [4, 4, 4]),
    ],
)
def test_f10_sizes_that_sum_up_make_a_batch(batch_size: int, sizes: list[int], served: list[int]) -> None:
    """Null for ever, though the data suffices."""
    server = LocalServer()
    for size in sizes:
        server.send(size)
    server.register(batch_size=batch_size)
    assert server.sizes() == served


def test_f10_sizes_that_do_not_sum_up_make_a_short_one_in_the_end() -> None:
    """Null for ever."""
    server = started(10)
    for _ in range(6):
        server.send(4)
    assert server.sizes() is None
    server.clock.advance(30)
    reply = server.call("GET", "/batch")
    assert (len(reply.json()["batch"]), reply.headers["x-batch-sequences"]) == (2, "8")
    assert "atropos_short_batches_total 1" in server.call("GET", "/metrics").text


def test_f10_who_wants_exact_batches_is_told_why_there_is_none() -> None:
    """Null for ever, without a word."""
    server = started(10, exact_batches=True)
    for _ in range(6):
        server.send(4)
    server.clock.advance(31)
    reply = server.get("/batch")
    assert reply["batch"] is None and reply["reason"] == "no groups sum to 10"
    assert any("no groups sum to 10" in one for one in server.get("/health")["warnings"])


def test_f11_parts_of_a_group_stay_together() -> None:
    """Released as 3 and 1, then never packed; a larger group stays in the buffer, unseen, for ever."""
    server = started()
    env_id = server.add_env()
    for _ in range(4):
        server.send(3, env_id=env_id), server.send(1, env_id=env_id)
    assert server.sizes() == [3, 1, 3, 1]
    server.send(8, env_id=env_id)
    assert server.get("/envs")["envs"][0]["buffered_sequences"] == 0
    server.send(3, env_id=env_id)
    assert server.get("/envs")["envs"][0]["buffered_sequences"] == 3
    server.clock.advance(61)
    assert server.get("/status")["queue_sequences"] == 3 + 8 + 8
    server.send(2, env_id=env_id)
    server.post("/disconnect-env", {"env_id": env_id})  # nothing more will come
    assert server.get("/status")["queue_sequences"] == 2 + 3 + 8 + 8


def test_f12_a_group_whose_sender_has_gone_is_kept() -> None:
    """A throttled environment cancels its posts, and their groups are lost."""
    server = LocalServer(Limits(soft_groups=0))
    server.start(batch_size=4)

    async def story() -> None:
        async with server.http() as http:
            post = asyncio.create_task(http.post("/scored_data", json=group()))
            while not server.app.state.desk.held_posts:
                await asyncio.sleep(0)
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    server.run(story())
    assert queued(server) == 1


def test_f13_a_dead_environment_with_a_minimum_holds_nobody_up() -> None:
    """Null for ever; nobody calls /disconnect-env."""
    server = started()
    alive = server.add_env()
    server.add_env(min_batch_allocation=0.5)
    for _ in range(8):
        server.send(env_id=alive)
    assert server.sizes() is None
    server.clock.advance(31)
    assert server.sizes() == [4, 4]
    assert any("has a minimum but sent nothing" in one for one in server.get("/health")["warnings"])
    server.clock.advance(121)
    assert server.get("/status-env", env_id=alive)["unallocated_fraction"] == 1.0


def test_f14_groups_without_a_sender_fill_the_free_part() -> None:
    """They never pack once any minimum exists: null for ever."""
    server = started()
    env_id = server.add_env(min_batch_allocation=0.5)
    for tag in range(4):
        server.send(tag=tag)
    server.send(tag=9, env_id=env_id)
    assert server.tags() == [0, 9]


def test_f15_three_halves_strand_nobody() -> None:
    """Two batches of two environments, then null, with the third one's groups stuck."""
    server = started()
    envs = [server.add_env(min_batch_allocation=0.5) for _ in range(3)]
    for env_id in envs * 2:
        server.send(env_id=env_id)
    served = [server.sizes() for _ in range(2)]
    server.clock.advance(31)  # who has nothing queued is waited for, but not for ever
    served.append(server.sizes())
    assert served == [[4, 4]] * 3 and queued(server) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"min_batch_allocation": -1},
        {"min_batch_allocation": 5.0},
        {"weight": float("nan")},
        {"weight": -1},
        {"group_size": 0},
    ],
)
def test_f16_settings_without_a_meaning_are_refused(fields: dict[str, Any]) -> None:
    """All accepted; group_size 0 or weights that sum to nothing make every /status-env a 500."""
    server = started()
    server.post("/register-env", {**REGISTER_ENV, **fields}, status=422)


def test_f16_names_cannot_leave_their_folder() -> None:
    """Accepted as they are; environments join the name into a path."""
    server = started()
    for name in ("", "../../x"):
        reply = server.post("/register-env", {**REGISTER_ENV, "desired_name": name, "weight": 0})
        assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", reply["wandb_name"])
    assert server.get("/status-env", env_id=1)["env_weight"] == 0.01


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(group(4, scores=[float("nan"), float("inf"), 0, 1])),
        json.dumps(group(1, scores=[0])).replace('"scores": [0]', '"scores": [1e999]'),
        json.dumps(group(1, scores=["nan"])),
        json.dumps(group(1, group_overrides={"a": [{"b": float("nan")}]})),
    ],
)
def test_f17_what_is_no_number_is_refused_at_the_post(body: str) -> None:
    """200 received; then /latest_example and the batch are 500, and the batch is gone, good groups too."""
    server = started()
    server.send(), server.send()
    assert server.call("POST", "/scored_data", content=body, headers=JSON).status_code == 422
    assert server.sizes() == [4, 4]


@pytest.mark.parametrize(
    ("fields", "media_type", "statuses"),
    [
        ({"masks": [[float("nan"), 2, 3]]}, "application/json", {422}),
        ({"messages": 5}, "application/json", {422}),
        ({"messages": [[5]]}, "application/json", {422}),
        ({"messages": [[{"role": "user", "content": "\ud800"}]]}, "application/json", {422}),
        ({}, "application/msgpack", {422}),
    ],
)
def test_f18_no_body_is_our_fault(fields: dict[str, Any], media_type: str, statuses: set[int]) -> None:
    """500; the surrogate is accepted, and the batch with it lost."""
    server = started()
    body = json.dumps(group(1, **fields))
    reply = server.call("POST", "/scored_data", content=body, headers={"Content-Type": media_type})
    assert reply.status_code in statuses and queued(server) == 0


def test_f19_numbers_of_nobody() -> None:
    """-1 is a 500, or the last environment; /disconnect-env -1 marks that one; /status-env 99 is a 500."""
    server = started()
    server.add_env()
    server.post("/scored_data", group(env_id=-1), status=422)
    for unknown in (99, 2**70):
        assert server.send(env_id=unknown)["status"] == "received"
    for nobody in (-1, 99):
        assert server.post("/disconnect-env", {"env_id": nobody})["status"] == "failure"
    assert server.get("/envs")["envs"][0]["connected"]
    assert server.call("GET", "/status-env", params={"env_id": 99}).status_code == 404
    assert "2 groups came from environments that never registered" in server.get("/health")["warnings"]


@pytest.mark.parametrize(
    ("fields", "loc"),
    [
        ({"masks": [[-100, 2]]}, ["masks", 0]),
        ({"scores": []}, ["scores"]),
        ({"masks": []}, ["masks"]),
        ({"inference_logprobs": [[0.0]]}, ["inference_logprobs", 0]),
        ({"tokens": [[]], "masks": [[]]}, ["tokens", 0]),
        ({"tokens": [[1] * 65], "masks": [[1] * 65]}, ["tokens", 0]),
        ({"tokens": [[-5, 2, 3]]}, ["tokens", 0, 0]),
        ({"tokens": [[10**30, 2, 3]]}, ["tokens", 0, 0]),
        ({"masks": [[-100, 2, 9]]}, ["masks", 0, 2]),
        ({"masks": [[-100, -100, -100]]}, ["masks"]),
    ],
)
def test_f20_the_first_bad_place_is_named(fields: dict[str, Any], loc: list[Any]) -> None:
    """All received and served."""
    refused = started().post("/scored_data", group(1, **fields), status=422)
    assert refused["detail"][0]["loc"] == ["body", *loc]


def test_f21_an_empty_group_is_none() -> None:
    """Accepted, and in the queue for ever."""
    server = started(4)
    server.post("/scored_data", {"tokens": [], "masks": [], "scores": []}, status=422)
    server.send()
    assert server.sizes() == [4]


def test_f22_the_same_post_again_counts_once() -> None:
    """The queue grows by two."""
    server = started()
    options: dict[str, Any] = {"json": group(), "headers": {"Idempotency-Key": "k"}}
    first, again = (server.call("POST", "/scored_data", **options) for _ in range(2))
    assert first.json() == again.json() and queued(server) == 1


def test_f23_a_list_is_taken_whole_or_not_at_all_and_our_client_splits_it() -> None:
    """500; the sender tries three times, and the good one is queued each time. A 422 in one loses all."""
    server = started()
    refused = server.post("/scored_data_list", [group(), group(env_id=-3)], status=422)
    assert refused["detail"][0]["loc"][:2] == ["body", 1] and queued(server) == 0

    async def story() -> None:
        async with AsyncBatchClient("http://127.0.0.1:8000", transport=server.transport()) as client:
            good, long = (ScoredDataGroup.model_validate(group(size)) for size in (4, 9))
            await client.post_groups([good, long])

    with pytest.raises(GroupRefused):
        server.run(story())
    assert queued(server) == 1


def test_f24_a_small_body_cannot_become_a_large_one() -> None:
    """Inflated whole: 1.6 GB, and 19 s in which nobody is answered; then 200."""
    server = LocalServer(Limits(max_body_bytes=2**20))
    body = gzip.compress(b" " * 2**24)
    reply = server.call("POST", "/scored_data", content=body, headers={**JSON, "Content-Encoding": "gzip"})
    assert reply.status_code == 413


@pytest.mark.parametrize("harm", [lambda body: body[:-9], lambda body: body[:12] + b"\xff" * 9 + body[21:]])
def test_f25_a_broken_body_is_a_400(harm: Any) -> None:
    """500."""
    body = harm(gzip.compress(json.dumps(group()).encode()))
    headers = {**JSON, "Content-Encoding": "gzip"}
    reply = started().call("POST", "/scored_data", content=body, headers=headers)
    assert reply.status_code == 400 and reply.json()["detail"].startswith("invalid gzip body")


def test_f26_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """GET / waits 8.5 s while 65 MB are read, 55 s while they are written."""
    server = started()
    begun, answered = threading.Event(), threading.Event()
    read = requests.plain_groups

    def slowly(*words: Any) -> Any:
        begun.set()
        assert answered.wait(60), "nobody was answered meanwhile"
        return read(*words)

    monkeypatch.setattr(requests, "plain_groups", slowly)
    body = json.dumps(group()).encode().ljust(requests.LARGE_BYTES + 1)

    async def story() -> httpx.Response:
        async with server.http() as http:
            post = asyncio.create_task(http.post("/scored_data", content=body, headers=JSON))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            assert (await http.get("/health")).status_code == 200
            answered.set()
            return await post

    assert server.run(story()).status_code == 200


def test_f27_a_refusal_is_short() -> None:
    """0.8 MB: it shows the input again."""
    body = group(1, tokens=[list(range(40)) * 1000], masks=[list(range(40)) * 1000])
    del body["scores"]
    reply = started().call("POST", "/scored_data", json=body)
    assert reply.status_code == 422 and len(reply.content) < 1000
    (entry,) = started().post("/scored_data", group(1, scores=["x" * 10_000]), status=422)["detail"]
    assert "input" not in entry


def test_f28_a_queue_that_nobody_reads_has_an_end() -> None:
    """It grows without limit."""
    server = LocalServer(Limits(hard_bytes=2000, hold_seconds=0, soft_groups=10**6))
    server.start()
    statuses = [server.call("POST", "/scored_data", json=group()).status_code for _ in range(30)]
    assert set(statuses) == {200, 503} and statuses == sorted(statuses)
    assert server.app.state.desk.store.held_bytes < 3000


def test_f29_a_page_of_another_site_wipes_nothing() -> None:
    """200, everything is wiped, and the origin is reflected with credentials."""
    server = started()
    server.send()
    reply = server.call("GET", "/reset_data", headers={"Origin": "http://evil.example"})
    assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
    assert queued(server) == 1


def test_f30_after_a_reset_all_is_as_before_registration() -> None:
    """/batch is 500 until the next /register; max_token_len and the latest example stay."""
    server = started()
    env_id = server.add_env()
    server.send()
    server.call("GET", "/reset_data")
    assert server.get("/batch")["status"] == "error"
    assert server.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert server.get("/latest_example")["tokens"] == []
    assert not server.get("/envs")["envs"][0]["connected"]
    server.get("/status-env", env_id=env_id)
    assert server.get("/envs")["envs"][0]["connected"]


def test_f31_reading_changes_nothing() -> None:
    """A /status-env raises the environment's group_size to 8: its next group of 4 is buffered for ever."""
    server = LocalServer()
    server.send(8, env_id=0)
    server.start(batch_size=16)
    env_id = server.add_env()
    server.get("/status-env", env_id=env_id)
    assert server.send(env_id=env_id)["status"] == "received"
    assert server.get("/envs")["envs"][0]["group_size"] == 4


def test_f32_an_environment_sees_what_others_queued() -> None:
    """queue_size 0, so that it makes too much."""
    server = started()
    first, second = (server.add_env(group_size=1) for _ in range(2))
    for _ in range(10):
        server.send(1, env_id=first)
    seen = server.get("/status-env", env_id=second)
    assert (seen["queue_size"], seen["self_queue_size"]) == (10, 0)


def test_f33_status_env_costs_the_same_however_long_the_queue_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """1.5, 9 and 35 ms with 0, 5000 and 20 000 groups queued; each environment asks ten times a second."""
    server = started()
    env_id = server.add_env()
    server.send(env_id=env_id)

    def nobody_walks(queue: GroupQueue) -> Any:
        raise AssertionError("the queue was walked")

    monkeypatch.setattr(GroupQueue, "__iter__", nobody_walks)
    monkeypatch.setattr(GroupQueue, "__getitem__", nobody_walks)
    assert server.get("/status-env", env_id=env_id)["queue_size"] == 1


@pytest.mark.parametrize("fields", [{"batch_size": 0}, {"batch_size": -8}, {"starting_step": -1}])
def test_f34_a_trainer_that_can_never_be_served_is_refused(fields: dict[str, Any]) -> None:
    """Accepted, and null for ever."""
    server = LocalServer()
    server.post("/register", {**REGISTER, **fields}, status=422)
    server.register(max_token_len=-1, save_checkpoint_interval=-1, num_steps=-1)
    server.send(1, tokens=[[7] * 10_000], masks=[[7] * 10_000])  # no limit


def test_f35_a_trainers_name_survives_javascript() -> None:
    """A bare integer of 128 bits, which JavaScript rounds."""
    reply = started().register()
    assert re.fullmatch("[0-9a-f]{32}", reply["trainer_id"]) and int(reply["trainer_id"], 16) == reply["uuid"]


def test_f36_an_environment_without_a_name_is_called_env() -> None:
    """422 three times, and its process ends."""
    server = started()
    assert server.post("/register-env", {**REGISTER_ENV, "desired_name": None})["wandb_name"] == "env_0"
    unnamed = {name: value for name, value in REGISTER_ENV.items() if name != "desired_name"}
    assert server.post("/register-env", unnamed)["wandb_name"] == "env_1"


def test_f37_an_environment_that_stopped_gives_its_share_back() -> None:
    """It keeps weight and minimum for ever."""
    server = started()
    stopped, running = server.add_env(min_batch_allocation=0.5), server.add_env()
    server.clock.advance(100)
    assert server.get("/status-env", env_id=running)["unallocated_fraction"] == 0.5
    server.clock.advance(100)
    seen = server.get("/status-env", env_id=running)
    assert (seen["unallocated_fraction"], seen["env_weight"]) == (1.0, 1.0)
    assert not server.get("/envs")["envs"][stopped]["connected"]


def test_f38_a_post_connects_its_environment_again() -> None:
    """It stays disconnected: no weight, no minimum."""
    server = started()
    env_id = server.add_env()
    server.post("/disconnect-env", {"env_id": env_id})
    server.send(env_id=env_id)
    assert server.get("/envs")["envs"][0]["connected"]


@pytest.mark.parametrize("encoding", ["deflate", "br", "compress"])
def test_f39_an_encoding_that_is_not_spoken_is_named(encoding: str) -> None:
    """400."""
    headers = {**JSON, "Content-Encoding": encoding}
    reply = started().call("POST", "/scored_data", content=b"x", headers=headers)
    assert reply.status_code == 415 and "gzip" in reply.json()["detail"]


# Rows that take more than a request: what the original did, and the test that holds the rule.
ELSEWHERE = {
    "F6": (
        "a reader that hangs up unread leaves nothing: the data is gone",
        "test_batch_server.py",
        "test_a_batch_that_was_not_handed_over_goes_back",
    ),
}


def test_every_row_has_its_test() -> None:
    here = set(re.findall(r"^def test_f(\d+)_", Path(__file__).read_text(), re.MULTILINE))
    assert {f"F{row}" for row in range(1, 40)} == {f"F{row}" for row in here} | ELSEWHERE.keys()
    for _, file, name in ELSEWHERE.values():
        assert f"def {name}(" in (Path(__file__).parent / file).read_text()
