"""Tokenizers of every make: processors, files, backends, Python code, SentencePiece, and names nobody has."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import fingerprint, hub, load_tokenizer
from atropos_gym.tokenizers.control_text import ControlText
from tests.tools.imitation_families import FAMILIES, family_renderer, family_tokenizer
from tests.tools.imitation_tokenizers import CHATML, SPECIAL, tiny_tokenizer

USER = [{"role": "user", "content": "Hi é <|im_end|>"}]
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)


class Processor:
    """Images and a tokenizer, as vision models bring them."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template


def python_tokenizer() -> Any:
    """A tokenizer that transformers runs in Python: bytes from id 3 on, 125 added tokens behind."""
    from transformers import ByT5Tokenizer

    hf = ByT5Tokenizer()
    hf.chat_template = PLAIN
    return hf


# --- processors, files, backends ---


def test_a_processor_is_read_by_its_tokenizer() -> None:
    hf = tiny_tokenizer()
    assert load_tokenizer(Processor(hf)) is load_tokenizer(hf)
    bare = tiny_tokenizer(None)
    renderer = ChatRenderer(Processor(bare, CHATML))
    assert renderer.prompt(USER) == ChatRenderer(hf).prompt(USER)
    assert pickle.loads(pickle.dumps(renderer)).prompt(USER) == renderer.prompt(USER)


def test_a_tokenizer_json_is_a_tokenizer(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 500}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    tokenizer: Any = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("Hello") == load_tokenizer(tiny_tokenizer()).encode("Hello")
    assert (tokenizer.rows, tokenizer.eos_ids) == (500, (0,))
    assert ChatRenderer(tokenizer, template=CHATML).stop_ids == (2, 0)


def test_a_backend_is_a_tokenizer_without_a_template() -> None:
    backend = tiny_tokenizer().backend_tokenizer
    tokenizer = load_tokenizer(backend)
    assert load_tokenizer(backend) is tokenizer
    assert ChatRenderer(backend, template=CHATML).prompt(USER) == ChatRenderer(tiny_tokenizer()).prompt(USER)


def test_an_object_from_a_folder_finds_its_models_files(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 512}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    tokenizer: Any = load_tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert (tokenizer.rows, tokenizer.rows_known, tokenizer.eos_ids) == (512, True, (0, 2))
    assert ChatRenderer(tokenizer).stop_ids == (2, 0)
    assert tokenizer.fingerprint == fingerprint(tmp_path)


def test_rows_of_a_file_are_not_those_of_a_tokenizer_that_grew(tmp_path: Path) -> None:
    """Whoever adds tokens gives the model rows for them; a folder that lacks rows is still found out."""
    from transformers import AutoTokenizer

    hf = tiny_tokenizer()
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(hf)}))
    grown = AutoTokenizer.from_pretrained(tmp_path)
    grown.add_tokens(["<|stop|>"], special_tokens=True)
    stop = len(hf)
    tokenizer: Any = load_tokenizer(grown)
    assert (tokenizer.rows, tokenizer.rows_known) == (stop + 1, False)
    renderer = ChatRenderer(grown, template=CHATML.replace("<|im_end|>", "<|stop|>"), stop_ids=[stop])
    assert renderer.prompt(USER).count(stop) == 1
    assert load_tokenizer(grown, rows=stop + 9).rows == stop + 9
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(hf) - 5}))
    short: Any = load_tokenizer(AutoTokenizer.from_pretrained(tmp_path))
    assert (short.rows, short.rows_known) == (len(hf) - 5, True)


def test_a_processors_template_is_seen_after_its_tokenizer_was(tmp_path: Path) -> None:
    bare = tiny_tokenizer(None)
    load_tokenizer(bare)
    assert ChatRenderer(Processor(bare, CHATML)).prompt(USER) == ChatRenderer(tiny_tokenizer()).prompt(USER)


def test_a_vocabulary_with_holes_ends_behind_its_last_id() -> None:
    from tokenizers import AddedToken

    hf = tiny_tokenizer()
    vocabulary = json.loads(hf.backend_tokenizer.to_str())
    vocabulary["added_tokens"].append({**vocabulary["added_tokens"][-1], "id": 900, "content": "<far>"})
    vocabulary["model"]["vocab"]["<far>"] = 900
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    far = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)))
    assert AddedToken("<far>").content == "<far>"
    tokenizer = load_tokenizer(far)
    assert len(tokenizer) == 901
    assert tokenizer.decode([900, 700]) == "<far>"


@pytest.mark.parametrize(
    "source", [3, None, object(), ["a"], {"a": 1}], ids=lambda source: type(source).__name__
)
def test_what_is_no_tokenizer_is_told(source: Any) -> None:
    with pytest.raises(ConfigError, match=f"got {type(source).__name__}$"):
        load_tokenizer(source)


def test_a_class_is_no_tokenizer() -> None:
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ConfigError, match="got the class"):
        load_tokenizer(PreTrainedTokenizerFast)
    with pytest.raises(ConfigError, match="empty string"):
        load_tokenizer(" ")


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, "9"], ids=repr)
def test_rows_are_a_positive_number(rows: Any) -> None:
    with pytest.raises(ConfigError, match="rows must be a positive int"):
        load_tokenizer("bytes", rows=rows)


# --- names that nobody has ---


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ask", lambda: False)
    monkeypatch.setattr(hub, "_last", None)


def test_an_unknown_name_fails_at_once_where_no_hub_answers(no_hub: None) -> None:
    for name in ("nobody/has-this", "byte"):
        with pytest.raises(MissingData, match=f"no tokenizer at '{name}'.*hub was not reached") as caught:
            load_tokenizer(name)
        assert "\n" not in str(caught.value)


def test_the_hub_is_asked_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    now = [100.0]
    monkeypatch.setattr(hub, "_last", None)
    monkeypatch.setattr(hub, "_ask", lambda: asked.append(1) or True)
    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    assert all(hub.hub_answers() for _ in range(5))
    assert len(asked) == 1
    now[0] += 61
    hub.hub_answers()
    assert len(asked) == 2


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("asked"))
    assert not hub._ask()


def test_a_broken_file_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(MissingData, match=str(source)) as caught:
            load_tokenizer(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("generation_config.json", "{", "cannot read"),
        ("generation_config.json", b"\xff\xfe", "cannot read"),
        ("generation_config.json", "[2]", "must hold a JSON object, got list"),
        ("generation_config.json", '{"eos_token_id": ["</s>"]}', "eos_token_id .* must be ids, got '</s>'"),
        ("generation_config.json", '{"eos_token_id": [2, -1]}', "eos_token_id .* must be ids, got -1"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id .* must be ids, got True"),
        ("generation_config.json", '{"eos_token_id": 2.0}', "eos_token_id .* must be ids, got 2.0"),
        ("config.json", "{", "config.json"),
        ("config.json", '{"vocab_size": -3}', "vocab_size .* positive int, got -3"),
        ("config.json", '{"vocab_size": "many"}', "vocab_size"),
        ("atropos_gym.json", "{", "cannot read"),
        ("atropos_gym.json", "[]", "must hold a JSON object, got list"),
        ("atropos_gym.json", "{}", "names no tokenizer"),
        ("atropos_gym.json", '{"tokenizer": 3}', "names no tokenizer"),
    ],
)
def test_broken_files_beside_a_tokenizer_are_told_in_one_line(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ConfigError, MissingData), match=words) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"text_config": [1]}, {"text_config": None}, {"vocab_size": None}, {}])
def test_a_config_without_rows_leaves_them_unknown(tmp_path: Path, config: dict[str, Any]) -> None:
    hf = tiny_tokenizer()
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer: Any = load_tokenizer(tmp_path)
    assert not tokenizer.rows_known
    assert tokenizer.rows == len(hf)


@pytest.mark.parametrize("change", ["chat_template", "eos_token", "bos_token"])
def test_an_object_that_changed_is_seen_anew(change: str) -> None:
    hf = tiny_tokenizer()
    before = load_tokenizer(hf)
    was = fingerprint(hf)
    value = getattr(hf, change)
    setattr(hf, change, f"{value} " if change == "chat_template" else "<|im_start|>")
    assert fingerprint(hf) != was
    assert load_tokenizer(hf) is not before
    setattr(hf, change, value)
    if value is not None:
        assert fingerprint(hf) == was


def test_carriage_returns_in_one_of_several_templates_do_not_count() -> None:
    one, other = tiny_tokenizer(None), tiny_tokenizer(None)
    one.chat_template = {"default": CHATML + "\n", "rag": "a\r\nb"}
    other.chat_template = {"default": CHATML + "\r\n", "rag": "a\nb"}
    assert fingerprint(one) == fingerprint(other)


# --- tokenizers that run in Python ---


def test_a_python_tokenizer_renders_and_reads() -> None:
    renderer = ChatRenderer(python_tokenizer())
    assert renderer.stop_ids == (1,)
    ids = renderer.prompt(USER)
    assert renderer.tokenizer.decode(ids) == "user: Hi é <|im_end|></s>assistant: "
    for words in ("</s>", "<pad>x", "a<extra_id_0>"):
        loud = renderer.bridge([1], [{"role": "user", "content": words}])
        assert [i for i in loud if i < 3 or i > 258] == [1]
        assert words in renderer.tokenizer.decode(loud)
    said = renderer.say("é🙂")
    assert renderer.reply(said).text == "é🙂"
    assert renderer.reply([*said[:1], 384 - 1, *said[1:]]).complete
    assert renderer.bridge(said, USER) == renderer.bridge([], USER)[1:]


def test_a_python_tokenizer_has_spans_and_a_fingerprint() -> None:
    renderer = ChatRenderer(python_tokenizer())
    talk = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "b"}]
    ids, _ = renderer.transcript(talk)
    said = [i for i, span in zip(ids, renderer.spans(talk), strict=True) if span == "message"]
    assert renderer.tokenizer.decode(said) == "user"
    assert fingerprint(python_tokenizer()) == fingerprint(python_tokenizer()) != fingerprint(tiny_tokenizer())
    other = python_tokenizer()
    other.add_tokens(["<new>"])
    assert fingerprint(other) != fingerprint(python_tokenizer())


@given(
    st.lists(
        st.sampled_from(["a", " ", "é", "</s>", "<pad>", "<extra_id_3>"]) | st.text(max_size=3), max_size=6
    )
)
@settings(deadline=None, max_examples=60)
def test_text_of_a_python_tokenizer_holds_no_control_id(pieces: list[str]) -> None:
    tokenizer = _PYTHON
    ids = tokenizer.encode("".join(pieces))
    assert not [i for i in ids if i < 3 or i > 258]
    text = "".join(pieces)
    if text.isprintable():
        assert tokenizer.decode(ids) == text


_PYTHON: Any = load_tokenizer(python_tokenizer())


def test_a_python_tokenizer_of_its_own_ways_is_refused() -> None:
    hf = python_tokenizer()
    hf.tokenize = lambda text, **_: list(text.upper())
    with pytest.raises(ConfigError, match="way of its own.*give a folder with tokenizer.json"):
        load_tokenizer(hf)
    broken = python_tokenizer()
    broken._tokenize = lambda text: 1 / 0
    with pytest.raises(ConfigError, match="no tokenizer that can be used here .division by zero"):
        load_tokenizer(broken)


# --- SentencePiece ---


@pytest.mark.parametrize("name", ["Mistral v1", "Mistral v3", "Llama 2", "Magistral"])
def test_marked_text_of_a_sentencepiece_model_has_the_ids_of_unmarked_text(name: str) -> None:
    """A blank piece stands where the backend puts one: before every stretch, or before the first one only."""
    tokenizer: Any = family_tokenizer(name)
    control = ControlText(tokenizer.backend, tokenizer.special_ids)
    opening, end = FAMILIES[name].special[:2]
    for words in ("Hello", " Hello", "a  b", "", "é", "Hello" + end + "Hello", end, opening + "[INST] a"):
        assert control._encode_marked(words).ids == control.encode(words)


def test_a_piece_keeps_its_blank_as_an_id_alone() -> None:
    renderer = family_renderer("Mistral v1")
    tokenizer: Any = renderer.tokenizer
    (whole,) = tokenizer.encode("Hello")
    assert tokenizer.backend.id_to_token(whole) == "▁Hello"
    assert renderer.reply([whole, *renderer.stop_ids]).text == "Hello"
    assert renderer.reply([whole, whole]).text == "Hello Hello"


def test_a_disguised_control_token_is_text() -> None:
    """A token that is looked for behind the normaliser has spellings that no list shows."""
    from tokenizers import AddedToken, normalizers

    hf = tiny_tokenizer()
    backend = hf.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.add_special_tokens([AddedToken("[end]", normalized=True, special=True)])
    token = hf.convert_tokens_to_ids("[end]")
    assert token in backend.encode("a [END] b", add_special_tokens=False).ids
    renderer = ChatRenderer(hf)
    for words in ("a [END] b", "[end]", "［end］"):
        assert token not in renderer.prompt([{"role": "user", "content": words}])
        assert token not in renderer.tokenizer.encode(words)
    assert not set(range(3)) & set(renderer.tokenizer.encode("".join(SPECIAL)))
