"""Text without added tokens to ids, word by word: a backend's pre-tokenizer and model."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

__all__ = ["Words", "words_of"]

#: ``words(text, at_start)`` yields the ids of each word and where in the text it ends.
Words: TypeAlias = Callable[[str, bool], Iterator[tuple[list[int], int]]]


def words_of(backend: Any) -> Words:
    """Returns how ``backend`` makes ids of a stretch of normalised text.

    ``at_start`` says whether the stretch begins the whole text: some SentencePiece pipelines put a blank in
    front of the first word only.
    """
    own: Words | None = getattr(backend, "words", None)
    if own is not None:
        return own
    model, first = backend.model, backend.pre_tokenizer
    later = _behind_the_start(first)

    def words(text: str, at_start: bool = True) -> Iterator[tuple[list[int], int]]:
        if not text:
            return
        splitter = first if at_start else later
        if splitter is None:
            yield [token.id for token in model.tokenize(text)], len(text)
            return
        for word, (_, end) in splitter.pre_tokenize_str(text):
            yield [token.id for token in model.tokenize(word)], end

    return words


def _behind_the_start(pre_tokenizer: Any) -> Any:
    """Returns a pre-tokenizer as it works behind the start of a text."""
    if pre_tokenizer is None:
        return None
    try:
        state = json.loads(pre_tokenizer.__getstate__())
    except Exception:  # written in Python: it has no state, and no notion of a start
        return pre_tokenizer
    if not _never_prepends(state):
        return pre_tokenizer
    other = pickle.loads(pickle.dumps(pre_tokenizer))
    other.__setstate__(json.dumps(state).encode())
    return other


def _never_prepends(state: Any) -> bool:
    """Turns ``prepend_scheme: first`` into ``never``; returns whether there was one."""
    if isinstance(state, list):
        return any([_never_prepends(item) for item in state])
    if not isinstance(state, dict):
        return False
    found = state.get("prepend_scheme") == "first"
    if found:
        state["prepend_scheme"] = "never"
    return any([found, *(_never_prepends(item) for item in state.values())])
