"""The cases of tests/cases/c_rendering.json: bytes here, real tokenizers where they are prepared (slow)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import NewSegment
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import fingerprint, load_tokenizer
from tests.tools import rendering_cases as cases

Folder = Callable[[str], Path]


def _of(*kinds: str) -> Any:
    chosen = [case for case in cases.CASES.values() if case["kind"] in kinds]
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


@pytest.fixture
def quiet() -> Iterator[None]:
    """Families that lack a role warn once; the cases of those say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("episode", cases.CASES["c48"]["episodes"], ids=["c48-0", "c48-1"])
def test_bytes_case(episode: dict[str, Any]) -> None:
    renderer = ChatRenderer("bytes")
    cases.check_episode(renderer, episode)
    cases.check_through_an_environment(renderer, episode)


@pytest.mark.slow
@_of("episode")
def test_episode(case: dict[str, Any], tokenizer_folder: Folder, quiet: None) -> None:
    renderer = cases.renderer_of(tokenizer_folder(case["tokenizer"]), case)
    cases.check_episode(renderer, case)
    cases.check_full_render(renderer, case)


@pytest.mark.slow
@_of("episode")
def test_episode_through_an_environment(case: dict[str, Any], tokenizer_folder: Folder, quiet: None) -> None:
    cases.check_through_an_environment(cases.renderer_of(tokenizer_folder(case["tokenizer"]), case), case)


_REWRITTEN = [case for case in cases.CASES.values() if "template_mode" in case]


@pytest.mark.slow
@pytest.mark.parametrize("case", _REWRITTEN, ids=[case["id"] for case in _REWRITTEN])
def test_episode_in_template_mode(case: dict[str, Any], tokenizer_folder: Folder, quiet: None) -> None:
    renderer = cases.renderer_of(tokenizer_folder(case["tokenizer"]), case, past="template")
    cases.check_template_mode(renderer, case)
    assert cases.play(renderer, case) == case["template_mode"]["segments"]


@pytest.mark.slow
@_of("prompt")
def test_prompt(case: dict[str, Any], tokenizer_folder: Folder, quiet: None) -> None:
    cases.check_prompt(cases.renderer_of(tokenizer_folder(case["tokenizer"]), case), case)


@pytest.mark.slow
@_of("inject")
def test_inject(case: dict[str, Any], tokenizer_folder: Folder) -> None:
    cases.check_inject(cases.renderer_of(tokenizer_folder(case["tokenizer"]), case), case)


@pytest.mark.slow
@_of("refuse")
def test_refuse(case: dict[str, Any], tokenizer_folder: Folder) -> None:
    cases.check_refuse(tokenizer_folder(case["tokenizer"]), case)


@pytest.mark.slow
@_of("segment")
def test_segment(case: dict[str, Any], tokenizer_folder: Folder, quiet: None) -> None:
    cases.check_segment(tokenizer_folder(case["tokenizer"]), case)


_DECODED = [
    (c["id"], n, e, c.get("text"))
    for c in map(cases.CASES.get, ("c45", "c46"))
    if c
    for n, e in c["expect"].items()
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name", "expect", "text"), _DECODED, ids=[f"{d[0]}-{d[1]}" for d in _DECODED]
)
def test_decode(
    case: str, name: str, expect: dict[str, Any], text: str | None, tokenizer_folder: Folder
) -> None:
    cases.check_decode(tokenizer_folder(name), expect, text)


@pytest.mark.slow
@pytest.mark.parametrize("row", cases.invariant_rows(), ids=lambda row: f"c50-{row['name']}")
def test_invariants(row: dict[str, Any], tokenizer_folder: Folder) -> None:
    cases.check_invariants(tokenizer_folder(row["tokenizer"]), row)


# --- c49: fingerprints ---


def _without_last_merge(folder: Path, to: Path) -> str:
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["merges"].pop()
    (to / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    config = (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    (to / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return fingerprint(to)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral_v1"])
def test_c49_fingerprints_that_agree(name: str, tokenizer_folder: Folder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = tokenizer_folder(name)
    load = AutoTokenizer.from_pretrained
    padded, left = load(folder), load(folder)
    padded.pad_token = padded.pad_token or padded.eos_token
    left.padding_side = "left"
    padded(["a", "a b c d"], padding=True, truncation=True, max_length=3)
    load(folder).save_pretrained(tmp_path)
    equal = {
        "loaded twice": load(folder),
        "AutoTokenizer and PreTrainedTokenizerFast": PreTrainedTokenizerFast.from_pretrained(folder),
        "after a call with padding and truncation (the serialised backend differs then)": padded,
        "after save_pretrained and reload": tmp_path,
        "padding_side left": left,
    }
    assert list(equal) == cases.CASES["c49"]["equal"]
    prints = {what: fingerprint(tokenizer) for what, tokenizer in equal.items()}
    assert set(prints.values()) == {fingerprint(folder)}, prints


@pytest.mark.slow
def test_c49_fingerprints_that_differ(tokenizer_folder: Folder, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaTokenizer

    folder, mistral = tokenizer_folder("qwen3"), tokenizer_folder("mistral_v1")
    load = AutoTokenizer.from_pretrained
    blank, grown = load(folder), load(folder)
    blank.chat_template += " "
    grown.add_tokens(["<new>"])
    base = fingerprint(folder)
    different = {
        "one blank appended to the chat template": (base, fingerprint(blank)),
        "one token added": (base, fingerprint(grown)),
        "one merge removed (the probes alone do not see it)": (base, _without_last_merge(folder, tmp_path)),
        "template_kwargs enable_thinking=False": tuple(
            ChatRenderer(folder, template_kwargs=kwargs).fingerprint
            for kwargs in ({}, {"enable_thinking": False})
        ),
        "llama3 and llama3_1 folders (three control tokens renamed, same ids)": tuple(
            fingerprint(tokenizer_folder(name)) for name in ("llama3", "llama3_1")
        ),
        "mistral_v1 loaded with tokenizer_class LlamaTokenizer and with PreTrainedTokenizerFast "
        "(same vocabulary, other pipeline)": (
            fingerprint(mistral),
            fingerprint(LlamaTokenizer.from_pretrained(mistral)),
        ),
    }
    assert list(different) == cases.CASES["c49"]["different"]
    assert not [what for what, (one, other) in different.items() if one == other]
    pipelines = cases.CASES["c49"]["mistral_pipelines"]
    text = pipelines["text"]
    assert load_tokenizer(mistral).encode(text) == pipelines["PreTrainedTokenizerFast"]
    other = load_tokenizer(LlamaTokenizer.from_pretrained(mistral))
    assert other.encode(text) == pipelines["LlamaTokenizer_transformers_5"]


# --- what holds for every template, on real tokenizers ---

_REAL = {
    "qwen3": None, "smollm2": None, "llama3": None, "gemma3": None, "deepseek_v3": None,
    "gptoss": "harmony", "mistral_v1": "inst",
}  # fmt: skip
_WORDS = st.lists(
    st.sampled_from(["Hello", " ", "\n\n", "1234", "<", "é🙂", "日本", "<|im_", "end|>", "  "])
    | st.text(max_size=3),
    max_size=6,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", _REAL)
def test_promises_hold_on_a_real_tokenizer(name: str, tokenizer_folder: Folder, quiet: None) -> None:
    case = {"template": _REAL[name]} if _REAL[name] else {}
    renderer = cases.renderer_of(tokenizer_folder(name), case)
    tokenizer: Any = renderer.tokenizer
    controls: Any = renderer._dialect.controls
    spellings = st.sampled_from(sorted(controls.values()))
    text = st.lists(_WORDS.map("".join) | spellings, max_size=4).map("".join)
    ids = st.integers(0, len(tokenizer) - 1) | st.sampled_from(sorted(controls))

    def only_controls(found: list[int]) -> list[int]:
        return [token for token in found if token in controls]

    @given(said=text, again=text, turn=st.lists(ids, max_size=8))
    @settings(deadline=None, max_examples=60)
    def check(said: str, again: str, turn: list[int]) -> None:
        first = renderer.prompt([{"role": "user", "content": said}])
        assert only_controls(first) == only_controls(renderer.prompt([{"role": "user", "content": "x"}]))
        bridge = renderer.bridge(turn, [{"role": "user", "content": again}])
        plain = renderer.bridge(turn, [{"role": "user", "content": "x"}])
        assert only_controls(bridge) == only_controls(plain)
        reply = renderer.reply(turn)
        assert reply.ids == tuple(turn)
        talk = [
            {"role": "user", "content": said},
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": again},
        ]
        assert renderer.advance(first, turn, talk, talk[2:]) == (bridge, False)
        spans = renderer.spans(talk[:2], turns=[turn])
        assert len(spans) == len(first) + len(turn)
        assert spans.count("policy") == len(turn)
        # What the template itself writes behind a canonical answer.
        answered = [talk[0], {"role": "assistant", "content": "Hello"}, talk[2]]
        full, behind = renderer.prompt(answered), renderer.bridge(renderer.say("Hello"), talk[2:])
        assert full[len(full) - len(behind) :] == behind
        # Marked text is encoded as unmarked text is.
        assert renderer._dialect._text._encode_marked(again).ids == renderer._dialect._text.encode(again)  # type: ignore[attr-defined]

    check()


@pytest.mark.slow
def test_a_template_that_rewrites_history_gives_no_bridge(tokenizer_folder: Folder) -> None:
    case = cases.CASES["c42"]
    with pytest.warns(UserWarning, match="mistral_v1.*segment of its own"):
        renderer = cases.renderer_of(tokenizer_folder("mistral_v1"), case, system="role")
    with pytest.raises(NewSegment, match="whole conversation"):
        renderer.bridge(case["sampled"], case["new_messages"])
