"""Sample episodes of a run: groups as JSON lines, and their ids as HTML for the report."""

from __future__ import annotations

from typing import Any

from atropos_gym.cli.environment import find_env
from atropos_gym.cli.folder import RunFolder, write_whole
from atropos_gym.cli.report import stage_titles
from atropos_gym.engines.base import SamplingParams
from atropos_gym.html import render_group
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.reading import FileOfGroups
from atropos_gym.rollout.writers import JSONLWriter

__all__ = ["play_samples", "write_samples"]

GROUPS = 2
GROUP_SIZE = 4


def play_samples(folder: RunFolder, model: Any, stage: str) -> None:
    """Plays a few groups of a stage, the same starts in each stage, into ``rollouts/<stage>.jsonl``.

    The file has all of them or is not there: a run that is interrupted here plays them when it goes on.

    Args:
        folder: the run's.
        model: the learner; its engine plays at the run's temperature.
        stage: its name in the summary.
    """
    config = folder.config
    collector = GroupCollector(
        find_env(config.env),
        model.engine,
        group_size=GROUP_SIZE,
        concurrency=GROUPS * GROUP_SIZE,
        sampling=SamplingParams(max_tokens=model.action_space.max_length, temperature=config.temperature),
        seed=config.seed,
        common_random_numbers=config.common_random_numbers,
        env_kwargs=config.env_kwargs,
    )
    path = folder.path / "rollouts" / f"{stage}.jsonl"
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)
    try:
        with JSONLWriter(unfinished, collector.env.renderer) as writer:
            for played in collector.collect(GROUPS):
                writer.write(played)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
        collector.close()


def write_samples(folder: RunFolder, model: Any, newest: str) -> None:
    """Writes ``rollouts/samples.html`` from the samples of every stage in the summary; the newest is open."""
    rollouts = folder.path / "rollouts"
    parts = ['<div class="ag">']
    for name, title in stage_titles(folder.summary).items():
        file = rollouts / f"{name}.jsonl"
        if not file.is_file():
            continue
        for number, group in enumerate(FileOfGroups(file, model.tokenizer), start=1):
            opened = name == newest and number == 1
            parts.append(render_group(group, title=f"{title}, start {number}", open=opened))
    write_whole(rollouts / "samples.html", "".join(parts) + "</div>")
