"""Symbolic equality by latex2sympy's LaTeX reader and sympy; imported in the worker process only.

Everything is decided exactly: a numeric value may refute, it never proves. Nothing here bounds the time: the
worker does.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy import I, Pow, Rational, Symbol, expand, simplify, sqrtdenest

from atropos_gym.rewards._latex import exact_decimals, for_sympy
from atropos_gym.rewards._numbers import Number
from atropos_gym.rewards._size import TooBig, judge_size

__all__ = ["equal_expressions", "equal_relations", "is_rounded_value"]

_CONVERSION = ConversionConfig(interpret_as_mixed_fractions=False, lowercase_symbols=False)
_MAX_OPERATIONS = 150
_MAX_EXPANDED = 30
_REFUTED = 1e-15
# What the reader would drop or take for a product: bases, primes, transposes, marks of geometry, 3 4.
_UNREADABLE = re.compile(
    r"\d_|'|\^\s*\{?\s*(?:T|\\top|\\prime)\b|\\(?:angle|triangle|overline|overrightarrow|vec|hat|bar|parallel|perp)\b"
    r"|\d\s+\d|\d:\d|\\text|\\mid|&"
)


@lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    """Returns a sympy expression, unevaluated where its reader leaves it so; None where the text is none."""
    judge_size(text)
    readable = for_sympy(text)
    balanced = all(text.count(opener) == text.count(closer) for opener, closer in ("()", "[]", "{}"))
    if not text or not balanced or _UNREADABLE.search(readable):
        return None
    try:
        expression = latex2sympy(
            exact_decimals(readable),
            is_real=True,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    except Exception:  # the reader raises plain Exceptions at what is no formula
        return None
    if not isinstance(expression, sympy.Expr):
        return None
    if expression.count_ops() > _MAX_OPERATIONS:
        raise TooBig(text)
    return expression.subs(Symbol("i", real=True), I)


def _at_odd_point(expression: Any, symbols: Any) -> Any:
    """The expression's exact value where its symbols are fractions that no formula is about."""
    return expression.subs({s: Rational(7 * k + 5, 11) for k, s in enumerate(sorted(symbols, key=str), 1)})


def _is_zero(difference: Any) -> bool:
    """Whether a sympy expression is zero for all values of its symbols, decided exactly."""
    difference = difference.doit()
    if difference.is_Number:
        return bool(difference == 0)
    # A value at one odd point refutes nearly all that is unequal, before anything slow is tried.
    value = _at_odd_point(difference, difference.free_symbols).evalf(30)
    if value.is_number and value.is_finite and abs(value) > _REFUTED:
        return False
    if any(p.base.is_Add and p.exp.is_Integer and abs(p.exp) > _MAX_EXPANDED for p in difference.atoms(Pow)):
        raise TooBig(str(difference)[:100])
    return (
        bool(expand(difference) == 0)
        or bool(simplify(difference) == 0)
        or bool(simplify(sqrtdenest(difference)) == 0)
        or difference.equals(0) is True
    )


def _ratio(first: Any, second: Any) -> Any:
    """The number that one expression is of the other, or None."""
    first, second = first.doit(), second.doit()
    symbols = first.free_symbols
    if not symbols or symbols != second.free_symbols:
        return None
    at_first, at_second = _at_odd_point(first, symbols), _at_odd_point(second, symbols)
    if at_first == 0 or at_second == 0:
        return next((k for k in (1, -1) if _is_zero(first - k * second)), None)
    return at_first / at_second if _is_zero(first * at_second - second * at_first) else None


def equal_expressions(gold: str, answer: str) -> bool:
    r"""Whether two formulas are equal, exactly; False where one cannot be read.

    Raises:
        TooBig: one of them could take too long.

    Example:
        >>> equal_expressions(r"\frac{\sqrt{8}}{2}", "sqrt(2)"), equal_expressions("x^2", "x^3")
        (True, False)
    """
    left, right = _read(gold), _read(answer)
    return left is not None and right is not None and _is_zero(left - right)


def equal_relations(gold: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
    """Whether one relation is a multiple of the other; each is a side, a sign and a side.

    Raises:
        TooBig: one of them could take too long.

    Example:
        >>> equal_relations(("x + y", "=", "1"), ("2x", "=", "2 - 2y"))
        True
        >>> equal_relations(("x", "=", "5"), ("y", "=", "5"))
        False
        >>> equal_relations(("2x", "<", "6"), ("x", "<", "3"))
        True
    """
    sides = [_read(side) for side in (gold[0], gold[2], answer[0], answer[2])]
    if gold[1] != answer[1] or None in sides:
        return False
    ratio = _ratio(sides[0] - sides[1], sides[2] - sides[3])
    return ratio is not None and (gold[1] in ("=", r"\ne") or bool(ratio > 0))


def is_rounded_value(gold: str, answer: Number) -> bool:
    r"""Whether a decimal is a formula's value, rounded to the (at least six) places that it shows.

    Example:
        >>> from atropos_gym.rewards._numbers import read_number
        >>> is_rounded_value(r"\pi", read_number("3.141593")), is_rounded_value(r"\pi", read_number("3.14"))
        (True, False)
    """
    decimals = answer.decimals
    if decimals is None or decimals < 6 or answer.digits < 6 or answer.percent:
        return False
    expression = _read(gold)
    if expression is None or expression.free_symbols:
        return False
    exact = expression.doit()
    if exact.is_Rational or not exact.is_real:
        return False
    return bool(round(exact.evalf(answer.digits + 20) * 10**decimals) == answer.shown * 10**decimals)
