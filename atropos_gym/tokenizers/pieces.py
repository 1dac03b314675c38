"""The piece of text that each id of a tokenizer is, as files and pages show it."""

from __future__ import annotations

from functools import cache
from typing import Any

from atropos_gym.html import Pieces
from atropos_gym.tokenizers.base import BytesTokenizer, Tokenizer

__all__ = ["pieces_of"]

_BROKEN = "\ufffd"


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """Returns how a tokenizer's ids are shown: control ids by name, ids without text by number.

    Example:
        >>> from atropos_gym import load_tokenizer
        >>> pieces = pieces_of(load_tokenizer("bytes"))
        >>> pieces.control(258), pieces.control(104), pieces.text(104)
        ('<end>', None, 'h')
    """
    if isinstance(tokenizer, BytesTokenizer):
        return Pieces(
            lambda id_: bytes([id_]).decode("utf-8", "surrogateescape") if id_ < 256 else "",
            lambda id_: _BYTES_NAMES.get(id_) or (None if id_ < 256 else f"<{id_}>"),
        )
    return Pieces(cache(lambda id_: _piece(tokenizer, id_)), cache(lambda id_: _control(tokenizer, id_)))


def _piece(tokenizer: Tokenizer, id_: int) -> str:
    """Returns the text of an id in the middle of others; bytes of an incomplete character are escaped."""
    alone = tokenizer.decode([id_])
    if _BROKEN in alone:
        return _bytes_of(tokenizer, id_) or alone
    # SentencePiece drops the blank that a piece begins with where it stands first.
    twice = tokenizer.decode([id_, id_])
    return twice[len(alone) :] if twice.startswith(alone) else alone


def _bytes_of(tokenizer: Tokenizer, id_: int) -> str:
    """Returns the bytes of an id, escaped, in the two spellings that vocabularies have; "" for others."""
    backend: Any = getattr(tokenizer, "backend", None)
    token = None if backend is None else backend.id_to_token(id_)
    if token is None:
        return ""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # byte fallback
        spelt = bytes.fromhex(token[3:5])
    elif all(character in _byte_of_character() for character in token):
        spelt = bytes(_byte_of_character()[character] for character in token)
    else:
        return ""
    return spelt.decode("utf-8", "surrogateescape")


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE: printable Latin-1 is itself, the rest from U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


def _control(tokenizer: Tokenizer, id_: int) -> str | None:
    """Returns the name of a control id, or None."""
    text = tokenizer.decode([id_])
    if not text:
        return f"<{id_}>"
    # encode() gives no control id whatever the text, so what it does not give back is one. Pieces that look
    # like words are not asked: SentencePiece encodes them differently alone.
    looks_like_markup = text[0] in "<[" or text[-1] in ">]"
    return text if looks_like_markup and id_ not in tokenizer.encode(text) else None


_BYTES_NAMES = {
    BytesTokenizer.PAD: "<pad>",
    BytesTokenizer.BOS: "<bos>",
    BytesTokenizer.END: "<end>",
    BytesTokenizer.SYSTEM: "<system>",
    BytesTokenizer.USER: "<user>",
    BytesTokenizer.ASSISTANT: "<assistant>",
    BytesTokenizer.TOOL: "<tool>",
}
