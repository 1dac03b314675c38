"""``atropos-gym check-model`` on the real tokenizers: what it says of each, within a minute of computing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import main
from tests.tools.rendering_cases import DATA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def check(
    tokenizer_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Check:
    def call(name: str, template: str | None = None, *words: str) -> tuple[int, dict[str, Any]]:
        words = ("check-model", str(tokenizer_folder(name)), "--json", *words)
        if template is not None:
            (tmp_path / "t.jinja").write_text(DATA["templates"][template])
            words += ("--template", str(tmp_path / "t.jinja"))
        code = main(list(words))
        return code, json.loads(capsys.readouterr().out)

    return call


def status(report: dict[str, Any], name: str) -> str:
    return next(f["status"] for f in report["findings"] if f["name"] == name)


@pytest.mark.parametrize(
    ("name", "template", "words", "family", "notes"),
    [
        ("qwen3", None, (), "chatml", {"thinking"}),
        ("llama3", None, (), "llama3", {"earlier turns", "user text"}),
        ("llama3_1", "dated", ("--template-kwarg", "date_string=2025-01-01"), "llama3", {"user text"}),
        ("gemma3", None, (), "gemma", {"tools", "earlier turns", "user text"}),
        ("deepseek_v3", None, (), "deepseek", set()),
        ("smollm2", None, (), "chatml", set()),
        ("gptoss", "harmony", ("--stop-id", "200002", "--stop-id", "200012"), "harmony", {"bridge"}),
        ("mistral_v1", "inst", (), "mistral", {"tools"}),
    ],
)
def test_a_real_family_is_fit_and_described(
    check: Check, name: str, template: str | None, words: tuple[str, ...], family: str, notes: set[str]
) -> None:
    started = time.process_time()
    code, report = check(name, template, *words)
    assert time.process_time() - started < 60
    assert code == 0, [f for f in report["findings"] if f["status"] == "wrong"]
    assert report["family"] == family
    noted = {f["name"] for f in report["findings"] if f["status"] == "note"}
    assert notes <= noted
    assert noted <= {*notes, "vocabulary", "end of turn", "earlier turns", "tools", "bridge"}
    tried = report["control_text"]
    assert not any(tried["forged"].values()) and tried["plain_encoding"] >= tried["spellings"] - 8
    assert report["random_turns"]["failures"] == [] and report["canonical"]["bridges_equal"]


def test_a_template_without_an_end_is_wrong(check: Check) -> None:
    code, report = check("qwen3", "no_end")
    assert code == 1
    assert "writes no end of turn" in report["findings"][0]["detail"]


def test_a_tokenizer_without_a_template_is_wrong(check: Check) -> None:
    code, report = check("mistral_v1")
    assert code == 1
    assert "has no chat template" in report["findings"][0]["detail"]


def test_rows_of_the_model_are_read_beside_its_tokenizer(check: Check) -> None:
    code, report = check("smollm2")
    assert code == 0
    assert report["sizes"] == {"ids": 49152, "needed": 49152, "rows": 49152}
    assert status(report, "vocabulary") == "ok"


@pytest.mark.parametrize(("rows", "wanted"), [(151936, "ok"), (151643, "wrong")])
def test_padded_and_missing_rows(check: Check, rows: int, wanted: str) -> None:
    code, report = check("qwen3", None, "--rows", str(rows))
    assert code == (wanted == "wrong")
    assert status(report, "vocabulary") == wanted
