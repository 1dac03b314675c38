"""Whatever a model writes: one result, in linear time, in any thread.

1. Strict JSON agrees with the standard library on what both take, and takes nothing else.
2. Any text gives an action of the space or a reason; nothing raises.
3. Time is linear: 100,000 characters take under a second of CPU, and no more than in proportion.
4. Threads read what the main thread reads.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.parsing import (
    ACTION_FORMATS,
    REASONS,
    TOOL_DIALECTS,
    ParsedAction,
    format_action,
    format_call,
    parse_action,
    parse_tool_calls,
)
from atropos_gym.parsing._json import MAX_DEPTH, read_json
from tests.tools.odd_texts import OPENERS, PIECES, REPEATED
from tests.tools.parsing_cases import BLACKJACK, TAXI

TWO = spaces.Discrete(2)
PAIR = spaces.Box(-1, 1, (2,))
BOTH = spaces.Dict(move=TWO, force=PAIR)
READERS: dict[str, Callable[[str], ParsedAction]] = {
    **{
        format: lambda text, format=format: parse_action(
            text, TWO, format, names=BLACKJACK, aliases={"pick up a card": 1}
        )
        for format in ("tag", "json", "bare_word", "number")
    },
    "box": lambda text: parse_action(text, PAIR, "box"),
    "json of parts": lambda text: parse_action(text, BOTH, "json"),
    **{
        f"tool_call {dialect}": lambda text, dialect=dialect: parse_action(
            text, TWO, "tool_call", names=BLACKJACK, dialect=dialect
        )
        for dialect in TOOL_DIALECTS
    },
}
MEMBERS = {"box": PAIR, "json of parts": BOTH}


# --- 1. strict JSON -----------------------------------------------------------------------------------------

JSON_PIECES = [
    "{", "}", "[", "]", '"', ":", ",", " ", "\n", '"a"', '"b":', "1", "-", "0", ".5", "e9", "true",
    "null", "\\", "\\u00e9", "\\n", "\t", "'", "NaN", "{}", "[]",
]  # fmt: skip


def by_the_library(text: str) -> tuple[bool, Any]:
    """What ``json.loads`` makes of a text when it is told to be strict."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(items)) < len(items):
            raise ValueError("duplicate key")
        return dict(items)

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)
    except ValueError:
        return False, None
    return True, value


@settings(max_examples=250)
@given(st.lists(st.sampled_from(JSON_PIECES), max_size=12).map("".join))
def test_strict_json_takes_what_the_library_takes_and_no_more(text: str) -> None:
    read = read_json(text)
    is_json, value = by_the_library(text)
    assert (read.flaw is None and not text[read.end :].strip(" \t\r\n")) == is_json
    if is_json:
        assert read.value == value


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(VALUES, st.booleans())
def test_a_beginning_of_json_is_cut_off_and_never_wrong(value: Any, ascii_only: bool) -> None:
    text = json.dumps({"v": value}, ensure_ascii=ascii_only)
    assert read_json(text)[:3] == ({"v": value}, len(text), None)
    for length in range(len(text)):
        read = read_json(text[:length])
        assert (read.flaw, read.complete) == ("cut_off", False), text[:length]


def test_nesting_is_bounded_whatever_the_stack() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert read_json(nested(MAX_DEPTH)).flaw is None
    deep = read_json(nested(MAX_DEPTH + 1))
    assert (deep.flaw, deep.end) == ("bad_json", 2 * MAX_DEPTH + 2)
    assert read_json(nested(50_000)).flaw == "bad_json"


# --- 2. any text --------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join),
    st.sampled_from(sorted(READERS)),
)
def test_any_text_is_one_action_or_invalid_with_a_reason(text: str, name: str) -> None:
    parsed = READERS[name](text)
    if parsed.valid:
        assert parsed.reason is None and MEMBERS.get(name, TWO).contains(parsed.value)
    else:
        assert parsed.value is None and parsed.reason in REASONS


def test_the_letter_by_letter_table_says_what_the_reader_says() -> None:
    """The fast path is no second grammar: one more blank takes the slow path to the same action."""
    for dialect in (None, *TOOL_DIALECTS):
        for format in ("tool_call",) if dialect else set(ACTION_FORMATS) - {"box", "tool_call"}:
            for word in (*TAXI, *range(6)):
                said = format_action(word, format, dialect=dialect)
                exact = parse_action(said, spaces.Discrete(6), format, names=TAXI, dialect=dialect)
                slow = parse_action(said + " ", spaces.Discrete(6), format, names=TAXI, dialect=dialect)
                assert exact.valid and exact == slow


# --- 3. linear time -----------------------------------------------------------------------------------------


def cpu_seconds(read: Callable[[str], Any], text: str, tries: int = 1) -> float:
    """The quickest of some tries; without collections, which walk through what other tests left behind."""
    taken = []
    gc.disable()
    try:
        for _ in range(tries):
            started = time.process_time()
            read(text)
            taken.append(time.process_time() - started)
    finally:
        gc.enable()
    return min(taken)


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"tool_call llama", "tool_call qwen"}))
def test_time_is_linear_in_the_length(name: str) -> None:
    """Every text is tried short; a quadratic one would be among the slowest, which are tried long."""
    read = READERS[name]
    tried = [(opener, piece) for opener in OPENERS for piece in REPEATED]

    def seconds(text: tuple[str, str], size: int, tries: int = 1) -> float:
        return cpu_seconds(read, text[0] + text[1] * (size // len(text[1])), tries)

    for text in sorted(tried, key=lambda text: seconds(text, 1_000), reverse=True)[:2]:
        quarter, whole = (seconds(text, size, 2) for size in (25_000, 100_000))
        assert whole < 1.0, text
        assert whole < 10 * quarter + 0.05, (text, quarter, whole)


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_calls_with_a_schema_are_linear_too(dialect: str) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    tool = {"name": "act", "parameters": {"properties": {"action": numbers}, "required": ["action"]}}
    said = format_call("act", {"action": "@"}, dialect)
    for piece in ("x", "[", "1,", '{"a": 1},', "\\u0041", "</parameter>"):
        inner = piece * (50_000 // len(piece))
        for long in (said.replace("@", inner), said.replace('"@"', f"[{inner}]")):
            assert cpu_seconds(lambda text: parse_tool_calls(text, dialect, [tool]), long) < 1.0


# --- 4. threads ---------------------------------------------------------------------------------------------


def test_threads_read_what_the_main_thread_reads() -> None:
    texts = [
        "<action>hit</action>", '{"action": "stick"}', "I choose hit", "Action: 1", "[0.5, 0.5]", "{" * 3000,
        '{"action": {"move": 1, "force": [0, 0]}}', format_action("hit", "tool_call"), "[" * 5000,
    ]  # fmt: skip
    expected = {name: [read(text) for text in texts] for name, read in READERS.items()}
    seen: list[dict[str, list[ParsedAction]]] = []

    def work() -> None:
        seen.append({name: [read(text) for text in texts] for name, read in READERS.items()})

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == [expected] * 3
