"""``parse_action``: every shared case of the formats built so far, then promises that hold for any text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from gymnasium.spaces import Box, Discrete
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.parsing import ACTION_FORMATS, ParsedAction, format_action, parse_action

CASES_FILE = Path(__file__).parent.parent / "cases" / "b_actions.json"
ALL_CASES = json.loads(CASES_FILE.read_text(encoding="utf-8"))
CASES = [case for case in ALL_CASES if case["format"] in ACTION_FORMATS]
BLACKJACK = ("stick", "hit")
TAXI = ("south", "north", "east", "west", "pickup", "dropoff")
REASONS = {
    "no_container",
    "cut_off",
    "unclosed_think",
    "not_an_action",
    "several_actions",
    "conflict",
    "out_of_range",
    "not_legal",
    "too_long",
}


def text_of(case: dict[str, Any]) -> str:
    if "completion" in case:
        return case["completion"]
    return "".join(text * count for text, count in case["completion_repeat"])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    described = case["space"]
    space = Discrete(described["n"], start=described.get("start", 0))
    parsed = parse_action(
        text_of(case),
        space,
        case["format"],
        names=described.get("names"),
        aliases=described.get("aliases"),
        legal=case.get("legal"),
    )
    if case["expect"] == "invalid":
        assert not parsed.valid and parsed.value is None and parsed.reason in REASONS
    else:
        assert (parsed.valid, parsed.value, parsed.reason) == (True, case["expect"], None)
        assert type(parsed.value) is int and parsed.value in space


def test_all_tag_and_bare_word_cases_are_run() -> None:
    assert len(CASES) == 40


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("hit", "no_container"),
        ("<action>hit", "cut_off"),
        ("<action>hit</action> or <action>st", "cut_off"),
        ("<think><action>hit</action>", "unclosed_think"),
        ("<action>jump</action>", "not_an_action"),
        ("<action>hit or stick</action>", "several_actions"),
        ("<action>hit</action>, <action>stick</action>", "several_actions"),
        ("<action>1 (stick)</action>", "conflict"),
        ("<action>1 (or 0)</action>", "conflict"),
        ("<action>2</action>", "out_of_range"),
        ("<action>-1</action>", "out_of_range"),
        ("<action>" + "hit" * 1000 + "</action>", "too_long"),
        ("<action>1" + "0" * 5000 + "</action>", "too_long"),
        ("<action>" + "9" * 30 + "</action>", "not_an_action"),
        ("<action>1.0</action>", "not_an_action"),
        ("<action>stic\u212a</action>", "not_an_action"),
        ("<act\u0131on>hit</act\u0131on>", "no_container"),
    ],
)
def test_tag_says_why_there_is_no_action(completion: str, reason: str) -> None:
    assert parse_action(completion, Discrete(2), "tag", names=BLACKJACK).reason == reason


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("hit", 1),
        (" Hit! ", 1),
        ("**stick**", 0),
        ("```\nstick\n```", 0),
        ("1", 1),
        ("I'll pick hit", 1),
        ("The best action is: *stick*, since 20 is strong.", 0),
        ("Action: hit\nI hope for a five; stick would be weak.", 1),
        ("I choose stick. No, I choose hit.", 1),
        ("I would rather not stick, so hit", 1),
        ("hit\nObservation: you drew 5.\nstick", 1),
        ("Observation: you hold 12.\nhit", 1),
        ("hit hit hit", 1),
    ],
)
def test_bare_word_finds_the_one_action(completion: str, value: int) -> None:
    assert parse_action(completion, Discrete(2), "bare_word", names=BLACKJACK) == ParsedAction(value, True)


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "   ",
        "I choose hit or stick",
        "I choose not hit",
        "my move is to think",
        "hit-or-miss",
        "hits",
        "don't hit",
        "instead of hit",
        "I pick hit, stick",
        "action: ",
        "3",
        "shit",
        "\u0131 choose h\u0456t",
    ],
)
def test_bare_word_does_not_guess(completion: str) -> None:
    assert not parse_action(completion, Discrete(2), "bare_word", names=BLACKJACK)


def test_an_alias_counts_as_its_action_everywhere() -> None:
    aliases = {"pick up": 4, "go north": 1}
    keywords = {"names": TAXI, "aliases": aliases}
    assert parse_action("<action>Pick  Up</action>", Discrete(6), "tag", **keywords).value == 4
    assert parse_action("<action>4 (pick up)</action>", Discrete(6), "tag", **keywords).value == 4
    assert parse_action("<action>4 (go north)</action>", Discrete(6), "tag", **keywords).reason == "conflict"
    assert parse_action("Now go north, not south.", Discrete(6), "bare_word", **keywords).value == 1


def test_start_shifts_names_and_range() -> None:
    space = Discrete(3, start=-1)
    names = ("left", "stay", "right")
    assert parse_action("<action>left</action>", space, names=names).value == -1
    assert parse_action("<action>1</action>", space, names=names).value == 1
    assert parse_action("<action>2</action>", space, names=names).reason == "out_of_range"


def test_illegal_is_told_apart_from_unreadable() -> None:
    parsed = parse_action("<action>pickup</action>", Discrete(6), names=TAXI, legal=(0, 1))
    assert parsed == ParsedAction(None, False, "not_legal")


@pytest.mark.parametrize("format", ACTION_FORMATS)
def test_what_format_action_writes_is_read_back(format: str) -> None:
    for value, word in enumerate(TAXI):
        assert parse_action(format_action(word, format), Discrete(6), format, names=TAXI).value == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "json"}, "format must be one of tag, bare_word; got 'json'"),
        ({"space": Box(0, 1)}, "needs a Discrete action space"),
        ({"names": ("hit",)}, "one word for each of the 2 actions"),
        ({"names": ("hit", "Hit")}, "stands for two actions"),
        ({"names": ("hit", "1")}, "must be a word"),
        ({"names": ("hit", "")}, "must be a word"),
        ({"names": BLACKJACK, "aliases": {"card": 2}}, "but actions are 0 to 1"),
        ({"dialect": "hermes"}, "dialect belongs to tool calls"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: dict[str, Any], message: str) -> None:
    keywords = {"space": Discrete(2), "format": "tag", **arguments}
    with pytest.raises(ConfigError, match=message):
        parse_action("hit", **keywords)


PIECES = [
    "<action>",
    "</action>",
    "hit",
    "stick",
    "not ",
    "1",
    "-2",
    " ",
    ",",
    "\n",
    "<think>",
    "</think>",
    "I choose ",
    "action: ",
    "Observation:",
    "</s>",
    "(",
    ")",
    ":",
    "\u200b",
    "\u0130",
    "\u212a",
    "```",
    "or",
    "\ud800",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join),
    st.sampled_from(ACTION_FORMATS),
)
def test_any_text_is_one_action_or_invalid_with_a_reason(text: str, format: str) -> None:
    parsed = parse_action(text, Discrete(2), format, names=BLACKJACK, legal=(1,))
    assert parsed == ParsedAction(1, True) or (not parsed.valid and parsed.reason in REASONS)


@pytest.mark.parametrize("format", ACTION_FORMATS)
@pytest.mark.parametrize(
    "piece",
    [
        "<action>",
        "</action>",
        "<action>hit</action>",
        "hit ",
        "hit,",
        "not ",
        " ",
        "\n",
        "action: ",
        "I choose ",
        "*",
        "1 (",
        "hit\nUser:",
        "User:\n",
        "<think>",
        "</think>",
        "pick ",
        "I  ",
        "`",
        "\u0130",
    ],
)
def test_time_is_linear_in_the_length(piece: str, format: str) -> None:
    text = piece * (100_000 // len(piece))
    started = time.process_time()
    parse_action(text, Discrete(2), format, names=("stick", "hit"), aliases={"pick up a card": 1})
    assert time.process_time() - started < 1.0
