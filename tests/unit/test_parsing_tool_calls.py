"""``parse_tool_calls``: every shared case, each dialect's form, and arguments against schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError
from atropos_gym.messages import ToolCall
from atropos_gym.parsing import (
    TOOL_DIALECTS,
    ToolCallError,
    ToolCalls,
    check_tools,
    format_call,
    parse_tool_calls,
)
from tests.tools.parsing_cases import cases_of, turn_of

CASES = [case for case in cases_of("i_tools.json") if case["group"] == "parse"]

NUMBER = {"type": "integer"}
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
}
NOTE = {"name": "note", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
LLAMA_NOTE = '{"name": "note", "parameters": {"text": "x"}}'
A = "<parameter=a>1</parameter>"
TOOLS = [ADD, {"type": "function", "function": NOTE}]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    found = parse_tool_calls(case["completion"], case["dialect"], case["tools"])
    expect = case["expect"]
    assert turn_of(found) == expect["turn"]
    assert found.hallucinated_response is expect["hallucinated_response"]
    assert found.text == expect.get("text", found.text)
    assert len({entry.id for entry in found.turn}) == len(found.turn)
    assert (*found.calls, *found.errors) == (
        *(entry for entry in found.turn if isinstance(entry, ToolCall)),
        *(entry for entry in found.turn if isinstance(entry, ToolCallError)),
    )


def test_all_parse_cases_are_run() -> None:
    assert len(CASES) == 23


def kinds(found: ToolCalls) -> list[str]:
    """The name of each call and the kind of each error, in order."""
    return [entry.name if isinstance(entry, ToolCall) else f"!{entry.kind}" for entry in found.turn]


# --- what holds for every dialect ---------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_calls_stand_where_the_model_wrote_them(dialect: str) -> None:
    one = format_call("add", {"a": 1, "b": 2}, dialect)
    two = format_call("note", {"text": 'it\'s </tool_call> "fine"'}, dialect)
    found = parse_tool_calls(f"First:\n{one}\nthen\n{two}", dialect, TOOLS)
    assert kinds(found) == ["add", "note"] and found.text == "First:\n\nthen"
    assert found.calls[1].arguments == {"text": 'it\'s </tool_call> "fine"'}
    assert kinds(parse_tool_calls(f"<think>{one}</think>{two}", dialect, TOOLS)) == ["note"]
    assert parse_tool_calls(f"<think>{one}", dialect, TOOLS) == ToolCalls()
    for fence in ("```", "~~~~", "1. ```json", "> ```"):
        shown = parse_tool_calls(
            f"As in\n{fence}\n{one}\n{fence.lstrip('1. >').removesuffix('json')}", dialect, TOOLS
        )
        assert not shown.turn and shown.text.startswith("As in")
    assert not parse_tool_calls(f"As in\n```\n{one}", dialect, TOOLS).turn


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
@pytest.mark.parametrize(
    "behind",
    [
        "<tool_response>\n3\n</tool_response>",
        "Observation: 3",
        "User: thanks",
        "<|im_end|>\n<|im_start|>user\n3",
        "<|eot_id|><|start_header_id|>ipython<|end_header_id|>3",
        "</s>[TOOL_RESULTS]3",
        "</s>more",
    ],
)
def test_what_follows_a_made_up_answer_is_dropped(dialect: str, behind: str) -> None:
    one = format_call("add", {"a": 1, "b": 2}, dialect)
    found = parse_tool_calls(f"So {one}\n{behind}\n{one}", dialect, TOOLS)
    assert kinds(found) == ["add"] and found.hallucinated_response and found.text == "So"
    before = parse_tool_calls(f"{behind}\n{one}", dialect, TOOLS)
    assert kinds(before) == ["add"] and not before.hallucinated_response


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<|eot_id|>\n", " <|eom_id|></s>"])
def test_the_end_of_the_turn_itself_is_no_made_up_answer(dialect: str, end: str) -> None:
    found = parse_tool_calls(format_call("add", {"a": 1, "b": 2}, dialect) + end, dialect, TOOLS)
    assert kinds(found) == ["add"] and not found.hallucinated_response and found.text == ""


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_a_cut_call_never_runs_half(dialect: str) -> None:
    said = format_call("note", {"text": "one, two {three} and [four]"}, dialect)
    whole = parse_tool_calls(said, dialect, TOOLS).calls[0].arguments
    for length in range(len(said)):
        found = parse_tool_calls(said[:length], dialect, TOOLS)
        assert all(call.arguments == whole for call in found.calls)
        assert {error.kind for error in found.errors} <= {"unclosed_call"}


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_names_match_exactly_and_the_model_is_told_the_names_there_are(dialect: str) -> None:
    for name in ("Add", "add ", "\u0430dd", "ad", "a" * 500):
        found = parse_tool_calls(format_call(name, {"a": 1, "b": 2}, dialect), dialect, TOOLS)
        if kinds(found) != ["!unknown_tool"]:  # blanks end a name in mistral's second form alone
            raise AssertionError((name, found))
        assert found.errors[0].message.endswith("there are: add, note") and len(found.errors[0].message) < 200


@pytest.mark.parametrize("dialect", TOOL_DIALECTS)
def test_without_tools_calls_are_taken_as_they_are(dialect: str) -> None:
    found = parse_tool_calls(format_call("anything", {"x": 1, "y": "z"}, dialect), dialect)
    one: Any = "1" if dialect == "qwen3_coder" else 1
    assert kinds(found) == ["anything"] and found.calls[0].arguments == {"x": one, "y": "z"}


# --- hermes ----------------------------------------------------------------------------------------------


def hermes(inner: str) -> ToolCalls:
    return parse_tool_calls(f"<tool_call>{inner}</tool_call>", "hermes", TOOLS)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": 2}, "id": 7}', ["add"]),
        ('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}', ["add"]),
        ('{"name": "add", "arguments": "\\"{}\\""}', ["!bad_arguments"]),
        ('{"name": "add", "arguments": "{\\"a\\": 1} x"}', ["!bad_arguments"]),
        ('{"name": "add", "arguments": ""}', ["!bad_arguments"]),
        ('{"name": "add", "arguments": null}', ["!bad_arguments"]),
        ('{"name": "add"}', ["!missing_argument"]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}', ["!missing_argument"]),
        ('{"name": 5, "arguments": {}}', ["!bad_call"]),
        ('{"name": "", "arguments": {}}', ["!bad_call"]),
        ('{"arguments": {}}', ["!bad_call"]),
        ("{}", ["!bad_call"]),
        ("", ["!bad_json"]),
        ("[]", ["!bad_json"]),
        ('call: {"name": "add", "arguments": {"a": 1, "b": 2}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}} now', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2,}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": NaN, "b": 2}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": 1e400, "b": 2}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + ', "b": 2}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": ' + "[" * 100 + "]" * 100 + ', "b": 2}}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}', ["!bad_json"]),
        ('{"name": "add", "arguments": {"a": 5.0, "b": 2}}', ["!wrong_type"]),
        ('{"name": "add", "arguments": {"a": null, "b": 2}}', ["!wrong_type"]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2, "A": 3}}', ["!unexpected_argument"]),
    ],
)
def test_hermes(inner: str, expected: list[str]) -> None:
    assert kinds(hermes(inner)) == expected
    # Whatever is wrong with it, the next call is read.
    good = '{"name": "note", "arguments": {"text": "x"}}'
    behind = parse_tool_calls(
        f"<tool_call>{inner}</tool_call>\n<tool_call>{good}</tool_call>", "hermes", TOOLS
    )
    assert kinds(behind) == [*expected, "note"]


def test_errors_name_the_tool_and_the_argument() -> None:
    error = hermes('{"name": "add", "arguments": {"a": "1", "b": 2}}').errors[0]
    assert (error.name, error.argument) == ("add", "a")
    assert error.message == "add: the argument 'a' must be of type integer, got \"1\""
    assert hermes('{"name": "add", "arguments": {"a": 1}}').errors[0].message == (
        "add: the argument 'b' is missing"
    )


def test_ids_are_the_models_where_they_are_new() -> None:
    said = [
        {"name": "note", "arguments": {"text": str(k)}, **({} if own is None else {"id": own})}
        for k, own in enumerate(("x", "x", None, "", "y", 5))
    ]
    found = parse_tool_calls("[TOOL_CALLS]" + json.dumps(said), "mistral", TOOLS)
    ids = [call.id for call in found.calls]
    assert (ids[0], ids[4]) == ("x", "y") and len(set(ids)) == 6
    for made in (ids[1], ids[2], ids[3], ids[5]):  # the form that mistral's template asks for
        assert made is not None and len(made) == 9 and made.isalnum()
    assert parse_tool_calls("[TOOL_CALLS]" + json.dumps(said), "mistral", TOOLS) == found


# --- the other dialects -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', ["add"]),
        ('[TOOL_CALLS]add{"a": 1, "b": 2}[TOOL_CALLS]note[ARGS]{"text": "[TOOL_CALLS]"}', ["add", "note"]),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}', ["add"]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', ["add"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}', ["add"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}, {"name"', ["add", "!unclosed_call"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}} {}]', ["!bad_json"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "a": 2}}]', ["!bad_json"]),
        ("[TOOL_CALLS][1]", ["!bad_call"]),
        ("[TOOL_CALLS][]", ["!bad_call"]),
        ("[TOOL_CALLS]", ["!unclosed_call"]),
        ('[TOOL_CALLS]{"a": 1}', ["!bad_call"]),
        ("[TOOL_CALLS] is the token", ["!bad_json"]),
        ('[TOOL_CALLS]add[ARGS]{\'a\': 1}[TOOL_CALLS]note{"text": "x"}', ["!bad_json", "note"]),
        ('[{"name": "add", "arguments": {"a": 1, "b": 2}}]', []),
    ],
)
def test_mistral(text: str, expected: list[str]) -> None:
    assert kinds(parse_tool_calls(text, "mistral", TOOLS)) == expected


def test_mistral_takes_the_call_id_that_stands_in_the_text() -> None:
    text = '[TOOL_CALLS]note[CALL_ID]abcdefghi[ARGS]{"text": "x"}'
    assert parse_tool_calls(text, "mistral", TOOLS).calls[0].id == "abcdefghi"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', ["add"]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', ["add"]),
        (f"{LLAMA_ADD}; {LLAMA_NOTE}", ["add", "note"]),
        ('I call {"name": "add", "parameters": {"a": 1, "b": 2}} now', ["add"]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', ["!missing_argument"]),
        (format_call("note", {"text": LLAMA_ADD}, "llama"), ["note"]),
        ('{"plan": {"name": "add", "parameters": {"a": 1, "b": 2}}}', []),
        ('{"answer": 3}', []),
        ("the set {1, 2}", []),
        ('{"parameters": {}}', ["!bad_call"]),
        ("{'name': 'add', 'parameters': {}}", ["!bad_json"]),
        ('{"name": "add", "parameters": {"a": 1', ["!unclosed_call"]),
        ("<|python_tag|>add.call(a=1)", ["!bad_json"]),
        ("<|python_tag|>", ["!unclosed_call"]),
    ],
)
def test_llama3_json(text: str, expected: list[str]) -> None:
    for dialect in ("llama3_json", "llama"):
        assert kinds(parse_tool_calls(text, dialect, TOOLS)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<function=add>\n{A}\n<parameter=b>\n2\n</parameter>\n</function>", ["add"]),
        (f"<tool_call><function=add>{A}<parameter=b> 2 </parameter></function>", ["add"]),
        (f"<function=add>{A}<parameter=b>2</parameter></function></tool_call>", ["add"]),
        ("<function=add><parameter=a>one</parameter><parameter=b>2</parameter></function>", ["!wrong_type"]),
        ("<function=add><parameter=a>1.0</parameter><parameter=b>2</parameter></function>", ["!wrong_type"]),
        ("<function=add><parameter=a>1</parameter></function>", ["!missing_argument"]),
        ("<function=add><parameter=a>1</parameter><parameter=a>1</parameter></function>", ["!bad_json"]),
        ("<function=></function>", ["!bad_call"]),
        ("<tool_call>add</tool_call>", ["!bad_json"]),
        ("<function=note><parameter=text>1</function>", ["!bad_json"]),
        ("<tool_call><function=note><parameter=text>a</parameter></function><function=note>", ["!bad_json"]),
        ("<tool_call><function=note><parameter=text>a", ["!unclosed_call"]),
        ("<tool_call><function=note><parameter=text>a</parameter>", ["!unclosed_call"]),
    ],
)
def test_qwen3_coder(text: str, expected: list[str]) -> None:
    for dialect in ("qwen3_coder", "qwen"):
        assert kinds(parse_tool_calls(text, dialect, TOOLS)) == expected


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "\nline 1\n\nline 2\n\n", "line 1\n\nline 2\n"),
        ({"type": "string"}, "\r\n x \r\n", " x "),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "\n5\n", 5),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "true", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({}, "[1, 2]", [1, 2]),
        ({}, "some words", "some words"),
        ({"type": "string"}, "see </parameter> there", "see </parameter> there"),
    ],
)
def test_text_is_read_as_the_type_that_the_schema_names(schema: Any, text: str, value: Any) -> None:
    point = {"type": "object", "properties": {"x": NUMBER}, "required": ["x"]}
    tool = {"name": "t", "parameters": {"properties": {"v": schema}, "$defs": {"point": point}}}
    said = f"<function=t><parameter=v>{text}</parameter></function>"
    found = parse_tool_calls(said, "qwen3_coder", [tool])
    assert found.calls[0].arguments == {"v": value} and type(found.calls[0].arguments["v"]) is type(value)


@pytest.mark.parametrize("text", ["True", "yes", "1"])
def test_text_that_is_not_of_the_type_is_not_bent_to_it(text: str) -> None:
    tool = {"name": "t", "parameters": {"properties": {"v": {"type": "boolean"}}}}
    said = f"<function=t><parameter=v>{text}</parameter></function>"
    assert kinds(parse_tool_calls(said, "qwen3_coder", [tool])) == ["!wrong_type"]


# --- what is declared wrongly ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([{"parameters": {}}], "must be a mapping with name"),
        (["add"], "must be a mapping with name"),
        ([ADD, ADD], "two tools have the name 'add'"),
        ([{"name": "t", "parameters": {"$ref": "#/$defs/none"}}], "'#/\\$defs/none', which is not there"),
        (
            [{"name": "t", "parameters": {"properties": {"a": {"$ref": "http://x"}}}}],
            "only references within",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_tools(tools)
    check_tools(TOOLS)


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ConfigError, match="dialect must be one of hermes, .*; got 'xml'"):
        parse_tool_calls("", "xml")


# --- for any text ------------------------------------------------------------------------------------------

PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    "<function=add>",
    "</function>",
    "<parameter=a>",
    "</parameter>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "add",
    "<|python_tag|>",
    '{"name": "add", "parameters": {}}',
    "```",
    "\n",
    "<think>",
    "</think>",
    "<|im_end|>",
    "User:",
    "<tool_response>",
    ";",
    " ",
    "\ud800",
    "\u200b",
    "'",
]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30).map("".join),
    st.sampled_from(TOOL_DIALECTS),
    st.booleans(),
)
def test_any_text_gives_a_turn(text: str, dialect: str, with_tools: bool) -> None:
    found = parse_tool_calls(text, dialect, TOOLS if with_tools else None)
    assert len({entry.id for entry in found.turn}) == len(found.turn)
    for entry in found.turn:
        if isinstance(entry, ToolCallError):
            assert entry.message and "\n" not in entry.message
        elif with_tools:
            wanted = {"add": {"a", "b"}, "note": {"text"}}[entry.name]
            assert entry.arguments.keys() == wanted
            assert all(type(value) in (int, str) for value in entry.arguments.values())


TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), JSON, max_size=4),
    st.sampled_from(["hermes", "mistral", "llama3_json", "qwen"]),
)
def test_what_format_call_writes_is_read_back(arguments: dict[str, Any], dialect: str) -> None:
    said = format_call("t", arguments, dialect)
    if "</think>" in said or "<think>" in said:
        return
    found = parse_tool_calls(f"ok\n{said}\n", dialect)
    assert found.calls[0].arguments == arguments and found.text == "ok"
