"""Groups as clients write and read them: msgpack and JSON are the same group to the server and to readers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import LocalServer, group

from atropos_gym.batch_server._group_bodies import JSON, MSGPACK, body_of, body_of_list, group_of, unpack
from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.errors import GroupRefused, ServerError
from atropos_gym.wire import ScoredDataGroup

URL = "http://127.0.0.1:8000"
NUMBERS = st.one_of(
    st.floats(-(2.0**120), 0, width=32, allow_subnormal=False),
    st.floats(-5, 0, allow_subnormal=False),
    st.sampled_from([-1e300, 0.0, -0.7]),
)


@st.composite
def groups(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))

    def rows(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [draw(st.lists(values, min_size=length, max_size=length)) for length in lengths]

    tokens = rows(st.integers(0, 2**31 - 1))
    trained = rows(st.booleans())
    trained[0][0] = True
    made: dict[str, Any] = {
        "tokens": tokens,
        "masks": [
            [one if flag else -100 for one, flag in zip(ids, flags, strict=True)]
            for ids, flags in zip(tokens, trained, strict=True)
        ],
        "scores": [draw(st.floats(-1e9, 1e9)) for _ in lengths],
        "group_overrides": draw(st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text()))),
        "messages": draw(
            st.sampled_from(
                [None, [[{"role": "user", "content": "é🎲", "extra": [1.5, None]}]] * len(lengths)]
            )
        ),
        "env_id": draw(st.sampled_from([None, 0, 7])),
    }
    for name in ("inference_logprobs", "advantages", "ref_logprobs"):
        made[name] = draw(st.sampled_from([None, 1])) and rows(NUMBERS)
    return made


def narrow(value: Any) -> Any:
    """Numbers as the float32 that is kept, or as they are where that would be infinite."""
    with np.errstate(over="ignore"):
        return [float(np.float32(x)) if np.isfinite(np.float32(x)) else x for row in value for x in row]


@settings(deadline=None, max_examples=15)
@given(groups())
def test_both_forms_are_the_same_post_and_the_same_batch(made: dict[str, Any]) -> None:
    """The server's digest of a post is of its content: the second form is a repetition of the first."""
    posted = ScoredDataGroup.model_validate(made)
    server = LocalServer()
    server.register(batch_size=8, max_token_len=0, groups_per_update=1)
    for packed, replayed in ((False, None), (True, "true")):
        body = body_of(posted, packed=packed)
        headers = {"Content-Type": body.media_type, "Idempotency-Key": "k"}
        reply = server.call("POST", "/scored_data", content=body.content, headers=headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("Idempotency-Replayed") == replayed

    async def read() -> ScoredDataGroup:
        async with AsyncBatchClient(URL, transport=server.transport()) as client:
            batch = await client.batch()
            assert batch is not None
            return batch.groups[0]

    read_back = server.run(read())
    floats = ("inference_logprobs", "advantages", "ref_logprobs")
    for name in set(ScoredDataGroup.model_fields) - set(floats):
        assert getattr(read_back, name) == getattr(posted, name), name
    for name in floats:
        wanted, found = getattr(posted, name), getattr(read_back, name)
        assert (found is None) is (wanted is None)
        if wanted is not None and all(abs(x) < 3e38 for row in wanted for x in row):
            assert [x for row in found for x in row] == narrow(wanted), name


def test_what_a_client_reads_is_made_of_plain_numbers() -> None:
    posted = ScoredDataGroup.model_validate(group(2, inference_logprobs=[[1.0, -0.25, -0.5]] * 2))
    read = group_of(unpack(body_of(posted, packed=True).content))
    assert read == posted
    kinds = {type(x) for rows in (read.tokens, read.masks) for row in rows for x in row}
    assert kinds == {int} and {type(x) for row in read.inference_logprobs or [] for x in row} == {float}


def test_packed_groups_take_a_quarter_of_the_bytes() -> None:
    ids = list(range(100_000, 104_096))
    logprobs = [float(np.float32(-0.1234567 * (1 + k / 5000))) for k in range(len(ids))]
    big = ScoredDataGroup(tokens=[ids], masks=[ids], scores=[1.0], inference_logprobs=[logprobs])
    packed, plain = (len(body_of(big, packed=flag).content) for flag in (True, False))
    assert packed < 8.2 * len(ids) < plain / 3


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": [[-100, 2]]},
        {"tokens": [[1, 2, 2**40]]},
        {"tokens": [[1, 2.5, 3]]},
        {"tokens": [[]], "masks": [[]]},
        {"inference_logprobs": [[1.0, None, 0.5]]},
        {"inference_logprobs": [[1.0, -0.5]]},
        {"group_overrides": {"big": 2**70}},
    ],
)
def test_what_only_json_can_say_goes_as_json(changes: dict[str, Any]) -> None:
    """Groups made without checks among them: the server names what is wrong with them."""
    odd = ScoredDataGroup.model_construct(**{**ScoredDataGroup(**group(1)).__dict__, **changes})
    assert body_of(odd, packed=True) == body_of(odd, packed=False)
    assert body_of(odd, packed=True).media_type == JSON


def test_masks_of_ones_own_travel_as_they_are() -> None:
    foreign = ScoredDataGroup.model_validate(
        {**group(1), "masks": [[0, 1, 1]]}, context={"foreign_masks": "keep"}
    )
    body = body_of(foreign, packed=True)
    assert body.media_type == MSGPACK
    assert group_of(unpack(body.content)).masks == [[0, 1, 1]]


def test_teachers_in_either_form_are_read() -> None:
    nested = [[[1, 2], [3, 4], [5, 6]]]
    data = np.array(nested, "<i4").tobytes()
    for rows in (nested, [{"k": 2, "data": data}]):
        item = {"tokens": [[1, 2, 3]], "masks": [[1, 2, 3]], "scores": [1], "distill_token_ids": rows}
        assert group_of(item).distill_token_ids == nested


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x93\x01", b"\xdb\xff\xff\xff\xff"])
def test_what_is_cut_off_is_no_msgpack(content: bytes) -> None:
    with pytest.raises(ValueError, match="no msgpack"):
        unpack(content)
    with pytest.raises(ValueError, match="not a group"):
        group_of({"tokens": [b"1234"]} | {"mask_bits": 3})


# -- the client ----------------------------------------------------------------------------------------------


class Listening(httpx.AsyncBaseTransport):
    """Passes on to a server and keeps what was sent and answered."""

    def __init__(self, server: LocalServer) -> None:
        self._inner = server.transport()
        self.forms: list[tuple[str, str, str]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        said = request.headers.get("content-type", ""), response.headers.get("content-type", "")
        self.forms.append((request.url.path, *said))
        return response


def test_the_server_says_what_it_reads_and_the_client_goes_by_it() -> None:
    server = LocalServer()
    server.start(batch_size=100)
    network = Listening(server)
    made = ScoredDataGroup.model_validate(group(2))
    odd = made.model_copy(update={"group_overrides": {"big": 2**70}})

    async def story() -> None:
        async with AsyncBatchClient(URL, transport=network) as client:
            await client.post_group(made)  # nothing is known yet
            await client.post_group(made)
            await client.post_groups([made, made])
            await client.post_groups([made, odd])
        async with AsyncBatchClient(URL, transport=network) as service:
            await service.register_env(max_token_length=8, group_size=2)
            await service.post_groups([made])

    server.run(story())
    posts = [form for path, form, _ in network.forms if path.startswith("/scored")]
    assert posts == [JSON, MSGPACK, MSGPACK, JSON, MSGPACK]
    assert server.get("/status")["queue_size"] == 7


def test_a_batch_and_a_refusal_of_it_are_read_in_msgpack() -> None:
    server = LocalServer()
    server.start(batch_size=4)
    network = Listening(server)
    made = ScoredDataGroup.model_validate(group(4, inference_logprobs=[[1.0, -0.25, -0.5]] * 4))

    async def story() -> None:
        async with AsyncBatchClient(URL, transport=network) as client:
            await client.post_group(made)
            batch = await client.batch(lease_seconds=60)
            assert batch is not None and batch.groups == [made] and batch.batch_id == "b-1"
            assert await client.batch() is None
            with pytest.raises(ServerError, match="422"):
                await client.batch(lease_seconds=0)
            with pytest.raises(GroupRefused, match=r"tokens: group has 5 sequences"):
                await client.post_group(ScoredDataGroup.model_validate(group(5)))

    server.run(story())
    assert ("/batch", "", MSGPACK) in network.forms


def test_another_server_in_its_place_gets_json() -> None:
    forms: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        forms.append(request.headers["content-type"])
        if len(forms) == 2:
            raise httpx.ConnectError("gone", request=request)
        headers = {"Accept-Post": f"{JSON}, {MSGPACK}"} if len(forms) == 1 else {}
        return httpx.Response(200, json={"status": "received"}, headers=headers)

    async def sleep(seconds: float) -> None:
        pass

    async def story() -> None:
        async with AsyncBatchClient(URL, transport=httpx.MockTransport(answer), sleep=sleep) as client:
            made = ScoredDataGroup.model_validate(group(1))
            assert [await client.post_group(made) for _ in range(3)] == [None] * 3

    asyncio.run(story())
    assert forms == [JSON, MSGPACK, MSGPACK, JSON]


def test_a_server_that_does_not_take_msgpack_after_all_gets_json_next() -> None:
    forms: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        forms.append(request.headers["content-type"])
        if forms[-1] == MSGPACK:
            return httpx.Response(415, json={"detail": "JSON only"})
        headers = {"Accept-Post": f"{JSON}, {MSGPACK}"} if len(forms) == 1 else {}
        return httpx.Response(200, json={"status": "received"}, headers=headers)

    async def story() -> None:
        async with AsyncBatchClient(URL, transport=httpx.MockTransport(answer)) as client:
            made = ScoredDataGroup.model_validate(group(1))
            await client.post_group(made)
            with pytest.raises(ServerError, match="JSON only"):
                await client.post_group(made)
            await client.post_group(made)

    asyncio.run(story())
    assert forms == [JSON, MSGPACK, JSON]


def test_lists_are_one_form() -> None:
    made = ScoredDataGroup.model_validate(group(1))
    many = body_of_list([body_of(made, packed=True)] * 20)
    assert many.media_type == MSGPACK and [group_of(item) for item in unpack(many.content)] == [made] * 20
