"""Units after a value: found, dropped, and compared where both sides name one."""

from __future__ import annotations

import re

from atropos_gym.rewards._numbers import read_number

__all__ = ["STOP_WORDS", "same_unit", "split_unit"]

_NAMES = """
m meter metre; cm centimeter centimetre; mm millimeter millimetre; km kilometer kilometre; nm nanometer
in inch inches; ft foot feet; yd yard; mi mile
g gram gramme; kg kilogram kilo; mg milligram; lb lbs pound; oz ounce; ton tonne
s sec second; ms millisecond; min minute; h hr hour; day; week; month; yr year
l liter litre; ml milliliter millilitre; gal gallon; qt quart; pint; cup; tsp teaspoon; tbsp tablespoon
dollar buck usd; cent penny pennies; euro eur; rupee; yen; gbp
degree deg; rad radian; celsius c; fahrenheit f; k kelvin
n newton; j joule; kj kilojoule; w watt; kw kilowatt; v volt; a amp ampere; hz hertz; pa pascal; cal calorie
mph; kph kmh; acre; hectare ha; bit; byte; kb kilobyte; mb megabyte; gb gigabyte; am a.m; pm p.m; percent
person people; man men; woman women; child children; half halves; dozen; unit; square; cubic
"""
_KNOWN = {
    name: group.split()[0]
    for line in _NAMES.strip().splitlines()
    for group in line.split(";")
    for name in group.split()
}
_CANONICAL = frozenset(_KNOWN.values())
# A single letter is a unit only after a blank, and in the case in which units are written.
_LETTERS = frozenset("m g s h l L N J W V A K C F".split())

STOP_WORDS = frozenset(
    "is are was were be been am has have had do does did will would can could may might must should the a"
    " an and or but not no if then than because since so as which that this these those there here he she it"
    " they we you i his her its their our my your in at for from with to by into on between when while where"
    " who what whose how why let therefore thus hence only answer".split()
)
"""Words that no unit begins with or contains."""

_WORD = r"(?:[A-Za-z\u00b5\u03bc\u03a9]+(?:\.[A-Za-z](?=[\s.]|$))?)"
_POWER = r"(?:\s?\^\s?(?:\{\s?-?\d\s?\}|-?\d))?"
_TRAILING = re.compile(
    rf"(?P<space>\s*)(?P<unit>{_WORD}{_POWER}(?:\s*[/\u00b7-]\s*{_WORD}{_POWER}|\s+{_WORD}{_POWER}){{0,3}})\.?",
    re.A,
)
_BEFORE_UNIT = re.compile(r"(?:[\d.%)}\]]|\\(?:pi|infty))(?=\s*[A-Za-z\u00b5\u03bc\u03a9])")


def split_unit(text: str) -> tuple[str, str]:
    r"""Splits a cleaned text into a value and the unit after it, "" where there is none.

    After a plain number any few words are a unit, after a formula only known ones: ``5x`` is a product.

    Example:
        >>> split_unit("10 square feet"), split_unit(r"25\pi cm^2"), split_unit("5 x"), split_unit("5x")
        (('10', 'square feet'), ('25\\pi', 'cm^2'), ('5 x', ''), ('5x', ''))
    """
    for match in list(_BEFORE_UNIT.finditer(text))[:-4:-1]:
        rest = _TRAILING.fullmatch(text, match.end())
        if rest is not None and _is_unit(text[: match.end()], rest["space"], rest["unit"]):
            return text[: match.end()].rstrip(), rest["unit"]
    return text, ""


def _is_unit(value: str, space: str, unit: str) -> bool:
    words = [word for word in re.split(r"[^A-Za-z\u00b5\u03bc\u03a9.]+", unit) if word]
    if words != ["in"] and any(word.lower() in STOP_WORDS for word in words if word not in _LETTERS):
        return False
    known = [_canonical_word(word) in _CANONICAL and _written(word, space) for word in words]
    if all(known):
        return True
    long = all(ok or word == "of" or len(word) > 2 for word, ok in zip(words, known, strict=True))
    return space != "" and long and read_number(value) is not None


def _written(word: str, space: str) -> bool:
    return len(word) > 1 or (space != "" and word in _LETTERS)


def _canonical_word(word: str) -> str:
    word = word.lower()
    for form in (word, word[:-1], word[:-2]):
        if form in _KNOWN and word in (form, form + "s", form + "es"):
            return _KNOWN[form]
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def _canonical(unit: str) -> tuple[str, ...]:
    unit = re.sub(r"\s+of\b.*", "", unit)
    unit = re.sub(r"[{}\s]*\^[{\s]*(-?\d)[}\s]*", r"^\1 ", unit)
    unit = re.sub(r"\b(?:square|sq)\.?\s+([A-Za-z]+)", r"\1^2", unit)
    unit = re.sub(r"\b(?:cubic|cu)\.?\s+([A-Za-z]+)", r"\1^3", unit)
    unit = re.sub(r"\s+(?:per|an?)\s+", "/", unit)
    unit = re.sub(r"\bmph\b", "mi/h", re.sub(r"\bk(?:ph|mh)\b", "km/h", unit))
    return tuple(_canonical_word(part) for part in re.findall(r"[^\W\d_]+|\^-?\d|/", unit))


def same_unit(gold: str, answer: str) -> bool:
    """Whether two units agree; one that is not named agrees with all.

    Example:
        >>> same_unit("ft", "feet"), same_unit("m/s", "meters per second"), same_unit("feet", "inches")
        (True, True, False)
        >>> same_unit("red apples", "apples"), same_unit("feet", "square feet"), same_unit("", "cm")
        (True, False, True)
    """
    if not gold or not answer:
        return True
    first, second = _canonical(gold), _canonical(answer)
    if first == second:
        return True
    if all(part in _CANONICAL or not part.isalpha() for part in (*first, *second)):
        return False
    # A noun of no table: one side may say more about it.
    return bool(set(first) & set(second)) and "/" not in (*first, *second) and "^" not in gold + answer
