"""Checks of multiple-choice answers: a label such as ``B``, the text of an option, or both.

The rules are those of answers.py; what differs is what counts as a value. An option's whole text is looked
for before labels, because it may begin with an article or list other labels ("Both A and B").
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import SupportsIndex

from atropos_gym.errors import UnusableGold
from atropos_gym.rewards._commitment import MAX_ANSWER_CHARS, Commitment, find_commitment
from atropos_gym.rewards._options import Options, Reading, plain_text
from atropos_gym.rewards._phrases import ANNOUNCED, NEGATED, SKIPPED, settled
from atropos_gym.rewards._text import plain_characters
from atropos_gym.rewards.verdict import Verdict, right, unparsed, wrong

__all__ = ["verify_choice"]

_SKIPPED = re.compile(SKIPPED)
_NEGATED = re.compile(NEGATED, re.I | re.A)
_CHOSEN = r"\bI(?:'ll|'d|\s+will|\s+would)?\s+(?:choose|pick|select|go\s+with|think)\b"
_LIKE_A_NAME = re.compile(r"(?!I\b)[A-Z\d]", re.A)
_GOLD = re.compile(r"[(\[{]?\s*([A-Za-z])\s*[)\]}]?\s*[.:]?")


@dataclass(frozen=True, slots=True)
class _ChoiceGrammar:
    """How choices are said.

    Attributes:
        options: what can be chosen.
    """

    options: Options
    phrase = re.compile(rf"{ANNOUNCED}|(?P<chosen>{_CHOSEN})", re.I | re.A)

    def phrased(self, text: str) -> Commitment | None:
        """The value after the last phrase, unless it is taken back."""
        text = plain_text(text)
        if len(text) <= MAX_ANSWER_CHARS and self.options.is_whole(text):
            return None  # "no answer is right" may be an option
        phrases = list(self.phrase.finditer(text))
        for at in range(len(phrases) - 1, -1, -1):
            if self._commits(text, phrases[at]):
                phrase = self._around(text, phrases, at)
                begin = self._begin(text, phrase)
                reading = self.options.read(text, begin)
                end = reading.end if reading.labels else phrase.end()
                return settled(text, text[begin : reading.end], end, self._again)
        return None

    def _begin(self, text: str, phrase: re.Match[str]) -> int:
        skipped = _SKIPPED.match(text, phrase.end())
        return phrase.end() if skipped is None else skipped.end()

    def _commits(self, text: str, phrase: re.Match[str]) -> bool:
        """Whether a phrase commits to anything: "is not" to none, "I choose to wait" neither."""
        chosen = (phrase["chosen"] or "").lower()
        if not chosen and not _NEGATED.match(text, phrase.end()):
            return True
        begin = self._begin(text, phrase)
        named = self.options.named(text, begin)
        if chosen.endswith("think"):
            return named is not None and named.by_label
        # "I choose Rome" commits, to what is no option.
        return named is not None or (bool(chosen) and _LIKE_A_NAME.match(text, begin) is not None)

    def _around(self, text: str, phrases: list[re.Match[str]], at: int) -> re.Match[str]:
        """The phrase, or one before it that names an option whose text holds it: "no answer is right"."""
        reach = 2 * self.options.longest + 20
        for before in range(at - 1, max(-1, at - 4), -1):
            if phrases[at].start() - phrases[before].end() > reach:
                break
            named = self.options.named(text, self._begin(text, phrases[before]))
            if named is not None and named.end > phrases[at].start():
                return phrases[before]
        return phrases[at]

    def _again(self, text: str, begin: int) -> tuple[str, int] | None:
        named = self.options.named(text, begin)
        return None if named is None or not named.labels else (text[begin : named.end], named.end)

    def whole(self, text: str) -> str | None:
        """The whole text, if it is a label, an option's text or both; else a last line that is a label."""
        text = text.strip()
        last_line = text[text.rfind("\n") + 1 :]
        candidates = [text] if len(text) <= MAX_ANSWER_CHARS else []
        for candidate in candidates:
            if self.options.is_whole(plain_text(candidate)):
                return candidate
        if len(last_line) <= MAX_ANSWER_CHARS and self.options.is_label(plain_text(last_line)):
            return last_line
        return None


def verify_choice(
    completion: str,
    gold: str | SupportsIndex,
    options: Iterable[str] | Mapping[str, str],
    opened: bool = False,
) -> Verdict:
    r"""Checks a multiple-choice answer, given by its label, its text, or both.

    Args:
        completion: the assistant's text.
        gold: the label (``"B"``, ``"(B)"``, ``"b"``) or the index of the right option, from 0.
        options: texts of the options A, B, C …, or label -> text.
        opened: the prompt itself opened a think block.

    Raises:
        UnusableGold: the gold is no label or index within the options, or these cannot be used.

    Example:
        >>> cities = ["London", "Berlin", "Paris", "Madrid"]
        >>> [verify_choice(text, "C", cities).value.value for text in (r"\boxed{C}", "The answer is Paris.")]
        ['right', 'right']
        >>> verify_choice("The answer is B) Paris.", 1, cities).value == "wrong"
        True
        >>> verify_choice("C looks plausible.", "C", cities).reason
        'no_commitment'
    """
    choices = _read_options(options)
    wanted = _read_gold(gold, choices)
    grammar = _ChoiceGrammar(choices)
    found = find_commitment(completion, grammar, opened=opened)
    if not found.values:
        return unparsed(found.reason)
    readings = [_read_value(value, choices) for value in found.values]
    labels = frozenset().union(*(reading.labels for reading in readings))
    if len(labels) > 1:
        return wrong("hedged")
    every = all(reading.labels for reading in readings)
    return right() if every and labels == {wanted} else wrong()


def _read_value(value: str, options: Options) -> Reading:
    text = plain_text(value)
    skipped = _SKIPPED.match(text)
    return options.read(text, 0 if skipped is None else skipped.end())


def _read_options(options: Iterable[str] | Mapping[str, str]) -> Options:
    if isinstance(options, Mapping):
        texts = {str(label).strip().upper(): plain_characters(str(text)) for label, text in options.items()}
        count = len(options)
        usable = len(texts) == count and all(re.fullmatch(r"[A-Z]|\d{1,2}", label) for label in texts)
    elif isinstance(options, str) or not isinstance(options, Iterable):
        raise UnusableGold(f"options must be a list or a mapping, got {type(options).__name__}: fix this row")
    else:
        listed = [plain_characters(str(text)) for text in options]
        texts = dict(zip(ascii_uppercase, listed, strict=False))
        count = len(listed)
        usable = count <= len(ascii_uppercase)
    if not texts or not usable:
        raise UnusableGold(
            f"there must be 1 to 26 options with a letter each, got {count}: fix or drop this row"
        )
    return Options(texts)


def _read_gold(gold: object, options: Options) -> str:
    labels = list(options.texts)
    label = ""
    if isinstance(gold, str):
        text = plain_text(plain_characters(gold)).strip()
        match = _GOLD.fullmatch(text)
        label = text if match is None else match[1].upper()
        if label not in options.texts and re.fullmatch(r"\d{1,2}", label):
            label = labels[int(label)] if int(label) < len(labels) else label
    elif not isinstance(gold, bool) and isinstance(gold, SupportsIndex):
        index = operator.index(gold)
        label = labels[index] if 0 <= index < len(labels) else str(index)
    if label not in options.texts:
        raise UnusableGold(
            f"the gold must be one of {', '.join(labels)} or an index below {len(labels)}, got {gold!r:.60}:"
            " fix or drop this row"
        )
    return label
