"""The options of a multiple-choice question, and which of them a text names where it begins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Options", "Reading", "plain_text"]

_MACRO = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mathcal|boldsymbol|bm|mbox|operatorname)"
    r"\*?\s*\{([^{}]*)\}"
)
_MARKUP = re.compile(
    r"\*+|`+|\$|\\[()\[\]]|(?<![A-Za-z0-9])_+|_+(?![A-Za-z0-9])|\\(?:left|right|displaystyle)(?![A-Za-z])"
)
_BLANK = re.compile(r"\\[,;: ]|~")
_TOKEN = re.compile(r"[^\W_]+|\S")


def plain_text(text: str) -> str:
    r"""Returns a text without markdown, dollar signs and LaTeX's text commands.

    Example:
        >>> plain_text(r"**Answer:** $\text{(C)}$ _Paris_")
        'Answer: (C) Paris'
    """
    for _ in range(5):
        text, count = _MACRO.subn(r"\1", text)
        if not count:
            break
    return _BLANK.sub(" ", _MARKUP.sub("", text))


@dataclass(frozen=True, slots=True)
class Reading:
    """What stands at a place.

    Attributes:
        labels: labels of all options that are named there; a letter that labels no option is one too.
        end: where the naming ends.
        by_label: a label was given, not an option's text alone.
    """

    labels: frozenset[str]
    end: int
    by_label: bool = False


_LEAD = re.compile(
    r"[\s\"'\u2018\u2019\u201c\u201d]*(?:(?:indeed|clearly|simply|definitely|probably|therefore|thus)[\s,]+)?(?:(?:the|both|either)\s+)?"
    r"(?:(?:correct|best|right|final)\s+){0,2}"
    r"(?:(?:option|choice|letter|answer|alternative)s?\s*(?:is\b|:)?\s*)?(?:(?:both|either)\s+)?",
    re.I | re.A,
)
_QUOTES = " \t\r\n\"'\u2018\u2019\u201c\u201d"
_REASONS = r"because|since|as|so|for|which"
_SENTENCE_ENDS = r"\s*(?:$|\n|[.!?;](?=\s|$|[\"'\u2019\u201d)\]]))"
_TEXT_ENDS = re.compile(
    rf"[\"'\u2019\u201d]?(?:{_SENTENCE_ENDS}|,(?:\s|[A-Za-z])|\s*[)\]}}(:]|\s*[\u2013\u2014]|\s-\s|\s+(?:{_REASONS})\b)",
    re.I | re.A,
)
_WHOLE_SENTENCE = re.compile(rf"[\"'\u2019\u201d]?{_SENTENCE_ENDS}", re.A)
_CLAUSE = re.compile(rf"[^\n]*?(?={_SENTENCE_ENDS}|,\s*[A-Za-z]|\s(?:{_REASONS})\b)", re.I | re.A)
_LABEL_ENDS = re.compile(
    rf"[\"'\u2019\u201d]?\s*(?:$|\n|\.(?!\d|[A-Za-z]\b)|[:,;!?)\]}}/&\u2013\u2014(]|-(?:\s|$))|\s+(?:{_REASONS}|and|or)\b",
    re.I | re.A,
)
_MORE_LABEL_ENDS = re.compile(
    r"\s+(?:is|was|not|rather|instead|but|while|when|where|if|given|due|with|though|although)\b", re.I | re.A
)
_LISTED_ENDS = re.compile(
    r"\s*(?:$|\n|\.(?!\d|[A-Za-z]\b)|[,;!?)\]}/&])|\s+(?:because|since|as|so|for|and|or)\b", re.I | re.A
)
_JOINER = re.compile(
    r"\s*(?:,\s*(?:and|or)\b|[,/&+]|\b(?:and|or|nor)\b)\s*"
    r"(?:(?:also|maybe|perhaps|possibly|even|the|option|choice)\s+){0,3}",
    re.I | re.A,
)
_SEPARATOR = re.compile(r"[ \t]*(?P<marks>[.):\],\u2013\u2014-]{0,4})[ \t]*[\"'\u201c\u2018]?")
_BRACKETED = r"\s*[(\[]\s*({label})\s*[)\]]"
_FEW_WORDS = 3
_MAX_CLAUSE_CHARS = 2000


@dataclass(frozen=True)
class Options:
    """Labels and texts of a question's options.

    Args:
        texts: upper-case label -> text.

    Attributes:
        longest: characters of the longest text.
    """

    texts: dict[str, str]
    _patterns: dict[str, re.Pattern[str]] = field(init=False, repr=False)
    _label: re.Pattern[str] = field(init=False, repr=False)
    _whole_label: re.Pattern[str] = field(init=False, repr=False)
    _bracketed: re.Pattern[str] = field(init=False, repr=False)
    _most_words: int = field(init=False, repr=False)
    longest: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        one = r"[A-Za-z]" if all(label.isalpha() for label in self.texts) else r"[A-Za-z]|\d{1,2}"
        set_field = object.__setattr__
        set_field(
            self, "_label", re.compile(rf"(?P<open>[(\[{{<]\s*)?(?P<label>{one})(?P<close>\s*[)\]}}>])?")
        )
        set_field(
            self,
            "_whole_label",
            re.compile(
                rf"(?:(?:option|choice)\s+)?[(\[{{<]?\s*(?:{one})\s*[)\]}}>]?\s*[.:,;!]?", re.I | re.A
            ),
        )
        set_field(self, "_bracketed", re.compile(_BRACKETED.format(label=one)))
        patterns, words = {}, 0
        for label, text in self.texts.items():
            tokens = _TOKEN.findall(plain_text(text).strip(_QUOTES).rstrip(".,;:!") or text)
            words = max(words, len(tokens))
            if len(tokens) > 1 or (tokens and not (len(tokens[0]) == 1 and tokens[0].isalpha())):
                patterns[label] = re.compile(r"\s*".join(map(re.escape, tokens)), re.I)
        set_field(self, "_patterns", patterns)
        set_field(self, "_most_words", max(_FEW_WORDS, words))
        set_field(self, "longest", max(map(len, self.texts.values()), default=0))

    def read(self, text: str, begin: int) -> Reading:
        """Reads what stands at ``begin``: the options named, or no labels for a text that is no option."""
        named = self.named(text, begin)
        if named is not None:
            return named
        clause = _CLAUSE.match(text, begin, begin + _MAX_CLAUSE_CHARS)
        return Reading(frozenset(), len(text) if clause is None else clause.end())

    def named(self, text: str, begin: int) -> Reading | None:
        """Returns which options are named at ``begin``; None where none is."""
        lead = _LEAD.match(text, begin)
        starts = dict.fromkeys((begin, begin if lead is None else lead.end()))
        for start in starts:
            named = self._text_at(text, start, _TEXT_ENDS)
            if named is not None:
                return self._with_bracketed(text, named)
        for start in starts:
            label = self._label_at(text, start)
            if label is not None:
                return self._labels_from(text, label)
        return None

    def is_label(self, text: str) -> bool:
        """Whether a text is one label and nothing else."""
        return self._whole_label.fullmatch(text.strip(_QUOTES)) is not None

    def is_whole(self, text: str) -> bool:
        """Whether a text is one label, an option's text, or both, and nothing else."""
        text = text.strip(_QUOTES)
        if self.is_label(text):
            return True
        for start in self._text_starts(text):
            named = self._text_at(text, start, _WHOLE_SENTENCE)
            if named is None:
                named = self._text_at(text, start, _TEXT_ENDS)
                named = None if named is None else self._with_bracketed(text, named)
                if named is None or not named.by_label:
                    continue
            if not text[named.end :].strip(_QUOTES + ".!?;"):
                return True
        return False

    def _text_starts(self, text: str) -> Iterator[int]:
        yield 0
        label = self._label.match(text)
        separator = None if label is None else _SEPARATOR.match(text, label.end())
        if label is not None and separator is not None and (label["close"] or separator["marks"]):
            yield separator.end()

    def _text_at(self, text: str, begin: int, ends: re.Pattern[str]) -> Reading | None:
        """The options whose whole text stands here; the longest one, several where texts are the same."""
        found: dict[int, set[str]] = {}
        for label, pattern in self._patterns.items():
            match = pattern.match(text, begin)
            if match is not None and ends.match(text, match.end()):
                found.setdefault(match.end(), set()).add(label)
        if not found:
            return None
        end = max(found)
        return Reading(frozenset(found[end]), end)

    def _with_bracketed(self, text: str, named: Reading) -> Reading:
        """An option's text with a label in brackets after it: both count."""
        bracketed = self._bracketed.match(text, named.end)
        if bracketed is None:
            return named
        return Reading(named.labels | {bracketed[1].upper()}, bracketed.end(), by_label=True)

    def _label_at(self, text: str, begin: int) -> re.Match[str] | None:
        label = self._label.match(text, begin)
        if label is None or label["close"]:
            return label
        if text[label.end() : label.end() + 1].isalnum():
            return None
        if _LABEL_ENDS.match(text, label.end()):
            return label
        # "a triangle", "I think": an article, a pronoun.
        careful = label["label"] in ("a", "A", "I", "i")
        return label if not careful and _MORE_LABEL_ENDS.match(text, label.end()) else None

    def _labels_from(self, text: str, first: re.Match[str]) -> Reading:
        """Reads a label, what is joined to it, and the text that goes with it."""
        labels, end = {first["label"].upper()}, first.end()
        while joiner := _JOINER.match(text, end):
            named = self._text_at(text, joiner.end(), _TEXT_ENDS)
            label = self._label.match(text, joiner.end())
            if named is not None:
                labels, end = labels | named.labels, named.end
            elif label is not None and (label["close"] or _LISTED_ENDS.match(text, label.end())):
                labels, end = labels | {label["label"].upper()}, label.end()
            else:
                break
        if len(labels) > 1 or end != first.end():
            return Reading(frozenset(labels), end, by_label=True)
        return self._with_text(text, first)

    def _with_text(self, text: str, first: re.Match[str]) -> Reading:
        """A label and the option's text after it, which must be of the same option."""
        label = first["label"].upper()
        alone = Reading(frozenset((label,)), first.end(), by_label=True)
        separator = _SEPARATOR.match(text, first.end())
        if separator is None or not (first["close"] or separator["marks"]):
            return alone
        loose = not separator["marks"].endswith(
            (".", ",")
        )  # after these another sentence or clause may begin
        named = self._text_at(text, separator.end(), _TEXT_ENDS if loose else _WHOLE_SENTENCE)
        if named is not None:
            labels = alone.labels if label in named.labels else named.labels | alone.labels
            return Reading(labels, named.end, by_label=True)
        clause = _CLAUSE.match(text, separator.end(), separator.end() + _MAX_CLAUSE_CHARS)
        said = "" if clause is None else clause.group().strip(_QUOTES)
        if loose and self._looks_like_another(label, said):
            return Reading(frozenset(), separator.end() + len(said), by_label=True)
        return alone

    def _looks_like_another(self, label: str, said: str) -> bool:
        """Whether a few words after a label are the text of an option, and not of its own."""
        if not said or not (said[0].isupper() or said[0].isdigit()):
            return False
        words = _TOKEN.findall(said.lower())
        own = f" {' '.join(_TOKEN.findall(plain_text(self.texts.get(label, '')).lower()))} "
        joined = f" {' '.join(words)} "
        return len(words) <= self._most_words and joined not in own and (own.isspace() or own not in joined)
