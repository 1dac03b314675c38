"""Strict JSON, read from one place of a text.

The standard library's reader takes NaN, duplicate keys and lone surrogates, gives up at a nesting that
depends on the caller's stack, and does not tell a value that is cut off from one that is wrong. This one
walks the tokens with a stack of its own, in time linear in the length, and raises nothing.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, NamedTuple

__all__ = ["MAX_DEPTH", "JsonFlaw", "JsonRead", "balanced_end", "read_json"]

MAX_DEPTH = 64
"""Deeper nesting is refused."""

JsonFlaw = Literal["bad_json", "cut_off", "not_finite"]

_BLANK = re.compile(r"[ \t\n\r]*+")
_BODY = r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
_STRING = re.compile(_BODY + '"')
_STRING_CUT = re.compile(_BODY + r"(?:\\(?:u[0-9a-fA-F]{0,3})?+)?+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?+([eE][+-]?[0-9]++)?+")
_NUMBER_CUT = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.|(?:\.[0-9]++)?+[eE][+-]?)\Z")
_WORD = re.compile(r"true|false|null|NaN|-?Infinity")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_SURROGATE = re.compile("[\ud800-\udfff]")
_BRACE = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[{}]', re.S)


class JsonRead(NamedTuple):
    """What was read.

    Attributes:
        value: the value. Of one that is cut off, what was complete of the outermost list or object; of no
            use with another flaw.
        end: position behind the value, or where reading stopped.
        flaw: None, or why this is no strict JSON. ``not_finite``: NaN, Infinity or a float beyond range.
        complete: the value's extent is known, flaw or not.
        lacks_end_only: it is cut off, but for the last bracket nothing is missing.
    """

    value: Any
    end: int
    flaw: JsonFlaw | None = None
    complete: bool = True
    lacks_end_only: bool = False


class _Stop(Exception):
    """Reading cannot go on."""

    def __init__(self, position: int, flaw: JsonFlaw) -> None:
        self.position, self.flaw = position, flaw


def read_json(text: str, start: int = 0) -> JsonRead:
    """Reads the one value that begins at ``start``, blanks before it allowed; what follows is not looked at.

    Example:
        >>> read_json('{"a": [1, true]} and more')[:3]
        ({'a': [1, True]}, 16, None)
        >>> read_json('{"a": [1, tr').flaw, read_json("{'a': 1}").flaw, read_json("[NaN]").flaw
        ('cut_off', 'bad_json', 'not_finite')
    """
    reader = _Reader(text)
    try:
        value, end = reader.read(start)
    except _Stop as stop:
        return JsonRead(reader.outermost, stop.position, stop.flaw, False, reader.lacks_end_only)
    return JsonRead(value, end, reader.flaw)


def balanced_end(text: str, start: int) -> int | None:
    """Returns the position behind the brace that closes the one at ``start``; None where none does.

    For what is no JSON: braces in double quotes do not count, everything else is passed over.
    """
    depth = 0
    for token in _BRACE.finditer(text, start):
        mark = token[0]
        if mark == "{":
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                return token.end()
    return None


class _Reader:
    """One reading. A flaw that does not hide where the value ends is kept, and reading goes on."""

    __slots__ = ("flaw", "lacks_end_only", "outermost", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.flaw: JsonFlaw | None = None
        self.outermost: dict[str, Any] | list[Any] | None = None
        self.lacks_end_only = False

    def read(self, start: int) -> tuple[Any, int]:
        """Returns the value and the position behind it."""
        text = self.text
        open_values: list[dict[str, Any] | list[Any]] = []
        keys: list[str] = []
        position = self._skip(start)
        while True:
            opener = text[position : position + 1]
            if opener and opener in "{[":
                position = self._skip(position + 1)
                value: Any = {} if opener == "{" else []
                if len(open_values) >= MAX_DEPTH:
                    self._note("bad_json")
                if text[position : position + 1] != ("}" if opener == "{" else "]"):
                    open_values.append(value)
                    self.outermost = open_values[0]
                    if opener == "{":
                        position = self._key(position, keys)
                    continue
                position += 1
            else:
                value, position = self._scalar(position)
            while True:  # a value is complete
                if not open_values:
                    return value, position
                container = open_values[-1]
                is_object = isinstance(container, dict)
                self._put(container, keys, value)
                position = self._skip(position)
                mark = text[position : position + 1]
                if mark == ",":
                    position = self._skip(position + 1)
                    if is_object:
                        position = self._key(position, keys)
                    break
                if mark != ("}" if is_object else "]"):
                    self.lacks_end_only = len(open_values) == 1
                    raise self._stop(position)
                value = open_values.pop()
                position += 1

    def _put(self, container: dict[str, Any] | list[Any], keys: list[str], value: Any) -> None:
        if isinstance(container, list):
            container.append(value)
            return
        key = keys.pop()
        if key in container:
            self._note("bad_json")
        container[key] = value

    def _skip(self, position: int) -> int:
        blank = _BLANK.match(self.text, position)
        return blank.end() if blank else position

    def _note(self, flaw: JsonFlaw) -> None:
        self.flaw = self.flaw or flaw

    def _stop(self, position: int) -> _Stop:
        return _Stop(position, "cut_off" if position >= len(self.text) else "bad_json")

    def _key(self, position: int, keys: list[str]) -> int:
        key, position = self._string(position)
        keys.append(key)
        position = self._skip(position)
        if self.text[position : position + 1] != ":":
            raise self._stop(position)
        return self._skip(position + 1)

    def _string(self, position: int) -> tuple[str, int]:
        token = _STRING.match(self.text, position)
        if token is None:
            begun = _STRING_CUT.match(self.text, position)
            raise self._stop(begun.end() if begun else position)
        literal = token[0]
        if "\\" not in literal:
            return literal[1:-1], token.end()
        value = str(json.loads(literal))
        if _SURROGATE.search(value):  # half a character: no encoding can carry it
            self._note("bad_json")
        return value, token.end()

    def _scalar(self, position: int) -> tuple[Any, int]:
        if self.text.startswith('"', position):
            return self._string(position)
        if number := _NUMBER.match(self.text, position):
            # A longer beginning of a number that ends with the text: 1. or 2e-
            if _NUMBER_CUT.match(self.text, position):
                raise _Stop(len(self.text), "cut_off")
            return self._number(number), number.end()
        if word := _WORD.match(self.text, position):
            if word[0] not in _WORDS:
                self._note("not_finite")
            return _WORDS.get(word[0]), word.end()
        rest = self.text[position : position + 10]
        if position + len(rest) == len(self.text) and any(
            full.startswith(rest) for full in ("true", "false", "null", "NaN", "-Infinity")
        ):
            raise _Stop(len(self.text), "cut_off")
        raise self._stop(position)

    def _number(self, token: re.Match[str]) -> int | float:
        if token[1] is None and token[2] is None:
            try:
                return int(token[0])
            except ValueError:  # more digits than Python converts
                self._note("bad_json")
                return 0
        value = float(token[0])
        if not math.isfinite(value):
            self._note("not_finite")
        return value
