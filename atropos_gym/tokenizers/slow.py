"""Tokenizers that transformers runs in Python, behind the part of ``tokenizers.Tokenizer`` that is used here.

A few families (ByT5, SentencePiece models without a ``tokenizer.json``, code that came with a model) have no
backend of their own. They are slower, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SlowBackend"]


@dataclass(frozen=True, slots=True)
class _Encoding:
    ids: list[int]


class SlowBackend:
    """Reads a transformers tokenizer as if it were a ``tokenizers.Tokenizer``.

    Args:
        hf: a transformers tokenizer without a backend.
    """

    normalizer = pre_tokenizer = padding = truncation = None

    def __init__(self, hf: Any) -> None:
        self._hf = hf

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Returns the added tokens by id."""
        return dict(self._hf.added_tokens_decoder)

    def encode(self, text: str, add_special_tokens: bool = False) -> _Encoding:
        """Returns the ids of a text, as transformers gives them."""
        return _Encoding(list(self._hf.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of ids, nothing cleaned up."""
        return str(
            self._hf.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def words(self, text: str, at_start: bool = True) -> Iterator[tuple[list[int], int]]:
        """Yields the ids of each piece of a text without added tokens, and where it ends."""
        pieces = self._hf._tokenize(text)
        ids = self._hf.convert_tokens_to_ids(pieces)
        # Pieces are no strings, but where their lengths add up to the text's, they tell the places.
        exact = sum(map(len, pieces)) == len(text)
        end = 0
        for piece, token in zip(pieces, ids, strict=True):
            end = end + len(piece) if exact else len(text)
            yield [token], end
