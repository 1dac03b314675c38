"""Answers of many forms: numbers, lists, sets, tuples, intervals, matrices, relations, text."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from atropos_gym.rewards._latex import FUNCTION_NAMES, clean
from atropos_gym.rewards._numbers import Number, read_number
from atropos_gym.rewards._units import split_unit

__all__ = ["Form", "Group", "Leaf", "Matrix", "Relation", "read_form", "read_values"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value: a number where ``number`` is set, else a formula or a text.

    Attributes:
        text: as cleaned, without its unit.
        number: its value where it is a plain number.
        words: it reads as text (a day, a time of day), so that only the same text equals it.
        unit: what it is counted in; "" where nothing is said.
    """

    text: str
    number: Number | None = None
    words: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Several values; ``brackets`` is ``{}``, ``""`` for a bare list, ``U`` for a union, else two marks.

    Attributes:
        name: the unknown, where the group is the interval of an inequality; a tuple's unknowns.
    """

    brackets: str
    parts: tuple[Form, ...]
    name: str = ""

    @property
    def ordered(self) -> bool:
        """Whether it is a tuple or an interval."""
        return self.brackets not in ("{}", "", "U")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of cells."""

    rows: tuple[tuple[Form, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or an unsolved inequality; ``name`` is the left side where that is nothing but a name."""

    left: str
    sign: str
    right: str
    name: str = ""


Form = Leaf | Group | Matrix | Relation

_MAX_DEPTH = 8
_OPENERS, _CLOSERS = "([{", ")]}"
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.S)
_MATRIX = re.compile(
    r"\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.S
)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?")
_MEMBER = re.compile(r"^([A-Za-z])\s*\\in(?![A-Za-z])\s*")
_LETTER = r"(?:[A-Za-z]|\\(?!pi|infty|sqrt|frac|log|ln|sin|cos|tan)[A-Za-z]+)(?:_(?:\{[\w ,]+\}|\w))?'*"
_NAME = re.compile(rf"{_LETTER}(?:\([^()=]{{1,20}}\))?|[A-Z]{{2}}|[A-Za-z][A-Za-z ]{{2,}}", re.A)
_VARIABLE = re.compile(_LETTER, re.A)
_COMPARISON = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>)\s*")
_GROUPED = re.compile(r"[+-]?\s*\d{1,3}(?:,\d{3})+(?![\d,])[^,]*", re.A)
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_WORD = re.compile(r"[A-Za-z]{3,}|\d:\d|\d\s:\s\d")
_COMMAND = re.compile(r"\\[A-Za-z]+|_\{[A-Za-z]+\}")
_FUNCTION = re.compile(
    rf"(?<![A-Za-z])(?:a|arc)?(?:{'|'.join(sorted(FUNCTION_NAMES, key=len, reverse=True))})(?![A-Za-z])"
)
_TEXT = re.compile(r"\$?\\text(?:bf|it|rm|sf)?\s*\{[^{}]*\}\$?")
_NAMES = re.compile(rf"\(\s*{_LETTER}(?:\s*,\s*{_LETTER})+\s*\)", re.A)
_REALS = re.compile(r"\\(?:mathbb\s*\{?\s*R\s*\}?|R|Reals|reals)(?![A-Za-z])")
_ALL_REALS = (r"-\infty", r"\infty")
_BUILT_FROM = re.compile(rf"\s*({_LETTER})\s*(?:\\in\s*{_REALS.pattern})?\s*", re.A)
_ANGLED = re.compile(r"^\\langle\s*(.*?)\s*\\rangle$", re.S)


def read_form(answer: str, depth: int = 0) -> Form:
    r"""Reads one committed text.

    Example:
        >>> read_form(r"\{1, 2\}").brackets, read_form("x < 3").brackets, read_form("12:00").words
        ('{}', '()', True)
    """
    text = _ANGLED.sub(r"(\1)", clean(answer))
    if member := _MEMBER.match(text):
        form = read_form(text[member.end() :], depth + 1)
        return replace(form, name=member[1]) if isinstance(form, Group) else form
    if _REALS.fullmatch(text):
        return _interval("()", *_ALL_REALS, "", depth)
    value, unit = split_unit(text)
    number = read_number(value)
    if number is not None:
        return Leaf(value, number, unit=unit)
    if depth < _MAX_DEPTH:
        for read in (
            _read_matrix,
            _read_set_builder,
            _read_union,
            _read_list,
            _read_signs,
            _read_relation,
            _read_brackets,
        ):
            found = read(text, depth + 1)
            if found is not None:
                return found
    if unit and not _is_words(value):
        return Leaf(value, unit=unit)
    return Leaf(text, words=_is_words(text) or _TEXT.fullmatch(answer.strip()) is not None)


def read_values(values: tuple[str, ...]) -> Form:
    """Reads what a text commits to; several values are a bare list."""
    forms = tuple(read_form(value) for value in values)
    return forms[0] if len(forms) == 1 else Group("", forms)


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
    rows = [row for row in _ROW_END.split(match[2]) if row.strip()]
    return Matrix(tuple(tuple(read_form(cell, depth) for cell in row.split("&")) for row in rows))


def _read_union(text: str, depth: int) -> Form | None:
    parts = _split(text, (r"\cup",))
    return None if len(parts) < 2 else Group("U", tuple(read_form(part, depth) for part in parts))


_JOINER = re.compile(r"\s*(?:,\s*)?(?<![A-Za-z\\])(and|or)(?![A-Za-z])\s*", re.I)
_BOTH = re.compile(r"^(?:both|either)\s+", re.I)


def _read_list(text: str, depth: int) -> Form | None:
    """Values joined by commas, semicolons, "and", "or" outside all brackets."""
    pieces = _JOINER.split(_BOTH.sub("", text))
    parts: list[str] = []
    for piece in pieces[::2]:
        # "1,234, 5" first parts at the comma before a blank: the other one may be inside a number.
        for coarse in _split(re.sub(r",\s+", ";", piece), (";",)):
            parts += [coarse] if _GROUPED.fullmatch(coarse.strip()) else _split(coarse, (",",))
    parts = [part for part in parts if part.strip()]
    if len(parts) < 2 or not all(_balanced(part) for part in parts):
        return None
    forms = tuple(read_form(part, depth) for part in parts)
    joiners = {joiner.lower() for joiner in pieces[1::2]}
    return _joined_intervals(forms, joiners) or Group("", forms)


def _joined_intervals(forms: tuple[Form, ...], joiners: set[str]) -> Form | None:
    """Solved inequalities of one unknown: "or" makes a union, "and" the interval between two bounds."""
    intervals = [form for form in forms if isinstance(form, Group) and _VARIABLE.fullmatch(form.name)]
    if len(intervals) < len(forms) or len({form.name for form in intervals}) != 1:
        return None
    if joiners != {"and"}:
        return Group("U", forms, intervals[0].name)
    low = [form for form in intervals if _is_infinite(form.parts[1])]
    high = [form for form in intervals if _is_infinite(form.parts[0])]
    if len(low) != 1 or len(high) != 1:
        return None
    ends = (low[0].parts[0], high[0].parts[1])
    return Group(low[0].brackets[0] + high[0].brackets[1], ends, low[0].name)


def _is_infinite(form: Form) -> bool:
    return isinstance(form, Leaf) and form.text.lstrip("+-") == r"\infty"


def _balanced(text: str) -> bool:
    return sum(map(text.count, _OPENERS)) == sum(map(text.count, _CLOSERS))


_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")


def _read_signs(text: str, depth: int) -> Form | None:
    if not _SIGNS.search(text):
        return None
    both = (_with_sign(text, "+", "-"), _with_sign(text, "-", "+"))
    return Group("", tuple(read_form(part.lstrip("+ "), depth) for part in both))


def _with_sign(text: str, plus_minus: str, minus_plus: str) -> str:
    return _SIGNS.sub(lambda sign: plus_minus if sign[1] == "pm" else minus_plus, text)


def _read_relation(text: str, depth: int) -> Form | None:
    """An equation, or an inequality; one that is solved for a variable is its interval."""
    sides = [side.strip() for side in _split(text, ("=",))]
    if len(sides) > 1:
        return _equation(sides[0], sides[-1], depth)
    sides = [side.strip() for side in _split(text, (r"\ne",))]
    if len(sides) == 2 and all(sides):
        return _unequal(sides[0], sides[1], depth)
    found = [part.strip() for part in _COMPARISON.split(text)]
    if len(found) == 3 and found[0] and found[2]:
        return _inequality(found[0], found[1], found[2], depth)
    if len(found) == 5 and _VARIABLE.fullmatch(found[2]):
        low, first, name, second, high = found
        if first in (">", r"\ge") and second in (">", r"\ge"):
            low, first, second, high = high, _FLIPPED[second], _FLIPPED[first], low
        if first in ("<", r"\le") and second in ("<", r"\le"):
            brackets = ("(" if first == "<" else "[") + (")" if second == "<" else "]")
            return _interval(brackets, low, high, name, depth)
    return None


def _equation(left: str, right: str, depth: int) -> Form | None:
    if not left or not right:
        return None
    if _VARIABLE.fullmatch(right) and not _NAME.fullmatch(left):
        left, right = right, left
    if _NAMES.fullmatch(left):
        form = read_form(right, depth)
        if isinstance(form, Group) and form.brackets == "()":
            return replace(form, name="".join(left.split()))
    if not re.search(
        r"[A-Za-z]|\\(?:theta|alpha|beta|phi|lambda|mu)", _COMMAND.sub(" ", left)
    ) and not _NAME.fullmatch(left):
        return read_form(right, depth)  # a sum that is worked out: 2 + 3 = 5
    return Relation(left, "=", right, left if _NAME.fullmatch(left) else "")


def _unequal(left: str, right: str, depth: int) -> Form:
    if not _VARIABLE.fullmatch(left):
        return Relation(left, r"\ne", right)
    halves = (_interval("()", r"-\infty", right, left, depth), _interval("()", right, r"\infty", left, depth))
    return Group("U", halves, left)


def _inequality(left: str, sign: str, right: str, depth: int) -> Form:
    if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
        left, sign, right = right, _FLIPPED[sign], left
    if not _VARIABLE.fullmatch(left):
        if sign in (">", r"\ge"):
            left, sign, right = right, _FLIPPED[sign], left
        return Relation(left, sign, right)
    if sign in ("<", r"\le"):
        return _interval("()" if sign == "<" else "(]", r"-\infty", right, left, depth)
    return _interval("()" if sign == ">" else "[)", right, r"\infty", left, depth)


def _interval(brackets: str, low: str, high: str, name: str, depth: int) -> Group:
    return Group(brackets, (read_form(low, depth), read_form(high, depth)), name)


def _read_brackets(text: str, depth: int) -> Form | None:
    """A set, a tuple, an interval; brackets around one value go."""
    opener = _TOKEN.match(text)
    if text == r"\emptyset":
        return Group("{}", ())
    if opener is None or not text.endswith((")", "]", "}")) or not _closes_at_end(text):
        return None
    mark = opener.group()
    if mark in (r"\{", "{"):
        inside = text[len(mark) : -2] if text.endswith(r"\}") else text[len(mark) : -1]
        parts = [part for part in _split(inside, (",", ";")) if part.strip()]
        if mark == "{" and len(parts) < 2:
            return read_form(inside, depth) if parts else None
        return Group("{}", tuple(form for part in parts for form in _with_both_signs(part, depth)))
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


def _read_set_builder(text: str, depth: int) -> Form | None:
    """A set of all x for which a solved inequality holds: its interval."""
    if not (text.startswith(r"\{") and text.endswith(r"\}")):
        return None
    sides = _split(text[2:-2], (r"\mid", "|", ":"))
    unknown = _BUILT_FROM.fullmatch(sides[0])
    if len(sides) != 2 or unknown is None:
        return None
    form = read_form(sides[1], depth)
    return form if isinstance(form, Group) and form.name == unknown[1] else None


def _with_both_signs(part: str, depth: int) -> tuple[Form, ...]:
    form = read_form(part, depth)
    return form.parts if isinstance(form, Group) and _SIGNS.search(part) else (form,)


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
