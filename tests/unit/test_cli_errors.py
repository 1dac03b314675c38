"""A user's mistake on the command line: one line on stderr with what, which value and what to do; exit 2."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atropos_gym.cli import collect, main
from atropos_gym.cli.config import Config
from atropos_gym.cli.mistakes import as_mistake
from atropos_gym.cli.progress import Show
from atropos_gym.engines import make_engine
from atropos_gym.engines.base import SamplingParams
from atropos_gym.rollout.service import EnvironmentService

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return call


def refused(result: tuple[int, str, str], *said: str) -> None:
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("atropos-gym: ")
    assert "Traceback" not in err
    for part in said:
        assert part in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], ["unknown verb 'trian'", "nearest: train"]),
        (["xyz"], ["unknown verb 'xyz'", "verbs: train, serve, collect, eval, "]),
        (["train", "--updats", "3"], ["unknown flag --updats", "nearest: --updates"]),
        (["train", "--qqqqqq"], ["unknown flag --qqqqqq", "`atropos-gym train --help`"]),
        (["serve", "--updates", "3"], ["serve does not read --updates", "it belongs to train"]),
        (["train", "extra"], ["unexpected 'extra'"]),
        (["train", "--updates"], ["--updates", "expected one argument"]),
        (["train", "--updates", "few"], ["--updates", "valid integer", "'few'"]),
        (["train", "--group-size", "0"], ["--group-size", "greater than or equal to 2", "'0'"]),
        (["train", "--reduction", "mean"], ["--reduction", "'episode_sum'", "'mean'"]),
        (["train", "--env-arg", "terse"], ["--env-arg 'terse'", "KEY=VALUE"]),
        (["train", "--config", "none.yaml"], ["'none.yaml'", "--dry-run"]),
        (["train", "--resume", "runs/x"], ["no run in 'runs/x'"]),
        (["train", "--resume", "runs/x", "--seed", "1"], ["leave out --seed"]),
        (["serve", "--port", "70000"], ["--port", "65535", "'70000'"]),
        (["collect", "--policy", "x"], ["--out", "--to"]),
        (["collect", "--out", "a.txt", "--policy", "x"], ["a.txt", ".jsonl", ".html"]),
        (["eval"], ["--policy"]),
        (["eval", "--policy", "random", "--env", "atropos/Blakjack-v0"], ["nearest: atropos/Blackjack-v0"]),
        (["eval", "--policy", "random", "--env", "Blackjack-v1"], ["GymTextEnv"]),
        (["eval", "--policy", "random", "--env", "no_such_module:X-v0"], ["'no_such_module'"]),
        (["eval", "--policy", "random", "--env-arg", "colour=red"], ["the argument 'colour';", "--env-arg"]),
        (["eval", "--policy", "random", "--adapter", "x"], ["--adapter x", "random is no model"]),
        (["train", "--policy", "random"], ["--policy random", "nothing to train"]),
        (["collect", "--policy", "random", "--out", "a.jsonl"], ["--policy random", "`eval`"]),
        (["train", "--env", "atropos/Blakjack-v0", "--dry-run"], ["nearest: atropos/Blackjack-v0"]),
        (["play", "no_such_module:X", "--dry-run"], ["'no_such_module'"]),
        (["play", "os:nothing"], ["'os:nothing'", "has no 'nothing'"]),
        (["play", "os:path"], ["'os:path'", "no class of TextEnv"]),
        (["play", "atropos_gym:atropos/Blakjack-v0"], ["nearest: atropos/Blackjack-v0"]),
        (["serve", "--host", "0.0.0.0"], ["'0.0.0.0'", "--insecure"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(run: Run, words: list[str], said: list[str]) -> None:
    refused(run(*words), *said)


def test_debug_shows_where_it_was_raised() -> None:
    with pytest.raises(Exception, match="unknown verb"):
        main(["trian", "--debug"])


@pytest.mark.parametrize("module", ["torch", "transformers", "peft", "stable_baselines3"])
def test_a_missing_extra_names_the_command_that_installs_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    refused(run("train"), module, "pip install 'atropos-gym[learn]'")
    assert not Path("runs").exists()


def test_a_port_in_use_is_named(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(run("serve", "--port", str(port)), str(port), "another port")


def test_a_run_of_the_same_name_is_not_overwritten(run: Run) -> None:
    Path("runs/mine").mkdir(parents=True)
    refused(run("train", "--name", "mine"), "runs/mine exists", "--resume runs/mine")


def test_a_name_that_leads_elsewhere_is_refused(run: Run) -> None:
    refused(run("train", "--name", "../mine"), "'../mine'")


def test_an_interrupt_is_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("atropos_gym.cli.envs.run", interrupted)
    code, _, err = run("envs")
    assert code == 130
    assert "interrupted" in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: object) -> int:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("atropos_gym.cli.envs.run", broken)
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["envs"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(13, "Permission denied", "/root/x"), "'/root/x'"),
        (OSError(28, "No space left on device", "/x"), "no space left"),
        (ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"), "atropos-gym[learn]"),
        (ModuleNotFoundError("No module named 'ours'", name="ours"), None),
        (ValueError("bug"), None),
    ],
    ids=str,
)
def test_which_errors_are_a_users(error: Exception, said: str | None) -> None:
    line = as_mistake(error)
    assert line is None if said is None else line is not None and said in line


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"], []])
def test_help_and_version_are_no_mistakes(run: Run, words: list[str]) -> None:
    code, out, err = run(*words)
    assert code == 0
    assert "atropos-gym" in out
    assert err == ""


def test_dry_run_prints_yaml_and_does_nothing(run: Run) -> None:
    code, out, _ = run("train", "--dry-run", "--updates", "3")
    assert code == 0
    assert "updates: 3\n" in out
    assert "groups_per_update: 96\n" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["x.jsonl", "x.html"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_played(run: Run, name: str) -> None:
    Path("file").touch()
    refused(run("collect", "--policy", "x", "--out", f"file/{name}"), f"file/{name}", "another place")


def test_the_hub_is_quiet_about_tries(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    assert run("envs")[0] == 0
    assert os.environ["HF_HUB_VERBOSITY"] == "error"


def test_collect_says_that_it_waits_for_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def at_once(service: EnvironmentService) -> None:
        service.collector.close()

    monkeypatch.setattr(EnvironmentService, "run", at_once)
    with socket.socket() as nobody:  # bound, and never listening
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        engine = make_engine("scripted", script=lambda prompt, params, call: [258])
        collect._serve(Config(), url, engine, SamplingParams(max_tokens=8), Show())
    err = capsys.readouterr().err
    assert f"no answer from {url}" in err
    assert "waiting for it" in err
    assert "Ctrl-C ends it" in err
