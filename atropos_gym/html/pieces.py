"""How ids are shown: the piece of text that each of them is, and the names of control ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Pieces", "visible"]

_BROKEN = "\ufffd"
# A character of UTF-8 has at most four bytes, so at most four pieces of any tokenizer.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Pieces:
    """How ids are shown as text.

    A piece may be a part of a character only. Its bytes are then lone surrogates, as ``surrogateescape`` of
    Python writes them, so that pieces put together give the character.

    Attributes:
        text: the piece of an id; "" where it has none.
        control: the name of an id that is no text of its own (a control id), or None for text.
        known: whether any piece is known at all; without, ids are shown by number.

    Example:
        >>> pieces = Pieces(lambda id_: bytes([id_]).decode("utf-8", "surrogateescape"), lambda id_: None)
        >>> pieces.chunks([104, 195, 169])
        [([104], 'h'), ([195, 169], 'é')]
        >>> pieces.name(195)
        '<0xC3>'
    """

    text: Callable[[int], str]
    control: Callable[[int], str | None]
    known: bool = True

    @classmethod
    def of_table(cls, texts: Mapping[int, str], control: Mapping[int, str]) -> Pieces:
        """Returns the pieces that a file lists; an id that is in neither table is shown by number."""
        clean = {id_: _escapes_only(text) for id_, text in texts.items()}
        return cls(lambda id_: clean.get(id_, ""), control.get, known=bool(texts or control))

    @classmethod
    def unknown(cls) -> Pieces:
        """Returns pieces of which nothing is known."""
        return cls(lambda id_: "", lambda id_: None, known=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids put together; a character that stays incomplete gives U+FFFD."""
        text = "".join(map(self.text, ids))
        return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def chunks(self, ids: Sequence[int]) -> list[tuple[list[int], str]]:
        """Splits ids into the shortest runs that are whole characters; broken ones stand for themselves."""
        chunks = []
        position = 0
        while position < len(ids):
            length = self._whole(ids, position)
            run = list(ids[position : position + length])
            chunks.append((run, self.decode(run)))
            position += length
        return chunks

    def name(self, id_: int) -> str:
        """Returns what a table says of one id: its control name, its piece, or its number in brackets."""
        named = self.control(id_)
        if named is not None:
            return named
        text = self.text(id_)
        if not text:
            return f"⟨{id_}⟩"
        return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)

    def _whole(self, ids: Sequence[int], start: int) -> int:
        if _BROKEN not in self.decode(ids[start : start + 1]):
            return 1
        for length in range(2, _LONGEST_CHARACTER + 1):
            run = ids[start : start + length]
            if len(run) < length or any(self.control(id_) is not None for id_ in run):
                break
            if _BROKEN not in self.decode(run):
                return length
        return 1


def visible(text: str) -> str:
    r"""Gives control characters their pictures; a line end keeps ending the line.

    Example:
        >>> visible("a\x00b\n")
        'a␀b⏎\n'
    """
    return text if text.isprintable() else "".join(map(_picture, text))


def _picture(character: str) -> str:
    code = ord(character)
    if character == "\n":
        return "⏎\n"
    if code < 0x20 and character != "\t":
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    # Others that would move the cursor, turn the page's own text around, or be no legal UTF-8.
    turning = 0x200E <= code <= 0x200F or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    if turning or 0x80 <= code < 0xA0 or 0xD800 <= code < 0xE000 or code in (0x2028, 0x2029, 0xFEFF):
        return f"⟨U+{code:04X}⟩"
    return character


def _escapes_only(text: str) -> str:
    """Replaces surrogates that stand for no byte: nothing could encode them."""
    if text.isascii():
        return text
    return "".join(
        _BROKEN if "\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" else c for c in text
    )
