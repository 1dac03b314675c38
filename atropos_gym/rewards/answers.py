"""Checks of mathematical answers, three-valued: right, wrong, or not an answer.

The gold is read first; one that cannot be read raises ``UnusableGold``, because its row must yield no reward
at all. Nothing that a completion says raises. Numbers, lists, sets and text are compared here, exactly; only
other formulas go to a worker process, where they can be killed. Works in any thread and event loop.
"""

from __future__ import annotations

import math
import re
from numbers import Real
from typing import NoReturn

from atropos_gym.errors import UnusableGold
from atropos_gym.rewards import _worker
from atropos_gym.rewards._commitment import MAX_ANSWER_CHARS, boxed, find_commitment, hashed
from atropos_gym.rewards._equality import equal_forms
from atropos_gym.rewards._expression import ExpressionGrammar
from atropos_gym.rewards._forms import Group, read_form, read_values
from atropos_gym.rewards._latex import clean
from atropos_gym.rewards._numbers import Number, numbers_in, same_number
from atropos_gym.rewards._size import TooBig, judge_size
from atropos_gym.rewards._text import plain_characters
from atropos_gym.rewards.verdict import Verdict, right, unparsed, wrong

__all__ = ["read_gold_number", "verify_math", "verify_number"]

_NUMBERS = ExpressionGrammar(words_first=True)
_FORMULAS = ExpressionGrammar(words_first=False)


def _gold_value(gold: object) -> str:
    """The gold's own text: what stands after the last ``####``, or is boxed, or all of it.

    Raises:
        UnusableGold: it is no text, or its value is too long to be anybody's answer.
    """
    if isinstance(gold, bool) or not isinstance(gold, str | Real):
        raise UnusableGold(f"the gold must be a text, got {type(gold).__name__}: fix or drop this row")
    if isinstance(gold, Real) and not math.isfinite(gold):
        raise UnusableGold(f"the gold must be a text or a finite number, got {gold}: fix or drop this row")
    text = plain_characters(str(gold))
    found = hashed(text) or boxed(text)
    value = text if found is None or not found.values else ", ".join(found.values)
    if len(value.strip()) > MAX_ANSWER_CHARS:
        raise UnusableGold(f"the gold has {len(value)} characters: fix or drop this row")
    return value.strip()


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# --- one number -----------------------------------------------------------------------------------------
# What changes a number's value: two signs, a root, thousands as a letter.
_CHANGED = re.compile(r"\\(?:pm|mp|sqrt)(?![A-Za-z])|(?<![A-Za-z])sqrt(?![A-Za-z])|\d[kK](?![A-Za-z])")


def _one_number(text: str) -> Number | None:
    """The one number in a committed text, after its last equals sign; words around it are ignored."""
    text = clean(text.rpartition("=")[2])
    numbers = numbers_in(text)
    return numbers[0] if len(numbers) == 1 and not _CHANGED.search(text) else None


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


def verify_number(completion: str, gold: str, opened: bool = False) -> Verdict:
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
    found = find_commitment(completion, _NUMBERS, opened=opened)
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
class _NeedsAlgebra(Exception):
    """Two formulas must be compared by the worker."""


class _Elsewhere:
    """Algebra that is done by the worker: all that is done here is to judge sizes."""

    def equal_expressions(self, gold: str, answer: str) -> bool:
        return self._ask(gold, answer)

    def equal_relations(self, gold: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
        return self._ask(gold[0], gold[2], answer[0], answer[2])

    def is_rounded_value(self, gold: str, answer: Number) -> bool:
        return answer.decimals is not None and answer.decimals >= 6 and self._ask(gold)

    def _ask(self, *texts: str) -> NoReturn:
        for text in texts:
            judge_size(text)
        raise _NeedsAlgebra


def verify_math(completion: str, gold: str, opened: bool = False) -> Verdict:
    r"""Checks a mathematical answer of any form.

    Args:
        completion: the assistant's text.
        gold: the reference, in LaTeX or plain.
        opened: the prompt itself opened a think block.

    Raises:
        UnusableGold: the gold is blank.
        VerifierError: the process that compares formulas cannot be started.

    Example:
        >>> bool(verify_math(r"So \boxed{\frac{6}{4}}.", "1.5"))
        True
        >>> verify_math(r"\boxed{3} or \boxed{4}", "4").reason
        'hedged'
    """
    wanted = _gold_value(gold)
    if not clean(wanted):
        raise UnusableGold(f"the gold is blank: {_short(str(gold))}: fix or drop this row")
    found = find_commitment(completion, _FORMULAS, opened=opened)
    if not found.values:
        return unparsed(found.reason)
    gold_form, answer = read_form(wanted), read_values(found.values)
    try:
        outcome = "equal" if equal_forms(gold_form, answer, _Elsewhere()) else "not_equal"
    except TooBig:
        outcome = "too_big"
    except _NeedsAlgebra:
        outcome = _worker.compare(wanted, found.values)
    if outcome == "equal":
        return right()
    hedged = isinstance(answer, Group) and answer.brackets == "" and not isinstance(gold_form, Group)
    return wrong("hedged" if hedged and outcome == "not_equal" else outcome)
