"""``atropos-gym collect`` as a service: what the command line says reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import collect
from atropos_gym.cli.command import parse
from atropos_gym.cli.progress import Show
from atropos_gym.engines import SamplingParams
from atropos_gym.errors import ConfigError
from atropos_gym.rollout.service import EnvironmentService
from tests.unit.rollout_cases import saying


def service_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> EnvironmentService:
    """The service that a command line makes; it is not run."""
    made: list[EnvironmentService] = []

    async def run(self: EnvironmentService) -> None:
        made.append(self)
        self.collector.close()

    monkeypatch.setattr(EnvironmentService, "run", run)
    command = parse(["collect", "--to", "http://127.0.0.1:1", "--policy", "x", *words])
    assert command is not None and command.config.to is not None
    collect._serve(command.config, command.config.to, saying("ja"), SamplingParams(max_tokens=8), Show())
    return made[0]


def test_the_environment_is_the_word_that_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert service_of(monkeypatch, "atropos/Taxi-v0").name == "atropos/Taxi-v0"
    assert service_of(monkeypatch, "--env", "atropos/Taxi-v0").name == "atropos/Taxi-v0"
    with pytest.raises(ConfigError, match="two environments: a and --env b; give one"):
        parse(["collect", "a", "--env", "b"])


def test_without_a_word_about_it_there_is_no_evaluation_and_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(monkeypatch)
    assert service._evaluation is None and service._position.next_number == 0


def test_spool_items_and_curriculum(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_lessons.py").write_text(
        "from atropos_gym.text_env import TextEnv, Feedback\n"
        "def harder(step, progress): return {'level': step}\n"
        "class Ladder:\n"
        "    def __call__(self, step, progress): return {}\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--spool", str(tmp_path / "spool"), "--curriculum", "my_lessons:harder"]
    service = service_of(monkeypatch, *words)
    assert service._lessons.reached(3) and service._lessons.options(0) == {"level": 3}
    service._position.posted([4])
    assert (tmp_path / "spool" / "service.json").exists()
    assert service_of(monkeypatch, "--curriculum", "my_lessons:Ladder")._lessons.reached(0)
    for name, match in (
        ("harder", "must be module:name, such as my_tasks:harder"),
        ("my_lessons:number", "has 'number', which cannot be called"),
        ("my_lessons:nothing", "has no 'nothing'"),
        ("no_such_module:harder", "cannot be imported from"),
    ):
        with pytest.raises(ConfigError, match=match):
            service_of(monkeypatch, "--curriculum", name)


def test_items_are_gone_through_only_where_there_are_some() -> None:
    command = parse(["collect", "--out", "x.html", "--policy", "x", "--each-item"])
    assert command is not None
    with pytest.raises(ConfigError, match="--each-item: atropos/Blackjack-v0 has no items to go through"):
        collect.run(command)


def test_evaluation_share_and_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--evaluate-every", "7", "--episodes", "30", "--evaluate-split", "test", "--weight", "2"]
    words += ["--min-batch-allocation", "0.25", "--state", str(tmp_path / "state.json"), "--seed", "3"]
    service = service_of(monkeypatch, *words)
    evaluation: Any = service._evaluation
    assert (evaluation.every, evaluation.episodes, evaluation.seed) == (7, 30, 3)
    assert evaluation.env_kwargs == {"split": "test"}
    settings = service._membership._settings
    assert (settings["weight"], settings["min_batch_allocation"]) == (2.0, 0.25)
    evaluation.on_result(14, "0.5 ± 0.1")
    assert "evaluation at step 14: 0.5 ± 0.1" in "".join(capsys.readouterr())
    service._position.posted([4])
    assert service_of(monkeypatch, *words).collector.next_number == 5


def test_the_last_line_says_what_is_not_at_the_server_for_sure() -> None:
    report = {"posted": 7, "refused": {}, "spool": {"folder": "s", "waiting": 2, "unsure": 1}}
    assert collect._summary(report) == "7 groups posted, 2 wait in s, 1 may have arrived and lie in s/unsure"
    assert (
        collect._summary({**report, "spool": None, "refused": {"unsure": 1}}) == "7 groups posted, 1 refused"
    )
