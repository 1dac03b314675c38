"""Hugging Face tokenizers behind our ``Tokenizer`` protocol; transformers is imported when one is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.tokenizers import FINGERPRINT_FORMAT, digest, load_tokenizer
from atropos_gym.tokenizers.plain_encoding import PlainEncoder

__all__ = ["HFTokenizer", "load_hf", "wrap_hf"]

# Texts whose ids see the whole pipeline: blanks, newlines, digits, scripts, emoji, marks, control spellings.
_PROBES = (
    "", " ", "  ", "a", " a", "a ", "  a  b", "\n", "\n\n", " \n ", "\t", "\r\n", "12345", "a  12", "3.14",
    "1,000.50%", "it's we'll", "DON'T", "x != y", "do n't", "é", "e\u0301", "\u00a0", "½ ١", "日本語", "🙂",
    "👩\u200d🚀", "\u200b", "\ufeff", "Hello world", "<think>\n</think>", "<|im_end|>", "</s>", "[INST]", "▁",
)  # fmt: skip


class HFTokenizer:
    """A transformers tokenizer with a fast backend.

    Args:
        hf: the transformers tokenizer.
        name: what people call it.
        rows: rows of the model's embedding.
        source: what ``load_tokenizer`` takes to load it again; None pickles the object itself.
        eos_ids: end ids that the model's generation config names.

    Attributes:
        hf: the transformers tokenizer.
        backend: its ``tokenizers.Tokenizer``.
        eos_ids: every end id known without looking at a template.
        config_eos_ids: those of them that the generation config names.
        rows_known: the rows are the model's own, not just the tokenizer's length.

    Raises:
        ConfigError: a tokenizer without a fast backend.
    """

    def __init__(
        self,
        hf: Any,
        name: str,
        rows: int,
        *,
        source: tuple[str, int | None] | None,
        eos_ids: Sequence[int],
        rows_known: bool = False,
    ) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
            raise ConfigError(f"{name} is a slow tokenizer ({type(hf).__name__}): it needs a tokenizer.json")
        self.hf = hf
        self.backend = backend
        self.name = name
        self.rows = rows
        self.rows_known = rows_known
        self._source = source
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.config_eos_ids: tuple[int, ...] = tuple(map(int, eos_ids))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*self.config_eos_ids, *own)))
        self._length = len(hf)

    def __len__(self) -> int:
        """Returns the number of ids that the tokenizer knows, added tokens included."""
        return self._length

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are marked special."""
        return frozenset(i for i, t in self.backend.get_added_tokens_decoder().items() if t.special)

    @cached_property
    def _plain(self) -> PlainEncoder:
        return PlainEncoder(self.backend, self.special_ids.union(self.eos_ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text: no BOS, no special id whatever the text spells."""
        return self._plain.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, control tokens visible; ids beyond the tokenizer have none."""
        return str(self.backend.decode([int(i) for i in ids if i < self._length], skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """``sha256:...``: equal for two tokenizers that give the same ids, whatever class or state."""
        # What stands before the model is state: padding and truncation of whoever called last.
        serialised = self.backend.to_str(pretty=False)
        model = serialised[serialised.index('"model":{') :]
        if self.backend.padding is not None:
            self.backend.no_padding()
        if self.backend.truncation is not None:
            self.backend.no_truncation()
        added = sorted(self.backend.get_added_tokens_decoder().items())
        template = getattr(self.hf, "chat_template", None)
        if isinstance(template, str):
            template = template.replace("\r\n", "\n")
        return digest(
            {
                "format": FINGERPRINT_FORMAT,
                "model": hashlib.sha256(model.encode()).hexdigest(),
                "added": [[i, t.content, t.lstrip, t.rstrip, t.single_word, t.normalized] for i, t in added],
                "probes": [self.backend.encode(text, add_special_tokens=False).ids for text in _PROBES],
                "bos": self.hf.bos_token_id,
                "eos": self.hf.eos_token_id,
                "template": template,
            }
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> HFTokenizer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None:
            name, rows = self._source
            return _reload, (name, rows)
        return wrap_hf, (self.hf, self.rows)

    def __repr__(self) -> str:
        return f"HFTokenizer({self.name!r}, rows={self.rows})"


def _reload(source: str, rows: int | None) -> Any:
    """Unpickles a tokenizer from its source."""
    return load_tokenizer(source, rows=rows)


def load_hf(source: str, rows: int | None) -> HFTokenizer:
    """Loads a tokenizer by folder or model name.

    Raises:
        MissingData: transformers is not installed, or nothing is there.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingData(
            f"tokenizer {source!r} needs transformers: pip install 'atropos-gym[learn]', or use 'bytes'"
        ) from None
    if source.startswith(("/", ".", "~")) and not Path(source).is_dir():
        raise MissingData(f"no tokenizer at {source!r}: the folder does not exist")
    try:
        hf = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise MissingData(
            f"no tokenizer at {source!r} ({reason}): give a folder with tokenizer.json or 'bytes'"
        ) from error
    config = _read_json(source, "config.json")
    known = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    ends = _read_json(source, "generation_config.json").get("eos_token_id")
    eos_ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    wanted = rows or known
    return HFTokenizer(
        hf,
        source,
        int(wanted or len(hf)),
        source=(source, rows),
        eos_ids=eos_ids,
        rows_known=wanted is not None,
    )


def _read_json(source: str, name: str) -> dict[str, Any]:
    """Returns a JSON file beside the tokenizer, or {} where there is none."""
    path: Path | None = Path(source) / name
    if not Path(source).is_dir():
        from transformers.utils import cached_file

        found = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        path = None if found is None else Path(found)
    if path is None or not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


_wrapped: dict[int, HFTokenizer] = {}


def wrap_hf(hf: Any, rows: int | None = None) -> HFTokenizer:
    """Returns our view of a transformers tokenizer, one per object."""
    # The view keeps the object alive, so its id is never reused.
    known = _wrapped.get(id(hf))
    if known is None or len(known) != len(hf) or rows not in (None, known.rows):
        name = str(getattr(hf, "name_or_path", "") or type(hf).__name__)
        _wrapped[id(hf)] = HFTokenizer(
            hf, name, int(rows or len(hf)), source=None, eos_ids=(), rows_known=rows is not None
        )
    return _wrapped[id(hf)]
