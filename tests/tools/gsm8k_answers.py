"""Ways in which a completion gives a number as its answer, and near misses; for golds of GSM8K."""

from __future__ import annotations

from fractions import Fraction

__all__ = ["near_misses", "phrasings"]


def _number(gold: str) -> Fraction:
    return Fraction(gold.replace(",", ""))


def _plain(number: Fraction) -> str:
    assert number.denominator == 1, "GSM8K's golds are whole numbers"
    return str(number.numerator)


def phrasings(gold: str) -> dict[str, str]:
    """Returns ten completions that give the gold, by what is special about each."""
    number = _number(gold)
    plain, grouped, other = _plain(number), f"{int(number):,}", _plain(number + 1)
    return {
        "boxed": rf"Adding both gives $\boxed{{{plain}}}$ in all.",
        "hash": f"Adding both gives {plain}.\n#### {plain}",
        "currency": f"After the discount it costs less. The answer is ${grouped}.00.",
        "thousands": rf"The total is \boxed{{{grouped.replace(',', '{,}')}}}.",
        "trailing period": f"Two steps are needed. The answer is {plain}.",
        "unit": f"She packs them all.\n<answer>{grouped} boxes</answer>",
        "bold": f"It takes a while.\n\n**Final Answer:** **{plain}**",
        "fraction or decimal": rf"Half of the double is $\boxed{{\frac{{{2 * int(number)}}}{{2}}}}$"
        if int(number) % 2
        else f"Half of the double is the same.\n#### {plain}.0",
        "thinking before": f"<think>Is it {other}? \\boxed{{{other}}}</think>\nThe answer is {plain}",
        "retracted box before": rf"At first \boxed{{{other}}}. That forgot one, so it is \boxed{{{plain}}}.",
    }


def near_misses(gold: str) -> dict[str, str]:
    """Returns ten completions that commit to something else, by what is wrong with each."""
    number = _number(gold)
    plain, more, less = _plain(number), _plain(number + 1), _plain(number - 1)
    opposite = _plain(-number if number else Fraction(7))
    return {
        "one more": rf"Adding both gives $\boxed{{{more}}}$ in all.",
        "one less": f"Adding both gives {plain} and one is lost.\n#### {less}",
        "other sign": f"The answer is {opposite}.",
        "ten times": f"The answer is ${plain}0." if number else "The answer is $10.",
        "another digit before": rf"The total is \boxed{{{'-' * (number < 0)}1{plain.lstrip('-')}}}.",
        "half more": f"It takes a while.\n\n**Final Answer:** **{plain}.5**",
        "hedged": f"The answer is {plain} or {more}.",
        "listed": rf"It is one of \boxed{{{plain}, {more}}}.",
        "last box": rf"At first \boxed{{{plain}}}. That forgot one, so it is \boxed{{{more}}}.",
        "taken back": f"The answer is {plain}. No, wait, it is {more}.",
    }
