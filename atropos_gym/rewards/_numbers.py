"""Numbers as people write them, read exactly."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["Number", "numbers_in", "read_number", "same_number"]

# Thousands: a comma or a blank before exactly three digits.
_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?:[ ]\d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?!\.?\d)"
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
_REPEATING = re.compile(rf"{_SIGN}(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{{(\d{{1,50}})\}}|(\d))", re.A)
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL})", re.A)
_PERCENT = re.compile(r"\s*%")
_START = re.compile(r"(?:(?<![\w.)}])[+-])?(?:(?<![A-Za-z_\d.])(?:\d|\.\d)|\\frac)", re.A)

_MAX_EXPONENT = 10_000
_SURE_DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written.

    Attributes:
        shown: the number itself, a percent sign aside.
        percent: whether a percent sign follows it.
        decimals: digits after the point where it is written as a decimal, else None.
        digits: significant digits where it is written as a decimal, else 0.
    """

    shown: Fraction
    percent: bool = False
    decimals: int | None = None
    digits: int = 0

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


def _repeating(match: re.Match[str]) -> Number:
    sign, whole, fixed, repeated = match[1], match[2], match[3], match[4] or match[5]
    tail = Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return Number(_signed(sign, _fraction(f"{whole}.{fixed}") + tail))


def _plain(match: re.Match[str]) -> Number:
    written = re.sub(r"[, ]", "", match[2])
    decimals = len(written.partition(".")[2]) if "." in written else None
    significant = len(written.replace(".", "").lstrip("0"))
    return Number(_signed(match[1], _fraction(written)), decimals=decimals, digits=significant)


_FORMS = (
    (_REPEATING, _repeating),
    (_MIXED, _mixed),
    (_FRAC, _frac),
    (_SCIENTIFIC, _scientific),
    (_RATIO, _ratio),
    (_PLAIN, _plain),
)


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
    r"""Reads a cleaned text that is one number as a whole.

    Example:
        >>> read_number("-1,234.50"), read_number("5x")
        (Number(shown=Fraction(-2469, 2), percent=False, decimals=2, digits=6), None)
    """
    text = text.strip()
    scanned = _scan(text, 0)
    return scanned[0] if scanned is not None and scanned[1] == len(text) else None


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
    if gold.value == answer.value:
        return True
    places = answer.decimals or 0
    if gold.percent == answer.percent:
        return _is_rounded(gold.shown, answer.shown, places, answer.digits)
    if gold.shown == answer.shown or _is_rounded(gold.shown, answer.shown, places, answer.digits):
        return gold.percent or abs(gold.shown) > 1
    return _is_rounded(gold.value, answer.value, places + 2 * answer.percent, answer.digits)


def _is_rounded(gold: Fraction, answer: Fraction, places: int, digits: int) -> bool:
    if places < _SURE_DECIMALS or digits < _SURE_DECIMALS:
        return False
    denominator = gold.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    # A finite decimal can be written exactly.
    return denominator != 1 and round(gold, places) == answer
