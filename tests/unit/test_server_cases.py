"""Area f: bad and odd inputs to the batch server. Test ids are case ids.

After every case a valid group still comes through unchanged. Cases that need a socket are in
``tests/integration/test_serve.py``; ``ON_A_SOCKET`` lists them.
"""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_tools import LocalServer

from atropos_gym.batch_server.limits import Limits

FILE = json.loads((Path(__file__).parent.parent / "cases" / "f_server.json").read_text())
BASE = FILE["base"]
CASES = {case["id"]: case for case in FILE["cases"]}
ON_A_SOCKET = {"f-content-length-too-long", "f-slow-body", "f-pipelined", "f-huge-header"}
LIMIT = 16 * 2**20
JSON = {"Content-Type": "application/json"}


def set_up(case: dict[str, Any]) -> LocalServer:
    server = LocalServer(Limits(max_body_bytes=LIMIT))
    for action in case["input"]["setup"]:
        if action == "register":
            server.post("/register", BASE["register"])
        elif action == "batch":
            assert server.get("/batch") == {"batch": None}
        elif action == "register_env":
            assert server.post("/register-env", BASE["register_env"])["status"] == "success"
        elif action == "disconnect_env":
            server.post("/disconnect-env", {"env_id": 0})
        else:
            assert action == "reset"
            server.call("GET", "/reset_data")
    return server


def patched(patch: dict[str, Any]) -> dict[str, Any]:
    merged = {**BASE["group"], **patch}
    return {key: value for key, value in merged.items() if value is not None}


GROUP_TEXT = json.dumps(BASE["group"])


def with_member(member: bytes) -> bytes:
    return GROUP_TEXT[:-1].encode() + b", " + member + b"}"


def rows(n: int) -> str:
    return json.dumps({"tokens": [[1, 2]] * n, "masks": [[-100, 2]] * n, "scores": [0.0] * n})


def long_message(n: int) -> str:
    messages = [[{"role": "user", "content": "x" * n}], [{"role": "user", "content": "y"}]]
    return json.dumps(patched({"messages": messages}))


async def pieces() -> AsyncIterator[bytes]:
    for start in range(0, len(GROUP_TEXT), 50):
        yield GROUP_TEXT[start : start + 50].encode()


# Bodies that a case names instead of spelling them out.
GENERATED: dict[str, Callable[..., Any]] = {
    "replace_first_token": lambda **_: GROUP_TEXT.replace("[[1,", "[[1" + "0" * 400 + ",", 1),
    "group_of_rows": rows,
    "group_overrides_nested_lists": lambda depth: with_member(
        b'"group_overrides": {"a": ' + b"[" * depth + b"]" * depth + b"}"
    ),
    "messages_content_of_bytes": long_message,
    "body_bytes": lambda **_: GROUP_TEXT.ljust(LIMIT + 1),
    "extra_member_with_bytes": lambda hex: with_member(b'"x": "' + bytes.fromhex(hex) + b'"'),
    "gzip_of_group": lambda: gzip.compress(GROUP_TEXT.encode()),
    "gzip_of_group_cut": lambda drop: gzip.compress(GROUP_TEXT.encode())[:-drop],
    "gzip_of_zeros_in_string": lambda bytes: gzip.compress(
        with_member(b'"x": "' + b"0" * bytes + b'"'), compresslevel=1
    ),
    "plain_group": lambda: GROUP_TEXT,
    "chunked_group": pieces,
}


def generated(kind: str, **settings: Any) -> Any:
    return GENERATED[kind](**settings)


def send(server: LocalServer, request: dict[str, Any]) -> httpx.Response:
    if "raw" in request:
        content = request["raw"]
    elif "generate" in request:
        content = generated(**request["generate"])
    elif "json" in request:
        base = BASE["register_env" if request["path"] == "/register-env" else "register"]
        content = json.dumps({**base, **request["json"]})
    else:
        content = json.dumps(patched(request.get("group_patch", {})))
    headers = {**JSON, **request.get("headers", {})}
    return server.call(request["method"], request["path"], content=content, headers=headers)


def stored(server: LocalServer) -> int:
    """Sequences in queue and buffers."""
    buffered = sum(env["buffered_sequences"] for env in server.get("/envs")["envs"])
    return int(server.get("/status")["queue_sequences"]) + int(buffered)


def path_of(loc: list[str | int]) -> str:
    """``["body", "masks", 0]`` as the cases write it: ``masks[0]``."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:])
    return parts.lstrip(".") or str(loc[0])


def check_error(reply: httpx.Response, field: str) -> None:
    assert len(reply.content) < 5000
    detail = reply.json()["detail"]
    if reply.status_code != 422:
        assert field.lower() in detail.lower()
        return
    assert path_of(detail[0]["loc"]) == field
    assert all(set(entry) <= {"type", "loc", "msg", "input"} for entry in detail)
    assert all(len(str(entry.get("input", ""))) <= 200 for entry in detail)


def check_still_works(server: LocalServer) -> None:
    """A valid group comes back unchanged, behind everything that was accepted before."""
    server.call("POST", "/register", json=BASE["register"])
    assert server.post("/scored_data", BASE["group"])["status"] == "received"
    last = None
    while (batch := server.get("/batch", groups=1)["batch"]) is not None:
        last = batch[-1]
    assert last is not None
    assert {key: last[key] for key in BASE["group"]} == BASE["group"]


def all_groups(server: LocalServer) -> list[dict[str, Any]]:
    return list(server.get("/batch")["batch"] or [])


# What a case's "then" says, and the cases that are told as steps.


def then_parts_stay_together(server: LocalServer, reply: httpx.Response) -> None:
    assert reply.json()["status"] == "buffered"
    assert reply.json()["buffer_size"] == 1
    part = {"tokens": [[1, 2, 4]], "masks": [[-100, 2, 4]], "scores": [0.5], "env_id": 0}
    assert server.post("/scored_data", part)["buffer_size"] == 0
    server.post("/scored_data", patched({"scores": [7.0, 7.0]}))
    assert [item["scores"] for item in all_groups(server)] == [[1.0], [0.5], [7.0, 7.0]]


def then_scores_are_the_last(server: LocalServer, reply: httpx.Response) -> None:
    server.post("/scored_data", BASE["group"])
    assert all_groups(server)[0]["scores"] == [5, 6]


def then_empty_fields_are_null(server: LocalServer, reply: httpx.Response) -> None:
    server.post("/scored_data", BASE["group"])
    item = all_groups(server)[0]
    names = ("advantages", "ref_logprobs", "messages", "images", "overrides", "group_overrides")
    assert [item[name] for name in names] == [None] * 6
    assert "inference_logprobs" not in item


def then_it_is_connected(server: LocalServer, reply: httpx.Response) -> None:
    assert server.get("/envs")["envs"][0]["connected"]


def then_the_name_is_clean(server: LocalServer, reply: httpx.Response) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", reply.json()["wandb_name"])


def then_the_path_is_only_echoed(server: LocalServer, reply: httpx.Response) -> None:
    assert server.get("/batch") == {"batch": None}
    assert server.post("/register-env", BASE["register_env"])["checkpoint_dir"] == "../../etc"


def then_the_name_is_reported(server: LocalServer, reply: httpx.Response) -> None:
    assert reply.json()["unknown_fields"] == ["inference_logprob"]


THEN: dict[str, Callable[[LocalServer, httpx.Response], None]] = {
    "f-group-size-short": then_parts_stay_together,
    "f-duplicate-keys": then_scores_are_the_last,
    "f-empty-optional-lists": then_empty_fields_are_null,
    "f-post-after-disconnect": then_it_is_connected,
    "f-env-name-control": then_the_name_is_clean,
    "f-checkpoint-traversal": then_the_path_is_only_echoed,
    "f-unknown-field": then_the_name_is_reported,
}


def steps_batch_order(server: LocalServer) -> None:
    server.post("/register", {**BASE["register"], "batch_size": 2}, takeover=True)
    for score in (1, 2, 3):
        server.post("/scored_data", patched({"scores": [score, 0.5]}))
    assert stored(server) == 6
    for step in (1, 2, 3):
        assert all_groups(server)[0]["scores"][0] == step
        assert server.get("/status")["current_step"] == step


def steps_data_before_trainer(server: LocalServer) -> None:
    server.post("/scored_data", BASE["group"])
    assert stored(server) == 2
    server.post("/register", BASE["register"])
    assert server.get("/info")["batch_size"] == 4
    assert server.get("/batch") == {"batch": None}
    server.post("/scored_data", BASE["group"])
    assert len(all_groups(server)) == 2


def steps_batch_unregistered(server: LocalServer) -> None:
    assert server.get("/batch").items() >= {"status": "error", "batch": []}.items()


def steps_register_twice(server: LocalServer) -> None:
    refused = server.post("/register", {**BASE["register"], "batch_size": 8}, status=409)
    assert "batch_size" in refused["detail"]


def steps_weight_zero(server: LocalServer) -> None:
    env_id = server.post("/register-env", {**BASE["register_env"], "weight": 0})["env_id"]
    assert server.get("/status-env", env_id=env_id)["env_weight"] == 0.01


def steps_same_name(server: LocalServer) -> None:
    replies = [server.post("/register-env", BASE["register_env"]) for _ in range(2)]
    assert [reply["env_id"] for reply in replies] == [0, 1]
    assert [reply["wandb_name"] for reply in replies] == ["e_0", "e_1"]


def steps_status_env_unknown(server: LocalServer) -> None:
    reply = server.call("GET", "/status-env", params={"env_id": 7})
    assert reply.status_code == 404
    check_error(reply, "env_id")


def steps_list_one_bad(server: LocalServer) -> None:
    groups = [BASE["group"], patched({"scores": [None, 0]})]
    reply = server.call("POST", "/scored_data_list", json=groups)
    assert reply.status_code == 422
    check_error(reply, "[1].scores[0]")
    assert stored(server) == 0


def steps_cross_site(server: LocalServer) -> None:
    headers = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
    reply = server.call("GET", "/reset_data", headers=headers)
    assert reply.status_code == 403
    check_error(reply, "origin")
    assert server.get("/info")["batch_size"] == 4


def steps_host(server: LocalServer) -> None:
    reply = server.call("GET", "/status", headers={"Host": "other.example"})
    assert reply.status_code == 400
    check_error(reply, "host")


def steps_method_and_slash(server: LocalServer) -> None:
    allowed = CASES["f-method-and-slash"]["expect"]["status"]
    for (method, path), statuses in zip(CASES["f-method-and-slash"]["input"]["steps"], allowed, strict=True):
        reply = server.call(method, f"http://127.0.0.1:8000{path}")
        assert reply.status_code in statuses, (method, path)
        assert reply.status_code != 405 or reply.headers["allow"]
    assert stored(server) == 0


STEPS: dict[str, Callable[[LocalServer], None]] = {
    "f-batch-order": steps_batch_order,
    "f-data-before-trainer": steps_data_before_trainer,
    "f-batch-unregistered": steps_batch_unregistered,
    "f-register-twice-different": steps_register_twice,
    "f-env-weight-zero-only": steps_weight_zero,
    "f-env-same-name": steps_same_name,
    "f-status-env-unknown": steps_status_env_unknown,
    "f-list-one-bad": steps_list_one_bad,
    "f-cross-site-reset": steps_cross_site,
    "f-host-rebinding": steps_host,
    "f-method-and-slash": steps_method_and_slash,
}
REQUESTS = [case for case in CASES if case not in STEPS and case not in ON_A_SOCKET and case != "f-gzip-bomb"]


@pytest.mark.parametrize("case_id", REQUESTS)
def test_request(case_id: str) -> None:
    case = CASES[case_id]
    server = set_up(case)
    reply = send(server, case["input"])
    expect = case["expect"]
    statuses = expect["status"] if isinstance(expect["status"], list) else [expect["status"]]
    assert reply.status_code in statuses, reply.text[:500]
    if reply.status_code != 200 and "field" in expect:
        check_error(reply, expect["field"])
    if expect["stored_sequences"] == "2 or 0":
        assert stored(server) == (2 if reply.status_code == 200 else 0)
    else:
        assert stored(server) == expect["stored_sequences"]
    if case_id in THEN:
        THEN[case_id](server, reply)
    check_still_works(server)


@pytest.mark.parametrize("case_id", STEPS)
def test_steps(case_id: str) -> None:
    server = set_up(CASES[case_id])
    STEPS[case_id](server)
    if case_id not in ("f-batch-order", "f-data-before-trainer"):  # both have read the queue to its end
        assert stored(server) == CASES[case_id]["expect"]["stored_sequences"]
    check_still_works(server)


def test_gzip_bomb() -> None:
    case = CASES["f-gzip-bomb"]
    server = set_up(case)
    bomb = generated(**case["input"]["generate"])
    tracemalloc.start()
    try:
        reply = server.call(
            "POST", "/scored_data", content=bomb, headers={**JSON, **case["input"]["headers"]}
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply.status_code == 413
    check_error(reply, "body")
    assert peak < 2 * LIMIT
    assert stored(server) == 0
    check_still_works(server)


def test_every_case_is_run() -> None:
    assert {*REQUESTS, *STEPS, *ON_A_SOCKET, "f-gzip-bomb"} == set(CASES)
    assert set(THEN) | {"f-batch-order", "f-data-before-trainer", "f-env-same-name", "f-gzip-bomb"} == {
        case_id for case_id, case in CASES.items() if "then" in case["expect"]
    }
