"""Tokenizers: the protocol, the bytes tokenizer, the Hugging Face loader and the fingerprint.

One object per source and process: a Hugging Face tokenizer takes seconds to load and to copy, so ours
deep-copy to themselves and pickle as their source. Loading ``"bytes"`` imports no transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from atropos_gym.errors import ConfigError

__all__ = ["BytesTokenizer", "Tokenizer", "fingerprint", "load_tokenizer"]

#: Part of every fingerprint; raised when its recipe changes.
FINGERPRINT_FORMAT = 1


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


class BytesTokenizer:
    """UTF-8 bytes as ids 0-255, then eight control ids; no merges, so every rule can be checked by hand.

    Text can never hold a control id, and control ids have no text.

    Args:
        rows: embedding rows of the model that uses it, >= 264.

    Example:
        >>> tokenizer = BytesTokenizer()
        >>> tokenizer.encode("é")
        [195, 169]
        >>> tokenizer.decode([111, 107, BytesTokenizer.END])
        'ok'
    """

    PAD = 256
    BOS = 257
    END = 258
    SYSTEM = 259
    USER = 260
    ASSISTANT = 261
    TOOL = 262

    name = "bytes"

    def __init__(self, rows: int = 264) -> None:
        if rows < 264:
            raise ConfigError(f"rows of the bytes tokenizer must be >= 264, got {rows}")
        self.rows = rows

    def __len__(self) -> int:
        """Returns 264: 256 bytes, seven control ids and a spare one."""
        return 264

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of ``text``; a lone surrogate becomes the bytes it would have."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids below 256; broken characters become U+FFFD."""
        return bytes([i for i in ids if i < 256]).decode("utf-8", "replace")

    @property
    def fingerprint(self) -> str:
        """``sha256:...`` of what decides its ids."""
        return digest({"format": FINGERPRINT_FORMAT, "kind": "bytes", "control": 8})

    def __deepcopy__(self, memo: dict[int, Any]) -> BytesTokenizer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _reload, ("bytes", self.rows)

    def __repr__(self) -> str:
        return "BytesTokenizer()" if self.rows == 264 else f"BytesTokenizer(rows={self.rows})"


_cache: dict[tuple[str, int | None], Tokenizer] = {}


def load_tokenizer(source: str | Path | Any, *, rows: int | None = None) -> Tokenizer:
    """Returns the tokenizer of ``source``, one object per source and process.

    Args:
        source: ``"bytes"``; a folder, a ``tokenizer.json`` or a model's name; a tokenizer or processor of
            transformers; a ``tokenizers.Tokenizer``; or a ``Tokenizer`` of ours, which is returned as it is.
        rows: embedding rows of the model, if they differ from what the folder's ``config.json`` says.

    Raises:
        MissingData: no tokenizer there, or transformers is not installed.
        ConfigError: no tokenizer at all, or ``rows`` is no positive number.

    Example:
        >>> load_tokenizer("bytes") is load_tokenizer("bytes")
        True
    """
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ConfigError(f"rows must be a positive int or None, got {rows!r}")
    if isinstance(source, Path) or (isinstance(source, str) and source.startswith("~")):
        source = str(Path(source).expanduser())
    if isinstance(source, str):
        if not source.strip():
            raise ConfigError(
                "tokenizer must be a name or a folder, got an empty string: 'bytes' needs no file"
            )
        key = (source, rows)
        if key not in _cache:
            _cache[key] = _load(source, rows)
        return _cache[key]
    if _is_ours(source) and rows in (None, source.rows):
        return cast(Tokenizer, source)
    if isinstance(source, type):
        raise ConfigError(f"tokenizer must be an object, got the class {source.__name__}: load or make one")
    inner = getattr(source, "tokenizer", None)  # a processor: images, sound and a tokenizer
    if hasattr(inner, "convert_ids_to_tokens"):
        from atropos_gym.tokenizers.hf import wrap_hf

        return wrap_hf(inner, rows, getattr(source, "chat_template", None))
    if hasattr(source, "convert_ids_to_tokens"):
        from atropos_gym.tokenizers.hf import wrap_hf

        return wrap_hf(source, rows)
    if hasattr(source, "get_added_tokens_decoder"):
        from atropos_gym.tokenizers.hf import wrap_backend

        return wrap_backend(source, rows)
    raise ConfigError(
        f"tokenizer must be a name, a folder, or a tokenizer or processor of transformers, got "
        f"{type(source).__name__}"
    )


def _is_ours(source: Any) -> bool:
    """Returns whether an object has our protocol, without asking for its fingerprint: that takes seconds."""
    names = ("encode", "decode", "fingerprint", "rows", "name")
    return all(hasattr(type(source), name) or name in getattr(source, "__dict__", ()) for name in names)


def _load(source: str, rows: int | None) -> Tokenizer:
    """Builds the tokenizer of a name."""
    note = Path(source, "atropos_gym.json")
    if note.is_file():  # a model folder of ours names its tokenizer: one over bytes has no file of its own
        from atropos_gym.tokenizers.hub import read_object

        named = read_object(note).get("tokenizer")
        if not isinstance(named, str) or not named.strip():
            raise ConfigError(f'{str(note)!r} names no tokenizer: write {{"tokenizer": "bytes"}}')
        source = named
    if source == "bytes":
        return BytesTokenizer() if rows is None else BytesTokenizer(rows)
    from atropos_gym.tokenizers.hf import load_hf

    return load_hf(source, rows)


def _reload(source: str, rows: int | None) -> Tokenizer:
    """Unpickles a tokenizer from its source."""
    return load_tokenizer(source, rows=None if source == "bytes" and rows == 264 else rows)


def digest(parts: Mapping[str, Any]) -> str:
    """Returns ``sha256:...`` over the canonical JSON of ``parts``."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def fingerprint(tokenizer: str | Path | Any) -> str:
    """Returns ``sha256:...``: equal for two tokenizers that give the same ids, whatever class loaded them.

    Example:
        >>> fingerprint("bytes") == load_tokenizer("bytes").fingerprint
        True
    """
    return load_tokenizer(tokenizer).fingerprint
