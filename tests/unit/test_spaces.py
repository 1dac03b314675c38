"""TokenSequence: members, samples, JSON, equality, pickling (DESIGN section 3)."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import (
    batch_differing_spaces,
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.spaces import TokenSequence

SPACE = TokenSequence(10, max_length=3)


@pytest.mark.parametrize(
    "member",
    [
        np.array([0, 9, 5], np.int32),
        np.array([1], np.int64),
        np.array([1], np.uint8),
        np.zeros(0, np.int32),
        [0, 9],
        [],
        (1, 2),
        [np.int32(3)],
    ],
    ids=repr,
)
def test_integer_sequences_within_the_bounds_are_members(member: Any) -> None:
    assert member in SPACE


@pytest.mark.parametrize(
    "stranger",
    [
        np.array([1.0]),
        np.zeros(0),
        np.array([True]),
        np.array([[1]]),
        np.array(1),
        np.array([10]),
        np.array([-1]),
        np.array([1, 2, 3, 4]),
        np.array(["1"]),
        np.array([1, None]),
        [1.0],
        [True],
        [np.bool_(True)],
        [10],
        [-1],
        [1, 2, 3, 4],
        [[1]],
        [2**70],
        "12",
        b"12",
        7,
        None,
        {1},
    ],
    ids=repr,
)
def test_anything_else_is_no_member(stranger: Any) -> None:
    assert stranger not in SPACE


def test_min_length_excludes_shorter_members() -> None:
    space = TokenSequence(10, 3, min_length=2)
    assert [1] not in space
    assert np.array([1]) not in space
    assert [1, 2] in space


@pytest.mark.parametrize(
    ("arguments", "word"),
    [((0, 3), "vocab_size"), ((3, -1), "max_length"), ((3, 2, 3), "min_length"), ((3, 2, -1), "min_length")],
)
def test_impossible_bounds_are_named(arguments: tuple[int, ...], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TokenSequence(*arguments)


@given(
    vocab=st.integers(1, 300),
    low=st.integers(0, 5),
    extra=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=50)
def test_samples_are_members_and_follow_the_seed(vocab: int, low: int, extra: int, seed: int) -> None:
    space = TokenSequence(vocab, low + extra, low)
    assert len(space.seed(seed)) == 2  # type: ignore[arg-type]
    first = [space.sample() for _ in range(4)]
    space.seed(seed)
    again = [space.sample() for _ in range(4)]
    for sample, same in zip(first, again, strict=True):
        assert sample in space
        assert sample.dtype == np.int32
        np.testing.assert_array_equal(sample, same)


def test_samples_use_the_whole_range_of_lengths_and_ids() -> None:
    space = TokenSequence(3, 2, seed=1)
    samples = [space.sample().tolist() for _ in range(200)]
    assert {len(sample) for sample in samples} == {0, 1, 2}
    assert {i for sample in samples for i in sample} == {0, 1, 2}


def test_a_mask_fixes_the_length_and_the_allowed_ids() -> None:
    space = TokenSequence(5, 8, seed=0)
    allowed = np.array([0, 1, 0, 1, 0], np.int8)
    sample = space.sample(mask=(6, allowed))
    assert sample.shape == (6,)
    assert set(sample.tolist()) <= {1, 3}
    lengths = {space.sample(mask=(np.array([2, 4]), None)).size for _ in range(30)}
    assert lengths == {2, 4}


def test_probabilities_weigh_the_ids() -> None:
    space = TokenSequence(3, 8, seed=0)
    sample = space.sample(probability=(8, np.array([0.0, 0.0, 1.0])))
    assert sample.tolist() == [2] * 8
    assert space.sample(probability=(0, np.array([0.5, 0.5, 0.0]))).size == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": (1, None), "probability": (1, None)}, "not both"),
        ({"mask": (9, None)}, "length must be in"),
        ({"mask": (1, np.zeros(3, np.int8))}, "allows no id"),
        ({"mask": (1, np.ones(4, np.int8))}, "shape"),
    ],
)
def test_impossible_samples_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenSequence(3, 8).sample(**arguments)


@pytest.mark.parametrize("length", [1.5, np.array([1.5]), True, "2"], ids=repr)
def test_lengths_are_integers(length: Any) -> None:
    with pytest.raises(TypeError, match="length must be an int, got"):
        TokenSequence(3, 8).sample(mask=(length, None))


@pytest.mark.parametrize("arguments", [(10.0, 3), (10, 3.5), (10, 3, "0"), (True, 3)], ids=repr)
def test_bounds_are_integers(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="must be an int, got"):
        TokenSequence(*arguments)
    assert TokenSequence(np.int64(10), np.int32(3)) == SPACE


def test_a_long_prompt_is_checked_in_no_time() -> None:
    """Vectorised: a plain Sequence of Discrete takes a tenth of a second for 4,096 ids."""
    space, prompt = TokenSequence(152_000, 40_000), np.zeros(32_768, np.int32)
    begun = time.process_time()
    assert all(prompt in space for _ in range(50))
    assert time.process_time() - begun < 2.0  # 50 checks take about 2 ms


def test_json_goes_there_and_back() -> None:
    batch = [np.array([1, 2], np.int32), np.zeros(0, np.int32)]
    assert SPACE.to_jsonable(batch) == [[1, 2], []]
    back = SPACE.from_jsonable([[1, 2], []])
    assert [b.dtype for b in back] == [np.int32, np.int32]
    assert all(b in SPACE for b in back)


def test_equality_compares_kind_and_bounds() -> None:
    assert TokenSequence(10, 3) == SPACE
    for other in (TokenSequence(11, 3), TokenSequence(10, 4), TokenSequence(10, 3, 1), spaces.Discrete(10)):
        assert other != SPACE
    assert spaces.Sequence(spaces.Discrete(10), stack=True) != SPACE


def test_repr_is_short_at_any_size() -> None:
    assert repr(TokenSequence(152_000, 32_768, 1)) == "TokenSequence(152000, max_length=32768, min_length=1)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda space: pickle.loads(pickle.dumps(space))])
def test_copies_are_equal_and_sample_alike(copied: Any) -> None:
    space = TokenSequence(10, 3, seed=4)
    twin = copied(space)
    assert twin == space
    assert (twin.shape, twin.dtype) == ((), np.dtype(object))
    np.testing.assert_array_equal(twin.sample(), space.sample())


# --- what Gymnasium's vector environments make of it ---


def test_a_batch_is_a_tuple_of_spaces_and_of_arrays() -> None:
    batch = batch_space(SPACE, 3)
    assert batch == spaces.Tuple([SPACE] * 3)
    batch.seed(0)
    members = batch.sample()
    assert members in batch and all(member in SPACE for member in members)
    assert batch.from_jsonable(batch.to_jsonable([members]))[0] in batch
    joined = concatenate(SPACE, members, create_empty_array(SPACE, 3))
    assert all(one is other for one, other in zip(joined, members, strict=True))


def _slots(rows: list[list[int]]) -> np.ndarray[Any, Any]:
    slots = np.empty(len(rows), dtype=object)
    for k, row in enumerate(rows):
        slots[k] = np.array(row)
    return slots


@pytest.mark.parametrize(
    "actions",
    [
        (np.array([1, 2]), np.array([3])),
        [[1, 2], [3]],
        ((1, 2), (3,)),
        _slots([[1, 2], [3]]),
        np.array([[1, 2], [3, 4]]),
        ((1, 2, 3), (4, 5, 6)),
    ],
    ids=["arrays", "lists", "tuples", "object slots", "one array", "equal lengths"],
)
def test_a_batch_of_actions_is_handed_out_by_environment(actions: Any) -> None:
    handed = [list(action) for action in iterate(batch_space(SPACE, 2), actions)]
    assert handed == [list(action) for action in actions]


def test_shared_memory_and_different_spaces_are_refused() -> None:
    with pytest.raises(TypeError, match=r"As TokenSequence\(10, max_length=3\) .* disable `shared_memory`"):
        create_shared_memory(SPACE, 2)
    with pytest.raises(TypeError, match="batch_differing_space"):
        batch_differing_spaces([SPACE, TokenSequence(10, 4)])


def test_flattening_is_one_hot_and_goes_back() -> None:
    member = np.array([4, 0], np.int32)
    flat = spaces.utils.flatten(SPACE, member)
    assert flat.shape == (2, 10) and flat.sum() == 2
    assert spaces.utils.unflatten(SPACE, flat).tolist() == [4, 0]


def test_is_a_stacked_sequence_of_object_slots() -> None:
    assert isinstance(SPACE, spaces.Sequence)
    assert SPACE.stack
    assert (SPACE.shape, SPACE.dtype) == ((), np.dtype(object))
    assert not SPACE.is_np_flattenable
