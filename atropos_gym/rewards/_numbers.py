"""Numbers as people write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Number", "numbers_in", "read_number", "same_number"]

# Thousands: a comma or a blank before exactly three digits.
_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?:[ ]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_PART = rf"(?:\{{\s*([+-]?\s*{_DECIMAL})\s*\}}|\s*(\d))"
_SIGN = r"([+-]?)\s*"

_FRACTION = rf"\\frac\s*{_PART}\s*{_PART}"
_MIXED = re.compile(rf"{_SIGN}(\d+)(?:\s+(\d+)\s*/\s*(\d+)(?![\d.])|\s*{_FRACTION})", re.A)
_FRAC = re.compile(rf"{_SIGN}{_FRACTION}", re.A)
_RATIO = re.compile(rf"{_SIGN}({_DECIMAL})\s*/\s*({_DECIMAL})(?!\s*/)", re.A)
_SCIENTIFIC = re.compile(
    rf"{_SIGN}({_DECIMAL})(?:[eE]([+-]?\d{{1,6}})(?![\w.])"
    r"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{\s*([+-]?\s?\d{1,6})\s*\}|([+-]?\d{1,6})))",
    re.A,
)
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL})", re.A)
_PERCENT = re.compile(r"\s*%")
_START = re.compile(r"(?:(?<![\w.)}])[+-])?(?:(?<![A-Za-z_\d.])(?:\d|\.\d)|\\frac)", re.A)

_MAX_EXPONENT = 10_000
_SURE_DECIMALS = 6

_SHORT_UNITS = frozenset(
    "m cm mm km ft in yd mi g kg mg lb oz s h hr min l ml n j w v a k c f hz pa mph kph m/s km/h".split()
)
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt and or max min mod gcd lcm".split())
_UNIT = re.compile(r"[A-Za-z\u00b5\u03a9][A-Za-z\u00b5\u03a9 /.\-]*(?:\s*\^\s*\{?\s*-?\d\s*\}?)?")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written.

    Attributes:
        shown: the number itself, a percent sign aside.
        percent: whether a percent sign follows it.
        decimals: digits after the point where it is written as a decimal, else None.
        digits: significant digits where it is written as a decimal, else 0.
        unit: what follows it, in lower case; "" if nothing does.
    """

    shown: Fraction
    percent: bool = False
    decimals: int | None = None
    digits: int = 0
    unit: str = ""

    @property
    def value(self) -> Fraction:
        """The number's value: a percent sign divides by a hundred."""
        return self.shown / 100 if self.percent else self.shown


def _fraction(text: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", text).rstrip(".") or "0")


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _parts(top_braced: str, top_digit: str, low_braced: str, low_digit: str) -> Fraction | None:
    low = _fraction(low_braced or low_digit)
    return None if low == 0 else _fraction(top_braced or top_digit) / low


def _mixed(match: re.Match[str]) -> Number | None:
    sign, whole, top, low = match.group(1, 2, 3, 4)
    if top is not None:
        if int(low) == 0:
            return None
        part: Fraction | None = Fraction(int(top), int(low))
    else:
        part = _parts(*match.group(5, 6, 7, 8))
    if part is None or not 0 <= part < 1:
        return None
    return Number(_signed(sign, int(whole) + part))


def _frac(match: re.Match[str]) -> Number | None:
    value = _parts(*match.group(2, 3, 4, 5))
    return None if value is None else Number(_signed(match[1], value))


def _ratio(match: re.Match[str]) -> Number | None:
    low = _fraction(match[3])
    return None if low == 0 else Number(_signed(match[1], _fraction(match[2]) / low))


def _scientific(match: re.Match[str]) -> Number | None:
    exponent = int((match[3] or match[4] or match[5]).replace(" ", ""))
    if abs(exponent) > _MAX_EXPONENT:
        return None
    return Number(_signed(match[1], _fraction(match[2]) * Fraction(10) ** exponent))


def _plain(match: re.Match[str]) -> Number:
    written = re.sub(r"[, ]", "", match[2])
    decimals = len(written.partition(".")[2]) if "." in written else None
    significant = len(written.replace(".", "").lstrip("0"))
    return Number(_signed(match[1], _fraction(written)), decimals=decimals, digits=significant)


_FORMS = ((_MIXED, _mixed), (_FRAC, _frac), (_SCIENTIFIC, _scientific), (_RATIO, _ratio), (_PLAIN, _plain))


def _scan(text: str, begin: int) -> tuple[Number, int] | None:
    """Returns the number that begins at ``begin`` and where it ends."""
    for pattern, build in _FORMS:
        match = pattern.match(text, begin)
        number = None if match is None else build(match)
        if match is None or number is None:
            continue
        end = match.end()
        if percent := _PERCENT.match(text, end):
            end = percent.end()
            number = Number(number.shown, True, number.decimals, number.digits)
        return number, end
    return None


def numbers_in(text: str) -> list[Number]:
    """Returns all numbers in a cleaned text, in order.

    Example:
        >>> [str(number.shown) for number in numbers_in("2 1/2 of 1,200 is 3e3, not .5")]
        ['5/2', '1200', '3000', '1/2']
    """
    found: list[Number] = []
    position = 0
    while match := _START.search(text, position):
        scanned = _scan(text, match.start())
        if scanned is None:
            position = match.end()
        else:
            found.append(scanned[0])
            position = max(scanned[1], match.end())
    return found


def read_number(text: str) -> Number | None:
    r"""Reads a cleaned text that is one number as a whole, with a unit or not.

    Example:
        >>> read_number("-1,234.50"), read_number("10 feet").unit, read_number("5x")
        (Number(shown=Fraction(-2469, 2), percent=False, decimals=2, digits=6, unit=''), 'feet', None)
    """
    text = text.strip()
    scanned = _scan(text, 0)
    if scanned is None:
        return None
    number, end = scanned
    rest = text[end:]
    unit = _unit(rest)
    if unit is None:
        return None
    return number if not unit else Number(number.shown, number.percent, number.decimals, number.digits, unit)


def _unit(rest: str) -> str | None:
    """Returns what ``rest`` names as a unit; None where it is none: ``5x`` is no number."""
    unit = rest.strip().strip(".")
    if not unit:
        return ""
    if not _UNIT.fullmatch(unit):
        return None
    words = unit.split("^")[0].split()
    if not words or any(word.lower() in _FUNCTIONS for word in words[:1]):
        return None
    long = max(len(word) for word in words) >= 3
    if not long and not (rest[0] == " " and words[0].lower() in _SHORT_UNITS):
        return None
    return "".join(unit.lower().replace("{", "").replace("}", "").split())


def same_number(gold: Number, answer: Number) -> bool:
    """Whether two numbers are equal: exactly, but for percent signs and long decimals of fractions.

    A percent sign on one side only may be a unit: the gold's may be left out, and the answer's may be added
    where the gold is above 1. A decimal counts for a gold without a finite decimal if it shows at least six
    decimals and six digits and is the gold rounded to those.

    Example:
        >>> same_number(read_number("1/3"), read_number("0.333333"))
        True
        >>> same_number(read_number("0.5"), read_number("0.5%"))
        False
    """
    if gold.unit and answer.unit and _singular(gold.unit) != _singular(answer.unit):
        return False
    if gold.value == answer.value:
        return True
    if gold.percent != answer.percent and gold.shown == answer.shown:
        return gold.percent or abs(gold.shown) > 1
    return _is_rounded(gold, answer)


def _singular(unit: str) -> str:
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


def _is_rounded(gold: Number, answer: Number) -> bool:
    if answer.decimals is None or answer.decimals < _SURE_DECIMALS or answer.digits < _SURE_DECIMALS:
        return False
    denominator = gold.value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    if denominator == 1:  # a finite decimal can be written exactly
        return False
    decimals = answer.decimals + (2 if answer.percent else 0)
    return round(gold.value, decimals) == answer.value
