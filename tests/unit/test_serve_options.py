"""``atropos-gym serve``: which flags reach the server, and as what."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.limits import Limits
from atropos_gym.cli import serve as verb
from atropos_gym.cli.command import parse
from atropos_gym.errors import ConfigError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What the server was started with."""
    monkeypatch.delenv("ATROPOS_GYM_TOKEN", raising=False)
    monkeypatch.delenv("ATROPOS_GYM_ENV_TOKEN", raising=False)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(verb, "serve", lambda *words, **options: calls.append((words, options)))
    return calls


def run(*words: str) -> int:
    command = parse(["serve", *words])
    assert command is not None
    return verb.run(command)


def test_without_flags_the_defaults_hold(served: list[Any]) -> None:
    assert run() == 0
    ((words, options),) = served
    assert words == ("127.0.0.1", 8000)
    assert options["limits"] == Limits()
    assert options["access"] == Access()
    assert options["insecure"] is False


def test_flags_become_limits_and_access(served: list[Any]) -> None:
    run(
        *("--host", "0.0.0.0", "--port", "0", "--token", "a", "--env-token", "b"),
        *("--cors-origin", "https://x.example, https://y.example"),
        *("--hold-seconds", "5", "--soft-groups", "7", "--hard-bytes", "1000", "--max-body-bytes", "2000"),
        *("--short-batch-seconds", "1", "--min-wait-seconds", "2", "--buffer-seconds", "3"),
        *("--env-timeout", "4", "--trainer-timeout", "6", "--max-deliveries", "2"),
    )
    ((words, options),) = served
    assert words == ("0.0.0.0", 0)
    assert options["access"] == Access("a", "b", ("https://x.example", "https://y.example"))
    assert options["limits"] == Limits(
        hold_seconds=5,
        soft_groups=7,
        hard_bytes=1000,
        max_body_bytes=2000,
        short_batch_seconds=1,
        min_wait_seconds=2,
        buffer_seconds=3,
        env_timeout=4,
        trainer_timeout=6,
        max_deliveries=2,
    )


def test_the_old_flags_are_taken(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run("--host", "127.0.0.1", "--port", "8000", "--reload")
    assert served
    assert capsys.readouterr().out.startswith("--reload has no effect")


def test_a_post_is_held_for_less_than_its_sender_waits() -> None:
    with pytest.raises(ConfigError, match="--hold-seconds"):
        parse(["serve", "--hold-seconds", "300"])


def test_help_is_for_newcomers(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["serve", "--help"]) is None
    said = " ".join(capsys.readouterr().out.split())
    assert "http://127.0.0.1:8000" in said and "started again" in said and "--hold-seconds" in said
    assert said.startswith("usage: atropos-gym serve [options] ")
    for words in (
        "[1GiB]",
        "[256MiB]",
        "$ATROPOS_GYM_TOKEN",
        "server- PORT.sqlite",
        "Type=notify",
        "SIGTERM",
    ):
        assert words in said, words
    assert "[null]" not in said and "--no-fresh" not in said


def test_help_of_collect_shows_both_uses(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["collect", "--help"]) is None
    said = capsys.readouterr().out
    assert "usage: atropos-gym collect [ENV] [options]" in said
    for words in ("into a file:", "as a service:", "--spool FOLDER", "--each-item", "--out taxi.html"):
        assert words in said, words


def test_every_limit_of_bytes_is_a_size(served: list[Any]) -> None:
    run("--memory-bytes", "64MiB", "--hard-bytes", "1GiB", "--max-body-bytes", "1 MB")
    limits = served[0][1]["limits"]
    assert (limits.memory_bytes, limits.hard_bytes, limits.max_body_bytes) == (2**26, 2**30, 10**6)
