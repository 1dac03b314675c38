"""Text to ids and back: the protocol, the bytes tokenizer, Hugging Face's, and the fingerprint."""

from __future__ import annotations

from atropos_gym.tokenizers.base import (
    FINGERPRINT_FORMAT,
    BytesTokenizer,
    Tokenizer,
    digest,
    fingerprint,
    load_tokenizer,
)

__all__ = ["FINGERPRINT_FORMAT", "BytesTokenizer", "Tokenizer", "digest", "fingerprint", "load_tokenizer"]
