"""Equality of answers by their forms: what needs no algebra is decided here, the rest is asked for."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Protocol

from atropos_gym.rewards._forms import Form, Group, Leaf, Matrix, Relation, read_form
from atropos_gym.rewards._numbers import Number, same_number
from atropos_gym.rewards._units import same_unit

__all__ = ["Algebra", "equal_forms"]

_MAX_PARTS = 50
_LARGE = 10**100


class Algebra(Protocol):
    """Decides what arithmetic cannot; each method may raise TooBig."""

    def equal_expressions(self, gold: str, answer: str) -> bool:
        """Whether two formulas are equal."""

    def equal_relations(self, gold: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
        """Whether one relation (side, sign, side) is a multiple of the other."""

    def is_rounded_value(self, gold: str, answer: Number) -> bool:
        """Whether a decimal is a formula's value, rounded to the places that it shows."""


def equal_forms(gold: Form, answer: Form, algebra: Algebra) -> bool:
    """Whether two forms are equal; the gold comes first.

    Raises:
        TooBig: that cannot be said within bounds.
    """
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _equal_relations(gold, answer, algebra)
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _equal_groups(gold, answer, algebra)
    if isinstance(gold, Group) and gold.brackets == "{}" and len(gold.parts) == 1:
        return equal_forms(gold.parts[0], answer, algebra)
    if isinstance(answer, Group) and answer.brackets == "{}" and len(answer.parts) == 1:
        return equal_forms(gold, answer.parts[0], algebra)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        cells = zip(sum(gold.rows, ()), sum(answer.rows, ()), strict=True)
        return all(equal_forms(one, other, algebra) for one, other in cells)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _equal_leaves(gold, answer, algebra)
    return False


def _equal_relations(gold: Form, answer: Form, algebra: Algebra) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if (gold.left, gold.sign, gold.right) == (answer.left, answer.sign, answer.right):
            return True
        if gold.name and _bare_text(gold.name) == _bare_text(answer.name):
            return equal_forms(read_form(gold.right), read_form(answer.right), algebra)
        return algebra.equal_relations(
            (gold.left, gold.sign, gold.right), (answer.left, answer.sign, answer.right)
        )
    if isinstance(gold, Relation):
        return bool(gold.name) and not _is_set(answer) and equal_forms(read_form(gold.right), answer, algebra)
    if isinstance(answer, Relation):
        return bool(answer.name) and not _is_set(gold) and equal_forms(gold, read_form(answer.right), algebra)
    return False


def _is_set(form: Form) -> bool:
    return isinstance(form, Group) and form.brackets == "{}" and len(form.parts) == 1


def _equal_groups(gold: Group, answer: Group, algebra: Algebra) -> bool:
    if len(gold.parts) != len(answer.parts) or len(gold.parts) > _MAX_PARTS:
        return False
    if gold.name and answer.name and gold.name != answer.name:
        return False
    kinds = {gold.brackets, answer.brackets}
    if gold.ordered or answer.ordered:
        # A list equals a tuple; square and half-open brackets around two values are an interval's.
        listed = "" in kinds and not (len(gold.parts) == 2 and kinds & {"[]", "[)", "(]"})
        if len(kinds) > 1 and not listed:
            return False
        pairs = zip(gold.parts, answer.parts, strict=True)
        return all(equal_forms(one, other, algebra) for one, other in pairs)
    if "U" in kinds and len(kinds) > 1:
        return False
    return _same_in_any_order(gold.parts, list(answer.parts), algebra)


def _same_in_any_order(gold: tuple[Form, ...], answer: list[Form], algebra: Algebra) -> bool:
    """Pairs each part of the gold with one of the answer; a few parts are tried in all orders."""
    if len(gold) <= 3:
        return any(
            all(equal_forms(one, other, algebra) for one, other in zip(gold, order, strict=True))
            for order in permutations(answer)
        )
    for one in gold:
        match = next((k for k, other in enumerate(answer) if equal_forms(one, other, algebra)), None)
        if match is None:
            return False
        del answer[match]
    return True


def _equal_leaves(gold: Leaf, answer: Leaf, algebra: Algebra) -> bool:
    if not same_unit(gold.unit, answer.unit):
        return False
    if gold.number is not None and answer.number is not None:
        return same_number(gold.number, answer.number)
    first, second = _bare_text(gold.text), _bare_text(answer.text)
    if first == second or (first.isalpha() and len(first) > 1 and first.lower() == second.lower()):
        return True
    if gold.words or answer.words:
        return first.lower() == second.lower()
    if answer.number is not None and algebra.is_rounded_value(gold.text, answer.number):
        return True
    return algebra.equal_expressions(_formula(gold), _formula(answer))


def _formula(leaf: Leaf) -> str:
    """A leaf as LaTeX; numbers in one way of the many that they are written in."""
    if leaf.number is None or max(abs(leaf.number.value.numerator), leaf.number.value.denominator) > _LARGE:
        return leaf.text
    value = leaf.number.value
    return (
        str(value.numerator)
        if value.denominator == 1
        else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    )


_SINGLE = re.compile(r"(?<=[\^_])\{(\w)\}")
_BLANKS = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def _bare_text(text: str) -> str:
    """The text without outer brackets and without blanks, but between two digits."""
    text = _SINGLE.sub(r"\1", _BLANKS.sub("", text))
    while len(text) > 2 and text[0] + text[-1] in ("()", "[]", "{}"):
        text = text[1:-1]
    return text
