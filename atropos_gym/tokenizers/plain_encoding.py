"""Encodes text as if some added tokens did not exist, with the backend's own pipeline."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_gym.errors import TemplateError
from atropos_gym.tokenizers.words import words_of

__all__ = ["BLANK", "Encoded", "PlainEncoder"]

#: Unicode's White_Space, as the backend strips it; str.strip() takes four control characters more.
BLANK = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids, and where in the text each of them ends (characters, from 0)."""

    ids: list[int]
    ends: list[int]


class PlainEncoder:
    """Encodes with the backend's own pipeline as if some added tokens did not exist.

    The steps are the backend's: split at the other added tokens, normalise, pre-tokenise, model. It is the
    same as a backend rebuilt without those tokens, which would take seconds.

    Args:
        backend: a ``tokenizers.Tokenizer``, or a ``SlowBackend``.
        control: ids of added tokens that text must never become.
    """

    def __init__(self, backend: Any, control: frozenset[int]) -> None:
        self._normalizer = backend.normalizer
        self._words = words_of(backend)
        self.control = control
        others = {i: t for i, t in backend.get_added_tokens_decoder().items() if i not in control}
        self._raw = _by_first_character({i: t for i, t in others.items() if not t.normalized})
        self._normal = _by_first_character(
            {i: t for i, t in others.items() if t.normalized}, lambda text: self.normalize(text) or text
        )

    def normalize(self, text: str) -> str:
        """Returns text as the backend's normaliser leaves it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def encode(self, text: str, *, at_start: bool = True) -> list[int]:
        """Returns the ids of ``text``; none of them is a control id.

        Args:
            text: the text.
            at_start: nothing stands before it.
        """
        return self.encode_with_ends(text, at_start=at_start).ids

    def encode_with_ends(
        self, text: str, begin: int = 0, stop: int | None = None, *, at_start: bool = True
    ) -> Encoded:
        """Returns the ids and where each one's piece of text ends.

        Args:
            text: the text.
            begin: plain text before it is not encoded: a token in front of the text swallows it.
            stop: plain text behind it is not encoded: a token behind the text swallows it.
            at_start: nothing stands before the text.

        Raises:
            TemplateError: the vocabulary itself spells a control token, so text cannot avoid it.
        """
        ids: list[int] = []
        ends: list[int] = []
        for token, raw, raw_end in _split(text, self._raw, begin, stop):
            if token is not None:
                ids.append(token)
                ends.append(raw_end)
                continue
            normal = self.normalize(raw)
            # Offsets are exact where normalising changes no length; else they are this stretch's end.
            exact = len(normal) == len(raw)
            start = raw_end - len(raw)
            for added, piece, piece_end in _split(normal, self._normal):
                if added is not None:
                    ids.append(added)
                    ends.append(start + piece_end if exact else raw_end)
                    continue
                piece_start = piece_end - len(piece)
                first = at_start and start == 0 and piece_start == 0
                for new, word_end in self._words(piece, first):
                    ids += new
                    ends += [start + piece_start + word_end if exact else raw_end] * len(new)
        forged = self.control.intersection(ids)
        if forged:
            raise TemplateError(
                f"the vocabulary makes control id {min(forged)} out of plain text {text!r:.60}"
            )
        return Encoded(ids, ends)


_Index = dict[str, list[tuple[str, int, Any]]]


def _by_first_character(tokens: Mapping[int, Any], spell: Any = str) -> _Index:
    """Returns added tokens by their first character, longest first."""
    index: _Index = {}
    for token, added in tokens.items():
        text = spell(added.content)
        index.setdefault(text[0], []).append((text, token, added))
    for candidates in index.values():
        candidates.sort(key=lambda candidate: len(candidate[0]), reverse=True)
    return index


def _split(
    text: str, index: _Index, begin: int = 0, stop: int | None = None
) -> Iterator[tuple[int | None, str, int]]:
    """Yields ``(added id or None, text, where it ends)`` as the backend splits, quirk for quirk.

    Matches are leftmost longest. One that is no whole word is passed over whole, and a token that strips what
    follows it does not hide a token that stands there.

    Args:
        text: the text.
        index: added tokens by first character.
        begin: plain text before it is swallowed by a token before the text.
        stop: plain text behind it is swallowed by a token behind the text.
    """
    at = 0
    while index and at < len(text):
        match = next((c for c in index.get(text[at], ()) if text.startswith(c[0], at)), None)
        if match is None:
            at += 1
            continue
        spelling, token, added = match
        left, right = at, at + len(spelling)
        at = right
        if added.single_word and (_is_word(text[left - 1 : left]) or _is_word(text[right : right + 1])):
            continue
        if added.lstrip:
            left = max(begin, len(text[:left].rstrip(BLANK)))
        if added.rstrip:
            right = len(text) - len(text[right:].lstrip(BLANK))
        if left > begin:
            yield None, text[begin:left], left
        yield token, text[left:right], right
        begin = right
    stop = len(text) if stop is None else stop
    if stop > begin:
        yield None, text[begin:stop], stop


def _is_word(character: str) -> bool:
    r"""Returns whether a character (or "") is one of the backend's ``\w``."""
    if not character:
        return False
    category = unicodedata.category(character)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or character in "\u200c\u200d"
