"""Symbolic equality, by math-verify's LaTeX reader and sympy.

Both are imported on first use: it takes seconds. Size is judged before anything is evaluated, because
nothing stops an evaluation in a thread: math-verify's own time limit uses SIGALRM, which works in the main
thread only and cancels the host program's alarm, so it stays off.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from atropos_gym.rewards._numbers import Number

__all__ = ["TooBig", "equal_equations", "equal_expressions", "is_rounded_value", "warm_up"]

_LOG = logging.getLogger(__name__)
_LOCK = threading.Lock()
"""sympy's caches are not made for several threads at once."""

_MAX_CHARS = 300
_MAX_DIGITS = 10_000
_MAX_FACTORIAL = 3_000
_MAX_OPERATIONS = 150
_MAX_EXPANDED = 30
_SLOW = re.compile(r"\\(?:int|sum|prod|lim|binom|oint|iint)(?![A-Za-z])")
_INTEGERS = re.compile(r"\d+")
_FACTORIAL = re.compile(r"(\d*)\s*!")
_EXPONENT = re.compile(
    r"(?:\^|\*\*)\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(-?\d+|[A-Za-z]|\\(?:pi|circ|infty|prime|alpha|theta)\b))"
)


class TooBig(Exception):
    """An expression is not evaluated, because that could take too long."""


def _judge_size(text: str) -> None:
    """Raises TooBig for what could take long: power towers, huge powers and factorials, sums, integrals."""
    if len(text) > _MAX_CHARS or _SLOW.search(text):
        raise TooBig(text)
    factorials = _FACTORIAL.findall(text)
    if any(not number or len(number) > 4 or int(number) > _MAX_FACTORIAL for number in factorials):
        raise TooBig(text)
    exponents = [next(group for group in m.groups() if group is not None) for m in _EXPONENT.finditer(text)]
    # Every power must be understood, or one hides in another's exponent.
    if len(exponents) != text.count("^") + text.count("**") or (exponents and factorials):
        raise TooBig(text)
    if any("^" in exponent or "*" in exponent for exponent in exponents):
        raise TooBig(text)
    size = 1
    for exponent in exponents:
        for digits in _INTEGERS.findall(exponent):
            size *= max(1, int(digits)) if len(digits) < 6 else _MAX_DIGITS
    if exponents and size * sum(map(len, _INTEGERS.findall(text))) > _MAX_DIGITS:
        raise TooBig(text)


def _read(text: str) -> Any:
    """Returns a sympy expression, unevaluated, or None where the text is none."""
    import math_verify.parser
    from math_verify import LatexExtractionConfig, parse
    from sympy import Basic

    math_verify.parser.TIMEOUT_WARNING_SHOWN = True  # we judge sizes ourselves
    config = LatexExtractionConfig(boxed_match_priority=0)
    found = parse(f"\\boxed{{{text}}}", extraction_config=(config,), parsing_timeout=None)
    expression = found[0] if found else None
    if not isinstance(expression, Basic):
        return None
    if expression.count_ops() > _MAX_OPERATIONS:
        raise TooBig(text)
    return expression


def _at_odd_point(expression: Any, symbols: Any) -> Any:
    """The expression's exact value where its symbols are fractions that no formula is about."""
    from sympy import Rational

    return expression.subs({s: Rational(7 * k + 5, 11) for k, s in enumerate(sorted(symbols, key=str), 1)})


def _is_zero(difference: Any) -> bool:
    """Whether a sympy expression is zero for all values of its symbols, decided exactly."""
    from sympy import Pow, expand, simplify

    difference = difference.doit()
    if difference.is_Number:
        return bool(difference == 0)
    # A value at one odd point refutes nearly all that is unequal, before anything slow is tried.
    value = _at_odd_point(difference, difference.free_symbols).evalf(30)
    if value.is_number and value.is_finite and abs(value) > 1e-15:
        return False
    if any(p.base.is_Add and p.exp.is_Integer and abs(p.exp) > _MAX_EXPANDED for p in difference.atoms(Pow)):
        raise TooBig(str(difference)[:_MAX_CHARS])
    return bool(expand(difference) == 0) or bool(simplify(difference) == 0)


def _is_multiple(first: Any, second: Any) -> bool:
    """Whether one expression is the other times a number other than zero."""
    first, second = first.doit(), second.doit()
    symbols = first.free_symbols
    if not symbols or symbols != second.free_symbols:
        return False
    at_first, at_second = _at_odd_point(first, symbols), _at_odd_point(second, symbols)
    if at_first == 0 or at_second == 0:
        return _is_zero(first - second) or _is_zero(first + second)
    return _is_zero(first * at_second - second * at_first)


def _decide(texts: Sequence[str], judge: Callable[..., bool]) -> bool:
    """Reads the texts and judges them; False where one is no expression.

    Raises:
        TooBig: one of them could take too long.
    """
    for text in texts:
        _judge_size(text)
    with _LOCK:
        try:
            expressions = [_read(text) for text in texts]
            return None not in expressions and judge(*expressions)
        except TooBig:
            raise
        except Exception:  # sympy raises nearly anything on what has no difference: a set, a relation
            _LOG.debug("not comparable: %s", texts, exc_info=True)
            return False


def equal_expressions(gold: str, answer: str) -> bool:
    r"""Whether two expressions are equal, exactly; False where one cannot be read.

    Raises:
        TooBig: one of them could take too long.

    Example:
        >>> equal_expressions(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"), equal_expressions("x^2", "x^3")
        (True, False)
    """
    return _decide((gold, answer), lambda left, right: _is_zero(left - right))


def equal_equations(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether one equation is a multiple of the other; each is its two sides.

    Raises:
        TooBig: one of them could take too long.

    Example:
        >>> equal_equations(("x + y", "1"), ("2x", "2 - 2y")), equal_equations(("x", "5"), ("y", "5"))
        (True, False)
    """
    return _decide((*gold, *answer), lambda a, b, c, d: _is_multiple(a - b, c - d))


def is_rounded_value(gold: str, answer: Number) -> bool:
    r"""Whether a decimal is an expression's value, rounded to the (at least six) places that it shows.

    Raises:
        TooBig: the expression could take too long.

    Example:
        >>> from atropos_gym.rewards._numbers import read_number
        >>> is_rounded_value(r"\pi", read_number("3.141593")), is_rounded_value(r"\pi", read_number("3.14"))
        (True, False)
    """
    decimals = answer.decimals
    if decimals is None or decimals < 6 or answer.digits < 6 or answer.percent:
        return False

    def judge(expression: Any) -> bool:
        exact = expression.doit()
        if expression.free_symbols or exact.is_Rational or not exact.is_real:
            return False
        return bool(round(exact.evalf(answer.digits + 20) * 10**decimals) == answer.shown * 10**decimals)

    return _decide((gold,), judge)


def warm_up() -> None:
    """Imports math-verify and reads one expression, so that the first real one is fast."""
    equal_expressions("x + 1", "1 + x")
