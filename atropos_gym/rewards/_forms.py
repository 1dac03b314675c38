"""Answers of many forms: numbers, lists, sets, tuples, intervals, matrices, equations, text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from atropos_gym.rewards._latex import clean
from atropos_gym.rewards._numbers import Number, read_number

__all__ = ["Equation", "Form", "Group", "Leaf", "Matrix", "read_form"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a number where ``number`` is set, else an expression or a text.

    Attributes:
        text: as cleaned.
        number: its value where it is a plain number.
        words: it reads as text (a day, a time of day), so that only the same text equals it.
    """

    text: str
    number: Number | None = None
    words: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Several values; ``brackets`` is ``{}``, ``""`` for a bare list, ``U`` for a union, else two marks."""

    brackets: str
    parts: tuple[Form, ...]

    @property
    def ordered(self) -> bool:
        """Whether it is a tuple or an interval."""
        return self.brackets not in ("{}", "", "U")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """Two sides; ``name`` is the left one where it is nothing but a name."""

    left: str
    right: str
    name: str = ""


Form = Leaf | Group | Matrix | Equation

_MAX_DEPTH = 8
_OPENERS, _CLOSERS = "([{", ")]}"
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.S)
_MATRIX = re.compile(
    r"\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.S
)
_MEMBER = re.compile(r"^[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?|[A-Za-z][A-Za-z ]{2,}")
_VARIABLE = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?")
_COMPARISON = re.compile(r"(\\le|\\ge|<|>)(?![A-Za-z])\s*")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_WORD = re.compile(r"[A-Za-z]{3,}|\d:\d")
_COMMAND = re.compile(r"\\[A-Za-z]+|_\{[A-Za-z]+\}")
_FUNCTION = re.compile(
    r"\b(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?\b|\b(?:log|exp|sqrt|max|min|gcd|lcm|mod|det)\b"
)


def read_form(answer: str, depth: int = 0) -> Form:
    r"""Reads one committed text.

    Example:
        >>> read_form(r"\{1, 2\}").brackets, read_form("x < 3").brackets, read_form("12:00").words
        ('{}', '()', True)
    """
    text = clean(answer)
    text = _MEMBER.sub("", text)
    number = read_number(text)
    if number is not None:
        return Leaf(text, number)
    if depth < _MAX_DEPTH:
        for read in (_read_matrix, _read_union, _read_list, _read_signs, _read_relation, _read_brackets):
            form = read(text, depth + 1)
            if form is not None:
                return form
    return Leaf(text, words=_is_words(text))


def _is_words(text: str) -> bool:
    return _WORD.search(_FUNCTION.sub(" ", _COMMAND.sub(" ", text))) is not None


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Splits at separators that stand in no bracket."""
    parts, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        found = token.group()
        if found in separators and depth == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
        elif found.lstrip("\\") in _OPENERS and found != "\\":
            depth += 1
        elif found.lstrip("\\") in _CLOSERS and found != "\\":
            depth = max(0, depth - 1)
    return [*parts, text[begin:]]


def _read_matrix(text: str, depth: int) -> Form | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row for row in match[2].split(r"\\") if row.strip()]
    return Matrix(tuple(tuple(read_form(cell, depth) for cell in row.split("&")) for row in rows))


def _read_union(text: str, depth: int) -> Form | None:
    parts = _split(text, (r"\cup",))
    return None if len(parts) < 2 else Group("U", tuple(read_form(part, depth) for part in parts))


_AND_OR = re.compile(r"\s*(?:,\s*)?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*", re.I)


def _read_list(text: str, depth: int) -> Form | None:
    """Values joined by commas, semicolons, "and", "or" outside all brackets."""
    pieces = _AND_OR.split(text)
    parts: list[str] = []
    for piece in pieces:
        # "1,234, 5" first parts at the comma before a blank: the other one may be inside a number.
        for coarse in _split(re.sub(r",\s+", ";", piece), (";",)):
            parts += [coarse] if read_number(clean(coarse)) else _split(coarse, (",",))
    parts = [part for part in parts if part.strip()]
    balanced = all(_balanced(part) for part in parts)
    if len(parts) < 2 or not balanced:
        return None
    return Group("", tuple(read_form(part, depth) for part in parts))


def _balanced(text: str) -> bool:
    return sum(map(text.count, _OPENERS)) == sum(map(text.count, _CLOSERS))


def _read_signs(text: str, depth: int) -> Form | None:
    if r"\pm" not in text:
        return None
    both = (text.replace(r"\pm", sign) for sign in "+-")
    return Group("", tuple(read_form(part, depth) for part in both))


def _read_relation(text: str, depth: int) -> Form | None:
    """An equation, or an inequality that is solved for one variable, as its interval."""
    sides = _split(text, ("=",))
    if len(sides) > 1:
        left, right = sides[0].strip(), sides[-1].strip()
        if not left or not right:
            return None
        if not re.search(r"[A-Za-z]", _COMMAND.sub(" ", left)):  # a sum that is worked out: 2 + 3 = 5
            return read_form(right, depth)
        return Equation(left, right, left if _NAME.fullmatch(left) else "")
    found = _COMPARISON.split(text)
    if len(found) == 3:
        left, sign, right = (part.strip() for part in found)
        if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
            left, sign, right = right, _FLIPPED[sign], left
        if not _VARIABLE.fullmatch(left) or not right:
            return None
        if sign in ("<", r"\le"):
            return _interval("(", r"-\infty", right, ")" if sign == "<" else "]", depth)
        return _interval("(" if sign == ">" else "[", right, r"\infty", ")", depth)
    if len(found) == 5 and _VARIABLE.fullmatch(found[2].strip()):
        low, first, _, second, high = (part.strip() for part in found)
        if first in (">", r"\ge") and second in (">", r"\ge"):
            low, first, second, high = high, _FLIPPED[second], _FLIPPED[first], low
        if first in ("<", r"\le") and second in ("<", r"\le"):
            return _interval("(" if first == "<" else "[", low, high, ")" if second == "<" else "]", depth)
    return None


def _interval(opener: str, low: str, high: str, closer: str, depth: int) -> Group:
    return Group(opener + closer, (read_form(low, depth), read_form(high, depth)))


def _read_brackets(text: str, depth: int) -> Form | None:
    """A set, a tuple, an interval; brackets around one value go."""
    opener = _TOKEN.match(text)
    if opener is None or not text.endswith((")", "]", "}")) or not _closes_at_end(text):
        return None
    mark = opener.group()
    if mark in (r"\{", "{"):
        inside = text[len(mark) : -2] if text.endswith(r"\}") else text[len(mark) : -1]
        if mark == "{":
            return read_form(inside, depth)
        return Group(
            "{}", tuple(read_form(part, depth) for part in _split(inside, (",", ";")) if part.strip())
        )
    if mark not in ("(", "["):
        return None
    parts = _split(text[1:-1], (",", ";"))
    if len(parts) == 1:
        return read_form(text[1:-1], depth)
    brackets = mark + text[-1]
    values = tuple(read_form(part, depth) for part in parts)
    if len(parts) == 2:  # an end at infinity is always open
        brackets = ("(" if r"\infty" in parts[0] else mark) + (")" if r"\infty" in parts[1] else text[-1])
    return Group(brackets, values)


def _closes_at_end(text: str) -> bool:
    """Whether the bracket that opens the text is closed by its last mark and no earlier one."""
    depth = 0
    for token in _TOKEN.finditer(text):
        found = token.group().lstrip("\\") or "\\"
        if found in _OPENERS:
            depth += 1
        elif found in _CLOSERS:
            depth -= 1
            if depth == 0:
                return token.end() == len(text)
    return False
