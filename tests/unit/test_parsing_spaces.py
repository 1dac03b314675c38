"""Actions of every space: JSON to members, members to text, and text back to the same member."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.messages import ToolCall
from atropos_gym.parsing import (
    ACTION_FORMATS,
    TOOL_DIALECTS,
    action_tool,
    describe_format,
    format_action,
    format_call,
    parse_action,
    parse_tool_calls,
)
from atropos_gym.parsing.parsed import is_same
from tests.tools.parsing_cases import BLACKJACK, LAKE

INFINITE = float("inf")
ARRAYS: list[Space[Any]] = [
    spaces.Box(-1, 1, (2,)),
    spaces.Box(-INFINITE, INFINITE, (3,), np.float64),
    spaces.Box(np.array([-INFINITE, 0.1], np.float32), np.array([0.1, INFINITE], np.float32)),
    spaces.Box(0, 1, (1,)),
    spaces.Box(0, 1, ()),
    spaces.Box(-2, 2, (2, 3), np.float16),
    spaces.Box(0, 255, (2, 2, 3), np.uint8),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.MultiDiscrete([3, 2, 7]),
    spaces.MultiDiscrete([[3, 2], [4, 5]], start=[[-1, 0], [2, 3]], dtype=np.int32),
    spaces.MultiDiscrete([5]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 2]),
]
NESTED = spaces.Dict(
    move=spaces.Discrete(4),
    force=spaces.Box(-1, 1, (2,)),
    pair=spaces.Tuple(
        [spaces.Discrete(2), spaces.MultiBinary(2), spaces.Dict(deep=spaces.Discrete(3, start=-1))]
    ),
)
NESTED_NAMES = {"move": LAKE, "pair": [BLACKJACK, None, {"deep": ("less", "same", "more")}]}
COMPOUND: list[tuple[Space[Any], Any]] = [
    (NESTED, NESTED_NAMES),
    (NESTED, None),
    (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2), spaces.Discrete(5)]), None),
    (spaces.Tuple([spaces.Discrete(4), spaces.Box(0, 1, ())]), (LAKE, None)),
]
DISCRETE: list[tuple[Space[Any], Any]] = [
    (spaces.Discrete(2), BLACKJACK),
    (spaces.Discrete(3, start=-1), ("less", "same", "more")),
    (spaces.Discrete(3, start=-1), None),
    (spaces.Discrete(1000, start=5), None),
    (spaces.Discrete(2, dtype=np.uint8), ("null", "true")),
    (spaces.Discrete(2), ("h\u00f6her rein", "Tiefer")),
]


def written(space: Space[Any], names: Any) -> list[tuple[str, str | None]]:
    """The formats that can write an action of a space."""
    formats = {"json"}
    if isinstance(space, spaces.Discrete):
        formats |= {"tag", "bare_word", "number"}
    elif isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        formats |= {"box"}
    return [*((format, None) for format in sorted(formats)), *(("tool_call", name) for name in TOOL_DIALECTS)]


ALL = [*DISCRETE, *COMPOUND, *((space, None) for space in ARRAYS)]


def test_every_format_is_tried() -> None:
    assert {format for space, names in ALL for format, _ in written(space, names)} == set(ACTION_FORMATS)


@pytest.mark.parametrize("place", range(len(ALL)))
@settings(max_examples=12)
@given(seed=st.integers(0, 2**31 - 1))
def test_what_is_said_for_an_action_is_read_as_that_action(place: int, seed: int) -> None:
    space, names = ALL[place]
    space.seed(seed)
    action = space.sample()
    for format, dialect in written(space, names):
        said = format_action(action, format, space=space, names=names, dialect=dialect)
        parsed = parse_action(said, space, format, names=names, dialect=dialect, legal=[action])
        assert parsed.valid, (format, dialect, said, parsed.reason)
        assert space.contains(parsed.value) and is_same(parsed.value, action)
        around = parse_action(f"<think>{said}</think>\n{said}\n", space, format, names=names, dialect=dialect)
        assert around == parsed


@pytest.mark.parametrize("place", range(len(ALL)))
def test_members_have_the_types_that_the_space_has(place: int) -> None:
    space, names = ALL[place]
    space.seed(0)
    action = space.sample()
    parsed = parse_action(format_action(action, "json", space=space, names=names), space, "json", names=names)

    def check(value: Any, part: Space[Any]) -> None:
        if isinstance(part, spaces.Discrete):
            assert type(value) is int
        elif isinstance(part, spaces.Dict):
            assert list(value) == list(part.spaces)
            for key, own in part.spaces.items():
                check(value[key], own)
        elif isinstance(part, spaces.Tuple):
            assert isinstance(value, tuple)
            for member, own in zip(value, part.spaces, strict=True):
                check(member, own)
        else:
            assert isinstance(value, np.ndarray)
            assert (value.dtype, value.shape) == (part.dtype, part.shape)

    check(parsed.value, space)


@pytest.mark.parametrize("edge", ["low", "high"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bounds_are_inclusive_as_they_are_written(edge: str, dtype: Any) -> None:
    space = spaces.Box(dtype(0.1), dtype(0.7), (1,), dtype)
    parsed = parse_action("[0.1]" if edge == "low" else "[0.7]", space, "box")
    assert parsed.valid and parsed.value == getattr(space, edge) and space.contains(parsed.value)
    beyond = "0.0999999999" if edge == "low" else "0.7000000001"
    assert parse_action(f"[{beyond}]", space, "box").reason == "out_of_range"


PAIR = spaces.Box(-1, 1, (2,))
BYTES = spaces.Box(0, 255, (3,), np.uint8)
FREE = spaces.Box(-INFINITE, INFINITE, (2,))
GRID = spaces.MultiDiscrete([3, 2])


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("[1, -1]", [1, -1]),
        ("`[0.5, -0.25]`.", [0.5, -0.25]),
        ("```json\n[0.5, -0.25]\n```", [0.5, -0.25]),
        ("I push right.\nAction: [5e-1, -0.25]\nLet us see.", [0.5, -0.25]),
        ("I will go with **[0.5, -0.25]**.", [0.5, -0.25]),
        ("Action: [0, 0]\nNo. Action: [0.5, -0.25]", [0.5, -0.25]),
        ("[0.5, -0.25]\n[0.50, -0.25]", [0.5, -0.25]),
        ("[0.5, -0.25]\nObservation: 3\n[0, 0]", [0.5, -0.25]),
        ("I choose [0.5, -0.25]\nUser: ok\nI choose [0, 0]", [0.5, -0.25]),
        ("My move is:\n[0.5,\n -0.25]", [0.5, -0.25]),
    ],
)
def test_box_reads_one_list(completion: str, value: list[float]) -> None:
    parsed = parse_action(completion, PAIR, "box")
    assert parsed.valid and parsed.value.tolist() == value


@pytest.mark.parametrize(
    ("space", "completion", "reason"),
    [
        (PAIR, "", "no_container"),
        (PAIR, "0.5, -0.25", "wrong_shape"),
        (PAIR, "(0.5, -0.25)", "no_container"),
        (PAIR, "I think [0.5, -0.25] is best", "no_container"),
        (PAIR, "[0.5, -0.25] is best", "not_an_action"),
        (PAIR, "Action: [0.5, -0.25] or [0, 0]", "not_an_action"),
        (PAIR, "[0.5, -0.25], [0, 0]", "several_actions"),
        (PAIR, "[0.5, -0.25", "cut_off"),
        (PAIR, "[0.5, -0.25,]", "bad_json"),
        (PAIR, "[.5, 0]", "bad_json"),
        (PAIR, "[0.5; 0]", "bad_json"),
        (PAIR, "[inf, 0]", "bad_json"),
        (PAIR, "[Infinity, 0]", "not_finite"),
        (PAIR, "[[0.5, 0]]", "wrong_shape"),
        (PAIR, "[0.5, 0, 0]", "wrong_shape"),
        (PAIR, '["0.5", "0"]', "not_an_action"),
        (PAIR, "[true, 0]", "not_an_action"),
        (PAIR, "[null, 0]", "not_an_action"),
        (PAIR, "[0.5, 1.00000001]", "out_of_range"),
        (PAIR, "[0.5, " + "9" * 400 + "]", "not_finite"),
        (PAIR, "[0.5, " + "9" * 5000 + "]", "bad_json"),
        (FREE, "[0, 3.5e38]", "not_finite"),
        (FREE, "[0, -1e39]", "not_finite"),
        (FREE, "[0, " + "9" * 400 + "]", "not_finite"),
        (spaces.Box(-INFINITE, INFINITE, (1,), np.float16), "65520.0", "not_finite"),
        (BYTES, "[255, 0, 256]", "out_of_range"),
        (BYTES, "[255, 0, -1]", "out_of_range"),
        (BYTES, "[255.0, 0, 0]", "not_an_action"),
        (BYTES, "[255, 0, 18446744073709551616]", "out_of_range"),
        (GRID, "[2, 2]", "out_of_range"),
        (GRID, "[-1, 0]", "out_of_range"),
        (GRID, "[2.0, 1]", "not_an_action"),
        (GRID, "[true, 1]", "not_an_action"),
        (spaces.MultiBinary(2), "[1, true]", "not_an_action"),
        (spaces.MultiBinary(2), "[1, 1.0]", "not_an_action"),
        (spaces.MultiBinary(2), "[1, 2]", "out_of_range"),
        (spaces.MultiBinary(2), "[1]", "wrong_shape"),
        (spaces.Box(-1, 1, (1,)), "0.5 0.5", "several_actions"),
    ],
)
def test_box_says_why_there_is_no_action(space: Space[Any], completion: str, reason: str) -> None:
    assert parse_action(completion, space, "box").reason == reason
    if completion.startswith("[") and completion.endswith("]") and reason != "several_actions":
        assert parse_action(f'{{"action": {completion}}}', space, "json").reason == reason


@pytest.mark.parametrize("text", ["0.5", "[0.5]", "Action: 0.5", "Action: 0.5.", "-0.5"])
def test_one_number_may_be_bare(text: str) -> None:
    parsed = parse_action(text, spaces.Box(-1, 1, (1,)), "box")
    assert parsed.valid and abs(parsed.value) == [0.5]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('{"move": "up", "force": [0, 0]}', "wrong_shape"),
        ('{"move": "up", "force": [0, 0], "pair": ["hit", [0, 1], {"deep": 0}], "x": 1}', "wrong_shape"),
        ('{"move": "up", "force": [0, 0], "Pair": ["hit", [0, 1], {"deep": 0}]}', "wrong_shape"),
        ('{"move": "up", "force": [0, 0], "pair": ["hit", [0, 1]]}', "wrong_shape"),
        (
            '{"move": "up", "force": [0, 0], "pair": {"0": "hit", "1": [0, 1], "2": {}}}',
            "not_an_action",
        ),
        ('{"move": "fly", "force": [0, 0], "pair": ["hit", [0, 1], {"deep": 0}]}', "not_an_action"),
        ('{"move": "up", "force": [0, 2], "pair": ["hit", [0, 1], {"deep": 0}]}', "out_of_range"),
        ('{"move": "up", "force": [0, 0], "pair": ["hit", [0, 1], {"deep": -2}]}', "out_of_range"),
        ('["up", [0, 0], ["hit", [0, 1], {"deep": 0}]]', "not_an_action"),
    ],
)
def test_every_part_must_fit(said: str, reason: str) -> None:
    assert parse_action(f'{{"action": {said}}}', NESTED, "json", names=NESTED_NAMES).reason == reason


def test_aliases_mirror_the_space() -> None:
    said = '{"action": {"move": "go up", "force": [0, 0], "pair": ["card please", [0, 1], {"deep": "same"}]}}'
    aliases = {"move": {"go up": 3}, "pair": ({"card please": 1}, None, None)}
    parsed = parse_action(said, NESTED, "json", names=NESTED_NAMES, aliases=aliases)
    assert (
        parsed.value["move"] == 3 and parsed.value["pair"][0] == 1 and parsed.value["pair"][2] == {"deep": 0}
    )
    assert not parse_action(said, NESTED, "json", names=NESTED_NAMES)


def test_legal_values_are_compared_by_their_parts() -> None:
    legal = [np.array([2, 1]), [0, 0]]
    assert parse_action("[2, 1]", GRID, "box", legal=legal).valid
    assert parse_action("[0, 0]", GRID, "box", legal=legal).valid
    assert parse_action("[1, 1]", GRID, "box", legal=legal).reason == "not_legal"


def test_a_value_of_another_space_is_not_written() -> None:
    with pytest.raises(ConfigError, match="is no action of"):
        format_action(np.array([2.0, 0.0], np.float32), "box", space=PAIR)
    with pytest.raises(ConfigError, match="is no action of"):
        format_action(7, "json", space=spaces.Discrete(2))


# --- the tool that is offered, and calls written ------------------------------------------------------------


@pytest.mark.parametrize("place", range(len(ALL)))
def test_the_offered_tool_takes_every_action(place: int) -> None:
    space, names = ALL[place]
    tool = action_tool(space, names=names)
    space.seed(3)
    for dialect in TOOL_DIALECTS:
        for _ in range(5):
            action = space.sample()
            said = format_action(action, "tool_call", space=space, names=names, dialect=dialect)
            found = parse_tool_calls(said, dialect, [tool])
            assert isinstance(found.turn[0], ToolCall), (said, found)


def test_the_offered_tool_refuses_what_is_no_action() -> None:
    tool = action_tool(NESTED, names=NESTED_NAMES)
    for action in (
        {"move": "fly"},
        {"move": "up", "force": [0, 2]},
        {"move": "up", "force": [0, 0], "pair": []},
    ):
        assert parse_tool_calls(format_call("act", {"action": action}), "hermes", [tool]).errors


def test_calls_are_written_as_each_family_writes_them() -> None:
    arguments = {"path": "a.txt", "lines": [1, 2]}
    assert format_call("write", arguments, "qwen3_coder") == (
        "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n"
        "<parameter=lines>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    said = '{"name": "write", "arguments": {"path": "a.txt", "lines": [1, 2]}}'
    assert format_call("write", arguments, "hermes") == f"<tool_call>\n{said}\n</tool_call>"
    assert format_call("write", arguments, "mistral") == f"[TOOL_CALLS][{said}]"
    assert format_call("write", arguments, "llama") == said.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Box(-1, 1, (1,)), "a list of 1 number, from -1 to 1"),
        (spaces.Box(0, INFINITE, (2,)), "a list of 2 numbers, each at least 0"),
        (spaces.Box(-INFINITE, INFINITE, (2,)), "a list of 2 numbers"),
        (spaces.Box(-INFINITE, 3, (2,)), "a list of 2 numbers, each at most 3"),
        (BYTES, "a list of 3 integers, each from 0 to 255"),
        (GRID, "a list of 2 integers, from [0, 0] to [2, 1]"),
        (spaces.MultiBinary(4), "a list of 4 integers, each from 0 to 1"),
        (spaces.Box(0, 1, (2, 3)), "numbers in nested lists of shape 2 x 3, each from 0 to 1"),
        (spaces.Box(0, 1, ()), "one number from 0 to 1"),
    ],
)
def test_numbers_are_described(space: Space[Any], said: str) -> None:
    assert describe_format("json", space) == f'Answer as {{"action": ACTION}}, where ACTION is {said}.'


def test_parts_are_described_each_in_its_own_words() -> None:
    said = describe_format("json", NESTED, names=NESTED_NAMES)
    for part in (
        '"move": one of "left", "down"',
        '"force": a list of 2 numbers',
        '"pair": a list of 3: one of',
    ):
        assert part in said
    assert "the tool act" in describe_format("tool_call", NESTED, names=NESTED_NAMES)
