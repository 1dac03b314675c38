"""A run's sample episodes: whole files, whatever happens while they are played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_gym.cli.config import Config
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.samples import play_samples, write_samples
from atropos_gym.engines import make_engine
from atropos_gym.rollout.writers import read_jsonl
from atropos_gym.tokenizers import load_tokenizer


def learner(script: Callable[..., list[int]]) -> Any:
    """What samples need of a learner."""
    engine = make_engine("scripted", script=script)
    return SimpleNamespace(
        engine=engine, action_space=SimpleNamespace(max_length=8), tokenizer=load_tokenizer("bytes")
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(Config(runs=tmp_path, name="a", env="atropos/Identity-v0"))


def test_a_stage_that_is_interrupted_leaves_nothing_and_is_played_again(folder: RunFolder) -> None:
    def script(prompt: Any, params: Any, number: int) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play_samples(folder, learner(script), "untrained")
    assert list((folder.path / "rollouts").iterdir()) == []
    play_samples(folder, learner(lambda *_: [*b"red", 258]), "untrained")
    assert [len(group.episodes) for group in read_jsonl(folder.path / "rollouts/untrained.jsonl")] == [4, 4]


def test_the_page_has_the_stages_of_the_summary_and_opens_the_newest(folder: RunFolder) -> None:
    model = learner(lambda *_: [*b"red", 258])
    for stage in ("untrained", "before"):
        play_samples(folder, model, stage)
    folder.summary |= {"untrained": {"mean": 0.0}, "after": {"mean": 0.0}}  # the latter has no file
    write_samples(folder, model, "untrained")
    page = (folder.path / "rollouts/samples.html").read_text()
    assert page.count("untrained weights, start") == 2
    assert "format lesson" not in page and "after GRPO" not in page
    assert page.count('<details class="group" open>') == 1
