"""The mathematical value that stands first after a phrase, cut out of its sentence."""

from __future__ import annotations

import re

from atropos_gym.rewards._commitment import MAX_ANSWER_CHARS, Commitment
from atropos_gym.rewards._latex import FUNCTION_NAMES, clean
from atropos_gym.rewards._numbers import read_number
from atropos_gym.rewards._phrases import ANNOUNCED, NEGATED, SKIPPED, last_phrase, settled
from atropos_gym.rewards._units import STOP_WORDS, split_unit

__all__ = ["ExpressionGrammar"]

_SKIPPED = re.compile(SKIPPED)
_LEAD = re.compile(
    r"(?:(?:indeed|simply|just|thus|therefore|clearly|exactly|equal\s+to|given\s+by|either|both)\b[\s,:*_]{0,4}){1,3}",
    re.I | re.A,
)
_DELIMITERS = (("$$", "$$"), (r"\(", r"\)"), (r"\[", r"\]"))
_AFTER_FORMULA = re.compile(r"\s{0,2}\\?%")
_MARKUP = " \t\r\n*_`\"'\u2018\u2019\u201c\u201d"
_WHOLE_UNIT_WORDS = 2

_PIECE = re.compile(
    r"(?P<delimiter>\\[()\[\]])|\\[A-Za-z]+|\\.|(?P<opener>[(\[{])|(?P<closer>[)\]}])"
    r"|(?P<word>[A-Za-z]+(?:['\u2019][A-Za-z]+)*)|(?P<newline>\n)|(?P<stop>\u2026|[.!?;](?=[\s*_`\"')]|$))|(?P<comma>,)"
    r"|(?P<emoji>[\u2600-\u27bf\U0001f000-\U0001faff])|.",
    re.S | re.A,
)
_CONNECTIVES = frozenset("because since so as which but whereas while although though".split())
_JOINERS = frozenset(("and", "or"))
_VALUE = (
    r"[+-]?\s?(?:\\?\$\s?)?(?:\d|\.\d|\\[A-Za-z({\[]|[(\[{]|(?:sqrt|pi|infinity)\b"
    r"|[A-Za-z]\s?[=<>^+*/(-]|(?![aAI]\s)[A-Za-z](?=[\s.,;!?)]|$))"
)
_STARTS = re.compile(_VALUE, re.A)
_JOINED = re.compile(
    r"[*_]{0,2}\s{0,3}(?:,\s{0,3}(?:and|or)\b|,|;|\band\b|\bor\b|&"
    r"|\bto\s(?=\\?\$?\d)(?!\d+\s(?:decimal|significant|d\.?p|s\.?f|places?|digits?|figures?)\b))\s{0,3}"
    r"(?:(?:also|maybe|perhaps|possibly|even)\s)?\s{0,3}(?=[*_]{0,2}" + _VALUE + ")",
    re.I | re.A,
)
# A remark in brackets, such as (not 6) or (24 in May); (or 6) is no remark.
_ASIDE = re.compile(
    rf"\((?:\\?\$?\d[\d.,]*\s)?(?!(?:{'|'.join(FUNCTION_NAMES)}|or|and|maybe|perhaps|possibly)\b)[A-Za-z]{{2}}",
    re.A,
)
_SUM = re.compile(r"(?<=\s)\([\d.,\s$]+[+*/\u00d7-][^()A-Za-z]*\)", re.A)
_NAMED = re.compile(r"[A-Za-z][A-Za-z ]{0,30}(?:\([A-Za-z0-9, ]{1,10}\))?\s?=\s?", re.A)
_FIRST_DIGIT = re.compile(r"[+-]?\s?\\?\$?\.?\d|\\[dtc]?frac", re.A)
_NO_ANSWERS = STOP_WORDS | {"right", "correct", "fine", "nothing", "wait"}
_INTRODUCED = re.compile(r"(?:[,.:;!\u2026\u2013\u2014-]|\bis|'s|\bbe|\bmean)[\s*_\"]*$", re.I | re.A)
_ONE_WORD = re.compile(r"[A-Za-z][A-Za-z'-]+(?=[*_`\"']{0,3}\s{0,3}(?:[.!?\n]|$))", re.A)


class ExpressionGrammar:
    """How numbers and formulas are said.

    Args:
        words_first: words before the first digit are dropped, as where the answer is known to be a number.
    """

    phrase = re.compile(rf"{ANNOUNCED}(?!{NEGATED})", re.I | re.A)

    def __init__(self, *, words_first: bool) -> None:
        self.words_first = words_first

    def whole(self, text: str) -> str | None:
        """The whole text, if it is one number; a unit may follow."""
        text = text.strip()
        if not text or len(text) > MAX_ANSWER_CHARS:
            return None
        value, unit = split_unit(clean(text))
        one = read_number(value) is not None and len(unit.split()) <= _WHOLE_UNIT_WORDS
        return text if one else None

    def phrased(self, text: str) -> Commitment | None:
        """The value after the last phrase, unless it is taken back."""
        phrase = last_phrase(text, self.phrase)
        if phrase is None:
            return None
        value, end = self._value(text, phrase.end())
        return settled(text, value, end, self._again)

    def _again(self, text: str, begin: int) -> tuple[str, int] | None:
        """A value at once: a formula, or one word that ends its sentence."""
        begin = _end_of(_SKIPPED, text, begin)
        if _STARTS.match(text, begin) or _NAMED.match(text, begin):
            return self._value(text, begin)
        word = _ONE_WORD.match(text, begin)
        if word is None or self.words_first or word.group().lower() in _NO_ANSWERS:
            return None
        introduced = _INTRODUCED.search(text[max(0, begin - 12) : begin])
        return None if introduced is None else (word.group(), word.end())

    def _value(self, text: str, begin: int) -> tuple[str, int]:
        """Returns the value that stands first from ``begin``, with all that is joined to it, and its end."""
        begin = _end_of(_SKIPPED, text, begin)
        begin = _end_of(_SKIPPED, text, _end_of(_LEAD, text, begin))
        values: list[str] = []
        while True:
            value, end = _formula(text, begin) or self._clause(text, begin)
            values.append(value)
            joined = _JOINED.match(text, end) if len(values) < MAX_ANSWER_CHARS else None
            if joined is None:
                return ", ".join(values), end
            begin = _end_of(_SKIPPED, text, joined.end())

    def _clause(self, text: str, begin: int) -> tuple[str, int]:
        end = _clause_end(text, begin)
        closing = text.find('"', begin, end) if text[begin - 1 : begin] == '"' else -1
        if closing > begin:
            return text[begin:closing].strip(_MARKUP), closing + 1
        if self.words_first and (equals := text.rfind("=", begin, end)) >= 0:
            begin = _end_of(_SKIPPED, text, equals + 1)
        if self.words_first and not _STARTS.match(text, begin):
            digit = _FIRST_DIGIT.search(text, begin, end)
            begin = begin if digit is None else digit.start()
        named = _NAMED.match(text, begin, end)
        if _STARTS.match(text, begin) or named is not None:
            begin_value = begin if named is None else named.end()
            end = _expression_end(text, begin_value, end, is_number=self.words_first)
        value = text[begin:end].strip(_MARKUP)
        if value.endswith("|") and value.count("|") == 1:  # the edge of a table's cell
            value = value[:-1].rstrip(_MARKUP)
        return value, end


def _end_of(pattern: re.Pattern[str], text: str, begin: int) -> int:
    match = pattern.match(text, begin)
    return begin if match is None else match.end()


def _formula(text: str, begin: int) -> tuple[str, int] | None:
    """The inside of the formula that starts here, a percent sign after it included."""
    limit = begin + MAX_ANSWER_CHARS + 4
    for opener, closer in _DELIMITERS:
        if text.startswith(opener, begin):
            inside = begin + len(opener)
            end = text.find(closer, inside, limit)
            return None if end < 0 else _with_percent(text, inside, end, end + len(closer))
    if not text.startswith("$", begin):
        return None
    end = text.find("$", begin + 1, limit)
    # A second dollar before a number is a price, not the end of a formula.
    if end <= begin + 1 or "\n" in text[begin:end] or text[end + 1 : end + 2].isdigit():
        return None
    return _with_percent(text, begin + 1, end, end + 1)


def _with_percent(text: str, inside: int, end: int, after: int) -> tuple[str, int]:
    percent = _AFTER_FORMULA.match(text, after)
    if percent is None:
        return text[inside:end], after
    return text[inside:end] + "%", percent.end()


def _clause_end(text: str, begin: int) -> int:
    """Where the clause ends: with its line, its sentence, a comma before a word, a reason."""
    depth = 0
    for piece in _PIECE.finditer(text, begin, begin + 2 * MAX_ANSWER_CHARS):
        kind, at = piece.lastgroup, piece.start()
        if kind == "newline":
            return at
        if kind == "opener":
            depth += 1
        elif kind == "closer":
            depth -= 1
            if depth < 0:
                return at
        elif kind == "delimiter":
            depth += 1 if piece.group() in (r"\(", r"\[") else -1
            if depth < 0:
                return at
        elif depth == 0 and _ends(text, piece):
            return at
    return min(len(text), begin + 2 * MAX_ANSWER_CHARS)


_COMMA_WORD = re.compile(r",\s{0,4}[*_]{0,2}(?:[A-Za-z]{2}|[aI]\s)", re.A)


def _ends(text: str, piece: re.Match[str]) -> bool:
    """Whether a piece outside all brackets ends the clause before it."""
    kind, at = piece.lastgroup, piece.start()
    if kind == "stop":
        return True
    if kind == "word":
        return piece.group().lower() in _CONNECTIVES and text[at - 1 : at].isspace()
    return kind == "comma" and bool(_COMMA_WORD.match(text, at)) and not _JOINED.match(text, at)


def _expression_end(text: str, begin: int, end: int, *, is_number: bool) -> int:
    """Where the expression that begins here ends: before the first word that is neither name nor unit.

    After a number a sum in brackets is a remark, in a formula it is a factor.
    """
    depth, units, last = 0, 0, begin
    for piece in _PIECE.finditer(text, begin, end):
        kind, found = piece.lastgroup, piece.group()
        if depth == 0 and last > begin:
            remark = _ASIDE.match(text, piece.start()) or (is_number and _SUM.match(text, piece.start()))
            if remark or kind == "emoji":
                break
        if kind in ("opener", "closer"):
            depth += 1 if kind == "opener" else -1
        if kind == "word" and depth == 0 and (len(found) > 1 or _is_article(text, piece)):
            word = found.lower()
            if word in FUNCTION_NAMES:
                pass
            elif word in _JOINERS:
                if not _JOINED.match(text, last):
                    break
                units = 0
            elif word == "of" or word in STOP_WORDS or last == begin or units == _MAX_UNIT_WORDS:
                break
            else:
                units += 1
        if not found.isspace():
            last = piece.end()
    return last


_MAX_UNIT_WORDS = 4


def _is_article(text: str, piece: re.Match[str]) -> bool:
    return (
        piece.group() in ("a", "A", "I")
        and re.match(r"\s[A-Za-z]{2}", text[piece.end() : piece.end() + 3]) is not None
    )
