"""Tokenizers: the protocol, the bytes tokenizer, the Hugging Face loader and the fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["Tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back. Deep-copies to itself and pickles as its source.

    Attributes:
        name: what people call it; used in every error.
        rows: rows of the model's embedding if known, else ``len(tokenizer)``: the action space's size.
    """

    name: str
    rows: int

    def __len__(self) -> int:
        """Number of ids that the tokenizer itself knows."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no BOS, and no control id whatever the text is."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens visible, nothing cleaned up; ids without text give ""."""
        ...

    @property
    def fingerprint(self) -> str:
        """``sha256:...`` (rendering.md section 13)."""
        ...
