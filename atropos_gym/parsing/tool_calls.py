"""From an assistant's text to calls of tools, by the model family's dialect.

A turn is a list in order: each entry is a call that may be run, or an error that the model is to be told. An
error never ends anything by itself, and nothing is guessed: the dialect is declared, JSON is strict,
arguments are checked against the tool's schema and never coerced. No text raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atropos_gym.errors import ConfigError
from atropos_gym.messages import ToolCall
from atropos_gym.parsing._dialects import DIALECTS, CallFlaw, RawCall
from atropos_gym.parsing._json import read_json
from atropos_gym.parsing._scan import scan
from atropos_gym.parsing._schema import check_arguments, check_references, read_text
from atropos_gym.parsing._text import visible

__all__ = [
    "TOOL_DIALECTS",
    "ErrorKind",
    "ToolCallError",
    "ToolCalls",
    "check_call",
    "check_tools",
    "find_dialect",
    "parse_tool_calls",
]

ErrorKind = Literal[
    "unknown_tool",
    "bad_json",
    "bad_call",
    "bad_arguments",
    "missing_argument",
    "unexpected_argument",
    "wrong_type",
    "unclosed_call",
]

_ALIASES = {"llama": "llama3_json"}
TOOL_DIALECTS: tuple[str, ...] = (*DIALECTS, *_ALIASES)
"""``qwen`` takes the forms of Qwen3 (``hermes``) and Qwen3-Coder; ``llama`` is ``llama3_json``."""

_SHOWN = 80
"""Characters of the model's own words that an error repeats."""

_FLAWS: dict[CallFlaw, str] = {
    "bad_json": "the call is not one strict JSON object between its tags",
    "unclosed_call": "the call was cut off",
    "bad_call": "the call names no tool",
}


@dataclass(frozen=True, slots=True)
class ToolCallError:
    """A call that is not run, and what the model is told in its place.

    Attributes:
        kind: what is wrong, for counting.
        message: one line for the model.
        name: the tool's name, where one was read.
        argument: the argument at fault, such as ``filter.limit``, or None.
        id: the id of this call within the turn; the tool message that answers it carries it.
    """

    kind: ErrorKind
    message: str
    name: str | None = None
    argument: str | None = None
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """What an assistant's text asked for.

    Attributes:
        turn: one entry for each call found, in order.
        text: what is left as the visible answer, without the calls and blanks around.
        hallucinated_response: behind a call the model wrote the tool's answer or another role's turn itself;
            all from there on was dropped.
    """

    turn: tuple[ToolCall | ToolCallError, ...] = ()
    text: str = ""
    hallucinated_response: bool = False

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that may be run, in order."""
        return tuple(entry for entry in self.turn if isinstance(entry, ToolCall))

    @property
    def errors(self) -> tuple[ToolCallError, ...]:
        """The calls that are not run, in order."""
        return tuple(entry for entry in self.turn if isinstance(entry, ToolCallError))


def find_dialect(name: str) -> str:
    """Returns the dialect that a name or an alias stands for.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in TOOL_DIALECTS:
        raise ConfigError(f"dialect must be one of {', '.join(TOOL_DIALECTS)}; got {name!r}")
    return _ALIASES.get(name, name)


def parse_tool_calls(
    text: str, dialect: str = "hermes", tools: Sequence[Mapping[str, Any]] | None = None
) -> ToolCalls:
    r"""Reads the tool calls in an assistant's text.

    Args:
        text: the assistant's text of this turn; of thinking only what follows it is read.
        dialect: one of ``TOOL_DIALECTS``.
        tools: what may be called, each with ``name`` and ``parameters`` (a JSON schema), bare or as
            ``{"type": "function", "function": …}``. None: names and arguments are not checked; the dialect
            ``qwen3_coder``, which carries text alone, then yields strings.

    Returns:
        Calls, errors and the text around them. Ids differ within the turn: the model's own where it gave
        them, else nine letters and digits made from the text and the call's place in it.

    Raises:
        ConfigError: the dialect is unknown, or a tool cannot be used; never because of ``text``.

    Example:
        >>> schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
        >>> tools = [{"name": "add", "parameters": schema}]
        >>> said = 'Two.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
        >>> found = parse_tool_calls(said, "hermes", tools)
        >>> found.text, found.calls[0].name, found.calls[0].arguments
        ('Two.', 'add', {'a': 2})
        >>> parse_tool_calls(said.replace("2}", "2.0}"), "hermes", tools).errors[0].message
        "add: the argument 'a' must be of type integer, got 2.0"
    """
    dialect = find_dialect(dialect)
    schemas = None if tools is None else _schemas(tools)
    said = visible(text)
    if said is None:
        return ToolCalls()
    found, rest, hallucinated = scan(said, dialect)
    ids = _own_ids([call.id for call in found], said)
    turn = tuple(check_call(call, schemas, own) for call, own in zip(found, ids, strict=True))
    return ToolCalls(turn, rest, hallucinated)


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Says what is wrong with tools before any model calls one: for whoever declares them.

    Raises:
        ConfigError: one has no name, two share one, or a reference in a schema leads nowhere.
    """
    for name, schema in _schemas(tools).items():
        if schema is not None:
            check_references(schema, name)


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any] | None]:
    """Returns each tool's schema by name."""
    schemas: dict[str, Mapping[str, Any] | None] = {}
    for tool in tools:
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if inner is None or not isinstance(name, str) or not name:
            raise ConfigError(f"a tool must be a mapping with name and parameters, got {tool!r}")
        if name in schemas:
            raise ConfigError(f"two tools have the name {name!r}: rename one")
        schemas[name] = inner.get("parameters")
    return schemas


def check_call(
    call: RawCall, schemas: Mapping[str, Mapping[str, Any] | None] | None = None, id: str = ""
) -> ToolCall | ToolCallError:
    """Returns the call as it may be run, or what is wrong with it."""
    if call.flaw is not None:
        return ToolCallError(call.flaw, _FLAWS[call.flaw], id=id)
    name = call.name if len(call.name) <= _SHOWN else call.name[:_SHOWN] + "…"
    if schemas is not None and call.name not in schemas:
        known = ", ".join(schemas) or "none"
        return ToolCallError("unknown_tool", f"there is no tool {name!r}; there are: {known}", name, id=id)
    arguments = call.arguments
    if isinstance(arguments, str):  # an object within a string, decoded once
        read = read_json(arguments)
        is_all = read.flaw is None and not arguments[read.end :].strip()
        arguments = read.value if is_all else None
    if not isinstance(arguments, dict):
        return ToolCallError("bad_arguments", f"{name}: arguments must be a JSON object", name, id=id)
    schema = None if schemas is None else schemas[call.name]
    if schema is not None:
        if call.is_text:
            arguments = read_text(arguments, schema)
        violation = check_arguments(arguments, schema, call.name)
        if violation is not None:
            what = f"the argument {violation.path!r}" if violation.path else "the arguments"
            said = f"{name}: {what} {violation.detail}"
            return ToolCallError(violation.kind, said, name, violation.path or None, id)
    return ToolCall(call.name, arguments, id)


def _own_ids(given: Sequence[Any], text: str) -> list[str]:
    """Returns an id of its own for each call: the model's where it is a new one, else made from the text."""
    if not given:
        return []
    used = {own for own in given if isinstance(own, str)}
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    made = int.from_bytes(digest, "big")
    kept: set[str] = set()
    ids: list[str] = []
    for own in given:
        if not isinstance(own, str) or not own or own in kept:
            own = ""
            while not own or own in used:
                made += 1
                own = f"{made % 16**9:09x}"
        kept.add(own)
        ids.append(own)
    return ids
