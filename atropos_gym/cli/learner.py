"""The learner that a configuration describes: new, or gone on with from a checkpoint.

Importing this loads torch, transformers, peft and Stable-Baselines3.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stable_baselines3.common.utils import LinearSchedule

from atropos_gym.cli.config import Config
from atropos_gym.cli.environment import find_env
from atropos_gym.cli.folder import RunFolder, write_whole
from atropos_gym.cli.models import find_model
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.schedules import Geometric, Schedule
from atropos_gym.trainers.tiny import TINY

__all__ = ["last_checkpoint", "open_learner"]


def open_learner(folder: RunFolder) -> GRPO:
    """Returns the learner of a run, from its last checkpoint where there is one.

    What the run's files say about updates after that checkpoint is taken back: those updates are made again.
    """
    config = folder.config
    checkpoint = last_checkpoint(folder.path)
    if checkpoint is None:
        _take_back(folder, 0)
        return _new_learner(config, folder.path)
    model = GRPO.load(
        checkpoint,
        env=find_env(config.env),
        env_kwargs=config.env_kwargs,
        folder=folder.path,
        engine_spec=config.engine,
        engine_kwargs=config.engine_kwargs,
    )
    _take_back(folder, model._n_updates)
    return model


def last_checkpoint(run: Path) -> Path | None:
    """Returns the newest ``checkpoints/<update>.zip``, or None."""
    return max((run / "checkpoints").glob("[0-9]*.zip"), default=None)


def _new_learner(config: Config, folder: Path) -> GRPO:
    return GRPO(
        config.policy if config.policy == TINY else find_model(config.policy),
        find_env(config.env),
        env_kwargs=config.env_kwargs,
        learning_rate=_learning_rate(config),
        warm_up_updates=config.warm_up_updates,
        group_size=config.group_size,
        groups_per_update=config.groups_per_update,
        concurrency=config.concurrency,
        temperature=config.temperature,
        common_random_numbers=config.common_random_numbers,
        engine=config.engine,
        engine_kwargs=config.engine_kwargs,
        engine_check=config.engine_check,
        slope_test=config.slope_test,
        max_staleness=config.max_staleness,
        drop_equal=config.drop_equal,
        reduction=config.reduction,
        entropy=(_entropy(config), config.entropy_over),
        sub_batches=config.sub_batches,
        lora=Lora(rank=config.lora_rank, alpha=config.lora_alpha),
        dtype=config.dtype,
        folder=folder,
        threads=config.threads,
        checkpoint_every=config.checkpoint_every,
        seed=config.seed,
    )


def _learning_rate(config: Config) -> float | Schedule:
    if config.learning_rate_end == 1.0:
        return config.learning_rate
    falling: Schedule = LinearSchedule(
        config.learning_rate, config.learning_rate * config.learning_rate_end, 1.0
    )
    return falling


def _entropy(config: Config) -> float | Schedule:
    if config.entropy_end is None or config.entropy_end == config.entropy:
        return config.entropy
    return Geometric(config.entropy, config.entropy_end)


def _take_back(folder: RunFolder, update: int) -> None:
    """Drops what metrics and curve say of later updates than ``update``."""
    metrics = folder.path / "metrics.jsonl"
    if metrics.is_file():
        text = metrics.read_text(encoding="utf-8")
        lines = text[: text.rfind("\n") + 1].splitlines()
        kept = [line for line in lines if json.loads(line)["update"] <= update]
        write_whole(metrics, "".join(line + "\n" for line in kept))
    curve: list[dict[str, Any]] = folder.summary.get("curve") or []
    if curve:
        folder.summary["curve"] = [point for point in curve if point["update"] <= update]
