"""A run's folder: names, whole files, and what is taken back when a run goes on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from atropos_gym.cli.config import Config, load_yaml
from atropos_gym.cli.environment import short_name
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.models import find_model
from atropos_gym.cli.progress import Show
from atropos_gym.errors import ConfigError, MissingData


def config(tmp_path: Path, **values: object) -> Config:
    return Config.model_validate({"runs": tmp_path / "runs", **values})


def test_runs_without_a_name_get_the_tasks_and_the_next_number(tmp_path: Path) -> None:
    names = [RunFolder.create(config(tmp_path)).path.name for _ in range(3)]
    assert names == ["blackjack-1", "blackjack-2", "blackjack-3"]


def test_a_folder_says_what_it_is_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path, name="a", updates=7))
    again = RunFolder.open(folder.path)
    assert again.config == folder.config
    assert again.config.updates == 7
    assert again.summary["status"] == "running"
    assert load_yaml(folder.path / "config.yaml")["name"] == "a"


def test_a_summary_grows_and_is_whole_on_disk(tmp_path: Path) -> None:
    folder = RunFolder.create(config(tmp_path))
    folder.spend("GRPO", 1.5)
    folder.spend("GRPO", 2.0)
    folder.save(before={"mean": -0.4})
    written = json.loads((folder.path / "summary.json").read_text())
    assert written["seconds"] == {"GRPO": 3.5}
    assert written["before"] == {"mean": -0.4}
    assert not list(folder.path.glob("*.tmp"))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a"])
def test_a_name_is_one_folder_below(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be a folder's name"):
        RunFolder.create(config(tmp_path, name=name))


def test_a_taken_name_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path, name="a")).save(mine=1)
    with pytest.raises(ConfigError, match="--resume"):
        RunFolder.create(config(tmp_path, name="a"))
    assert RunFolder.open(tmp_path / "runs/a").summary["mine"] == 1


def test_runs_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="choose another --runs"):
        RunFolder.create(config(tmp_path, name="a"))


def test_what_is_no_run_names_the_runs_beside_it(tmp_path: Path) -> None:
    RunFolder.create(config(tmp_path, name="a"))
    with pytest.raises(MissingData, match="found there: a"):
        RunFolder.open(tmp_path / "runs/b")


@pytest.mark.parametrize(
    ("env", "name"),
    [("atropos/GSM8K-v0", "gsm8k"), ("mod:Mine", "mine"), ("mod:ns/Mine-v12", "mine"), ("a b", "a-b")],
)
def test_short_names(env: str, name: str) -> None:
    assert short_name(env) == name


def test_a_model_is_a_folder_or_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    (tmp_path / "runs/x").mkdir(parents=True)
    assert find_model("runs/x") == "runs/x"
    assert find_model("hf:runs/x") == "runs/x"
    assert find_model("org/name") == "org/name"
    for name in ("runs/y", "./y", "/no/where", "a/b/c"):
        with pytest.raises(MissingData, match="no such folder"):
            find_model(name)


def test_without_a_terminal_progress_is_a_line_at_the_end() -> None:
    out = io.StringIO()
    show = Show(Console(file=out, width=40))
    with show.bar("format lesson", 2) as update:
        update(1, "loss 0.5")
        update(2, "loss 0.4")
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().startswith("format lesson: 2/2 loss 0.4  (")


def test_in_a_terminal_progress_is_a_bar_that_stays() -> None:
    out = io.StringIO()
    with Show(Console(file=out, force_terminal=True, width=100)).bar("GRPO", 2) as update:
        update(2, "return -0.1")
    assert "GRPO" in out.getvalue()
    assert "2/2" in out.getvalue()
    assert "return -0.1" in out.getvalue()
