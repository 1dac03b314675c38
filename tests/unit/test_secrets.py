"""Keys and passwords of an engine: never in a run's folder, and said again by whoever goes on."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from atropos_gym._secrets import is_secret, secrets_in, without_secrets
from atropos_gym.cli.again import say_again
from atropos_gym.cli.command import parse
from atropos_gym.cli.config import Config, resolve
from atropos_gym.cli.folder import RunFolder
from atropos_gym.errors import ConfigError
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO

SECRET = "s3cret"  # noqa: S105
URL = f"vllm:http://me:{SECRET}@one:8000,http://me:{SECRET}@two:8000"
ARGS: dict[str, Any] = {
    "api_key": SECRET,
    "retries": 2,
    "env": {"HF_TOKEN": SECRET, "VLLM_LOGGING_LEVEL": "INFO"},
    "flags": ["--seed", "1", "--api-key", SECRET, f"--auth-token={SECRET}", "--dtype", "auto"],
}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True),
        ("apiKey", True),
        ("hub-token", True),
        ("Authorization", True),
        ("db_password", True),
        ("tokenizer", False),
        ("max_tokens", False),
        ("token_limit", False),
        ("monkey", False),
        ("", False),
    ],
)
def test_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_what_is_left_of_settings() -> None:
    assert without_secrets(ARGS) == {
        "retries": 2,
        "env": {"VLLM_LOGGING_LEVEL": "INFO"},
        "flags": ["--seed", "1", "--dtype", "auto"],
    }
    assert without_secrets(URL) == "vllm:http://one:8000,http://two:8000"
    assert without_secrets({"api_key": None, "url": ["http://h", f"http://a:{SECRET}@h"]}) == {
        "api_key": None,
        "url": ["http://h", "http://h"],
    }
    for plain in ("hf", "name@host", None, 3, ["a"], {"a": (1, 2)}):
        assert secrets_in(plain, "x") == []


def test_a_runs_folder_names_secrets_and_has_none(tmp_path: Path) -> None:
    config = Config(engine=URL, engine_args=ARGS, policy="m", runs=tmp_path, name="x")
    folder = RunFolder.create(config)
    assert folder.config.engine_args == ARGS, "the run itself goes on with them"
    assert all(SECRET not in path.read_text() for path in folder.path.iterdir())
    again = RunFolder.open(folder.path)
    assert again.summary["secrets"] == [
        "engine",
        "engine_args.api_key",
        "engine_args.env.HF_TOKEN",
        "engine_args.flags",
    ]
    assert again.config.engine == "vllm:http://one:8000,http://two:8000"
    assert again.config.engine_args["retries"] == 2


def test_a_run_without_secrets_says_nothing_of_them(tmp_path: Path) -> None:
    folder = RunFolder.create(Config(runs=tmp_path, name="x"))
    assert "secrets" not in RunFolder.open(folder.path).summary


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        (["engine"], "--engine vllm:http://NAME:PASSWORD@host"),
        (["engine_args.api_key"], "--engine-arg api_key=..., or the variable VLLM_API_KEY"),
        (["engine_args.env.HF_TOKEN"], "--engine-arg env=...$"),
        (["server"], "the variable ATROPOS_GYM_TOKEN, or --server"),
    ],
)
def test_what_is_missing_is_named(secrets: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "ATROPOS_GYM_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    config = Config(engine="vllm:http://one", policy="m", server="http://h")
    with pytest.raises(ConfigError, match=message) as error:
        say_again(config, {}, secrets, "runs/x")
    assert str(error.value).startswith("runs/x needs its") and "\n" not in str(error.value)


def test_what_was_said_again_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ["engine", "engine_args.api_key", "engine_args.env.HF_TOKEN", "server"]
    config = Config(engine="vllm:http://one", engine_args={"retries": 2}, policy="m", server="http://h")
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("ATROPOS_GYM_TOKEN", SECRET)
    given = {"engine": URL, "engine_args": {"env": {"HF_TOKEN": SECRET}}}
    found = say_again(config, given, secrets, "runs/x")
    assert (found.engine, found.server) == (URL, "http://h")
    assert found.engine_args == {"retries": 2, "env": {"HF_TOKEN": SECRET}}
    assert say_again(config, {}, [], "runs/x") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "sglang:http://h"}, "of kind vllm, not sglang"),
        ({"server": "http://h"}, "leave out --server"),
    ],
)
def test_another_run_than_the_saved_one(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        say_again(Config(engine="vllm:http://one", policy="m"), given, [], "runs/x")


def test_flags_beside_resume() -> None:
    command = parse(["train", "--resume", "runs/x", "--engine", URL, "--engine-arg", f"api_key={SECRET}"])
    assert command is not None and command.resume == Path("runs/x")
    assert command.given == {"engine", "engine_args"}
    assert (command.config.engine, command.config.engine_args) == (URL, {"api_key": SECRET})
    with pytest.raises(ConfigError, match="leave out --seed$"):
        parse(["train", "--resume", "runs/x", "--seed", "1", "--engine", URL])


def test_no_complaint_shows_one() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("train", {"engine_args": {"api_key": SECRET}, "updates": "many"})
    assert SECRET not in str(error.value)


def test_a_checkpoint_has_none_and_the_learner_keeps_its_own(tmp_path: Path) -> None:
    options = {"engine_kwargs": {"max_live_versions": 2, "api_key": SECRET}}
    with GRPO("tiny", "atropos/Identity-v0", lora=Lora(rank=1), engine=URL, device="cpu", **options) as model:
        model.save(tmp_path / "saved.zip")
        assert model.engine_spec == URL and model.engine_kwargs["api_key"] == SECRET
    with zipfile.ZipFile(tmp_path / "saved.zip") as file:
        assert all(SECRET.encode() not in file.read(name) for name in file.namelist())
    with GRPO.load(tmp_path / "saved.zip", device="cpu") as loaded:
        assert loaded.engine_kwargs == {"max_live_versions": 2}
        assert loaded.engine_spec == "vllm:http://one:8000,http://two:8000"
