"""Arguments against JSON schemas: one kind of error for each thing that can be wrong, and nothing coerced."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._schema import check_arguments

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": INTEGER}, "required": ["x"]}
TREE = {
    "type": "object",
    "properties": {"value": INTEGER, "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
}


def verdict(schema: Any, value: Any, **root: Any) -> str | None:
    """The kind and path of what is wrong with the argument ``v``."""
    wrong = check_arguments({"v": value}, {"properties": {"v": schema}, **root}, "tool")
    return None if wrong is None else f"{wrong.kind} {wrong.path}"


GOOD = [
    (INTEGER, -5),
    ({"type": "number"}, 5),
    ({"type": "number"}, 2.5),
    ({"type": ["integer", "null"]}, None),
    ({"type": "integer", "nullable": True}, None),
    ({"enum": ["a", 1, None]}, None),
    ({"const": [1, {"a": True}]}, [1, {"a": True}]),
    ({"type": "number", "enum": [1, 2]}, 1.0),
    (POINT, {"x": 1, "y": 2}),
    ({"type": "object"}, {"any": 1}),
    ({"type": "object", "properties": {"a": STRING}, "additionalProperties": True}, {"b": 1}),
    ({"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER}, {"b": 1}),
    ({"patternProperties": {"^n_": INTEGER}}, {"n_1": 1}),
    ({"type": "array", "items": POINT}, [{"x": 1}, {"x": 2}]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [1, "a"]),
    ({"anyOf": [INTEGER, STRING]}, "a"),
    ({"oneOf": [{"minimum": 5}, {"maximum": 3}]}, 6),
    ({"allOf": [POINT, {"properties": {"z": INTEGER}}]}, {"x": 1, "z": 2}),
    ({"not": STRING}, 1),
    ({"if": INTEGER, "then": {"minimum": 3}, "else": {"type": "string"}}, 4),
    ({"type": "number", "multipleOf": 0.1}, 0.3),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "aa"),
    ({"type": "array", "uniqueItems": True}, [1, True, 1.0, "1"]),
    ({"$ref": "#/$defs/t"}, {"value": 1, "kids": [{"value": 2, "kids": []}, {"value": 3}]}),
    (True, "anything"),
]


@pytest.mark.parametrize("place", range(len(GOOD)))
def test_what_keeps_to_the_schema_passes(place: int) -> None:
    schema, value = GOOD[place]
    assert verdict(schema, value, **{"$defs": {"t": TREE}}) is None


BAD = [
    (INTEGER, 5.0, "wrong_type v"),
    (INTEGER, "5", "wrong_type v"),
    (INTEGER, True, "wrong_type v"),
    (INTEGER, None, "wrong_type v"),
    ({"type": "number"}, False, "wrong_type v"),
    ({"type": "boolean"}, 0, "wrong_type v"),
    ({"type": "boolean"}, "false", "wrong_type v"),
    (STRING, 5, "wrong_type v"),
    ({"type": "null"}, False, "wrong_type v"),
    ({"type": "array"}, {}, "wrong_type v"),
    ({"type": "object"}, [], "wrong_type v"),
    ({"enum": ["a", "b"]}, "A", "wrong_type v"),
    ({"enum": [1, 0]}, True, "wrong_type v"),
    ({"enum": [1]}, 1.0, "wrong_type v"),
    ({"const": 0}, False, "wrong_type v"),
    (POINT, {"y": 1}, "missing_argument v.x"),
    (POINT, {"x": 1, "z": 1}, "unexpected_argument v.z"),
    (POINT, {"x": 1, "y": "2"}, "wrong_type v.y"),
    ({**POINT, "additionalProperties": False}, {"x": 1, "X": 1}, "unexpected_argument v.X"),
    ({"type": "object", "properties": {}}, {"a": 1}, "unexpected_argument v.a"),
    ({"type": "object", "additionalProperties": INTEGER}, {"a": "1"}, "wrong_type v.a"),
    ({"patternProperties": {"^n_": INTEGER}}, {"n_1": "1"}, "wrong_type v.n_1"),
    ({"type": "array", "items": POINT}, [{"x": 1}, {"y": 2}], "missing_argument v[1].x"),
    ({"type": "array", "prefixItems": [INTEGER], "items": False}, [1, 2], "wrong_type v[1]"),
    ({"type": "array", "items": [INTEGER, STRING]}, [1, 2], "wrong_type v[1]"),
    ({"type": "array", "minItems": 2}, [1], "wrong_type v"),
    ({"type": "array", "maxItems": 2}, [1, 2, 3], "wrong_type v"),
    ({"type": "array", "uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}], "wrong_type v"),
    ({"type": "array", "contains": STRING}, [1], "wrong_type v"),
    ({"minimum": 3}, 2, "wrong_type v"),
    ({"exclusiveMaximum": 3}, 3, "wrong_type v"),
    ({"multipleOf": 2}, 3, "wrong_type v"),
    ({"minLength": 2}, "a", "wrong_type v"),
    ({"pattern": "^a"}, "ba", "wrong_type v"),
    ({"anyOf": [INTEGER, STRING]}, 1.5, "wrong_type v"),
    ({"anyOf": [POINT, {"type": "null"}]}, {"y": 1}, "missing_argument v.x"),
    ({"oneOf": [{"minimum": 1}, {"maximum": 3}]}, 2, "wrong_type v"),
    ({"allOf": [POINT, {"properties": {"z": INTEGER}}]}, {"x": 1, "q": 2}, "unexpected_argument v.q"),
    ({"allOf": [POINT, {"required": ["y"]}]}, {"x": 1}, "missing_argument v.y"),
    ({"not": STRING}, "a", "wrong_type v"),
    ({"if": INTEGER, "then": {"minimum": 3}}, 2, "wrong_type v"),
    ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "missing_argument v.b"),
    ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, "unexpected_argument v.b"),
    ({"$ref": "#/$defs/t"}, {"kids": [{"kids": [{"value": "1"}]}]}, "wrong_type v.kids[0].kids[0].value"),
    ({"$ref": "#/$defs/t"}, {"kids": [{"kid": []}]}, "unexpected_argument v.kids[0].kid"),
    (False, 1, "wrong_type v"),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(BAD)))
def test_what_does_not_is_named_by_kind_and_path(place: int) -> None:
    schema, value, expected = BAD[place]
    assert verdict(schema, value, **{"$defs": {"t": TREE}}) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "int"},
        {"properties": {"v": {"pattern": "("}}},
        {"required": 5},
        {"properties": {"v": 5}},
        {"allOf": [{"$ref": "#"}]},
        {"properties": {"v": {"multipleOf": 0}}},
        {"properties": {"v": {"minimum": "1"}}},
    ],
)
def test_a_schema_that_is_none_is_said_to_be_so(schema: Any) -> None:
    with pytest.raises(ConfigError, match="tool 'tool'"):
        check_arguments({"v": "a"} if "pattern" in str(schema) else {"v": 1}, schema, "tool")
