"""``atropos-gym play``: a person at the keyboard sees what a policy reads and why it is paid what it is."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atropos_gym.cli import main

TASK = """
from atropos_gym import Feedback, Message, TextEnv

class Guess(TextEnv):
    max_turns = 3
    max_turn_tokens = 12
    scores = {"random": 0.25, "optimal": 1.0}

    def begin(self, options):
        self.word = str(self.np_random.choice(["ab", "cd"]))
        return [Message(role="system", content="Guess."), Message(role="user", content=f"not {self.word}")]

    def respond(self, reply):
        if reply.content == "restart":
            return Feedback("again", restart=[Message(role="user", content="so far: nothing")])
        if reply.content not in ("ab", "cd"):
            return Feedback("say ab or cd", reward=-0.5, invalid=True, info={"invalid_reason": "no_word"})
        right = reply.content != self.word
        return Feedback("Right." if right else "Wrong.", reward=float(right), terminated=True, success=right,
                        reward_terms={"word": float(right), "style": 0.0})

    def extra_info(self):
        return {"legal_actions": ["ab", "cd"]}

class Broken(Guess):
    def step(self, action):
        observation, *rest = super().step(action)
        observation[0] = 1
        return observation, *rest
"""

Play = Callable[..., tuple[int, str, str]]


@pytest.fixture
def play(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Play]:
    (tmp_path / "guess_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def call(typed: str, *words: str, env: str = "guess_task:Guess") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = main(["play", env, *words])
        out, err = capsys.readouterr()
        return code, out, err

    yield call
    sys.modules.pop("guess_task", None)


def episode_of(out: str, seed: int) -> str:
    """What was said of one episode."""
    return out.split(f"==== episode of seed {seed}\n")[1].split("\n====")[0]


def test_an_episode_from_prompt_to_score(play: Play) -> None:
    code, out, err = play("what?\ncd\n", "--seed", "0")
    assert (code, err) == (0, "")
    word = "ab" if "not ab" in episode_of(out, 0) else "cd"
    right = word == "ab"
    assert episode_of(out, 0).splitlines() == [
        "prompt, 16 ids",
        f"  | <bos><system>Guess.<user>not {word}<assistant>",
        "your turn · at most 12 ids · legal: ab, cd",
        "> what?",
        "turn 0, 6 ids · reward −0.5 · invalid: no_word",
        "bridge, 14 ids",
        "  | <user>say ab or cd<assistant>",
        "your turn · at most 12 ids · legal: ab, cd",
        "> cd",
        f"turn 1, 3 ids · reward {'+1' if right else '0'} · word {'+1' if right else '0'} · style 0",
        "user, at the end, read by no policy",
        f"  | {'Right.' if right else 'Wrong.'}",
        f"end · terminated · {'solved' if right else 'not solved'} · return {'+0.5' if right else '−0.5'}",
        f"mean return of 1 episode: {'+0.5' if right else '−0.5'} · random +0.25 · optimal +1",
    ]


def test_one_episode_follows_the_other_until_nothing_is_typed(play: Play) -> None:
    code, out, _ = play("ab\ncd\n", "--seed", "5")
    assert code == 0
    assert "==== episode of seed 5\n" in out
    assert "mean return of 2 episodes: " in out
    assert "==== episode of seed 7\n" in out
    assert out.endswith("\nleft in the middle of an episode, which does not count\n")


def test_the_same_seed_is_the_same_episode(play: Play) -> None:
    once = episode_of(play("ab\n", "--seed", "3")[1], 3)
    assert episode_of(play("ab\n", "--seed", "3")[1], 3) == once


def test_a_reply_may_have_several_lines(play: Play) -> None:
    _, out, _ = play("a\\\nb\n")
    assert "> a\n  b\nturn 0, 4 ids" in out


def test_help_says_how_to_type_several_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "one that ends in a backslash goes on in the next line" in said
    assert "Ctrl-D leaves" in said


def test_a_reply_that_is_too_long_is_cut_as_a_models_would_be(play: Play) -> None:
    _, out, _ = play("x" * 40 + "\n")
    assert "cut to 12 ids, as a model's reply would be\nturn 0, 12 ids · reward −0.5 · invalid" in out
    assert "cut: no end id" in out
    assert "bridge, 15 ids\n  | <end><user>say ab or cd<assistant>" in out


def test_ids_are_shown_with_piece_and_source(play: Play) -> None:
    _, out, _ = play("é\nab\n", "--show-ids")
    lines = [line.split() for line in out.splitlines()]
    assert ["0", "257", "template", "no", "<bos>"] in lines
    assert ["2", "71", "message", "no", "G"] in lines
    assert ["16", "195", "sampled", "trained", "<0xC3>"] in lines
    assert ["18", "258", "sampled", "trained", "<end>"] in lines
    assert ["19", "260", "template", "no", "<user>"] in lines
    assert ["20", "115", "message", "no", "s"] in lines


def test_a_new_segment_has_a_border(play: Play) -> None:
    _, out, _ = play("restart\nab\n")
    border = out.index("---- segment 1: ")
    assert "> restart" in out[:border]
    assert "  | <bos><user>so far: nothing<user>again<assistant>" in out[border:]
    assert "turn 1, 3 ids" in out[border:]


def test_every_turn_is_a_segment_where_only_the_latest_is_read(play: Play) -> None:
    _, out, _ = play("x\nab\n", "--history", "latest", "--show-ids")
    border = out.index("---- segment 1: ")
    assert "  template  no                         <system>" in out[border:]
    assert " message   no                         G" in out[border:]


def test_the_end_of_turns_is_said(play: Play) -> None:
    _, out, _ = play("x\ny\nz\n")
    assert "end · max_turns · truncated · return −1.5" in out


def test_control_c_leaves_politely(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    code, out, err = play("")
    assert (code, err) == (0, "")
    assert out.endswith("left in the middle of an episode, which does not count\n")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ("atropos/Blakjack-v0", "nearest: atropos/Blackjack-v0"),
        ("guess_task:Nothing", "'Nothing'"),
        ("no_such_task:X", "'no_such_task'"),
        ("CartPole-v1", "GymTextEnv"),
    ],
)
def test_what_cannot_be_played_is_one_line(play: Play, env: str, said: str) -> None:
    code, out, err = play("", env=env)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_an_argument_of_the_environment(play: Play) -> None:
    assert "at most 5 ids" in play("", "--env-arg", "max_turn_tokens=5")[1]
    code, _, err = play("", "--env-arg", "colour=red")
    assert code == 2
    assert "does not take the argument 'colour'" in err


def test_the_tokenizer_is_said(play: Play) -> None:
    assert play("", "--tokenizer", "bytes")[1].startswith("guess_task:Guess · tokenizer bytes\n")


def test_an_environment_that_breaks_its_ids_is_found_out(play: Play) -> None:
    code, _, err = play("x\n", env="guess_task:Broken")
    assert code == 2
    assert "guess_task:Broken breaks its own ids: prompt rewrote ids of its segment: position 0" in err
