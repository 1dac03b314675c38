"""``atropos-gym train``: teach a language model an environment; without arguments, the main job."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atropos_gym.cli.again import say_again
from atropos_gym.cli.command import Command
from atropos_gym.cli.engines import check_engine_settings
from atropos_gym.cli.envs import table
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.mistakes import need_learner
from atropos_gym.cli.models import find_model
from atropos_gym.cli.progress import Show
from atropos_gym.cli.report import references, stage_titles
from atropos_gym.errors import ConfigError

__all__ = ["run", "stages_table"]


def run(command: Command) -> int:
    """Trains, prints the stages beside the known values, and says where the report is."""
    started, show = time.monotonic(), Show()
    if command.resume is not None:
        folder = RunFolder.open(command.resume)
        if folder.summary.get("status") == "finished":
            show.say(f"{folder.path} is finished: {folder.config.updates} updates were made")
            _print(folder)
            return 0
        given = {name: getattr(command.config, name) for name in command.given}
        secrets = folder.summary.get("secrets") or []
        folder.config = say_again(folder.config, given, secrets, str(folder.path))
    else:
        if command.config.policy == "random":
            raise ConfigError("train --policy random: there is nothing to train in it; take a model, or tiny")
        check_engine_settings(command.config)
        if command.config.policy != "tiny":
            find_model(command.config.policy)
        need_learner()
        folder = RunFolder.create(command.config)
    show.say(f"{folder.path}: {folder.config.env}, policy {folder.config.policy}, seed {folder.config.seed}")
    need_learner()
    from atropos_gym.cli.training import Training

    training = Training(folder, show, started=started)
    try:
        training.open()
    except BaseException:
        if command.resume is None:  # nothing was done yet that is worth a folder
            shutil.rmtree(folder.path)
        raise
    try:
        with _short_warnings(show):
            training.run()
    except (KeyboardInterrupt, SystemExit):
        show.say(f"interrupted; go on with `atropos-gym train --resume {folder.path}`")
        raise
    _print(folder)
    return 0


@contextmanager
def _short_warnings(show: Show) -> Iterator[None]:
    """Shows warnings as one line each, without the place in the source that raised them."""

    def line(message: Warning | str, *place: Any, **more: Any) -> None:
        show.say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = line
        yield


def stages_table(summary: dict[str, Any]) -> str:
    """Returns the stages of a run, then the known values, as aligned text.

    Example:
        >>> row = {"mean": -0.5, "stderr": 0.01, "episodes": 100, "valid": 1.0, "play": "greedy"}
        >>> print(stages_table({"after": row, "random": -0.7}))
        stage       play    mean return  stderr  episodes    valid  exact greedy  exact sampled
        after GRPO  greedy      -0.5000  0.0100       100  100.0 %             –              –
        random                                                           -0.7000
    """
    rows = []
    for stage, title in stage_titles(summary).items():
        row = summary[stage]
        rows.append(
            (
                title,
                row["play"],
                f"{row['mean']:.4f}",
                f"{row['stderr']:.4f}",
                str(row["episodes"]),
                f"{100 * row['valid']:.1f} %",
                _exact(row.get("exact")),
                _exact(row.get("exact_sampled")),
            )
        )
    rows += [(name, "", "", "", "", "", f"{value:.4f}", "") for name, value in references(summary).items()]
    head = ("stage", "play", "mean return", "stderr", "episodes", "valid", "exact greedy", "exact sampled")
    return table(rows, head)


def _exact(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _print(folder: RunFolder) -> None:
    print(stages_table(folder.summary))
    print(f"report: {Path(folder.path / 'report.html')}")
