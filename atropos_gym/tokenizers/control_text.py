"""Encodes rendered text so that control tokens come from the template alone, never from what somebody wrote.

A tokenizer's backend turns any text that spells a control token into its id: a user could end a turn, or
forge one. ``ControlText`` marks such spellings before a template is rendered, and encodes the result so that
every marked spelling is ordinary text. Nothing is deleted: deleting ``<|im_end|>`` from
``<|im_<|im_end|>end|>`` would assemble one.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from atropos_gym.tokenizers.plain_encoding import BLANK, Encoded, PlainEncoder
from atropos_gym.tokenizers.spellings import any_of

__all__ = ["ControlText", "well_formed"]

# Private-use characters; they are removed from what comes in, so nobody can write a mark.
_OPEN, _CLOSE = "\U000f0002", "\U000f0003"
# The same as a template writes them in JSON of ASCII alone, and where it prints a list or a dict.
_ESCAPES = {form(mark)[1:-1]: mark for mark in (_OPEN, _CLOSE) for form in (json.dumps, ascii)}
_ESCAPED = re.compile("|".join(map(re.escape, _ESCAPES)))


class ControlText:
    """Marks control spellings in messages and encodes rendered text without obeying them.

    Args:
        backend: a ``tokenizers.Tokenizer``, or a ``SlowBackend``.
        control: ids of the control tokens, all of them added tokens of the backend.
    """

    def __init__(self, backend: Any, control: frozenset[int]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = {added[i].content: (i, added[i]) for i in control}
        spellings = any_of(self._added)
        self._spelled = re.compile(spellings)
        # A template may cut through marks (content[1:]): one of the two is enough to keep a spelling text.
        self._pieces = re.compile(
            f"{_OPEN}(?P<opened>{spellings})|(?P<closed>{spellings}){_CLOSE}|[{_OPEN}{_CLOSE}]"
            f"|(?P<control>{spellings})"
        )
        self._firsts = tuple({s[0] for s in self._added})
        self._lasts = tuple({s[-1] for s in self._added})
        self._longest = max(map(len, self._added), default=0)
        self._heads = frozenset(s[:k] for s in self._added for k in range(1, len(s)))
        self._tails = frozenset(s[k:] for s in self._added for k in range(1, len(s)))
        self.plain = PlainEncoder(backend, control)
        # A token that is looked for behind the normaliser has spellings that no list shows.
        normalized = [s for s, (_, token) in self._added.items() if token.normalized]
        self._disguised: tuple[str, ...] = (
            ()
            if backend.normalizer is None
            else tuple(self.plain.normalize(s).strip("▁ ") for s in normalized)
        )
        self._offsets = not hasattr(backend, "words")

    @cached_property
    def _whole(self) -> PlainEncoder:
        """Encodes as the backend does, whatever settings another caller has left on it."""
        return PlainEncoder(self._backend, frozenset())

    def mark(self, value: Any) -> Any:
        """Returns ``value`` with every control spelling in its strings marked, dict keys included.

        Other values than strings, mappings, lists and tuples are returned as they are.
        """
        if isinstance(value, str):
            return self._mark_text(well_formed(value))
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        """Returns a text with its control spellings marked, and its ends where they are half a spelling."""
        if _OPEN in text or _CLOSE in text:
            text = text.replace(_OPEN, "").replace(_CLOSE, "")
        marked = text
        for first in self._firsts:
            if first in text:
                marked = self._spelled.sub(f"{_OPEN}\\g<0>{_CLOSE}", text)
                break
        if "\\" in marked:  # what spells an escaped mark is no mark
            marked = _ESCAPED.sub(lambda found: f"\\{_CLOSE}{found[0][1:]}", marked)
        # What a template puts next to a text, such as another text, must not complete a spelling; nor where
        # it trims the text first.
        body = text.strip()
        trimmed = len(body) < len(text)
        ends = self._ends_spelling(text) or (trimmed and self._ends_spelling(body))
        if ends or (marked == text and self._is_disguised(text)):
            lead = len(marked) - len(marked.lstrip())
            marked = f"{marked[:lead]}{_OPEN}{marked[lead:]}"
        if self._begins_spelling(text) or (trimmed and self._begins_spelling(body)):
            end = len(marked.rstrip())
            marked = f"{marked[:end]}{_CLOSE}{marked[end:]}"
        return marked

    def _ends_spelling(self, text: str) -> bool:
        """Returns whether a text begins with the second half of a control spelling."""
        edge = text[: self._longest]
        return any(last in edge for last in self._lasts) and any(
            edge[:k] in self._tails for k in range(1, len(edge) + 1)
        )

    def _begins_spelling(self, text: str) -> bool:
        """Returns whether a text ends with the first half of a control spelling."""
        edge = text[-self._longest :]
        return any(first in edge for first in self._firsts) and any(
            edge[-k:] in self._heads for k in range(1, len(edge) + 1)
        )

    def _is_disguised(self, text: str) -> bool:
        """Returns whether a text becomes a control spelling only behind the normaliser."""
        if not self._disguised:
            return False
        normal = self.plain.normalize(text)
        return any(spelling in normal for spelling in self._disguised)

    @staticmethod
    def unmark(text: str) -> str:
        """Returns rendered text without marks."""
        return text.replace(_OPEN, "").replace(_CLOSE, "")

    @staticmethod
    def unmarked_places(text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns places in marked ``text`` as places in ``unmark(text)``."""
        marks = [at for at, character in enumerate(text) if character in (_OPEN, _CLOSE)]
        if not marks:
            return list(places)
        return [(a - bisect_left(marks, a), b - bisect_left(marks, b)) for a, b in places]

    @staticmethod
    def unescape(text: str) -> str:
        """Returns text whose marks a template has escaped with the marks themselves."""
        return _ESCAPED.sub(lambda found: _ESCAPES[found[0]], text) if "\\" in text else text

    def encode(self, text: str) -> list[int]:
        """Returns the ids of rendered text; without marks they are the backend's own."""
        if _OPEN in text or _CLOSE in text:
            return self._encode_marked(text).ids
        encoding = self._ordinary(text)
        return self._whole.encode(text) if encoding is None else encoding.ids

    def encode_plain(self, text: str) -> list[int]:
        """Returns the ids of text that nobody has marked, as if there were no control tokens."""
        text = well_formed(text)
        spelled = any(first in text for first in self._firsts) and self._spelled.search(text)
        if spelled or self._is_disguised(text):
            return self.plain.encode(text)
        encoding = self._ordinary(text)
        return self._whole.encode(text) if encoding is None else encoding.ids

    def encode_with_ends(self, text: str) -> Encoded:
        """Returns the ids of rendered text, and where each ends in ``unmark(text)``."""
        if _OPEN in text or _CLOSE in text or not self._offsets:
            return self._encode_marked(text)
        encoding = self._ordinary(text)
        if encoding is None:
            return self._whole.encode_with_ends(text)
        return Encoded(encoding.ids, [end for _, end in encoding.offsets])

    def _ordinary(self, text: str) -> Any:
        """Returns the backend's own encoding, or None where another caller's settings would change it.

        Padding and truncation are state of the shared backend. They are never switched here: a second thread
        may be encoding with them.
        """
        backend = self._backend
        if backend.padding is None and backend.truncation is None:
            encoding = backend.encode(text, add_special_tokens=False)
            if backend.padding is None and backend.truncation is None:
                return encoding
        return None

    def _encode_marked(self, text: str) -> Encoded:
        """Encodes the text between the template's own control tokens whole, each stretch as plain text."""
        ids: list[int] = []
        ends: list[int] = []
        done = 0  # unmarked characters encoded so far
        swallows = False  # the last control token strips what follows it
        for stretch, control in self._stretches(text):
            added = None if control is None else self._added[control]
            begin = len(stretch) - len(stretch.lstrip(BLANK)) if swallows else 0
            stop = len(stretch.rstrip(BLANK)) if added is not None and added[1].lstrip else None
            encoded = self.plain.encode_with_ends(stretch, begin, stop, at_start=done == 0)
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


def well_formed(text: str) -> str:
    r"""Returns a plain str that has an encoding: halves of a character become one, or U+FFFD.

    Example:
        >>> well_formed("\ud83d\ude42"), well_formed("a\ud83d")
        ('🙂', 'a�')
    """
    text = str.__str__(text)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
