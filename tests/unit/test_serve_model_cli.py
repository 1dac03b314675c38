"""``atropos-gym serve-model``: what it is told, and what it refuses before a model is loaded."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from atropos_gym.cli import main, serve_model
from atropos_gym.cli.config import resolve
from atropos_gym.engines.base import SamplingParams
from tests.unit.rollout_cases import saying


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server was told, in place of running it."""
    found: dict[str, Any] = {}
    engine = saying("ja")

    class Opened:
        def __enter__(self) -> Any:
            return engine

        def __exit__(self, *error: object) -> None:
            found["closed"] = True

    real = serve_model.create_app

    def create_app(engine: Any, **settings: Any) -> Any:
        found.update(settings)
        return real(engine, **settings)

    def serve(app: Any, listener: socket.socket, ready: Any) -> None:
        ready(f"http://127.0.0.1:{listener.getsockname()[1]}")

    monkeypatch.setattr(serve_model, "open_engine", lambda config: Opened())
    monkeypatch.setattr(serve_model, "with_saved_run", lambda command: command.config)
    monkeypatch.setattr(serve_model, "create_app", create_app)
    monkeypatch.setattr(serve_model, "serve", serve)
    monkeypatch.delenv("ATROPOS_GYM_TOKEN", raising=False)
    return found


def test_flags_reach_the_server(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--port 0 --temperature 0.7 --reply-tokens 64 --wishes refuse --alternatives drop --name calc"
    flags += " --seed 3 --max-body-bytes 2MiB"
    assert main(["serve-model", "--policy", "hf:x", *flags.split()]) == 0
    assert told["sampling"] == SamplingParams(max_tokens=64, temperature=0.7)
    wanted = {
        "wishes": "refuse",
        "alternatives": "drop",
        "name": "calc",
        "seed": 3,
        "max_body_bytes": 2 * 2**20,
        "outlet": None,
        "token": None,
    }
    assert {name: told[name] for name in wanted} == wanted
    assert told["closed"]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Model server ready on http://127.0.0.1:")
    assert said[1] == "0 groups opened"


def test_groups_go_where_to_says(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve-model", "--policy", "hf:x", "--port", "0", "--to", "http://x:TOKEN@127.0.0.1:9"]
    assert main(words) == 0
    assert told["outlet"] is not None
    assert "finished groups go to http://127.0.0.1:9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "0.0.0.0"], "there is no token"),
        (["--wishes", "mine"], "wishes"),
        (["--max-body-bytes", "0"], "--max-body-bytes"),
        (["--max-body-bytes", "much"], "a size such as 16GiB"),
        (["--to", "nowhere", "--port", "0"], "server must be a URL"),
    ],
)
def test_mistakes_are_one_line(
    told: dict[str, Any], words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-model", "--policy", "hf:x", *words]) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve-model", "--policy", "hf:x", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert told == {}


def test_its_defaults() -> None:
    config = resolve("serve-model", {})
    assert (config.wishes, config.alternatives, config.reply_tokens) == ("session", "train", 512)
