"""``atropos-gym envs`` and ``eval``: what is listed and measured, as a person sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import gymnasium
import pytest

from atropos_gym.cli import main
from atropos_gym.cli.environment import find_env, make_env
from atropos_gym.cli.envs import table
from atropos_gym.envs import ENVIRONMENTS
from atropos_gym.errors import ConfigError
from atropos_gym.text_env import TextEnv

OWN_TASK = """
from atropos_gym import Feedback, TextEnv
import gymnasium

class Reverse(TextEnv):
    def begin(self, options):
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        return f"Write {self.word} backwards."

    def respond(self, reply):
        return Feedback(reward=float(reply.content.strip() == self.word[::-1]), terminated=True)

    def sample_reply(self):
        return "abca"

gymnasium.register("mine/Reverse-v0", entry_point=Reverse)

def good(obs, info):
    return [104, 105, 258]

def texts(obs, info):
    return "hit"

def floats(obs, info):
    return [1.0, 2.0]

def too_large(obs, info):
    return [104, 99999]
"""


@pytest.fixture
def own_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    yield
    sys.modules.pop("own_task", None)
    gymnasium.registry.pop("mine/Reverse-v0", None)


def test_every_ready_environment_is_listed_with_its_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    rows = {
        line.split()[0]: line.split()[1:3] for line in out.splitlines()[1:] if line.startswith("atropos/")
    }
    assert set(rows) == set(ENVIRONMENTS)
    assert rows["atropos/Blackjack-v0"] == ["-0.3942", "-0.0431"]
    assert rows["atropos/Taxi-v0"] == ["-186.1795", "7.9300"]
    assert rows["atropos/GSM8K-v0"] == ["–", "–"]


def test_listing_reads_no_data_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["envs"]) == 0
    assert "GSM8K" in capsys.readouterr().out


def test_random_play_is_measured_beside_the_exact_scores(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--policy", "random", "--env-arg", "describe=terse", "--episodes", "2000", "--seed", "3"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    mean, stderr = (float(cell) for cell in out[1].split()[2:4])
    assert abs(mean + 0.3942) < 4 * stderr
    assert [line.split()[-1] for line in out[2:]] == ["-0.0431", "-0.3942"]


def test_the_same_seed_measures_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "--policy", "random", "--env", "atropos/FrozenLake-v0", "--episodes", "50", "--seed"]
    outs = []
    for seed in ("1", "1", "2"):
        assert main([*words, seed]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.usefixtures("own_task")
@pytest.mark.parametrize("name", ["own_task:Reverse", "own_task:mine/Reverse-v0"])
def test_an_environment_of_ones_own_is_found_in_the_working_folder(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["eval", "--policy", "random", "--env", name, "--episodes", "20"]) == 0
    assert "random, played" in capsys.readouterr().out


@pytest.mark.usefixtures("own_task")
def test_a_function_of_ones_own_plays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--policy", "own_task:good", "--env", "own_task:Reverse", "--episodes", "20"]) == 0
    assert "0.0000" in capsys.readouterr().out


@pytest.mark.usefixtures("own_task")
@pytest.mark.parametrize(
    ("function", "said"),
    [("texts", "str"), ("floats", "float"), ("too_large", "99999")],
)
def test_wrong_ids_from_a_function_are_one_line(
    capsys: pytest.CaptureFixture[str], function: str, said: str
) -> None:
    words = ["eval", "--policy", f"own_task:{function}", "--env", "own_task:Reverse", "--episodes", "20"]
    assert main(words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("atropos-gym: ")]
    assert len(lines) == 1
    assert said in lines[0]


def test_making_checks_names_and_keywords() -> None:
    env = make_env("atropos/Blackjack-v0", {"describe": "terse"})
    assert isinstance(env, TextEnv)
    assert env.history == "whole"
    env.close()
    with pytest.raises(ConfigError, match="nearest: atropos/Taxi-v0"):
        find_env("atropos/Taxy-v0")
    with pytest.raises(ConfigError, match="nothing"):
        make_env("atropos/Blackjack-v0", {"nothing": 1})


def test_columns_line_up() -> None:
    text = table([("a", "1.5"), ("bb", "–")], ("name", "value"))
    assert text.splitlines() == ["name  value", "a       1.5", "bb        –"]
