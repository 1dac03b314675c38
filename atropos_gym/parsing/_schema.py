"""Arguments of a call against the tool's JSON schema, with the strictness that running a tool needs.

Two things differ from a validator of documents. Nothing passes as something else: 5.0 is no integer, true is
no number, and an object that names its properties takes no others unless the schema allows them
(``additionalProperties``). And what is wrong comes as one of three kinds, with the argument's path.
References are resolved within the tool's own schema. Annotations, ``format`` among them, are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._json import read_json
from atropos_gym.parsing._schema_values import (
    TYPES,
    Schema,
    Violation,
    check_limits,
    check_type,
    choices_of,
    types_of,
)

__all__ = ["Violation", "check_arguments", "check_references", "read_text"]

_IN_PLACE = ("allOf", "anyOf", "oneOf")
_CONDITIONS = ("if", "then", "else")


def check_arguments(arguments: Mapping[str, Any], schema: Schema, tool: str) -> Violation | None:
    """Returns the first thing that is wrong with the arguments, or None.

    Raises:
        ConfigError: the schema itself cannot be used.

    Example:
        >>> schema = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
        >>> check_arguments({"n": 1}, schema, "t"), check_arguments({"n": True}, schema, "t").kind
        (None, 'wrong_type')
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"the parameters of tool {tool!r} must be a JSON schema, got {schema!r}")
    try:
        return _Checker(schema, tool).check(arguments, schema, "")
    except (ArithmeticError, AttributeError, TypeError, re.error) as error:
        raise ConfigError(f"the parameters of tool {tool!r} are no JSON schema: {error}") from error


def read_text(arguments: Mapping[str, str], schema: Schema) -> dict[str, Any]:
    """Reads arguments that came as bare text: a string as it stands, everything else as JSON.

    What cannot be read as the schema's type stays text, which the check then refuses.

    Example:
        >>> schema = {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
        >>> read_text({"n": "5", "s": "5"}, schema)
        {'n': 5, 's': '5'}
    """
    checker = _Checker(schema, "")
    return {key: checker.read(text, checker.property(schema, key)) for key, text in arguments.items()}


def check_references(schema: Any, tool: str) -> None:
    """Follows every reference of a tool's schema.

    Raises:
        ConfigError: one leads nowhere.
    """
    checker = _Checker(schema, tool)
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                checker.resolve(part["$ref"])
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


class _Checker:
    """One tool's schema, whose parts may refer to each other."""

    def __init__(self, root: Schema, tool: str) -> None:
        self.root, self.tool = root, tool
        self._following: list[tuple[str, int]] = []

    # --- the schema's parts ---

    def resolve(self, reference: Any) -> Any:
        """Returns the part of the schema that ``#/a/b`` points to."""
        target: Any = self.root
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ConfigError(
                f"the schema of tool {self.tool!r} refers to {reference!r}: only references within the "
                "schema itself, such as '#/$defs/name', are known"
            )
        for step in reference.split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                raise ConfigError(
                    f"the schema of tool {self.tool!r} refers to {reference!r}, which is not there"
                )
        return target

    def in_place(self, schema: Any) -> list[Schema]:
        """Returns the schema and all those in it that speak of the same value."""
        found: list[Schema] = []
        waiting = [schema]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Mapping) or any(part is seen for seen in found):
                continue
            found.append(part)
            if "$ref" in part:
                waiting.append(self.resolve(part["$ref"]))
            for keyword in _IN_PLACE:
                waiting += part.get(keyword, ())
            waiting += [part[keyword] for keyword in _CONDITIONS if keyword in part]
            waiting += part.get("dependentSchemas", {}).values()
        return found

    def property(self, schema: Schema, key: str) -> Any:
        """Returns the schema of one argument; an empty one where nothing is said of it."""
        parts = self.in_place(schema)
        for part in parts:
            if key in part.get("properties", {}):
                return part["properties"][key]
        for part in parts:
            for pattern, value in part.get("patternProperties", {}).items():
                if re.search(pattern, key):
                    return value
        return next((part["additionalProperties"] for part in parts if "additionalProperties" in part), {})

    # --- bare text ---

    def read(self, text: str, schema: Any) -> Any:
        """Returns what a text means as a value of this schema."""
        parts = self.in_place(schema)
        types = {name for part in parts for name in types_of(part)}
        choices = [choice for part in parts for choice in choices_of(part)]
        if types == {"string"} or (not types and text in choices):
            return text
        read = read_json(text)
        if read.flaw is not None or text[read.end :].strip():
            return text
        others = types - {"string"}
        fits = any(TYPES[name](read.value) for name in others if name in TYPES)
        return read.value if not types or "string" not in types or fits else text

    # --- the check ---

    def check(self, value: Any, schema: Any, path: str, *, is_whole: bool = True) -> Violation | None:
        """Returns what is wrong with one value.

        Args:
            value: what a JSON reader returned.
            schema: what it must keep to.
            path: where the value stands.
            is_whole: this is all that is said of the value; else it is a part of a schema that says more.
        """
        if schema is True:
            return None
        if schema is False:
            return Violation("wrong_type", path, "is not allowed")
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the schema of tool {self.tool!r} has {schema!r} where a schema belongs")
        if value is None and schema.get("nullable") is True:
            return None
        return (
            check_type(value, schema, path)
            or check_limits(value, schema, path)
            or self._check_object(value, schema, path, is_whole)
            or self._check_array(value, schema, path)
            or self._check_reference(value, schema, path)
            or self._check_combined(value, schema, path)
        )

    def _check_object(self, value: Any, schema: Schema, path: str, is_whole: bool) -> Violation | None:
        if not isinstance(value, dict):
            return None
        for key in schema.get("required", ()):
            if key not in value:
                return Violation("missing_argument", _join(path, key), "is missing")
        known = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        others = schema.get("additionalProperties", True)
        if is_whole and (unknown := self._unknown(value, schema)) is not None:
            return Violation("unexpected_argument", _join(path, unknown), "is unknown")
        for key, part in value.items():
            within = [known[key]] if key in known else []
            within += [rule for pattern, rule in patterns.items() if re.search(pattern, key)]
            if not within and others is False:
                return Violation("unexpected_argument", _join(path, key), "is unknown")
            for rule in within or [others]:
                if wrong := self.check(part, rule, _join(path, key)):
                    return wrong
        return self._check_keys(value, schema, path)

    def _check_keys(self, value: dict[str, Any], schema: Schema, path: str) -> Violation | None:
        for key, needed in schema.get("dependentRequired", {}).items():
            for other in needed:
                if key in value and other not in value:
                    return Violation("missing_argument", _join(path, other), f"is missing: {key!r} needs it")
        for key, rule in schema.get("dependentSchemas", {}).items():
            if key in value and (wrong := self.check(value, rule, path, is_whole=False)):
                return wrong
        if "propertyNames" in schema:
            for key in value:
                if self.check(key, schema["propertyNames"], path):
                    return Violation("unexpected_argument", _join(path, key), "has no allowed name")
        return None

    def _unknown(self, value: dict[str, Any], schema: Schema) -> str | None:
        """Returns a key unknown to an object that names its properties and says nothing of others."""
        parts = self.in_place(schema)
        is_closed = any(part.get("unevaluatedProperties") is False for part in parts)
        if not is_closed and (
            any({"additionalProperties", "unevaluatedProperties"} & part.keys() for part in parts)
            or not any({"properties", "patternProperties"} & part.keys() for part in parts)
        ):
            return None
        known = {key for part in parts for key in part.get("properties", ())}
        patterns = [pattern for part in parts for pattern in part.get("patternProperties", ())]
        for key in value:
            if key not in known and not any(re.search(pattern, key) for pattern in patterns):
                return key
        return None

    def _check_array(self, value: Any, schema: Schema, path: str) -> Violation | None:
        if not isinstance(value, list):
            return None
        items = schema.get("items", True)
        first: Sequence[Any] = schema.get("prefixItems", ())
        if isinstance(items, list):  # the older form of prefixItems
            first, items = items, schema.get("additionalItems", True)
        for k, part in enumerate(value):
            if wrong := self.check(part, first[k] if k < len(first) else items, f"{path}[{k}]"):
                return wrong
        if "contains" in schema:
            count = sum(self.check(part, schema["contains"], path) is None for part in value)
            if not schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value)):
                return Violation("wrong_type", path, "does not have the items that it must")
        return None

    def _check_reference(self, value: Any, schema: Schema, path: str) -> Violation | None:
        if "$ref" not in schema:
            return None
        step = (str(schema["$ref"]), id(value))
        if step in self._following:
            raise ConfigError(
                f"the schema of tool {self.tool!r} refers to itself by {schema['$ref']!r} alone"
            )
        self._following.append(step)
        try:
            return self.check(value, self.resolve(schema["$ref"]), path, is_whole=False)
        finally:
            self._following.pop()

    def _check_combined(self, value: Any, schema: Schema, path: str) -> Violation | None:
        for rule in schema.get("allOf", ()):
            if wrong := self.check(value, rule, path, is_whole=False):
                return wrong
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and (wrong := self._check_choice(value, schema[keyword], path, keyword)):
                return wrong
        if "not" in schema and self.check(value, schema["not"], path, is_whole=False) is None:
            return Violation("wrong_type", path, "is what it must not be")
        if "if" in schema:
            holds = self.check(value, schema["if"], path, is_whole=False) is None
            return self.check(value, schema.get("then" if holds else "else", True), path, is_whole=False)
        return None

    def _check_choice(self, value: Any, rules: Sequence[Any], path: str, keyword: str) -> Violation | None:
        wrongs = [self.check(value, rule, path, is_whole=False) for rule in rules]
        fitting = wrongs.count(None)
        if fitting == 1 or (fitting > 1 and keyword == "anyOf"):
            return None
        if fitting > 1:
            return Violation("wrong_type", path, "fits more than one of the allowed forms")
        # Where only one form is of this type at all, what is wrong within it says more.
        inner = [wrong for wrong in wrongs if wrong and wrong.path != path]
        return (
            inner[0] if len(inner) == 1 else Violation("wrong_type", path, "fits none of the allowed forms")
        )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
