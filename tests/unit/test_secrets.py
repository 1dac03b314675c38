"""Keys and passwords of engines and environments: never in a run's folder, said again by whoever goes on."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import yaml
from hypothesis import given as given_that
from hypothesis import settings
from hypothesis import strategies as st

from atropos_gym._secrets import is_secret, secrets_in, without_secrets
from atropos_gym.cli.again import say_again
from atropos_gym.cli.command import parse
from atropos_gym.cli.config import Config, resolve
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.learner import open_learner
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
        ("accessToken", True),
        ("access_tokens", True),
        ("apiKeys", True),
        ("API_KEY_2", True),
        ("OPENAIAPIKey", True),
        ("clientsecret", True),
        ("bearer", True),
        ("Set-Cookie", True),
        ("sessionCookies", True),
        ("eos_token", False),
        ("padToken", False),
        ("additional_special_tokens", False),
        ("stop_token_ids", False),
        ("max_num_batched_tokens", False),
        ("num_speculative_tokens", False),
        ("reply_tokens", False),
        ("answer_key", False),
        ("ssl_keyfile", False),
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
    assert without_secrets(("--seed", 1, "--key", 2)) == ("--seed", 1)


@pytest.mark.parametrize(
    ("value", "left"),
    [
        (["--api-key", SECRET, f"{SECRET}2", "--seed", "1"], ["--seed", "1"]),
        (["--apiKey", 5, 6, "-x"], ["-x"]),
        (["-e", f"HF_TOKEN={SECRET}", "-e", "RANK=1"], ["-e", "-e", "RANK=1"]),
        ({"headers": {"Cookie": SECRET, "Accept": "x"}}, {"headers": {"Accept": "x"}}),
        (["-H", f"Authorization: Bearer {SECRET}", "-v"], ["-H", "Authorization:", "-v"]),
        ({"shown": f"Bearer {SECRET}"}, {"shown": "Bearer"}),
        ([{"url": "http://a", "apiKey": SECRET}], [{"url": "http://a"}]),
        (f"vllm:http://me:pa/{SECRET}@one:80,http://me:pa/{SECRET}@two", "vllm:http://one:80,http://two"),
        (f"http://me:pa {SECRET}@host", "http://host"),
        (f"http://h/v1?api_key={SECRET}", "http://h/v1"),
        (f"http://h/?a=1&accessToken={SECRET}&b=2#c", "http://h/?a=1&b=2&c"),
        (f"vllm:http://a?api%5Fkey={SECRET},http://b?key={SECRET}&x=1", "vllm:http://a,http://b?x=1"),
        (f"https://bucket/x?X-Amz-Signature={SECRET}", "https://bucket/x"),
        (f"see http://me:{SECRET}@h/ or mail me@h", "see http://h or mail me@h"),
    ],
)
def test_no_secret_is_left(value: object, left: object) -> None:
    found = without_secrets(value)
    assert found == left and SECRET not in str(found)
    assert without_secrets(found) is found, "what is written down has no secret to be asked for"
    assert secrets_in({"a": value}, "x") != []


@pytest.mark.parametrize(
    "plain",
    [
        *("hf", "name@host", "//share@x/y/", "a@b/", None, 3, ["a"]),
        {"a": (1, 2), "eos_token": "</s>", "token": None, "use_token": True, "tokens": [1, 2], "api_key": ""},
        ["--max-model-len", "512", "--pad-token", "<pad>", "--max-tokens", "5"],
        *("http://host:8000/a@b?x=1#y", "http://[::1]:8000/a@b", "http://h?to=a@b", "vllm:http://a,http://b"),
        *("Who plays? Ask http://rules.example: then write to me@example", "The bearer of bad news"),
    ],
    ids=str,
)
def test_what_has_no_secret_is_the_same_object(plain: object) -> None:
    assert without_secrets(plain) is plain
    assert secrets_in(plain, "x") == []


NAMES = ["api_key", "apiKeys", "HF_TOKEN", "bearer", "Cookie", "--auth-token", "dbPassword"]


@settings(max_examples=60, deadline=None)
@given_that(
    name=st.sampled_from(NAMES),
    path=st.lists(st.sampled_from(["{", "["]), max_size=4),
    several=st.integers(1, 3),
)
def test_none_is_left_however_deep(name: str, path: list[str], several: int) -> None:
    value: Any = {"a": 1, name: [SECRET] * several, "b": ["--seed", "1", f"--{name}", *[SECRET] * several]}
    for kind in path:
        value = {"inner": value} if kind == "{" else [value, "x"]
    assert SECRET not in str(without_secrets(value))
    assert secrets_in(value, "x")


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
        (["engine_args.env.HF_TOKEN"], "--engine-arg 'env={HF_TOKEN: ...}'$"),
        (["env_args.api_key"], "--env-arg api_key=...$"),
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


def saved(**values: Any) -> tuple[Config, list[str]]:
    """A configuration as its run's folder has it, and where its secrets were."""
    config = Config(engine="vllm:http://one", policy="m", **values)
    return Config.model_validate(yaml.safe_load(config.to_yaml())), config.secrets


FLAGS = ["--api-key", SECRET, f"{SECRET}2", "--max-model-len", "512"]
NESTED = {"flags": FLAGS, "env": {"HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": "1"}}


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (FLAGS[:3], ["--max-model-len", "512", *FLAGS[:3]]),
        (FLAGS, FLAGS),
        ([*FLAGS[:3], "--seed", "1"], ["--max-model-len", "512", *FLAGS[:3], "--seed", "1"]),
    ],
)
def test_what_is_said_again_comes_beside_what_was_kept(flags: list[str], found: list[str]) -> None:
    config, secrets = saved(engine_args=NESTED)
    given = {"engine_args": {"flags": flags, "env": {"HF_TOKEN": SECRET}}}
    assert say_again(config, given, secrets, "runs/x").engine_args == {"flags": found, "env": NESTED["env"]}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"flags": FLAGS[:2], "env": {"CUDA_VISIBLE_DEVICES": "0"}}, "engine_args.env.HF_TOKEN"),
        ({"flags": ["--seed", "1"], "env": {"HF_TOKEN": SECRET}}, "engine_args.flags"),
        ({"flags": FLAGS, "env": None}, "engine_args.env.HF_TOKEN"),
    ],
)
def test_a_setting_without_its_secret_was_not_said_again(given: dict[str, Any], place: str) -> None:
    config, secrets = saved(engine_args=NESTED)
    with pytest.raises(ConfigError, match=f"needs its {place} again"):
        say_again(config, {"engine_args": given}, secrets, "runs/x")


def test_lists_of_replicas_are_not_doubled() -> None:
    replicas = [{"url": "http://a", "api_key": SECRET}, f"http://me:{SECRET}@b"]
    config, secrets = saved(engine_args={"replicas": replicas, "auth": {"user": "me"}})
    given = {"engine_args": {"replicas": replicas, "auth": {"user": "me"}}}
    assert say_again(config, given, secrets, "runs/x").engine_args == given["engine_args"]


def test_the_engines_url_without_its_password_was_not_said_again() -> None:
    config = Config(engine="vllm:http://one", policy="m")
    with pytest.raises(ConfigError, match="needs its engine's password again"):
        say_again(config, {"engine": "vllm:http://one"}, ["engine"], "runs/x")
    other = {"engine": "vllm:http://two"}
    assert say_again(config, other, ["engine"], "runs/x").engine == "vllm:http://two", "it may have none"


def test_an_environments_secrets_are_never_written_and_asked_for(tmp_path: Path) -> None:
    args = {"api_key": SECRET, "client": {"url": f"http://x:{SECRET}@h", "retries": 2}}
    folder = RunFolder.create(Config(env_args=args, runs=tmp_path, name="x"))
    assert all(SECRET not in path.read_text() for path in folder.path.iterdir())
    again = RunFolder.open(folder.path)
    assert again.config.env_args == {"client": {"url": "http://h", "retries": 2}}
    secrets = again.summary["secrets"]
    assert secrets == ["env_args.api_key", "env_args.client.url"]
    words = ["--env-arg", f"api_key={SECRET}", "--env-arg", f"client={{url: http://x:{SECRET}@h}}"]
    command = parse(["train", "--resume", str(folder.path), *words])
    assert command is not None
    given = {name: getattr(command.config, name) for name in command.given}
    assert say_again(again.config, given, secrets, "runs/x").env_args == args


@pytest.mark.parametrize("given", [{"describe": "full"}, {"client": {"retries": 3}}, {"more": 1}])
def test_an_environment_stays_as_it_was(given: dict[str, Any]) -> None:
    config, secrets = saved(env_args={"describe": "terse", "client": {"retries": 2, "api_key": SECRET}})
    with pytest.raises(ConfigError, match=f"leave out --env-arg {next(iter(given))}=...$"):
        say_again(config, {"env_args": given}, secrets, "runs/x")


@pytest.mark.parametrize("given", ["http://other:9", f"http://x:{SECRET}@one:2", None])
def test_a_run_stays_at_its_server(given: str | None) -> None:
    config, secrets = saved(server=f"http://x:{SECRET}@one:1")
    with pytest.raises(
        ConfigError, match="learns from http://one:1, not from .*: leave out --server"
    ) as error:
        say_again(config, {"server": given}, secrets, "runs/x")
    assert SECRET not in str(error.value)
    for same in (f"http://x:{SECRET}@one:1", f"http://y:{SECRET}@one:1/"):
        assert say_again(config, {"server": same}, secrets, "runs/x").server == same


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


def test_no_complaint_shows_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("train", {"engine_args": {"api_key": SECRET}, "updates": "many"})
    assert SECRET not in str(error.value)
    (tmp_path / "x.yaml").write_text(f"env_args: {SECRET}\n")
    with pytest.raises(ConfigError) as error:
        resolve("train", {}, tmp_path / "x.yaml")
    assert SECRET not in str(error.value)


def asked(*, api_key: str, **kwargs: Any) -> Any:
    """A factory of an environment that cannot be made without a key."""
    assert api_key == SECRET
    return gymnasium.make("atropos/Identity-v0", **kwargs)


def test_a_checkpoint_has_none_and_the_learner_keeps_its_own(tmp_path: Path) -> None:
    options = {
        "engine_kwargs": {"max_live_versions": 2, "api_key": SECRET},
        "env_kwargs": {"words": ["one", "two"], "api_key": SECRET},
    }
    with GRPO("tiny", asked, lora=Lora(rank=1), engine=URL, device="cpu", **options) as model:
        model.save(tmp_path / "saved.zip")
        assert model.engine_spec == URL and model.engine_kwargs["api_key"] == SECRET
        assert model.env_kwargs == options["env_kwargs"]
    with zipfile.ZipFile(tmp_path / "saved.zip") as file:
        assert all(SECRET.encode() not in file.read(name) for name in file.namelist())
    with GRPO.load(tmp_path / "saved.zip", device="cpu") as loaded:
        assert loaded.engine_kwargs == {"max_live_versions": 2}
        assert loaded.engine_spec == "vllm:http://one:8000,http://two:8000"
        assert loaded.env_kwargs == {"words": ["one", "two"]}
    with GRPO.load(
        tmp_path / "saved.zip", env=asked, env_kwargs=options["env_kwargs"], device="cpu"
    ) as loaded:
        assert loaded.env_kwargs == options["env_kwargs"]


def test_a_run_that_goes_on_gives_its_environment_what_was_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(Config(env_args={"api_key": SECRET}, history="latest", runs=tmp_path, name="x"))
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints/000001.zip").touch()
    heard: dict[str, Any] = {}

    def load(path: Path, **settings: Any) -> SimpleNamespace:
        heard.update(settings)
        return SimpleNamespace(_n_updates=1)

    monkeypatch.setattr(GRPO, "load", load)
    open_learner(folder)
    assert heard["env_kwargs"] == {"api_key": SECRET, "history": "latest"}
