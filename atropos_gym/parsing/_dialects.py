"""How each family of models writes a tool call.

A dialect is a pattern for what opens a call and a reader of what stands behind it. Nothing is checked here
against a tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from atropos_gym.parsing._json import JsonRead, balanced_end, read_json

__all__ = ["DIALECTS", "CallFlaw", "Dialect", "Found", "RawCall"]


CallFlaw = Literal["bad_json", "unclosed_call", "bad_call"]


class RawCall(NamedTuple):
    """A call as it was found: not yet checked, or with the reason why it is none.

    Attributes:
        name: what stands in the place of the tool's name.
        arguments: what stands in the place of the arguments; ``{}`` where nothing does.
        id: what the model gave as the call's id.
        flaw: why this is no call at all, or None.
        is_text: arguments are text that the schema's types say how to read.
    """

    name: str = ""
    arguments: Any = None
    id: Any = None
    flaw: CallFlaw | None = None
    is_text: bool = False


class Found(NamedTuple):
    """Calls that stand together, and the position behind them; without calls it is text up to there."""

    calls: list[RawCall]
    end: int


class Dialect(NamedTuple):
    """A pattern for what opens a call, and a reader that gets the text and the pattern's match."""

    opener: str
    read: Callable[[str, re.Match[str]], Found]


_BLANKS = re.compile(r"\s*+")


def _skip(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _behind(text: str, close: str, position: int) -> int | None:
    """The position behind a closing tag that stands at ``position``; a text that ends within it will do."""
    if text.startswith(close, position):
        return position + len(close)
    rest = text[position : position + len(close)]
    return len(text) if position + len(rest) == len(text) and close.startswith(rest) else None


def _broken(text: str, close: str, position: int) -> Found:
    """A call that cannot be read, with all up to its closing tag, or to the end of the text."""
    end = text.find(close, position)
    return Found([RawCall(flaw="bad_json")], len(text) if end < 0 else end + len(close))


def _cut(text: str) -> Found:
    return Found([RawCall(flaw="unclosed_call")], len(text))


def _object_call(value: Any, key: str = "arguments") -> RawCall:
    """The call that an object describes."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return RawCall(flaw="bad_call")
    return RawCall(name, value.get(key, {}), value.get("id"))


def _call_of(read: JsonRead, key: str = "arguments") -> RawCall:
    return RawCall(flaw="bad_json") if read.flaw else _object_call(read.value, key)


# --- hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call> ------------------------------------------
def _read_hermes(text: str, opener: re.Match[str]) -> Found:
    start = _skip(text, opener.end())
    if start == len(text):
        return _cut(text)
    if text[start] != "{":
        return _broken(text, "</tool_call>", start)
    read = read_json(text, start)
    if read.flaw == "cut_off":
        return _cut(text)
    end = _behind(text, "</tool_call>", _skip(text, read.end)) if read.complete else None
    return _broken(text, "</tool_call>", read.end) if end is None else Found([_call_of(read)], end)


# --- mistral: [TOOL_CALLS][{…}, {…}], or [TOOL_CALLS]name[ARGS]{…} -----------------------------------------
_MISTRAL_NAME = re.compile(
    r"([^\s\[\]{}]*+)\s*+(?:\[CALL_ID\]([^\s\[\]{}]*+)\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{|\Z)"
)


def _read_mistral(text: str, opener: re.Match[str]) -> Found:
    start = _skip(text, opener.end())
    if text.startswith("[", start):
        read = read_json(text, start)
        if read.flaw != "cut_off" and not read.complete:
            return _until_opener(text, read.end)
        return Found(_list_calls(read), read.end)
    named = _MISTRAL_NAME.match(text, start)
    if named is None:
        return _until_opener(text, start)
    read = read_json(text, named.end())
    if read.flaw == "cut_off":
        return _cut(text)
    if not read.complete:
        return _until_opener(text, read.end)
    if read.flaw is not None:
        return Found([RawCall(flaw="bad_json")], read.end)
    return Found([_object_call({"name": named[1], "arguments": read.value, "id": named[2]})], read.end)


def _list_calls(read: JsonRead) -> list[RawCall]:
    """The calls of a list; where the text's end cuts it off, complete ones count."""
    if read.flaw not in (None, "cut_off"):
        return [_call_of(read)]
    if not all(isinstance(item, dict) for item in read.value or ()):
        return [RawCall(flaw="bad_call")]
    calls = list(map(_object_call, read.value or ()))
    if read.flaw and not read.lacks_end_only:
        calls.append(RawCall(flaw="unclosed_call"))
    return calls or [RawCall(flaw="bad_call")]


def _until_opener(text: str, position: int) -> Found:
    end = text.find("[TOOL_CALLS]", position)
    return Found([RawCall(flaw="bad_json")], len(text) if end < 0 else end)


# --- llama3_json: {"name": …, "parameters": {…}}, also behind <|python_tag|> -------------------------------
_LLAMA_KEY = re.compile(r"[\"'](?:name|parameters)[\"']\s{0,8}:")
_LLAMA_BETWEEN = re.compile(r"(?:\s*+;)?")


def _read_llama(text: str, opener: re.Match[str]) -> Found:
    is_tagged = opener[0] != "{"
    start = _skip(text, opener.end()) if is_tagged else opener.start()
    if start == len(text):
        return _cut(text)
    if text[start] != "{":  # code, not a call
        return Found([RawCall(flaw="bad_json")], len(text))
    read = read_json(text, start)
    end: int | None = read.end
    if read.flaw == "cut_off" or not read.complete:
        end = None if read.flaw == "cut_off" else balanced_end(text, start)
    if end is None:
        end = len(text)
    if read.flaw is None:
        is_call = is_tagged or "parameters" in read.value or {"name", "arguments"} <= read.value.keys()
    else:
        is_call = is_tagged or _LLAMA_KEY.search(text, start, min(end, start + 1000)) is not None
    if not is_call:
        return Found([], end)
    call = RawCall(flaw="unclosed_call") if read.flaw == "cut_off" else _call_of(read, "parameters")
    between = _LLAMA_BETWEEN.match(text, end)
    return Found([call], between.end() if between else end)


# --- qwen3_coder: <function=name><parameter=key>text</parameter></function> --------------------------------
_FUNCTION = re.compile(r"<function=([^<>\n]*+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*+)>")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>|</tool_call>|\Z))")
_FUNCTION_END = re.compile(r"</function>\s*+</tool_call>")


def _read_qwen3_coder(text: str, opener: re.Match[str]) -> Found:
    is_wrapped = opener[0] == "<tool_call>"
    close = "</tool_call>" if is_wrapped else "</function>"
    start = _skip(text, opener.end()) if is_wrapped else opener.start()
    function = _FUNCTION.match(text, start)
    if function is None:
        begun = text[start : start + 200]
        is_cut = start + len(begun) == len(text) and (
            "<function=".startswith(begun) or re.fullmatch(r"<function=[^<>\n]*", begun)
        )
        return _cut(text) if is_cut else _broken(text, close, start)
    arguments: dict[str, str] = {}
    has_double = False
    position = _skip(text, function.end())
    while parameter := _PARAMETER.match(text, position):
        end = _PARAMETER_END.search(text, parameter.end())
        if end is None:
            return _cut(text) if text.find(close, parameter.end()) < 0 else _broken(text, close, position)
        if _FUNCTION_END.search(text, parameter.end(), end.start()):  # the value's own end is missing
            return _broken(text, close, position)
        has_double = has_double or parameter[1] in arguments
        arguments[parameter[1]] = _without_breaks(text[parameter.end() : end.start()])
        position = _skip(text, end.end())
    if not text.startswith("</function>", position):
        rest = text[position : position + 200]
        is_cut = position + len(rest) == len(text) and (
            "</function>".startswith(rest) or re.fullmatch(r"<p[^<>\n]*", rest)
        )
        return _cut(text) if is_cut else _broken(text, close, position)
    end_of_call = position + len("</function>")
    behind = _behind(text, "</tool_call>", _skip(text, end_of_call))
    if is_wrapped and behind is None:
        return _broken(text, close, end_of_call)
    call = RawCall(function[1], arguments, is_text=True) if function[1] else RawCall(flaw="bad_call")
    return Found([RawCall(flaw="bad_json") if has_double else call], behind or end_of_call)


def _without_breaks(value: str) -> str:
    """A value without the line break next to each of its tags."""
    value = value.removeprefix("\r\n") if value.startswith("\r") else value.removeprefix("\n")
    return value.removesuffix("\r\n") if value.endswith("\r\n") else value.removesuffix("\n")


def _read_qwen(text: str, opener: re.Match[str]) -> Found:
    """Qwen models write hermes (2.5, 3) or functions (Coder), told apart by what stands behind the opener."""
    start = _skip(text, opener.end())
    is_function = opener[0] != "<tool_call>" or text.startswith("<f", start)
    return _read_qwen3_coder(text, opener) if is_function else _read_hermes(text, opener)


DIALECTS: dict[str, Dialect] = {
    "hermes": Dialect(r"<tool_call>", _read_hermes),
    "qwen3_coder": Dialect(r"<tool_call>|<function=", _read_qwen3_coder),
    "qwen": Dialect(r"<tool_call>|<function=", _read_qwen),
    "mistral": Dialect(r"\[TOOL_CALLS\]", _read_mistral),
    "llama3_json": Dialect(r"<\|python_tag\|>|\{(?=\s*[\"'])", _read_llama),
}
