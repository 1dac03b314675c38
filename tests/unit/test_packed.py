"""Groups as they are kept: what goes in comes out, and the fast way in agrees with the exact one.

1. packing loses nothing but what float32 cannot hold, and serves the shortest decimals,
2. what the fast reader takes, the exact validator takes too, as the same bytes,
3. a group costs at most 9 bytes a token besides its rows.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from fastapi import HTTPException
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.batch_server.bodies.exact import parse, parse_groups
from atropos_gym.batch_server.bodies.fast_json import read_json_groups
from atropos_gym.batch_server.bodies.msgpack import expand, pack, read_msgpack_groups, unpack
from atropos_gym.batch_server.state import packed
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.packed import FLOATS, PackedGroup, pack_group
from atropos_gym.wire import ScoredDataGroup

CASES = json.loads((Path(__file__).parent.parent / "cases" / "f_server.json").read_text())
SMALL = {"tokens": [[1, 2, 3], [4, 5]], "masks": [[-100, 2, 3], [-100, 5]], "scores": [1.0, 0.5]}
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
free = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def groups(draw: st.DrawFn, number: st.SearchStrategy[float] = float32) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    tokens = [draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)) for n in lengths]
    trained = [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]
    trained[0][0] = True
    masks = [
        [one if flag else -100 for one, flag in zip(*row, strict=True)]
        for row in zip(tokens, trained, strict=True)
    ]
    group: dict[str, Any] = {"tokens": tokens, "masks": masks}
    group["scores"] = draw(st.lists(finite, min_size=len(lengths), max_size=len(lengths)))
    for name in FLOATS:
        if draw(st.booleans()):
            group[name] = [draw(st.lists(number, min_size=n, max_size=n)) for n in lengths]
    if "inference_logprobs" in group:
        group["inference_logprobs"] = [
            [-abs(value) if flag else 1.0 for value, flag in zip(*row, strict=True)]
            for row in zip(group["inference_logprobs"], trained, strict=True)
        ]
    if draw(st.booleans()):
        turn = {"role": "user", "content": draw(st.text(max_size=8)), "more": draw(free)}
        group["messages"] = [[turn]] * len(lengths)
        group["overrides"] = [{"episode": row, "free": draw(free)} for row in range(len(lengths))]
        group["group_overrides"] = {"policy_version": draw(st.integers(0, 9)), "free": draw(free)}
        group["env_id"] = draw(st.none() | st.integers(0, 2**70))
    return group


def shown(group: dict[str, Any]) -> dict[str, Any]:
    """What a client should read: empty fields are null, an absent ``inference_logprobs`` stays away."""
    fields = {name: group.get(name) for name in ScoredDataGroup.model_fields}
    if fields["inference_logprobs"] is None:
        del fields["inference_logprobs"]
    return {name: None if value in ([], {}) else value for name, value in fields.items()}


def as_float32(group: dict[str, Any]) -> dict[str, Any]:
    """The group as a reader sees it whose numbers are float32."""
    found = copy.deepcopy(group)
    for name in FLOATS:
        if found.get(name) is not None:
            found[name] = [np.array(row, np.float32).tolist() for row in found[name]]
    return found


def in_64_bits(value: Any) -> Any:
    """What msgpack makes of integers that are too large for it."""
    if isinstance(value, dict):
        return {name: in_64_bits(one) for name, one in value.items()}
    if isinstance(value, list):
        return [in_64_bits(one) for one in value]
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return float(value) if large else value


def exactly(body: bytes) -> list[Incoming] | None:
    """What the exact validator makes of a body; None where it refuses it."""
    try:
        return parse_groups(parse(body), many=False)
    except HTTPException:
        return None


@settings(deadline=None, max_examples=60)
@given(groups())
def test_what_goes_in_comes_out(group: dict[str, Any]) -> None:
    packed = pack_group(ScoredDataGroup.model_validate(group))
    served = json.loads(packed.to_json())
    assert list(served) == list(shown(group))
    assert as_float32(served) == as_float32(shown(group))
    again = ScoredDataGroup.model_validate(served)
    assert pack_group(again) == packed
    assert expand(unpack(pack(packed.to_map()))) == in_64_bits(as_float32(shown(group)))


@settings(deadline=None, max_examples=60)
@given(groups(finite), st.booleans())
def test_the_fast_way_agrees_with_the_exact_one(group: dict[str, Any], spaces: bool) -> None:
    body = json.dumps(group, separators=None if spaces else (",", ":")).encode()
    fast = read_json_groups(body, many=False)
    assert fast is None or fast == exactly(body)
    if "messages" not in group:
        assert fast is not None


@settings(deadline=None, max_examples=150)
@given(groups(), st.data())
def test_whatever_is_wrong_the_fast_way_takes_nothing_that_the_exact_one_refuses(
    group: dict[str, Any], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(group)))
    strange = st.sampled_from([None, True, -1, -100, 1.5, "1", 2**31, 2**64, [], {}, [1], [[]], [[1, [2]]]])
    if isinstance(group[name], list) and group[name] and data.draw(st.booleans()):
        row = data.draw(st.integers(0, len(group[name]) - 1))
        if isinstance(group[name][row], list) and group[name][row] and data.draw(st.booleans()):
            column = data.draw(st.integers(0, len(group[name][row]) - 1))
            group[name][row] = [*group[name][row]]
            group[name][row][column] = data.draw(strange)
        else:
            group[name][row] = data.draw(strange)
    else:
        group[name] = data.draw(strange)
    body = json.dumps(group).encode()
    fast = read_json_groups(body, many=False)
    assert fast is None or fast == exactly(body)


@pytest.mark.parametrize("case", [case["id"] for case in CASES["cases"] if "raw" in case["input"]])
def test_bodies_of_the_cases(case: str) -> None:
    body = next(one for one in CASES["cases"] if one["id"] == case)["input"]["raw"].encode()
    fast = read_json_groups(body, many=False)
    assert fast is None or fast == exactly(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"tokens":[[1,[2]]],"masks":[[1,2]],"scores":[0]}',
        b'{"tokens":[[1,2]],"masks":[[1,2]],"scores":[[0]]}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"scores":[1]}',
        b'{"tokens":[[1,[2]]],"masks":[[1,2]],"scores":[0],"x":"\\u005b"}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"group_overrides":0}',
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"x":' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"distill_token_ids":[[[1]]]}',
        b"[]",
        b"5",
    ],
)
def test_what_is_odd_is_left_to_the_validator(body: bytes) -> None:
    assert read_json_groups(body, many=False) is None


def test_brackets_in_text_are_no_arrays() -> None:
    body = json.dumps({**SMALL, "generation_params": {"stop": "[[", "a[": [1]}, "unknown[": "]["}).encode()
    fast = read_json_groups(body, many=False)
    assert fast is not None and fast == exactly(body)
    assert fast[0].unknown_fields == ("unknown[",)


def test_floats_print_as_the_shortest_decimal_that_reads_back() -> None:
    values = np.array([-0.1, -1.2345678, -16777217.0], np.float32)
    group = {**SMALL, "inference_logprobs": [[1.0, *values[:2].tolist()], [7.0, float(values[2])]]}
    served = pack_group(ScoredDataGroup.model_validate(group)).to_json()
    assert b'"inference_logprobs":[[1.0,-0.1,-1.2345678],[1.0,-16777216.0]]' in served


def test_scores_keep_all_their_digits_and_large_values_are_kept() -> None:
    group = {**SMALL, "scores": [0.1 + 0.2, 1e300], "advantages": [[1e300, 0.5, 0.25], [0.0, 1.0]]}
    served = json.loads(pack_group(ScoredDataGroup.model_validate(group)).to_json())
    assert served["scores"] == group["scores"]
    assert served["advantages"] == group["advantages"]


def test_a_group_costs_at_most_nine_bytes_a_token_besides_its_rows() -> None:
    rows, length = 8, 4096
    tokens = [[7] * length for _ in range(rows)]
    masks = [[-100] * 1024 + row[1024:] for row in tokens]
    logprobs = [[1.0] * 1024 + [-0.5] * (length - 1024) for _ in range(rows)]
    group = ScoredDataGroup(
        tokens=tokens, masks=masks, scores=[0.0] * rows, inference_logprobs=logprobs, env_id=3
    )
    assert len(pack_group(group).data) <= 9 * rows * length + 64 * rows


def test_a_large_group_lies_in_memory_of_its_own_and_is_the_same_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = [list(range(1, 9000))] * 2
    group = ScoredDataGroup(
        tokens=ids, masks=ids, scores=[1.0, 2.0], env_id=3, messages=[[{"role": "user", "content": "é"}]] * 2
    )
    apart = pack_group(group)
    monkeypatch.setattr(packed, "OWN_MEMORY_BYTES", 10**9)
    on_the_heap = pack_group(group)
    assert isinstance(apart.data, memoryview) and apart.data.readonly
    assert isinstance(on_the_heap.data, bytes)
    assert apart == on_the_heap
    assert (apart.to_json(), apart.to_map(), apart.free()) == (
        on_the_heap.to_json(),
        on_the_heap.to_map(),
        on_the_heap.free(),
    )
    with pytest.raises(ValueError, match="read-only"):
        apart.columns().tokens[0] = 7


def test_something_else_is_not_a_group() -> None:
    with pytest.raises(ValueError, match="not a packed group"):
        PackedGroup(b"x" * 40).to_json()


BINARY = {
    "tokens": [np.array([1, 2, 3], "<i4").tobytes(), np.array([4, 5], "<i4").tobytes()],
    "mask_bits": [b"\x06", b"\x02"],
    "scores": [1, 0.5],
    "inference_logprobs": [np.array([9, -1, -2], "<f4").tobytes(), np.array([9, -3], "<f4").tobytes()],
    "generation_params": {"temperature": 1.0},
}
PLAIN = {
    **SMALL,
    "inference_logprobs": [[1.0, -1.0, -2.0], [1.0, -3.0]],
    "generation_params": {"temperature": 1.0},
}


def test_bytes_and_lists_are_the_same_group() -> None:
    expected = exactly(json.dumps(PLAIN).encode())
    assert read_msgpack_groups(BINARY, many=False) == expected
    assert parse_groups(BINARY, many=False, packed=True) == expected
    assert parse_groups(PLAIN, many=False, packed=True) == expected
    masks = [np.array(row, "<i4").tobytes() for row in SMALL["masks"]]  # type: ignore[attr-defined]
    named = {name: value for name, value in BINARY.items() if name != "mask_bits"} | {"masks": masks}
    assert read_msgpack_groups(named, many=False) == expected


@pytest.mark.parametrize(
    ("change", "loc"),
    [
        ({"tokens": [b"\1\0\0", b"\1\0\0\0"]}, ["body", "tokens", 0]),
        ({"mask_bits": [b"\x06"]}, ["body", "mask_bits"]),
        ({"mask_bits": [b"\x0e", b"\x02"]}, ["body", "mask_bits"]),
        ({"mask_bits": [b"\x00", b"\x00"]}, ["body", "masks"]),
        ({"masks": SMALL["masks"]}, ["body", "mask_bits"]),
        (
            {"inference_logprobs": [np.array([1, 2, -1], "<f4").tobytes()] * 2},
            ["body", "inference_logprobs", 1],
        ),
        ({"advantages": [np.array([np.nan, 2, -1], "<f4").tobytes()] * 2}, ["body", "advantages", 0, 0]),
        ({"generation_params": {"seed": b"x"}}, ["body", "generation_params", "seed"]),
        ({"generation_params": {"temperature": float("nan")}}, ["body", "generation_params", "temperature"]),
        ({"generation_params": {"t": msgpack.Timestamp(1)}}, ["body", "generation_params", "t"]),
    ],
)
def test_bytes_that_are_no_group_are_refused_by_place(change: dict[str, Any], loc: list[str | int]) -> None:
    body = {**BINARY, **change}
    assert read_msgpack_groups(body, many=False) is None
    with pytest.raises(HTTPException) as caught:
        parse_groups(body, many=False, packed=True)
    detail: Any = caught.value.detail
    assert caught.value.status_code == 422 and detail[0]["loc"] == loc


def test_teachers_as_bytes() -> None:
    ids = {"k": 2, "data": np.arange(6, dtype="<i4").tobytes()}
    group = {**BINARY, "distill_token_ids": [ids, {"k": 1, "data": np.arange(2, dtype="<i4").tobytes()}]}
    incoming = parse_groups(group, many=False, packed=True)
    assert incoming[0].free["distill_token_ids"] == [[[0, 1], [2, 3], [4, 5]], [[0], [1]]]
