"""PlainEncoder and ControlText against the backend itself, on added tokens of every kind."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import TemplateError
from atropos_gym.tokenizers.control_text import ControlText
from atropos_gym.tokenizers.plain_encoding import PlainEncoder
from atropos_gym.tokenizers.spellings import any_of
from tests.tools.imitation_tokenizers import SPECIAL, TAGS, tiny_tokenizer

# content: (lstrip, rstrip, single_word, normalized)
ADDED = {
    "[L]": (True, False, False, False),
    "[R]": (False, True, False, False),
    "[B]": (True, True, False, False),
    "Word": (False, False, True, False),
    "NoRm": (False, False, False, True),
    "\n\n": (False, False, False, False),
    "\n\n\n": (False, False, False, False),
}


def _backend(normalizer: Any = None) -> Any:
    from tokenizers import AddedToken

    backend = tiny_tokenizer().backend_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(
        [
            AddedToken(text, lstrip=left, rstrip=right, single_word=word, normalized=normal)
            for text, (left, right, word, normal) in ADDED.items()
        ]
    )
    return backend


def _lower() -> Any:
    from tokenizers import normalizers

    return normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


BACKENDS = {"byte level": _backend(), "lowercase": _backend(_lower())}
NAMES = st.sampled_from(sorted(BACKENDS))
TEXT = st.lists(
    st.sampled_from([" ", "  ", "\n", "a", "norm", "sword", "é", *ADDED, *SPECIAL, *TAGS])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@given(name=NAMES, text=TEXT)
@settings(deadline=None, max_examples=150)
def test_without_control_tokens_it_is_the_backend(name: str, text: str) -> None:
    backend = BACKENDS[name]
    assert (
        PlainEncoder(backend, frozenset()).encode(text) == backend.encode(text, add_special_tokens=False).ids
    )


@given(name=NAMES, text=TEXT)
@settings(deadline=None, max_examples=150)
def test_the_templates_own_control_tokens_keep_their_ids_and_their_neighbours(name: str, text: str) -> None:
    """Encoding stretch by stretch is the backend's encoding of the whole, blanks around tokens included."""
    backend, text = BACKENDS[name], ControlText.unmark(text)
    spelled = {t.content: i for i, t in backend.get_added_tokens_decoder().items()}
    control = ControlText(backend, frozenset(spelled[s] for s in (*SPECIAL, "[L]", "[R]", "[B]")))
    whole = backend.encode(text, add_special_tokens=False).ids
    assert control._encode_marked(text).ids == whole == control.encode(text)
    ends = control.encode_with_ends(text).ends
    assert all(0 <= end <= len(text) for end in ends)


@given(name=NAMES, texts=st.lists(TEXT, max_size=4))
@settings(deadline=None, max_examples=150)
def test_marked_spellings_are_text(name: str, texts: list[str]) -> None:
    backend = BACKENDS[name]
    special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.content in SPECIAL)
    control = ControlText(backend, special)
    rendered = "".join(f"<|im_start|>{control.mark(text)}<|im_end|>" for text in texts)
    ids = control.encode(rendered)
    assert [i for i in ids if i in special] == [1, 2] * len(texts)
    plain = "".join(f"<|im_start|>{text}<|im_end|>" for text in texts)
    assert control.unmark(rendered) == control.unmark(plain)


def test_marks_in_the_input_are_removed_before_they_can_hide_a_spelling() -> None:
    control = ControlText(_backend(), frozenset({1, 2}))
    for sly in (
        "<|im_\U000f0002end|>",
        "\U000f0002<|im_end|>",
        "<|im_end\U000f0003|>",
        "<|im_<|im_end|>end|>",
    ):
        assert 2 not in control.encode(control.mark(sly))
        (key, value), *_ = control.mark({sly: [sly, 1, None]}).items()
        assert 2 not in control.encode(key)
        assert value == [key, 1, None]


def test_a_template_may_cut_through_marks() -> None:
    control = ControlText(_backend(), frozenset({1, 2}))
    marked = control.mark("<|im_end|>")
    for cut in (marked[:3], marked[3:], marked[1:], marked[:-1]):
        assert 2 not in control.encode(f"a{cut}b")
    assert control.mark([1, 2.5, None, True]) == [1, 2.5, None, True]


def test_a_vocabulary_that_spells_a_control_token_is_told() -> None:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    with pytest.raises(TemplateError, match="control id 0"):
        PlainEncoder(backend, frozenset({0})).encode("<s>")


@given(
    st.lists(st.text(alphabet="ab<|é.(", min_size=1, max_size=5), max_size=12),
    st.text(alphabet="ab<|é.(", max_size=30),
)
@settings(max_examples=200)
def test_a_pattern_of_many_spellings_finds_the_longest(spellings: list[str], text: str) -> None:
    plain = "|".join(re.escape(s) for s in sorted(spellings, key=len, reverse=True)) or "(?!)"
    assert re.findall(any_of(spellings), text) == re.findall(plain, text)
    assert re.findall(f"{any_of(spellings)}(?=b)", text) == re.findall(f"(?:{plain})(?=b)", text)


def test_spellings_that_go_on_from_one_another_nest() -> None:
    runs = ["\n" * length for length in range(1, 33)]
    assert re.findall(any_of(runs), "\n" * 40 + "x\n") == ["\n" * 32, "\n" * 8, "\n"]
