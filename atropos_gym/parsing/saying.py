"""What a policy that knows the format says for an action, and how to ask it for one."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from atropos_gym.errors import ConfigError
from atropos_gym.parsing._calls import TOOL
from atropos_gym.parsing._objects import KEY
from atropos_gym.parsing._values import check_space, parts_of
from atropos_gym.parsing._words import Words, find_words
from atropos_gym.parsing.tool_calls import find_dialect

__all__ = ["ACTION_FORMATS", "action_tool", "describe_format", "exact_texts", "format_action", "format_call"]

ACTION_FORMATS: tuple[str, ...] = ("tag", "json", "tool_call", "bare_word", "number", "box")

_MANY = 256
"""So many numbers of a discrete space are known letter by letter."""


def format_action(
    value: Any,
    format: str = "tag",
    *,
    space: Space[Any] | None = None,
    names: Any = None,
    dialect: str | None = None,
) -> str:
    r"""Writes an action as a policy that keeps to the format would say it.

    Args:
        value: a member of ``space``; without a space the word, number or list itself.
        format: one of ``ACTION_FORMATS``.
        space: the action space.
        names: one word for each discrete action; they mirror the space, as for ``parse_action``.
        dialect: of ``tool_call`` alone; None is ``hermes``.

    Raises:
        ConfigError: the format is unknown, or the value is no member of the space.

    Example:
        >>> format_action("hit", "tag"), format_action("hit", "bare_word"), format_action("hit", "json")
        ('<action>hit</action>', 'hit', '{"action": "hit"}')
        >>> format_action(1, "tag", space=Discrete(2), names=("stick", "hit"))
        '<action>hit</action>'
        >>> format_action(np.array([0.5, -0.25], np.float32), "box", space=Box(-1, 1, (2,)))
        '[0.5, -0.25]'
    """
    _check_format(format)
    if space is not None:
        check_space(space, names)
        if not space.contains(np.asarray(value, space.dtype) if isinstance(space, Box) else value):
            raise ConfigError(f"{value!r} is no action of {space}")
        value = _plain(value, space, None if format == "number" else names)
    if format == "json":
        return _json({KEY: value})
    if format == "tool_call":
        return format_call(TOOL, {KEY: value}, dialect or "hermes")
    said = value if isinstance(value, str) else _json(value)
    return f"<action>{said}</action>" if format == "tag" else said


def format_call(name: str, arguments: Mapping[str, Any], dialect: str = "hermes") -> str:
    r"""Writes a call of a tool as a model of the dialect's family does.

    Example:
        >>> format_call("add", {"a": 2}, "llama3_json")
        '{"name": "add", "parameters": {"a": 2}}'
        >>> format_call("add", {"a": 2}, "mistral")
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]'
    """
    dialect = find_dialect(dialect)
    if dialect == "llama3_json":
        return _json({"name": name, "parameters": arguments})
    if dialect == "mistral":
        return f"[TOOL_CALLS]{_json([{'name': name, 'arguments': arguments}])}"
    if dialect == "qwen3_coder":
        texts = {key: value if isinstance(value, str) else _json(value) for key, value in arguments.items()}
        inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    return f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>"


def exact_texts(words: Words, format: str, dialect: str | None = None) -> Iterator[tuple[str, int]]:
    """Yields what a policy that knows the format says, letter by letter, and the action each text means."""
    spellings = {name: words.start + k for k, name in enumerate(words.names)} | words.values
    for word, value in spellings.items():
        yield format_action(word, format, dialect=dialect), value
    if words.n <= _MANY:
        for value in range(words.start, words.start + words.n):
            yield format_action(value, format, dialect=dialect), value


def describe_format(
    format: str,
    space: Space[Any],
    *,
    names: Any = None,
    legal: Collection[int] | None = None,
) -> str:
    """Returns one line that tells a policy what it may say and how.

    Args:
        format: one of ``ACTION_FORMATS``.
        space: the action space.
        names: one word for each discrete action; they mirror the space, as for ``parse_action``.
        legal: the discrete actions that are possible now; None names all.

    Example:
        >>> describe_format("tag", Discrete(2), names=("stick", "hit"))
        'Possible actions: stick, hit. Answer as <action>NAME</action>.'
        >>> describe_format("box", Box(-1, 1, (2,)))
        'Answer with a list of 2 numbers, each from -1 to 1, in brackets.'
        >>> describe_format("json", Dict(move=Discrete(2), force=Box(0, 1, (1,))))
        'Answer as {"action": ACTION}, where ACTION is an object with "move": an integer from 0 to 1; \
"force": a list of 1 number, from 0 to 1.'
    """
    _check_format(format)
    check_space(space, names)
    if isinstance(space, Discrete):
        return _describe_words(format, find_words(space, names), legal)
    said = _describe(space, names)
    if format == "tool_call":
        return f"Answer with one call of the tool {TOOL}. Its argument {KEY} is {said}."
    if format == "json":
        return f'Answer as {{"{KEY}": ACTION}}, where ACTION is {said}.'
    return f"Answer with {said}, in brackets."


def action_tool(
    space: Space[Any], *, names: Any = None, description: str = "Take one action."
) -> dict[str, Any]:
    """Returns the tool that the format ``tool_call`` calls, as chat templates want it.

    Example:
        >>> action_tool(Discrete(2), names=("stick", "hit"))["function"]["parameters"]["properties"]
        {'action': {'type': 'string', 'enum': ['stick', 'hit']}}
    """
    check_space(space, names)
    parameters = {"type": "object", "properties": {KEY: _schema(space, names)}, "required": [KEY]}
    function = {"name": TOOL, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _check_format(format: str) -> None:
    if format not in ACTION_FORMATS:
        raise ConfigError(f"format must be one of {', '.join(ACTION_FORMATS)}; got {format!r}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- each kind of space ------------------------------------------------------------------------------------
def _plain(value: Any, space: Space[Any], names: Any) -> Any:
    """A member of a space as what a JSON writer takes."""
    if isinstance(space, Discrete):
        return find_words(space, names).word(int(value)) if names else int(value)
    if isinstance(space, (Dict, Tuple)):
        parts = {key: _plain(value[key], part, own) for key, part, own, _ in parts_of(space, names)}
        return parts if isinstance(space, Dict) else list(parts.values())
    numbers = np.asarray(value)
    if numbers.dtype.kind == "f":  # the fewest digits that the dtype reads back
        return np.vectorize(lambda number: float(str(number)), otypes=[object])(numbers).tolist()
    return numbers.astype(object).tolist()


def _describe_words(format: str, words: Words, legal: Collection[int] | None) -> str:
    actions = range(words.start, words.start + words.n) if legal is None else legal
    if not words.names and legal is None:
        said = f"{words.start} to {words.start + words.n - 1}"
    elif format == "number" and words.names:
        said = ", ".join(f"{action} ({words.word(action)})" for action in actions)
    else:
        said = ", ".join(map(words.word, actions))
    if format == "bare_word":
        return f"Answer with one of these {'words' if words.names else 'numbers'}: {said}."
    noun = "NAME" if words.names else "NUMBER"
    how = {
        "tag": f"as <action>{noun}</action>",
        "number": "with the number alone",
        "json": f'as {{"{KEY}": {_json(noun) if words.names else noun}}}',
        "tool_call": f"with one call of the tool {TOOL}; its argument {KEY} is the {noun.lower()}",
    }
    return f"Possible actions: {said}. Answer {how[format]}."


def _describe(space: Space[Any], names: Any) -> str:
    """A kind of value in words."""
    if isinstance(space, Discrete):
        if names:
            return f"one of {', '.join(map(_json, find_words(space, names).names))}"
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, (Dict, Tuple)):
        parts = parts_of(space, names)
        if isinstance(space, Dict):
            return "an object with " + "; ".join(
                f'"{key}": {_describe(part, own)}' for key, part, own, _ in parts
            )
        return f"a list of {len(parts)}: " + "; ".join(_describe(part, own) for _, part, own, _ in parts)
    shape = tuple(space.shape or ())
    noun = "number" if isinstance(space, Box) and space.dtype.kind == "f" else "integer"
    if not shape:
        return f"one {noun}{_bounds(space, '')}"
    if len(shape) > 1:
        return f"{noun}s in nested lists of shape {' x '.join(map(str, shape))}{_bounds(space, ', each ')}"
    return f"a list of {shape[0]} {noun}{'s' if shape[0] != 1 else ''}{_bounds(space, ', each ')}"


def _limits(space: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    if isinstance(space, MultiBinary):
        return np.zeros(space.shape, np.int64), np.ones(space.shape, np.int64)
    if isinstance(space, MultiDiscrete):
        return np.asarray(space.start), np.asarray(space.start) + np.asarray(space.nvec) - 1
    return space.low, space.high


def _bounds(space: Any, each: str) -> str:
    """Bounds in words; none where a number is free."""
    low, high = _limits(space)
    lows, highs = _plain(np.unique(low), Box(-1, 1), None), _plain(np.unique(high), Box(-1, 1), None)
    each = each if low.size > 1 else each.replace("each ", "") or " "
    if len(lows) > 1 or len(highs) > 1:
        return f"{each.replace('each ', '')}from {_short(low)} to {_short(high)}"
    least, most = lows[0], highs[0]
    if np.isneginf(least):
        return "" if np.isposinf(most) else f"{each}at most {most:g}"
    return f"{each}at least {least:g}" if np.isposinf(most) else f"{each}from {least:g} to {most:g}"


def _short(bounds: np.ndarray[Any, Any]) -> str:
    return "[" + ", ".join(f"{bound:g}" for bound in bounds.flat) + "]"


def _schema(space: Space[Any], names: Any) -> dict[str, Any]:
    """A space as a JSON schema."""
    if isinstance(space, Discrete):
        if names:
            return {"type": "string", "enum": list(find_words(space, names).names)}
        first = int(space.start)
        return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
    if isinstance(space, (Dict, Tuple)):
        parts = {key: _schema(part, own) for key, part, own, _ in parts_of(space, names)}
        if isinstance(space, Dict):
            return {
                "type": "object",
                "properties": parts,
                "required": list(parts),
                "additionalProperties": False,
            }
        items = list(parts.values())
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    low, high = _limits(space)
    return _array_schema(low, high, "number" if low.dtype.kind == "f" else "integer")


def _array_schema(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any], kind: str) -> dict[str, Any]:
    """A schema for numbers between bounds, one list a dimension."""
    if not low.ndim:
        bounds = {"minimum": _plain(low, Box(-1, 1), None), "maximum": _plain(high, Box(-1, 1), None)}
        return {"type": kind, **{what: bound for what, bound in bounds.items() if np.isfinite(bound)}}
    length = {"minItems": len(low), "maxItems": len(low)}
    parts = [_array_schema(*pair, kind) for pair in zip(low, high, strict=True)]
    if all(part == parts[0] for part in parts):
        return {"type": "array", "items": parts[0], **length}
    return {"type": "array", "prefixItems": parts, **length}
