"""Judges by its text alone whether a formula may be evaluated.

What could take long or grow huge is compared as text only: powers in the exponent of a number, results above
10,000 digits, large factorials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import log10

__all__ = ["MAX_CHARS", "TooBig", "judge_size"]

MAX_CHARS = 300
"""Formulas that are longer are compared as text only."""

_MAX_DIGITS = 10_000
_MAX_FACTORIAL = 3_000
_MAX_DEPTH = 3
_INTEGERS = re.compile(r"\d+")
_FACTORIAL = re.compile(r"(\d+|[A-Za-z]?|\([^()!^\\]*[A-Za-z][^()!^\\]*\))\s*(!+)")
_BINOMIAL = re.compile(
    r"\\binom\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(\d+)\s*\\choose\s*(\d+)"
)
_SCIENTIFIC = re.compile(r"[\d.][eE][+-]?0*[1-9]\d{4,}")
_HAT = re.compile(r"\^|\*\*")
_NUMBER_AT_END = re.compile(r"(?:\d+\.?\d*|\.\d+)$")
_TOKEN = re.compile(r"\s*(-?\s*(?:\d+(?:\.\d+)?|\\[A-Za-z]+(?:\s*\{[^{}]*\})*|[^\s{(]))")
_CLOSERS = {"{": "}", "(": ")"}


class TooBig(Exception):
    """A formula is not evaluated, because that could take too long."""


def judge_size(text: str, depth: int = 0) -> None:
    """Raises TooBig for a cleaned formula that is compared as text only.

    Example:
        >>> judge_size("2^{100} + 5!")
        >>> judge_size("9^{9^9}")
        Traceback (most recent call last):
        ...
        atropos_gym.rewards._size.TooBig: 9^{9^9}
    """
    if len(text) > MAX_CHARS or depth > _MAX_DEPTH:
        raise TooBig(text)
    _judge_counts(text)
    _judge_powers(text, depth)


def _judge_counts(text: str) -> None:
    """Factorials, binomial coefficients, powers of ten written with an e."""
    for number, marks in _FACTORIAL.findall(text):
        if (
            len(marks) > 1
            or not number
            or (number.isdigit() and (len(number) > 4 or int(number) > _MAX_FACTORIAL))
        ):
            raise TooBig(text)
    for groups in _BINOMIAL.findall(text):
        top, low = (number for number in groups if number)
        if len(top) > 6 or len(low) > 6 or min(int(low), abs(int(top) - int(low))) * len(top) > _MAX_DIGITS:
            raise TooBig(text)
    if _SCIENTIFIC.search(text):
        raise TooBig(text)


def _judge_powers(text: str, depth: int) -> None:
    product, digits, are_plain = 1, 0.0, True
    for before, exponent, after in _powers(text):
        base = before[-1:]
        # A letter stays as it is: e^{x^2} is no tower.
        tower = _HAT.search(exponent) is not None or _HAT.match(after) is not None
        if (tower and not base.isalpha()) or "!" in exponent or after.startswith("!"):
            raise TooBig(text)
        judge_size(exponent, depth + 1)
        if base.isalpha():
            continue
        power = 1
        for number in _INTEGERS.findall(exponent):
            power *= max(1, int(number)) if len(number) < 6 else 10 * _MAX_DIGITS
        product *= power
        raised = _NUMBER_AT_END.search(before)
        if raised is None:
            are_plain = False
        else:
            digits += power * log10(max(2, int(raised[0].replace(".", ""))))
    # Powers of plain numbers add up; those of brackets may stand in one another.
    if not are_plain and product > 1:
        digits = product * sum(map(len, _INTEGERS.findall(text)))
    if digits > _MAX_DIGITS:
        raise TooBig(text)


def _powers(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields each power outside other exponents: what stands before it, the exponent, what follows it."""
    position = 0
    while hat := _HAT.search(text, position):
        before = text[: hat.start()].rstrip()
        begin = hat.end() + len(text[hat.end() :]) - len(text[hat.end() :].lstrip())
        position = _group_end(text, begin)
        if position < 0:
            token = _TOKEN.match(text, begin)
            position = begin if token is None else token.end()
        yield before, text[begin:position], text[position:].lstrip()


def _group_end(text: str, begin: int) -> int:
    """Where the bracket that opens at ``begin`` closes; -1 where none opens."""
    opener = text[begin : begin + 1]
    if opener not in _CLOSERS:
        return -1
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == opener) - (text[at] == _CLOSERS[opener])
        if depth == 0:
            return at + 1
    return len(text)
