"""How bodies come and go: plain, gzip or zstd; JSON or msgpack (rows F24, F25 and F39, section 6.7)."""

from __future__ import annotations

import asyncio
import gzip
import json
import struct
from collections.abc import AsyncIterator, Callable
from itertools import product
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import REGISTER_ENV, LocalServer, group
from starlette.datastructures import Headers

from atropos_gym.batch_server.bodies import codings
from atropos_gym.batch_server.bodies.codings import BrokenStream, Inflater
from atropos_gym.batch_server.bodies.forms import Form
from atropos_gym.batch_server.bodies.msgpack import pack
from atropos_gym.batch_server.http import asgi
from atropos_gym.batch_server.limits import Limits

zstd = codings.zstd

JSON, MSGPACK = "application/json", "application/msgpack"
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
DECOMPRESS: dict[str | None, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "zstd": zstd.decompress,
    None: lambda body: body,
}
SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"hello"
BODY = json.dumps(group()).encode()


def with_dictionary(body: bytes) -> bytes:
    words = zstd.train_dict([b"ids %d and masks" % number for number in range(500)], 600)
    return zstd.compress(body, zstd_dict=words)


@pytest.fixture
def server() -> LocalServer:
    server = LocalServer()
    server.start()
    return server


def post(server: LocalServer, content: Any, coding: str, media_type: str = JSON) -> httpx.Response:
    headers = {"Content-Type": media_type, "Content-Encoding": coding}
    return server.call("POST", "/scored_data", content=content, headers=headers)


async def sliced(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def raw(server: LocalServer, path: str, headers: dict[str, str]) -> tuple[httpx.Response, bytes]:
    """An answer and its body as it came."""

    async def read() -> tuple[httpx.Response, bytes]:
        async with server.http() as http:
            reply = await http.send(http.build_request("GET", path, headers=headers), stream=True)
            return reply, b"".join([piece async for piece in reply.aiter_raw()])

    return asyncio.run(read())


# In.


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY[:40], mtime=0) + gzip.compress(BODY[40:], mtime=0) + b"\0" * 5),
        ("gzip", gzip.compress(b"") * 3 + gzip.compress(BODY, mtime=0) + gzip.compress(b"")),
        ("zstd", zstd.compress(BODY)),
        ("ZSTD", zstd.compress(BODY, 19)),
        ("zstd", zstd.compress(BODY, options={zstd.CompressionParameter.checksum_flag: 1})),
        ("zstd", zstd.compress(BODY, options={zstd.CompressionParameter.content_size_flag: 0})),
        ("zstd", zstd.compress(BODY[:40]) + zstd.compress(BODY[40:])),
        ("zstd", SKIPPABLE + zstd.compress(BODY[:9]) + SKIPPABLE + zstd.compress(BODY[9:]) + SKIPPABLE),
        ("zstd", zstd.compress(b"") * 3 + zstd.compress(BODY)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_coded_body_is_read_however_it_is_cut(server: LocalServer, coding: str, content: bytes) -> None:
    for size in (1, 7, 1000):
        reply = post(server, sliced(content, size), coding)
        assert reply.status_code == 200, reply.text
        assert server.get("/batch", groups=1)["batch"][0]["tokens"] == group()["tokens"]


@pytest.mark.parametrize(
    ("coding", "content"),
    [
        ("gzip", BODY),
        ("gzip", zstd.compress(BODY)),
        ("gzip", gzip.compress(BODY, mtime=0)[:-1]),
        ("gzip", gzip.compress(BODY, mtime=0)[:-8] + b"\0" * 8),
        ("gzip", gzip.compress(BODY, mtime=0) + b"garbage"),
        ("zstd", BODY),
        ("zstd", b"\0" * 8),
        ("zstd", gzip.compress(BODY, mtime=0)),
        ("zstd", zstd.compress(BODY)[:-1]),
        ("zstd", zstd.compress(BODY)[:3]),
        ("zstd", zstd.compress(BODY)[1:]),
        ("zstd", zstd.compress(BODY) + b"garbage"),
        ("zstd", zstd.compress(BODY) + b"\0" * 5),
        ("zstd", zstd.compress(BODY) + SKIPPABLE[:6]),
        ("zstd", with_dictionary(BODY)),
        ("zstd", zstd.compress(BODY, options={zstd.CompressionParameter.checksum_flag: 1})[:-4] + b"\0" * 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_stream_is_the_senders_mistake(server: LocalServer, coding: str, content: bytes) -> None:
    reply = post(server, content, coding)
    assert reply.status_code == 400 and reply.json()["detail"].startswith(f"invalid {coding} body")
    assert server.get("/status")["queue_size"] == 0
    metrics = server.call("GET", "/metrics").text
    assert 'atropos_groups_refused_total{reason="status_400"} 1' in metrics


def test_a_frame_that_asks_for_much_memory_gets_none_beyond_the_body(server: LocalServer) -> None:
    """A window of 128 MiB is what the format's own tools take; more is refused."""
    magic = struct.pack("<I", 0xFD2FB528)
    frame = magic + b"\x00" + bytes([(31 - 10) << 3]) + b"\x01\x00\x00"  # 2 GiB, and one empty block
    reply = post(server, frame, "zstd")
    assert reply.status_code == 400


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_bomb_goes_off_in_small_pieces(coding: str) -> None:
    server = LocalServer(Limits(max_body_bytes=2**20))
    bomb = COMPRESS[coding](b" " * 2**25)
    assert len(bomb) < 2**16
    reply = post(server, bomb, coding)
    assert reply.status_code == 413 and "1048576" in reply.json()["detail"]
    assert len(next(Inflater(coding).feed(bomb))) == Inflater.PIECE_BYTES


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_without_content_have_an_end_too(coding: str) -> None:
    server = LocalServer(Limits(max_body_bytes=50_000))
    served = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal served
        while True:
            served += 1
            yield COMPRESS[coding](b"") * 100

    assert post(server, endless(), coding).status_code == 413
    assert served < 100


@pytest.mark.parametrize("cut", [2**10, 2**30])
@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_without_content_keep_nobody_waiting(coding: str, cut: int) -> None:
    member = COMPRESS[coding](b"")
    body = member * (4 * codings.FEED_BYTES // len(member) + 1)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def story() -> list[bytes]:
        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), cut):
                yield body[start : start + cut]

        other = asyncio.create_task(others())
        found = [piece async for piece in asgi._inflated(chunks(), Inflater(coding))]
        other.cancel()
        return found

    assert asyncio.run(story()) == []
    assert turns >= 3


@pytest.mark.parametrize("coding", ["deflate", "br", "gzip, zstd", "zstd, gzip", "\x7f" * 300])
def test_another_coding_is_answered_with_those_that_are_read(server: LocalServer, coding: str) -> None:
    reply = post(server, BODY, coding)
    assert reply.status_code == 415 and len(reply.content) < 600
    assert "gzip" in reply.json()["detail"] and "zstd" in reply.json()["detail"]


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("size", [0, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20])
def test_inflating_loses_nothing_at_the_end_of_a_piece(size: int, coding: str) -> None:
    inflater = Inflater(coding)
    assert sum(map(len, inflater.feed(COMPRESS[coding](b"0" * size)))) == size
    assert inflater.complete


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["gzip", "zstd"]),
    st.lists(st.binary(max_size=200), min_size=1, max_size=5),
    st.integers(1, 300),
    st.data(),
)
def test_members_come_out_whole_and_cut_ones_do_not(
    coding: str, contents: list[bytes], size: int, data: st.DataObject
) -> None:
    members = [COMPRESS[coding](content) for content in contents]
    stream = b"".join(members)

    def inflated(stream: bytes) -> tuple[bytes, bool]:
        inflater, out = Inflater(coding), []
        for start in range(0, len(stream), size):
            out += inflater.feed(stream[start : start + size])
        return b"".join(out), inflater.complete

    assert inflated(stream) == (b"".join(contents), True)
    cut = data.draw(st.integers(1, len(members[-1]) - 1))
    try:
        out, complete = inflated(stream[:-cut])
    except BrokenStream:
        return
    assert not complete and b"".join(contents).startswith(out)


# Out.


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        (None, None),
        ("", None),
        ("gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("GZIP", "gzip"),
        ("x-gzip", "gzip"),
        ("zstd", "zstd"),
        ("gzip, deflate, br, zstd", "zstd"),
        ("zstd;q=0.5, gzip;q=0.8", "gzip"),
        ("zstd ; q=0.8,gzip; q=0.8", "zstd"),
        ("gzip;q=0, zstd;q=0.1", "zstd"),
        ("zstd;q=0, *", "gzip"),
        ("*", "gzip"),
        ("*;q=0", None),
        ("gzip;q=0", None),
        ("gzip;q=0.000, zstd;q=0.0", None),
        ("identity", None),
        ("identity;q=1, gzip;q=0.5", None),
        ("identity;q=0.5, gzip", "gzip"),
        ("gzip;q=much", None),
        ("gzip;q=nan, zstd;q=-1", None),
        ("br", None),
        (",,;q=1,gzip", "gzip"),
    ],
)
def test_the_coding_is_the_one_that_the_client_likes_best(accepted: str | None, coding: str | None) -> None:
    headers = {} if accepted is None else {"accept-encoding": accepted}
    assert Form.of(Headers(headers)).coding == coding


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [
        ("*/*", False),
        (JSON, False),
        (MSGPACK, True),
        (f"{JSON}, {MSGPACK}", True),
        ("Application/MsgPack;q=0.9, */*;q=0.1", True),
        (f"{JSON}, {MSGPACK};q=0.5", False),
        (f"*/*, {MSGPACK};q=0.5", False),
        (f"{MSGPACK};q=0", False),
        ("application/msgpack-stream", False),
    ],
)
def test_msgpack_is_for_who_names_it(accepted: str, packed: bool) -> None:
    assert Form.of(Headers({"accept": accepted})).packed is packed


def test_headers_that_come_twice_are_one() -> None:
    lines = [
        (b"accept-encoding", b"gzip;q=0.1"),
        (b"accept-encoding", b"zstd;q=0.2"),
        (b"accept", b"*/*;q=0"),
    ]
    assert Form.of(Headers(raw=[*lines, (b"accept", MSGPACK.encode())])) == Form("zstd", packed=True)


@pytest.mark.parametrize("sent_as", [JSON, MSGPACK])
@pytest.mark.parametrize("sent_in", ["identity", "gzip", "zstd"])
def test_every_form_in_gives_the_same_batch_in_every_form_out(
    server: LocalServer, sent_in: str, sent_as: str
) -> None:
    sent = group(8, inference_logprobs=[[1.0, -0.5, -0.25]] * 8)
    body = COMPRESS.get(sent_in, bytes)(pack(sent) if sent_as == MSGPACK else json.dumps(sent).encode())
    for coding, accepted, lease in product(
        (None, "gzip", "zstd"), (JSON, MSGPACK), ("", "?lease_seconds=60")
    ):
        assert post(server, body, sent_in, sent_as).status_code == 200
        headers = {"Accept": accepted, "Accept-Encoding": coding or "identity"}
        reply, content = raw(server, f"/batch{lease}", headers)
        assert reply.headers.get("content-encoding") == coding and reply.headers["content-type"] == accepted
        assert int(reply.headers["content-length"]) == len(content)
        assert reply.headers["x-batch-sequences"] == "8" and "accept-encoding" in reply.headers["vary"]
        plain = DECOMPRESS[coding](content)
        answer = msgpack.unpackb(plain) if accepted == MSGPACK else json.loads(plain)
        assert ("batch_id" in answer) == bool(lease)
        (item,) = answer["batch"]
        if accepted == JSON:
            assert item["tokens"] == sent["tokens"] and item["masks"] == sent["masks"]
            assert item["inference_logprobs"] == sent["inference_logprobs"]
        else:
            assert item["tokens"] == [struct.pack("<3i", *row) for row in sent["tokens"]]
            assert item["mask_bits"] == [b"\x06"] * 8


def test_a_large_batch_is_squeezed_in_a_thread(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos_gym.batch_server.http.delivery.LARGE_BYTES", 1)
    server.send(4)
    server.send(4)
    reply, content = raw(server, "/batch", {"Accept-Encoding": "zstd"})
    assert reply.headers["content-encoding"] == "zstd"
    assert len(json.loads(zstd.decompress(content))["batch"]) == 2


@pytest.mark.parametrize("large", [0, 2**20])
def test_every_long_answer_is_squeezed(
    server: LocalServer, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atropos_gym.batch_server.bodies.forms.LARGE_BYTES", large)
    for number in range(8):
        server.post("/register-env", {**REGISTER_ENV, "desired_name": f"env-{number}"})
    server.send(8, messages=[[{"role": "user", "content": "words " * 40}]] * 8)
    paths = ("/latest_example", "/envs", "/dashboard", "/dashboard/data", "/metrics", "/openapi.json")
    for path, coding in product(paths, ("gzip", "zstd")):
        plain, expected = raw(server, path, {"Accept-Encoding": "identity"})
        reply, content = raw(server, path, {"Accept-Encoding": coding})
        assert reply.status_code == 200 and "content-encoding" not in plain.headers
        assert reply.headers["content-encoding"] == coding and "accept-encoding" in reply.headers["vary"]
        assert int(reply.headers["content-length"]) == len(content) < len(expected)
        assert reply.headers["content-type"] == plain.headers["content-type"]
        assert DECOMPRESS[coding](content)[:20] == expected[:20]


def test_short_answers_stay_plain(server: LocalServer) -> None:
    for path in ("/status", "/batch", "/info", "/nowhere"):
        reply, content = raw(server, path, {"Accept-Encoding": "gzip, zstd"})
        assert "content-encoding" not in reply.headers and json.loads(content)


def test_whoever_names_msgpack_gets_it_everywhere(server: LocalServer) -> None:
    server.send(8, inference_logprobs=[[1.0, -0.5, -0.25]] * 8)
    for path, names in {
        "/status": {"current_step", "queue_size"},
        "/latest_example": {"tokens", "mask_bits", "distill_logprobs"},
        "/envs": {"envs"},
        "/nowhere": {"detail"},
        "/batch": {"batch"},
    }.items():
        reply, content = raw(server, path, {"Accept": MSGPACK, "Accept-Encoding": "identity"})
        assert reply.headers["content-type"] == MSGPACK
        assert int(reply.headers["content-length"]) == len(content)
        assert names <= msgpack.unpackb(content).keys()
    reply, content = raw(server, "/metrics", {"Accept": MSGPACK, "Accept-Encoding": "identity"})
    assert reply.headers["content-type"].startswith("text/plain") and b"atropos_queue_groups" in content
