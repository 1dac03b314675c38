"""Masks of old environments that are neither -100 nor the id: refused, or kept by choice and counted."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from server_tools import LocalServer

from atropos_gym.batch_server.limits import Limits

OLD: dict[str, Any] = {
    "tokens": [[5, 6, 7], [5, 8]],
    "masks": [[0, 1, 1], [0, 1]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -2.0]],
}


def make_server(**limits: Any) -> LocalServer:
    server = LocalServer(Limits(**limits))
    server.start(batch_size=2)
    return server


def test_they_are_refused_by_default() -> None:
    refused = make_server().post("/scored_data", OLD, status=422)
    assert refused["detail"][0]["loc"] == ["body", "masks", 0, 0]


@pytest.mark.parametrize("many", [False, True])
def test_by_choice_they_go_through_as_they_came(many: bool) -> None:
    server = make_server(foreign_masks="keep")
    server.post("/scored_data_list" if many else "/scored_data", [OLD] if many else OLD)
    (item,) = server.get("/batch")["batch"]
    assert {name: item[name] for name in OLD} == OLD
    assert "1 groups have masks that are neither -100 nor the id: kept" in server.get("/health")["warnings"]
    assert "atropos_foreign_masks_total 1\n" in server.call("GET", "/metrics").text


def test_msgpack_carries_them_whole() -> None:
    server = make_server(foreign_masks="keep")
    body = msgpack.packb(OLD)
    reply = server.call("POST", "/scored_data", content=body, headers={"Content-Type": "application/msgpack"})
    assert reply.status_code == 200
    packed = server.call("GET", "/batch", headers={"Accept": "application/msgpack"})
    (item,) = msgpack.unpackb(packed.content)["batch"]
    assert item["masks"][0] == b"\0\0\0\0\1\0\0\0\1\0\0\0" and "mask_bits" not in item


def test_groups_in_the_usual_form_are_checked_as_ever() -> None:
    server = make_server(foreign_masks="keep")
    usual = {**OLD, "masks": [[-100, 6, 7], [-100, 8]]}
    server.post("/scored_data", usual)
    (item,) = server.get("/batch")["batch"]
    assert item["masks"] == usual["masks"]
    assert not any("masks" in warning for warning in server.get("/health")["warnings"])
    server.post("/scored_data", {**usual, "masks": [[-100] * 3, [-100] * 2]}, status=422)
    server.post("/scored_data", {**usual, "inference_logprobs": [[1.0, 0.5, 0], [1.0, 0]]}, status=422)
    server.post("/scored_data", {**OLD, "masks": [[0, 1], [0, 1]]}, status=422)
