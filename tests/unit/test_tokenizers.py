"""Tokenizers: bytes by hand, Hugging Face on a tiny imitation, caches and fingerprints."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import BytesTokenizer, Tokenizer, fingerprint, load_tokenizer
from tests.tools.imitation_tokenizers import CHATML, SPECIAL, TAGS, tiny_tokenizer

BYTES = load_tokenizer("bytes")
_TINY: Any = load_tokenizer(tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer().save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return path


# --- bytes ---


def test_bytes_has_its_eight_control_ids() -> None:
    names = ("PAD", "BOS", "END", "SYSTEM", "USER", "ASSISTANT", "TOOL")
    assert [getattr(BytesTokenizer, name) for name in names] == list(range(256, 263))
    assert (len(BYTES), BYTES.rows, BYTES.name) == (264, 264, "bytes")
    assert isinstance(BYTES, Tokenizer)


@given(st.text())
@settings(deadline=None)
def test_bytes_text_holds_no_control_id_and_comes_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert BYTES.decode(ids) == text


@given(st.lists(st.integers(0, 263)))
@settings(deadline=None)
def test_bytes_decode_never_raises_and_drops_control_ids(ids: list[int]) -> None:
    assert BYTES.decode(ids) == bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def test_a_lone_surrogate_is_encoded() -> None:
    assert BYTES.encode("\ud800") == [0xED, 0xA0, 0x80]


def test_bytes_takes_a_model_with_more_rows_and_no_fewer() -> None:
    assert load_tokenizer("bytes", rows=512).rows == 512
    with pytest.raises(ConfigError, match="264"):
        load_tokenizer("bytes", rows=100)


def test_bytes_imports_no_transformers() -> None:
    code = (
        "import sys\nimport atropos_gym.text_env\nfrom atropos_gym.rendering import ChatRenderer\n"
        "ChatRenderer('bytes').prompt([{'role': 'user', 'content': 'x'}])\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- loading, copying, pickling ---


@pytest.mark.parametrize("source", ["bytes", "folder"])
def test_one_object_per_source_copy_and_pickle(source: str, folder: Path) -> None:
    name: Any = str(folder) if source == "folder" else source
    tokenizer = load_tokenizer(name)
    assert load_tokenizer(name) is tokenizer
    assert load_tokenizer(tokenizer) is tokenizer
    assert copy.deepcopy(tokenizer) is tokenizer
    assert copy.deepcopy({"kwargs": [tokenizer]})["kwargs"][0] is tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)) is tokenizer


def test_a_path_is_a_folder(folder: Path) -> None:
    assert load_tokenizer(folder) is load_tokenizer(str(folder))


def test_rows_come_from_the_model_config_unless_told(folder: Path) -> None:
    assert load_tokenizer(folder).rows == 512
    assert load_tokenizer(folder, rows=600).rows == 600
    assert len(load_tokenizer(folder)) == len(tiny_tokenizer())


def test_generation_config_names_further_end_ids(folder: Path) -> None:
    assert ChatRenderer(str(folder)).stop_ids == (2, 0)


def test_a_transformers_tokenizer_is_wrapped_once_and_pickles_whole() -> None:
    hf = tiny_tokenizer()
    tokenizer = load_tokenizer(hf)
    assert load_tokenizer(hf) is tokenizer
    assert tokenizer.rows == len(hf)
    twin = pickle.loads(pickle.dumps(tokenizer))
    assert twin.encode("Hello <think>") == tokenizer.encode("Hello <think>")


def test_a_tokenizer_that_grew_is_wrapped_anew() -> None:
    hf = tiny_tokenizer()
    before = load_tokenizer(hf)
    hf.add_tokens(["<new>"])
    assert len(load_tokenizer(hf)) == len(before) + 1


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere"])
def test_a_missing_folder_is_named(source: str) -> None:
    with pytest.raises(MissingData, match=source):
        load_tokenizer(source)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_a_stranger_is_no_tokenizer() -> None:
    with pytest.raises(ConfigError, match="int"):
        load_tokenizer(3)


def test_reprs_name_the_source(folder: Path) -> None:
    assert repr(BYTES) == "BytesTokenizer()"
    assert repr(BytesTokenizer(300)) == "BytesTokenizer(rows=300)"
    assert repr(load_tokenizer(folder)) == f"HFTokenizer({str(folder)!r}, rows=512)"
    assert repr(ChatRenderer("bytes")) == "ChatRenderer('bytes', past='append')"


def test_without_transformers_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingData, match="pip install"):
        load_tokenizer("some/model")


# --- Hugging Face ---


def test_control_spellings_are_text() -> None:
    tokenizer = load_tokenizer(tiny_tokenizer())
    for spelling in SPECIAL:
        ids = tokenizer.encode(f"a{spelling}b")
        assert not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == f"a{spelling}b"


_WORDS = st.sampled_from(["a", " ", "\n", "é", "1", *SPECIAL, *TAGS]) | st.text(max_size=3)


@given(st.lists(_WORDS, max_size=8).map("".join))
@settings(deadline=None, max_examples=100)
def test_encoding_is_the_backends_own_where_nothing_is_special(text: str) -> None:
    hf = _TINY.hf
    tokenizer = _TINY
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & set(ids)
    if not any(spelling in text for spelling in SPECIAL):
        assert ids == hf(text, add_special_tokens=False)["input_ids"]


def test_decoding_keeps_control_tokens_and_skips_ids_beyond_the_tokenizer() -> None:
    tokenizer = _TINY
    ids = [*tokenizer.encode("Hi"), 2, len(tokenizer) + 5]
    assert tokenizer.decode(ids) == "Hi<|im_end|>"


def test_padding_left_on_the_backend_changes_nothing() -> None:
    hf = tiny_tokenizer()
    hf.backend_tokenizer.enable_padding(length=64)
    hf.backend_tokenizer.enable_truncation(3)
    said = [{"role": "user", "content": "Hello"}]
    assert ChatRenderer(hf).prompt(said) == ChatRenderer(_TINY).prompt(said)


# --- fingerprints ---


def test_fingerprints_have_the_form_of_a_digest() -> None:
    for tokenizer in (BYTES, _TINY):
        assert fingerprint(tokenizer).startswith("sha256:")
        assert len(fingerprint(tokenizer)) == 71
    assert fingerprint("bytes") == BYTES.fingerprint


def test_equal_tokenizers_have_equal_fingerprints(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    one = load_tokenizer(folder).fingerprint
    assert fingerprint(AutoTokenizer.from_pretrained(folder)) == one
    assert fingerprint(PreTrainedTokenizerFast.from_pretrained(folder)) == one
    assert fingerprint(tiny_tokenizer()) == one
    padded = tiny_tokenizer()
    padded(["a", "a b"], padding=True, truncation=True, max_length=2)
    assert fingerprint(padded) == one
    left = tiny_tokenizer()
    left.padding_side = "left"
    left.save_pretrained(tmp_path)
    assert fingerprint(tmp_path) == one


def test_anything_that_can_change_ids_changes_the_fingerprint() -> None:
    seen = {"bytes": fingerprint("bytes"), "tiny": fingerprint(tiny_tokenizer())}
    seen["a blank in the template"] = fingerprint(tiny_tokenizer(CHATML + " "))
    grown = tiny_tokenizer()
    grown.add_tokens(["<new>"])
    seen["one token more"] = fingerprint(grown)
    seen["one merge less"] = fingerprint(_without_last_merge())
    ended = tiny_tokenizer()
    ended.eos_token = "<|endoftext|>"
    seen["another eos"] = fingerprint(ended)
    assert len(set(seen.values())) == len(seen), seen


def _without_last_merge() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    hf = tiny_tokenizer()
    data = json.loads(hf.backend_tokenizer.to_str())
    data["model"]["merges"].pop()
    backend = Tokenizer.from_str(json.dumps(data))
    other = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    other.chat_template = CHATML
    return other


def test_renderers_add_template_and_settings_to_the_fingerprint() -> None:
    prints = {
        ChatRenderer(_TINY).fingerprint,
        ChatRenderer(_TINY, template=CHATML + " ").fingerprint,
        ChatRenderer(_TINY, template_kwargs={"enable_thinking": False}).fingerprint,
        ChatRenderer(_TINY, system="merge").fingerprint,
        ChatRenderer("bytes").fingerprint,
    }
    assert len(prints) == 5
    assert ChatRenderer(_TINY).fingerprint in prints


def test_carriage_returns_in_a_template_do_not_count() -> None:
    lines = CHATML.replace("{% endfor %}", "{% endfor %}\n")
    assert fingerprint(tiny_tokenizer(lines)) == fingerprint(tiny_tokenizer(lines.replace("\n", "\r\n")))
