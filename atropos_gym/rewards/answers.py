"""Checks of mathematical answers, three-valued: right, wrong, or not an answer.

The gold is read first; one that cannot be read raises ``UnusableGold``, because its row must yield no reward
at all. Nothing that a completion says raises. Plain numbers are compared as exact fractions; only other forms
load math-verify. Works in any thread.
"""

from __future__ import annotations

import re
from itertools import permutations

from atropos_gym.errors import UnusableGold
from atropos_gym.rewards._commitment import MAX_ANSWER_CHARS, Commitment, find_commitment
from atropos_gym.rewards._forms import Equation, Form, Group, Leaf, Matrix, read_form
from atropos_gym.rewards._latex import clean
from atropos_gym.rewards._numbers import Number, numbers_in, read_number, same_number
from atropos_gym.rewards._symbolic import TooBig, equal_equations, equal_expressions, is_rounded_value
from atropos_gym.rewards._text import plain_characters, visible
from atropos_gym.rewards.verdict import Verdict, right, unparsed, wrong

__all__ = ["read_gold_number", "verify_math", "verify_number"]

_MAX_PARTS = 50


def _is_number(text: str) -> bool:
    return len(text) <= MAX_ANSWER_CHARS and read_number(clean(text)) is not None


def _commitment(completion: str, opened: bool) -> Commitment:
    text = visible(completion, opened)
    if text is None:
        return Commitment((), "unclosed_think")
    return find_commitment(plain_characters(text), _is_number)


def _gold_value(gold: str) -> str:
    """The gold's own text: what is boxed, or stands after the last ``####``, or all of it."""
    text = plain_characters(str(gold))
    found = find_commitment(text, _is_number)
    if found.values and ("####" in text or "\\boxed" in text or "\\fbox" in text):
        return ", ".join(found.values)
    return text.rpartition("####")[2].strip()


# --- one number -----------------------------------------------------------------------------------------
def _one_number(text: str) -> Number | None:
    """The one number in a committed text, after its last equals sign; words around it are ignored."""
    numbers = numbers_in(clean(text.rpartition("=")[2]))
    return numbers[0] if len(numbers) == 1 else None


def read_gold_number(gold: str) -> Number:
    """Reads a gold that must be one number, as GSM8K has it.

    Raises:
        UnusableGold: it holds none, or several.

    Example:
        >>> str(read_gold_number("He pays 2 * 9 = 18. #### 18").value)
        '18'
    """
    value = _gold_value(gold)
    number = _one_number(value)
    if number is None:
        raise UnusableGold(
            f"the gold must hold exactly one number, got {_short(value)}: fix or drop this row"
        )
    return number


def verify_number(completion: str, gold: str, *, opened: bool = False) -> Verdict:
    r"""Checks an answer that is one number, as in GSM8K.

    Args:
        completion: the assistant's text.
        gold: the reference, as the data set has it (with or without ``####``).
        opened: the prompt itself opened a think block.

    Raises:
        UnusableGold: the gold is not one number.

    Example:
        >>> verify_number("48 + 24 = 72\n#### 72", "72").value == "right"
        True
        >>> verify_number("She sold 72.", "72")
        Verdict(value=<VerdictValue.UNPARSED: 'unparsed'>, reason='no_commitment')
    """
    wanted = read_gold_number(gold)
    found = _commitment(completion, opened)
    if not found.values:
        return unparsed(found.reason)
    if len(found.values) > 1:
        return wrong("hedged")
    number = _one_number(found.values[0])
    if number is None:
        several = len(numbers_in(clean(found.values[0]))) > 1
        return wrong("hedged" if several else "not_equal")
    return right() if same_number(wanted, number) else wrong()


# --- any form -------------------------------------------------------------------------------------------
def verify_math(completion: str, gold: str, *, opened: bool = False) -> Verdict:
    r"""Checks a mathematical answer of any form.

    Args:
        completion: the assistant's text.
        gold: the reference, in LaTeX or plain.
        opened: the prompt itself opened a think block.

    Raises:
        UnusableGold: the gold is blank.

    Example:
        >>> bool(verify_math(r"So \boxed{\frac{6}{4}}.", "1.5"))
        True
        >>> verify_math(r"\boxed{3} or \boxed{4}", "4").reason
        'hedged'
    """
    wanted = _gold_value(gold)
    if not clean(wanted):
        raise UnusableGold(f"the gold is blank: {_short(str(gold))}: fix or drop this row")
    found = _commitment(completion, opened)
    if not found.values:
        return unparsed(found.reason)
    gold_form, answer = read_form(wanted), _read_values(found.values)
    try:
        equal = _equal(gold_form, answer)
    except TooBig:
        return wrong("too_big")
    if equal:
        return right()
    hedged = isinstance(answer, Group) and answer.brackets == "" and not isinstance(gold_form, Group)
    return wrong("hedged" if hedged else "not_equal")


def _read_values(values: tuple[str, ...]) -> Form:
    forms = [read_form(value) for value in values]
    return forms[0] if len(forms) == 1 else Group("", tuple(forms))


def _equal(gold: Form, answer: Form) -> bool:
    """Whether two forms are equal; the gold comes first.

    Raises:
        TooBig: that cannot be said within bounds.
    """
    if isinstance(gold, Equation) and isinstance(answer, Equation):
        same = (gold.left, gold.right) == (answer.left, answer.right)
        return same or equal_equations((gold.left, gold.right), (answer.left, answer.right))
    if isinstance(gold, Equation):
        return bool(gold.name) and _equal(read_form(gold.right), answer)
    if isinstance(answer, Equation):
        return bool(answer.name) and _equal(gold, read_form(answer.right))
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _equal_groups(gold, answer)
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        cells = zip(sum(gold.rows, ()), sum(answer.rows, ()), strict=True)
        return all(_equal(one, other) for one, other in cells)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return _equal_leaves(gold, answer)
    return False


def _equal_groups(gold: Group, answer: Group) -> bool:
    if len(gold.parts) != len(answer.parts) or len(gold.parts) > _MAX_PARTS:
        return False
    if gold.ordered or answer.ordered:
        bare = "" in (gold.brackets, answer.brackets)
        if gold.brackets != answer.brackets and not bare:
            return False
        return all(_equal(one, other) for one, other in zip(gold.parts, answer.parts, strict=True))
    if "U" in (gold.brackets, answer.brackets) and gold.brackets != answer.brackets:
        return False
    return _same_in_any_order(gold.parts, list(answer.parts))


def _same_in_any_order(gold: tuple[Form, ...], answer: list[Form]) -> bool:
    """Pairs each part of the gold with one of the answer; a few parts are tried in all orders."""
    if len(gold) <= 3:
        return any(
            all(_equal(one, other) for one, other in zip(gold, order, strict=True))
            for order in permutations(answer)
        )
    for one in gold:
        match = next((k for k, other in enumerate(answer) if _equal(one, other)), None)
        if match is None:
            return False
        del answer[match]
    return True


def _equal_leaves(gold: Leaf, answer: Leaf) -> bool:
    if gold.number is not None and answer.number is not None:
        return same_number(gold.number, answer.number)
    if _bare_text(gold.text) == _bare_text(answer.text):
        return True
    if gold.words or answer.words:
        return _bare_text(gold.text).lower() == _bare_text(answer.text).lower()
    if answer.number is not None and is_rounded_value(gold.text, answer.number):
        return True
    return equal_expressions(_latex(gold), _latex(answer))


def _latex(leaf: Leaf) -> str:
    if leaf.number is None:
        return leaf.text
    value = leaf.number.value
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _bare_text(text: str) -> str:
    """The text without blanks and outer brackets."""
    text = re.sub(r"\s+", "", text)
    while len(text) > 2 and text[0] + text[-1] in ("()", "[]", "{}"):
        text = text[1:-1]
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
