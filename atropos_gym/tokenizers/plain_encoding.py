"""Encodes text so that control tokens come from the template alone, never from what somebody wrote.

A tokenizer's backend turns any text that spells a control token into its id: a user could end a turn, or
forge one. ``ControlText`` marks such spellings before a template is rendered, and encodes the result so that
every marked spelling is ordinary text. Nothing is deleted: deleting ``<|im_end|>`` from
``<|im_<|im_end|>end|>`` would assemble one.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_gym.errors import TemplateError

__all__ = ["ControlText", "Encoded", "PlainEncoder"]

# Private-use characters; they are removed from what comes in, so nobody can write a mark.
_OPEN, _CLOSE = "\U000f0002", "\U000f0003"

# Unicode's White_Space, as the backend strips it; str.strip() takes four control characters more.
_BLANK = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids, and where in the text each of them ends (unmarked characters, from 0)."""

    ids: list[int]
    ends: list[int]


class PlainEncoder:
    """Encodes with the backend's own pipeline as if some added tokens did not exist.

    The steps are the backend's: split at the other added tokens, normalise, pre-tokenise, model. It is the
    same as a backend rebuilt without those tokens, which would take seconds.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        control: ids of added tokens that text must never become.
    """

    def __init__(self, backend: Any, control: frozenset[int]) -> None:
        self._backend = backend
        self.control = control
        others = {i: t for i, t in backend.get_added_tokens_decoder().items() if i not in control}
        self._raw = _by_first_character({i: t for i, t in others.items() if not t.normalized})
        normalize = self._normalize
        self._normal = _by_first_character(
            {i: t for i, t in others.items() if t.normalized}, lambda text: normalize(text) or text
        )

    def _normalize(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of ``text``; none of them is a control id."""
        return self.encode_with_ends(text).ids

    def encode_with_ends(self, text: str, begin: int = 0, stop: int | None = None) -> Encoded:
        """Returns the ids and where each one's piece of text ends.

        Args:
            text: the text.
            begin: plain text before it is not encoded: a token in front of the text swallows it.
            stop: plain text behind it is not encoded: a token behind the text swallows it.

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
            normal = self._normalize(raw)
            # Offsets are exact where normalising changes no length; else they are this stretch's end.
            exact = len(normal) == len(raw)
            start = raw_end - len(raw)
            for added, piece, piece_end in _split(normal, self._normal):
                if added is not None:
                    ids.append(added)
                    ends.append(start + piece_end if exact else raw_end)
                    continue
                piece_start = piece_end - len(piece)
                for word, word_end in self._pre_tokenize(piece):
                    new = [token.id for token in self._backend.model.tokenize(word)]
                    ids += new
                    ends += [start + piece_start + word_end if exact else raw_end] * len(new)
        forged = self.control.intersection(ids)
        if forged:
            raise TemplateError(
                f"the vocabulary makes control id {min(forged)} out of plain text {text!r:.60}"
            )
        return Encoded(ids, ends)

    def _pre_tokenize(self, text: str) -> list[tuple[str, int]]:
        """Returns words and where they end."""
        if not text:
            return []
        if self._backend.pre_tokenizer is None:
            return [(text, len(text))]
        return [(word, end) for word, (_, end) in self._backend.pre_tokenizer.pre_tokenize_str(text)]


class ControlText:
    """Marks control spellings in messages and encodes rendered text without obeying them.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        control: ids of the control tokens, all of them added tokens of the backend.
    """

    def __init__(self, backend: Any, control: frozenset[int]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {added[i].content: (i, added[i]) for i in control}
        spellings = "|".join(re.escape(s) for s in sorted(self._added, key=len, reverse=True)) or "(?!)"
        self._spelled = re.compile(spellings)
        # A template may cut through marks (content[1:]): one of the two is enough to keep a spelling text.
        self._pieces = re.compile(
            f"{_OPEN}(?P<opened>{spellings})|(?P<closed>{spellings}){_CLOSE}|[{_OPEN}{_CLOSE}]"
            f"|(?P<control>{spellings})"
        )
        self.plain = PlainEncoder(backend, control)

    def mark(self, value: Any) -> Any:
        """Returns ``value`` with every control spelling in its strings marked, dict keys included.

        Numbers, bools and None are returned as they are.
        """
        if isinstance(value, str):
            if _OPEN in value or _CLOSE in value:
                value = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._spelled.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    @staticmethod
    def unmark(text: str) -> str:
        """Returns rendered text without marks."""
        return text.replace(_OPEN, "").replace(_CLOSE, "")

    def encode(self, text: str) -> list[int]:
        """Returns the ids of rendered text; without marks they are the backend's own."""
        if _OPEN not in text and _CLOSE not in text:
            return self._ordinary(text).ids  # type: ignore[no-any-return]
        return self._encode_marked(text).ids

    def encode_with_ends(self, text: str) -> Encoded:
        """Returns the ids of rendered text, and where each ends in ``unmark(text)``."""
        if _OPEN not in text and _CLOSE not in text:
            encoding = self._ordinary(text)
            return Encoded(encoding.ids, [end for _, end in encoding.offsets])
        return self._encode_marked(text)

    def _ordinary(self, text: str) -> Any:
        backend = self._backend
        # Padding and truncation are state that another caller of the shared backend may have left behind.
        if backend.padding is not None:
            backend.no_padding()
        if backend.truncation is not None:
            backend.no_truncation()
        return backend.encode(text, add_special_tokens=False)

    def _encode_marked(self, text: str) -> Encoded:
        """Encodes the text between the template's own control tokens whole, each stretch as plain text."""
        ids: list[int] = []
        ends: list[int] = []
        done = 0  # unmarked characters encoded so far
        swallows = False  # the last control token strips what follows it
        for stretch, control in self._stretches(text):
            added = None if control is None else self._added[control]
            begin = len(stretch) - len(stretch.lstrip(_BLANK)) if swallows else 0
            stop = len(stretch.rstrip(_BLANK)) if added is not None and added[1].lstrip else None
            encoded = self.plain.encode_with_ends(stretch, begin, stop)
            ids += encoded.ids
            ends += [done + end for end in encoded.ends]
            done += len(stretch)
            if added is not None and control is not None:
                done += len(control)
                ids.append(added[0])
                ends.append(done)
                swallows = added[1].rstrip
        return Encoded(ids, ends)

    def _stretches(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Yields ``(plain text, the template's control token behind it or None at the end)``."""
        plain: list[str] = []
        at = 0
        for found in self._pieces.finditer(text):
            plain.append(text[at : found.start()])
            at = found.end()
            if found["control"] is not None:
                yield "".join(plain), found["control"]
                plain = []
            else:
                plain.append(found["opened"] or found["closed"] or "")
        plain.append(text[at:])
        yield "".join(plain), None


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
            left = max(begin, len(text[:left].rstrip(_BLANK)))
        if added.rstrip:
            right = len(text) - len(text[right:].lstrip(_BLANK))
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
