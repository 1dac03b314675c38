"""Hugging Face tokenizers behind our ``Tokenizer`` protocol; transformers is imported when one is loaded."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.tokenizers.base import FINGERPRINT_FORMAT, digest, load_tokenizer
from atropos_gym.tokenizers.control_text import ControlText
from atropos_gym.tokenizers.hub import beside, hub_answers
from atropos_gym.tokenizers.plain_encoding import PlainEncoder
from atropos_gym.tokenizers.slow import SlowBackend

__all__ = ["HFTokenizer", "load_hf", "tool_schema", "wrap_backend", "wrap_hf"]

# Texts whose ids see the whole pipeline: blanks, newlines, digits, scripts, emoji, marks, control spellings.
_PROBES = (
    "", " ", "  ", "a", " a", "a ", "  a  b", "\n", "\n\n", " \n ", "\t", "\r\n", "12345", "a  12", "3.14",
    "1,000.50%", "it's we'll", "DON'T", "x != y", "do n't", "é", "e\u0301", "\u00a0", "½ ١", "日本語", "🙂",
    "👩\u200d🚀", "\u200b", "\ufeff", "Hello world", "<think>\n</think>", "<|im_end|>", "</s>", "[INST]", "▁",
)  # fmt: skip


class HFTokenizer:
    """A transformers tokenizer.

    Args:
        hf: the transformers tokenizer.
        name: what people call it.
        rows: rows of the model's embedding.
        source: what ``load_tokenizer`` takes to load it again; None pickles the object itself.
        eos_ids: end ids that the model's generation config names.
        rows_known: the rows are the model's own, not just the tokenizer's length.
        template: the chat template of the processor around it, for a tokenizer that has none itself.

    Attributes:
        hf: the transformers tokenizer.
        backend: its ``tokenizers.Tokenizer``, or a ``SlowBackend`` where it has none.
        eos_ids: every end id known without looking at a template.
        config_eos_ids: those of them that the generation config names.
        rows_known: the rows are the model's own, not just the tokenizer's length.
        given_template: the chat template of the processor around it.

    Raises:
        ConfigError: a tokenizer written in Python that does not take text apart as transformers expects.
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
        template: Any = None,
    ) -> None:
        self.hf = hf
        self.backend: Any = getattr(hf, "backend_tokenizer", None)
        self.name = name
        if not hasattr(self.backend, "get_added_tokens_decoder"):
            self.backend = _slow_backend(hf, name)
        self.rows = rows
        self.rows_known = rows_known
        self.given_template = template
        self._source = source
        own = () if hf.eos_token_id is None else (int(hf.eos_token_id),)
        self.config_eos_ids: tuple[int, ...] = tuple(map(int, eos_ids))
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*self.config_eos_ids, *own)))
        # A vocabulary may have holes; its last id decides what lies beyond it.
        self._length = max(len(hf), 1 + max(self.backend.get_added_tokens_decoder(), default=-1))

    def __len__(self) -> int:
        """Returns the number of ids that the tokenizer knows, added tokens included."""
        return self._length

    @property
    def chat_template(self) -> Any:
        """Jinja source, a dict of several by name, or None."""
        return getattr(self.hf, "chat_template", None) or self.given_template

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are marked special, or that have a role such as padding."""
        named = frozenset(getattr(self.hf, "all_special_ids", ()))
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(i for i, token in added if token.special or i in named)

    @cached_property
    def _text(self) -> ControlText:
        added = self.backend.get_added_tokens_decoder().keys()
        return ControlText(self.backend, self.special_ids.union(added & frozenset(self.eos_ids)))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text: no BOS, no special id whatever the text spells."""
        return self._text.encode_plain(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text, control tokens visible; ids beyond the tokenizer have none."""
        known = [int(i) for i in ids if 0 <= i < self._length]
        return str(self.backend.decode(known, skip_special_tokens=False))

    def fill_template(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        speak: bool,
        tools: Any = None,
        variables: Mapping[str, Any],
    ) -> str:
        """Returns what transformers' sandbox makes of a chat template; a template may raise anything."""
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered, _ = render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=speak, **variables
        )
        return str(rendered[0])

    @cached_property
    def fingerprint(self) -> str:
        """``sha256:...``: equal for two tokenizers that give the same ids, whatever class or state."""
        added = sorted(self.backend.get_added_tokens_decoder().items())
        template = self.chat_template
        if isinstance(template, str):
            template = template.replace("\r\n", "\n")
        elif isinstance(template, Mapping):
            template = {name: source.replace("\r\n", "\n") for name, source in template.items()}
        # The parts of the pipeline before the model are seen by probes: their form differs between versions.
        whole = PlainEncoder(self.backend, frozenset())
        return digest(
            {
                "format": FINGERPRINT_FORMAT,
                "model": hashlib.sha256(self._vocabulary().encode()).hexdigest(),
                "added": [[i, t.content, t.lstrip, t.rstrip, t.single_word, t.normalized] for i, t in added],
                "probes": [whole.encode(text) for text in _PROBES],
                "bos": self.hf.bos_token_id,
                "eos": self.hf.eos_token_id,
                "template": template,
            }
        )

    def _vocabulary(self) -> str:
        """Returns the model of a fast tokenizer, the sorted vocabulary of another."""
        if isinstance(self.backend, SlowBackend):
            return json.dumps(sorted(self.hf.get_vocab().items()))
        # What stands before the model is state: padding and truncation of whoever called last.
        serialised = str(self.backend.to_str(pretty=False))
        return serialised[serialised.index('"model":{') :]

    def __deepcopy__(self, memo: dict[int, Any]) -> HFTokenizer:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._source is not None:
            name, rows = self._source
            return _reload, (name, rows)
        return wrap_hf, (self.hf, self.rows if self.rows_known else None, self.given_template)

    def __repr__(self) -> str:
        return f"HFTokenizer({self.name!r}, rows={self.rows})"


def _slow_backend(hf: Any, name: str) -> SlowBackend:
    """Returns the backend of a tokenizer that transformers runs in Python, tried on a few texts."""
    backend = SlowBackend(hf)
    try:
        plain = PlainEncoder(backend, frozenset())
        works = all(plain.encode(text) == backend.encode(text).ids for text in _PROBES)
    except Exception as error:  # code that came with a model may raise anything
        raise ConfigError(
            f"{name} ({type(hf).__name__}) is no tokenizer that can be used here ({_first_line(error)}): "
            "give a folder with tokenizer.json"
        ) from error
    if not works:
        raise ConfigError(
            f"{name} ({type(hf).__name__}) takes text apart in a way of its own, so that control tokens in "
            "text cannot be kept out: give a folder with tokenizer.json"
        )
    return backend


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _reload(source: str, rows: int | None) -> Any:
    """Unpickles a tokenizer from its source."""
    return load_tokenizer(source, rows=rows)


def load_hf(source: str, rows: int | None) -> HFTokenizer:
    """Loads a tokenizer by folder, file or model name.

    Raises:
        MissingData: transformers is not installed, or nothing is there.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        raise MissingData(
            f"tokenizer {source!r} needs transformers: pip install 'atropos-gym[learn]', or use 'bytes'"
        ) from None
    path = Path(source)
    local = path.exists()
    if source.startswith(("/", ".", "~")) and not local:
        raise MissingData(f"no tokenizer at {source!r}: the folder does not exist")
    try:
        if path.is_file():
            hf = PreTrainedTokenizerFast(tokenizer_file=source)
        else:
            hf = AutoTokenizer.from_pretrained(source, local_files_only=local or not hub_answers())
    except Exception as error:  # a broken file raises what the library that reads it likes
        reason = _first_line(error)[:200]
        if not local and not hub_answers():
            reason = "no such folder, not among the models downloaded, and the model hub was not reached"
        raise MissingData(
            f"no tokenizer at {source!r} ({reason}): give a folder with tokenizer.json or 'bytes'"
        ) from error
    return _with_model_files(hf, source, source=(source, rows), rows=rows, folder=source)


def _with_model_files(
    hf: Any,
    name: str,
    *,
    source: tuple[str, int | None] | None,
    rows: int | None,
    folder: str | None,
    template: Any = None,
) -> HFTokenizer:
    """Returns our view of a tokenizer with what the files beside it say about its model."""
    wanted = rows or (None if folder is None else _rows_of(folder))
    return HFTokenizer(
        hf,
        name,
        int(wanted or len(hf)),
        source=source,
        eos_ids=[] if folder is None else _ends_of(folder),
        rows_known=wanted is not None,
        template=template,
    )


def _rows_of(folder: str) -> int | None:
    """Returns the rows that a model's configuration tells, or None.

    Raises:
        ConfigError: it tells something else.
    """
    config = beside(folder, "config.json")
    inner = config.get("text_config")
    known = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, Mapping) else None)
    if known is not None and (type(known) is not int or known < 1):
        raise ConfigError(f"vocab_size in config.json of {folder} must be a positive int, got {known!r:.60}")
    return known


def _ends_of(folder: str) -> list[int]:
    """Returns the end ids that a model's generation config names.

    Raises:
        ConfigError: it names something else.
    """
    ends = beside(folder, "generation_config.json").get("eos_token_id")
    if ends is None:
        return []
    ends = ends if isinstance(ends, list) else [ends]
    wrong = next((end for end in ends if type(end) is not int or end < 0), None)
    if wrong is not None:
        raise ConfigError(
            f"eos_token_id in generation_config.json of {folder} must be ids, got {wrong!r:.60}: mend it"
        )
    return ends


_wrapped: dict[int, tuple[HFTokenizer, Any]] = {}


def wrap_hf(hf: Any, rows: int | None = None, template: Any = None) -> HFTokenizer:
    """Returns our view of a transformers tokenizer, one per object and state.

    Args:
        hf: the tokenizer; one that was loaded from a folder finds its model's files there.
        rows: rows of the model's embedding, where they are known better.
        template: a chat template for a tokenizer that has none.
    """
    # The view keeps the object alive, so its id is never reused.
    known, state = _wrapped.get(id(hf), (None, None))
    now = copy.deepcopy((len(hf), getattr(hf, "chat_template", None), hf.bos_token_id, hf.eos_token_id))
    told = known is not None and rows in (None, known.rows) and template in (None, known.given_template)
    if known is None or state != now or not told:
        name = str(getattr(hf, "name_or_path", "") or type(hf).__name__)
        folder = name if Path(name).is_dir() and name != type(hf).__name__ else None
        known = _with_model_files(hf, name, source=None, rows=rows, folder=folder, template=template)
        if rows is None and folder is not None and known.rows < len(hf) and _grew(hf, folder):
            known = HFTokenizer(
                hf,
                name,
                len(hf),
                source=None,
                eos_ids=known.config_eos_ids,
                rows_known=False,
                template=template,
            )
        _wrapped[id(hf)] = known, now
    return known


def _grew(hf: Any, folder: str) -> bool:
    """Returns whether tokens were added since a tokenizer was loaded: its model's files know none of them."""
    return len(load_tokenizer(folder)) < len(hf)


_backends: dict[int, tuple[Any, Any]] = {}


def wrap_backend(backend: Any, rows: int | None = None) -> HFTokenizer:
    """Returns our view of a ``tokenizers.Tokenizer``: it has no end id and no template of its own."""
    from transformers import PreTrainedTokenizerFast

    if id(backend) not in _backends:
        _backends[id(backend)] = backend, PreTrainedTokenizerFast(tokenizer_object=backend)
    return wrap_hf(_backends[id(backend)][1], rows)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function with type hints and a docstring, as transformers makes it."""
    from transformers.utils import get_json_schema

    schema: dict[str, Any] = get_json_schema(function)
    return schema
