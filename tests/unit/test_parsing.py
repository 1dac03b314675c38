"""``parse_action``: every shared case, then what each format reads and why it refuses."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text

from atropos_gym.errors import ConfigError
from atropos_gym.parsing import (
    ACTION_FORMATS,
    REASONS,
    TOOL_DIALECTS,
    ParsedAction,
    describe_format,
    format_action,
    parse_action,
)
from tests.tools.parsing_cases import BLACKJACK, LAKE, TAXI, cases_of, plain, space_of, text_of

CASES = cases_of("b_actions.json")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    space, names, aliases = space_of(case["space"])
    parsed = parse_action(
        text_of(case),
        space,
        case["format"],
        names=names,
        aliases=aliases,
        legal=case.get("legal"),
        dialect=case.get("dialect"),
    )
    if case["expect"] == "invalid":
        assert not parsed.valid and parsed.value is None and parsed.reason in REASONS
    else:
        assert parsed.valid and parsed.reason is None and space.contains(parsed.value)
        assert plain(parsed.value) == case["expect"]
        assert case["space"]["type"] != "discrete" or type(parsed.value) is int


def test_all_cases_are_run() -> None:
    assert len(CASES) == 90 and {case["format"] for case in CASES} == set(ACTION_FORMATS)


# --- tag -------------------------------------------------------------------------------------------------


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
        ("I choose: hit", 1),
        ("Choosing: **hit**.", 1),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "xml"}, "format must be one of tag, json, .*; got 'xml'"),
        ({"space": Box(0, 1)}, "needs a Discrete action space"),
        ({"format": "box"}, "needs a Box, MultiDiscrete or MultiBinary space"),
        ({"format": "json", "space": Text(5)}, "cannot be written as text"),
        ({"format": "json", "space": Box(0, 1), "names": BLACKJACK}, "belong to Discrete"),
        (
            {"format": "json", "space": Dict(a=Discrete(2)), "names": {"b": BLACKJACK}},
            "no part is called 'b'",
        ),
        ({"format": "json", "space": Dict(a=Discrete(2)), "names": BLACKJACK}, "mapping by the parts"),
        ({"names": 5}, "names must be words"),
        ({"aliases": [1]}, "names must be words and aliases a mapping"),
        ({"format": "tool_call", "dialect": "xml"}, "dialect must be one of hermes, .*; got 'xml'"),
        ({"names": ("hit",)}, "one word for each of the 2 actions"),
        ({"names": ("hit", "Hit")}, "stands for two actions"),
        ({"names": ("hit", "1")}, "must be a word"),
        ({"names": ("hit", "")}, "must be a word"),
        ({"names": {"stick", "hit"}}, "names must be words"),
        ({"names": {"stick": 0, "hit": 2}}, "names must be words"),
        ({"names": BLACKJACK, "aliases": {"card": "hit"}}, "must stand for an action's number, got 'hit'"),
        ({"names": BLACKJACK, "aliases": {1: "card"}}, "must stand for an action's number, got 'card'"),
        ({"names": BLACKJACK, "aliases": {"card": 2}}, "but actions are 0 to 1"),
        ({"dialect": "hermes"}, "dialect belongs to tool calls"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments: dict[str, Any], message: str) -> None:
    keywords = {"space": Discrete(2), "format": "tag", **arguments}
    with pytest.raises(ConfigError, match=message):
        parse_action("hit", **keywords)


@pytest.mark.parametrize(
    "names",
    [
        ["stick", "hit"],
        np.array(BLACKJACK),
        {"hit": 6, "stick": 5},
        {6: "hit", 5: "stick"},
        MappingProxyType({np.int64(6): "hit", np.int64(5): "stick"}),
    ],
)
def test_names_and_legal_actions_come_in_any_container(names: Any) -> None:
    space = Discrete(2, start=5)
    for legal in (None, [6], {6}, np.array([6]), range(6, 7), (np.int32(6),)):
        parsed = parse_action("<action>hit</action>", space, "tag", names=names, legal=legal)
        assert parsed == ParsedAction(6, True) and type(parsed.value) is int


# --- json ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"action": "hit"}{"action": "Hit"}', 1),
        ('{"action": "stick"},\n{"action": 0}', 0),
        ('I hold {6, 9}. {"action": "hit"}', 1),
        ('{"action": "hit"} (see {above}, \\boxed{stick})', 1),
        ('{"action": "hit", "plan": {"action": "stick"}}', 1),
        ('{"note": "a } and a { and \\" in it", "action": "hit"}', 1),
        ('{"action": "stick"} no: {"action": "hit"}\nObservation: {"action": "stick"}', 1),
        ('Observation: 12\n{"action": "hit"}', 1),
        ('{"a\\u0063tion": "h\\u0069t"}', 1),
        ('{"thought": "Human: hi </s>", "action": "hit"}', 1),
        ("{'action': 'stick'} was no JSON. {\"action\": \"hit\"}", 1),
        ('~~~\n{"action": " **hit**. "}\n~~~', 1),
        ('{"action": "1 (hit)"}', 1),
        ('{"action": -0}', 0),
        ('{"thought": "low"}\n{"action": "hit"}', 1),
        ('f(x) = {x: 1} {"action": "hit"}', 1),
        ('{"action": "hit"} f(x) = {x: 1}', 1),
    ],
)
def test_json_reads_the_last_object(completion: str, value: int) -> None:
    assert parse_action(completion, Discrete(2), "json", names=BLACKJACK) == ParsedAction(value, True)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "no_container"),
        ('"hit"', "no_container"),
        ("{}", "no_container"),
        ('{"move": "hit"}', "no_container"),
        ('{"action": "hit"} {}', "no_container"),
        ('{"action": "hit"} or {}', "no_container"),
        ('{"action": "hit"}{"action": "stick"}', "several_actions"),
        ('{"action": "jump"} {"action": "stick"}', "several_actions"),
        ('{"action": 0, "action": 1}, {"action": "stick"}', "several_actions"),
        ('{"action": "hit"} or {"action": "st', "cut_off"),
        ('{"action": "hit"} then {', "cut_off"),
        ('{"action": "hit"} no: {"action": stick}', "bad_json"),
        ('{"action": "hit"} no: {action: "stick"}', "bad_json"),
        ('{"action": "hit",}', "bad_json"),
        ('{"action": "hit"', "cut_off"),
        ('{"action": "hit" "thought": 1}', "bad_json"),
        ('{{"action": "hit"}}', "bad_json"),
        ('{plan: {"action": "hit"}}', "bad_json"),
        ('{"action": "stick"} no: {{"action": "hit"}}', "bad_json"),
        ('{"plan": {"action": "hit"},', "cut_off"),
        ('{"plan": {"action": "hit"},}', "bad_json"),
        ('{"action": NaN}', "not_finite"),
        ('{"action": 1, "p": Infinity}', "not_finite"),
        ('{"action": 1, "p": 1, "p": 2}', "bad_json"),
        ('{"action": 1, "p": "\\ud800"}', "bad_json"),
        ('{"action": 01}', "bad_json"),
        ('{"action": "a\tb"}', "bad_json"),
        ('{"action": null}', "not_an_action"),
        ('{"action": false}', "not_an_action"),
        ('{"action": 1e0}', "not_an_action"),
        ('{"action": {"action": 1}}', "not_an_action"),
        ('{"action": "1.0"}', "not_an_action"),
        ('{"action": -1}', "out_of_range"),
        ('{"action": 18446744073709551617}', "out_of_range"),
        ('{"action": "0 (hit)"}', "conflict"),
        ('{"action": "' + "hit" * 400 + '"}', "too_long"),
        ('<think>{"action": 1}', "unclosed_think"),
    ],
)
def test_json_says_why_there_is_no_action(completion: str, reason: str) -> None:
    assert parse_action(completion, Discrete(2), "json", names=BLACKJACK).reason == reason


# --- number ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (" `2` ", 2),
        ("west", 3),
        ("+2", 2),
        ("003", 3),
        ("Action: 1\nAction: 2", 2),
        ("I'll go with 4.", 4),
        ("My answer is **5**.", 5),
        ("**Action**: 3 - west", 3),
        ("0 - south is free\n1 - north is a wall\nMove = 1 (north)", 1),
        ("```text\n3\n```", 3),
        ("3\nObservation: moved\n2", 3),
        ("Row 1, column 4.\nAction: 3\nUser: moved.\nAction: 2", 3),
        ("Observation: row 1\nAction: 3", 3),
    ],
)
def test_number_reads_the_text_or_a_phrase(completion: str, value: int) -> None:
    assert parse_action(completion, Discrete(6), "number", names=TAXI) == ParsedAction(value, True)


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "not_an_action"),
        ("I go to 3", "not_an_action"),
        ("Action: 1 or 2", "not_an_action"),
        ("Action: 3 because it is near", "not_an_action"),
        ("Action:\n3", "not_an_action"),
        ("Action: 3" + " " * 5000 + "or so", "too_long"),
        ("1 2", "not_an_action"),
        ("Action: 3 (or 2)", "conflict"),
        ("Action: 6", "out_of_range"),
        ("3rd", "not_an_action"),
        ("1e0", "not_an_action"),
        ("0x1", "not_an_action"),
        ("\uff13", "not_an_action"),
        ("\u2460", "not_an_action"),
        ("9" * 19, "not_an_action"),
        ("9" * 5000, "too_long"),
    ],
)
def test_number_says_why_there_is_no_action(completion: str, reason: str) -> None:
    assert parse_action(completion, Discrete(6), "number", names=TAXI).reason == reason


# --- tool call -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_a_call_is_read_in_every_dialect(dialect: str) -> None:
    for value, word in enumerate(LAKE):
        said = format_action(word, "tool_call", dialect=dialect)
        for text in (
            said,
            f"I go {word}.\n{said}\n",
            f"<think>{said}</think>{said}",
            f"{said}\nUser: {said}",
        ):
            assert parse_action(text, Discrete(4), "tool_call", names=LAKE, dialect=dialect).value == value
        number = format_action(value, "tool_call", dialect=dialect)
        assert parse_action(number, Discrete(4), "tool_call", names=LAKE, dialect=dialect).value == value
        twice = parse_action(f"{said}\n{said}", Discrete(4), "tool_call", names=LAKE, dialect=dialect)
        assert twice.reason == "several_actions"
        fenced = parse_action(f"```\n{said}\n```", Discrete(4), "tool_call", names=LAKE, dialect=dialect)
        assert fenced.reason == "no_container"


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ('{"name": "act"}', "no_container"),
        ('{"name": "act", "arguments": {"move": "hit"}}', "no_container"),
        ('{"name": "play", "arguments": {"action": "hit"}}', "no_container"),
        ('{"name": "act", "arguments": ["hit"]}', "no_container"),
        ('{"arguments": {"action": "hit"}}', "no_container"),
        ('{"name": "act", "arguments": {"action": "hit", "action": "hit"}}', "bad_json"),
        ("{'name': 'act', 'arguments': {'action': 'hit'}}", "bad_json"),
        ('{"name": "act", "arguments": {"action": 1.0}}', "not_an_action"),
        ('{"name": "act", "arguments": {"action": 5}}', "out_of_range"),
    ],
)
def test_a_call_says_why_there_is_no_action(inner: str, reason: str) -> None:
    text = f"<tool_call>{inner}</tool_call>"
    assert parse_action(text, Discrete(2), "tool_call", names=BLACKJACK, dialect="hermes").reason == reason


def test_a_call_cut_off_is_no_action_and_a_lost_closing_tag_does_no_harm() -> None:
    said = format_action("hit", "tool_call")
    for length in range(1, len(said)):
        parsed = parse_action(said[:length], Discrete(2), "tool_call", names=BLACKJACK)
        object_is_whole = said[:length].count("}") == 2
        assert parsed.valid is object_is_whole
        assert object_is_whole or parsed.reason in ("cut_off", "no_container")


# --- the word for what is asked -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "names", "said"),
    [
        ("tag", LAKE, "Possible actions: left, down, right, up. Answer as <action>NAME</action>."),
        ("tag", None, "Possible actions: 0 to 3. Answer as <action>NUMBER</action>."),
        ("bare_word", LAKE, "Answer with one of these words: left, down, right, up."),
        (
            "number",
            LAKE,
            "Possible actions: 0 (left), 1 (down), 2 (right), 3 (up). Answer with the number alone.",
        ),
        ("json", LAKE, 'Possible actions: left, down, right, up. Answer as {"action": "NAME"}.'),
        ("json", None, 'Possible actions: 0 to 3. Answer as {"action": NUMBER}.'),
    ],
)
def test_discrete_formats_are_described(format: str, names: Any, said: str) -> None:
    assert describe_format(format, Discrete(4), names=names) == said
    # What the instruction itself shows is no action.
    assert not parse_action(said, Discrete(4), format, names=names)


def test_only_legal_actions_are_offered() -> None:
    said = describe_format("tag", Discrete(4), names=LAKE, legal=(1, 2))
    assert said == "Possible actions: down, right. Answer as <action>NAME</action>."


@pytest.mark.parametrize("space", [MultiDiscrete([3, 2]), MultiBinary(4), Box(-1, 1, (2,))])
def test_formats_of_lists_are_described(space: Any) -> None:
    for format in ("json", "box", "tool_call"):
        said = describe_format(format, space)
        assert f"a list of {space.shape[0]}" in said and not parse_action(said, space, format)
