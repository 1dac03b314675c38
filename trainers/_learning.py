"""The run of ``GRPO.learn``: batches in, one step each, versions out; what is logged on the way."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import update_learning_rate

from atropos_gym.errors import ConfigError
from atropos_gym.trainers._parts import MetricsFile, Phases
from atropos_gym.trainers._sources import GroupSource, open_local, open_server
from atropos_gym.trainers._swap_watch import SwapWatch
from atropos_gym.trainers.batches import Batch, read_batch
from atropos_gym.trainers.merging import merge_rows
from atropos_gym.trainers.scoring import adapter_off
from atropos_gym.trainers.update import Accumulated, accumulate, alignment_of, totals_of
from atropos_gym.wire import ScoredDataGroup

if TYPE_CHECKING:
    from atropos_gym.trainers.grpo import GRPO
    from atropos_gym.trainers.packing import MicroBatch

__all__ = ["learn"]

#: Versions whose folders are kept at least: one that was just announced is not yet held by anyone.
KEPT_VERSIONS = 4

#: Engine and learner in float32 agree to about 5e-6 in the mean and 5e-5 at most; a run warns above these.
ALIGNMENT_WARNING = (1e-4, 1e-3)

Metrics = dict[str, float]


# -- the run -------------------------------------------------------------------------------------------


def learn(
    model: GRPO,
    *,
    total_timesteps: int | None,
    updates: int | None,
    callback: Any,
    log_interval: int,
    tb_log_name: str,
    reset_num_timesteps: bool,
    progress_bar: bool,
) -> None:
    """Makes updates until the wanted number is reached or a callback stops it."""
    model.entropy_trie()  # a missing answer list is said before anything is collected
    turns = total_timesteps or (updates or 0) * model.groups_per_update * model.group_size
    total, callback = model._setup_learn(turns, callback, reset_num_timesteps, tb_log_name, progress_bar)
    if model.server is None:
        _check_staleness(model, updates)
        model.require_fit_engine()
    run = _Run(model, callback, total if updates is None else None, updates, log_interval)
    source = open_local(model) if model.server is None else open_server(model, updates)
    finished = False
    try:
        callback.on_training_start({"total_timesteps": total}, globals())
        while not run.over:
            if not run.update(source):
                break
        callback.on_training_end()
        finished = True
    finally:
        source.close(finished=finished)
        if finished and model.server is not None:
            model._run_over = True


def _check_staleness(model: GRPO, updates: int | None) -> None:
    """Refuses an engine whose weights never change to a learner that would drop what it says.

    Raises:
        ConfigError: with the setting that is too small.
    """
    if getattr(model.engine, "swap", "hot_swap") != "none":
        return
    last = model.version + (updates or 1) - 1
    if last > model.max_staleness:
        raise ConfigError(
            f"swap='none' keeps the engine at version 0, and max_staleness={model.max_staleness} drops what "
            f"it says once the learner is at version {last}: set max_staleness to at least {last}"
        )


class _Run:
    """One call of ``learn``.

    Args:
        model: who learns.
        callback: SB3's.
        timesteps: where to stop, counted from 0; or
        updates: how many further updates to make.
        log_interval: updates between the logger's dumps.
    """

    def __init__(
        self,
        model: GRPO,
        callback: BaseCallback,
        timesteps: int | None,
        updates: int | None,
        log_interval: int,
    ) -> None:
        self.model = model
        self.callback = callback
        self.timesteps = timesteps
        self.last_update = None if updates is None else model._n_updates + updates
        self.log_interval = log_interval
        assert model._parts.folder is not None
        self.metrics = MetricsFile(Path(model.metrics_path or model._parts.folder.path / "metrics.jsonl"))
        self.watch = SwapWatch.of(model)
        self.warned = False
        self.checkpointing: Metrics = {}  # seconds of the last checkpoint, told with the update after it

    @property
    def over(self) -> bool:
        """Whether the wanted number is reached."""
        if self.last_update is not None:
            return self.model._n_updates >= self.last_update
        assert self.timesteps is not None
        return self.model.num_timesteps >= self.timesteps

    @property
    def progress_remaining(self) -> float:
        """From 1 to 0, by whichever of updates and timesteps was given."""
        done, total = (
            (self.model._n_updates, self.last_update)
            if self.last_update is not None
            else (self.model.num_timesteps, self.timesteps)
        )
        return 1.0 - min(1.0, done / max(1, total or 1))

    def update(self, source: GroupSource) -> bool:
        """Makes one update; False where a callback wants to stop."""
        model, phases = self.model, Phases()
        model._current_progress_remaining = self.progress_remaining
        self.callback.on_rollout_start()
        with phases.phase("collect"):
            groups = source.next(model._n_updates + 1)
        if model.deterministic:
            groups.sort(key=_place)  # as they were started, not as they were finished
        with phases.phase("read"):
            batch = read_batch(groups, model.row_rules())
            if not self._tell_turns(batch):
                source.give_back()
                return False
        self.callback.on_rollout_end()
        with phases.phase("train"):
            metrics = self._train(batch)
        with phases.phase("publish"):
            model._n_updates += 1
            model.version += 1
            source.announce(model.version, model.save_version())
            self._prune(source)
        model._settled_timesteps = model.num_timesteps
        source.moved_on()
        # Before the checkpoint: whoever goes on from that one adds no line for this update.
        self._log({**_rollout(batch), **metrics, **phases.seconds, **self.checkpointing})
        due = model.checkpoint_every is not None and model._n_updates % model.checkpoint_every == 0
        saving = Phases()
        if due:
            with saving.phase("checkpoint"):
                model.checkpoint()
        self.checkpointing = saving.seconds
        source.done(durable=due)
        return True

    def _prune(self, source: GroupSource) -> None:
        """Deletes adapters that nobody can use any more, from time to time."""
        model = self.model
        if model._n_updates % KEPT_VERSIONS == 0:
            assert model._parts.folder is not None
            newest = range(model.version - KEPT_VERSIONS - model.max_staleness, model.version + 1)
            model._parts.folder.prune({*newest, *source.held()})

    def _tell_turns(self, batch: Batch) -> bool:
        """Counts timesteps and calls callbacks, once a turn; False where one wants to stop."""
        model, callback = self.model, self.callback
        for episode in batch.played:
            turn_rewards = episode.turn_rewards or [episode.score]
            last = len(turn_rewards) - 1
            for turn, reward in enumerate(turn_rewards):
                model.num_timesteps += 1
                info: dict[str, Any] = {}
                if turn == last:
                    seconds = (time.time_ns() - model.start_time) / 1e9
                    info["episode"] = {"r": float(sum(turn_rewards)), "l": last + 1, "t": round(seconds, 6)}
                    if episode.success is not None:
                        info["is_success"] = episode.success
                    model._episode_num += 1
                infos, dones, rewards = [info], np.array([turn == last]), np.array([reward])
                model._update_info_buffer(infos, dones)
                callback.update_locals({"infos": infos, "dones": dones, "rewards": rewards, "self": model})
                if not callback.on_step():
                    return False
        return True

    # -- one step --------------------------------------------------------------------------------------

    def _train(self, batch: Batch) -> Metrics:
        """Takes one optimizer step (``n_epochs`` of them) on a batch and returns what there is to log."""
        model = self.model
        optimizer = model.policy.optimizer
        rate = model.lr_schedule(model._current_progress_remaining)
        rate *= min(1.0, (model._n_updates + 1) / max(1, model.warm_up_updates))
        update_learning_rate(optimizer, rate)
        metrics: Metrics = {"train/learning_rate": rate, "train/staleness": batch.staleness}
        metrics |= {f"train/dropped/{reason}": float(count) for reason, count in batch.dropped.items()}
        if batch.unknown_version:
            metrics["train/unknown_version"] = float(batch.unknown_version)

        rows, became = merge_rows(batch.rows)
        totals = totals_of(rows, batch.episodes, model.action_space.max_length)
        if totals.tokens == 0:
            return metrics | {"train/empty_updates": 1.0}
        metrics["train/rows"], metrics["train/distinct_rows"] = float(len(batch.rows)), float(len(rows))
        coefficient = model.entropy_schedule(model._current_progress_remaining)

        def gather(old: Sequence[np.ndarray] | None) -> Accumulated:
            optimizer.zero_grad(set_to_none=True)
            return accumulate(
                model._parts.scorer,
                rows,
                totals,
                model.loss_settings(),
                entropy_coef=coefficient,
                old=old,
                score_base=self._score_base if model.kl_coef else None,
                dtype=torch.float64 if model.dtype == "float64" else torch.float32,
                device=model.device,
            )

        result = gather(None)
        mean, largest = alignment_of(batch.rows, became, result.logprobs, model.version)
        metrics |= {"train/alignment": mean, "train/alignment_max": largest}
        self._warn_of_misalignment(mean, largest)
        if self.watch is not None:
            swapped, seen = self.watch.look(model, batch.rows, became, rows, result.logprobs)
            metrics |= seen
            if not swapped:
                optimizer.zero_grad(set_to_none=True)
                return metrics | {"train/dropped/slope": float(len(batch.rows))}
        old = None
        if mean > model.alignment_limit:
            # Engine and learner are two policies: clip learner against learner, weigh learner against engine.
            old = result.logprobs
            result = gather(old)
        for epoch in range(model.n_epochs):
            if epoch:
                result = gather(old)
            norm = torch.nn.utils.clip_grad_norm_(
                [p for p in model.policy.parameters() if p.requires_grad],
                model.max_grad_norm,
                error_if_nonfinite=True,
            )
            optimizer.step()
        metrics |= {
            "train/loss": result.loss,
            "train/entropy": result.entropy,
            "train/entropy_coef": coefficient,
            "train/ratio_max": result.ratio_max,
            "train/clip_fraction": result.clip_fraction,
            "train/approx_kl": result.approx_kl,
            "train/grad_norm": float(norm),
        }
        if model.kl_coef:
            metrics["train/kl_base"] = result.kl_base
        return metrics

    def _score_base(self, batch: MicroBatch) -> torch.Tensor:
        with adapter_off(self.model.policy.model):
            logits: torch.Tensor = self.model._parts.scorer(batch)
        return logits

    def _warn_of_misalignment(self, mean: float, largest: float) -> None:
        if self.warned or self.model.dtype not in ("float32", "float64"):
            return
        if mean > ALIGNMENT_WARNING[0] or largest > ALIGNMENT_WARNING[1]:
            self.warned = True
            warnings.warn(
                f"engine and learner disagree on sampled logprobs by {mean:.1e} in the mean, {largest:.1e} "
                "at most: do both have the same weights, dtype and temperature?",
                stacklevel=2,
            )

    # -- what is said ----------------------------------------------------------------------------------

    def _log(self, metrics: Metrics) -> None:
        """Records an update with SB3's logger and in ``metrics.jsonl``."""
        model = self.model
        elapsed = max((time.time_ns() - model.start_time) / 1e9, 1e-9)
        metrics["time/total_timesteps"] = model.num_timesteps
        metrics["time/fps"] = (model.num_timesteps - model._num_timesteps_at_start) / elapsed
        for key, value in metrics.items():
            model.logger.record(key, value)
        self.metrics.add({"update": model._n_updates, "version": model.version, **metrics})
        if self.log_interval and model._n_updates % self.log_interval == 0:
            model.dump_logs()


def _place(group: ScoredDataGroup) -> tuple[int, int, list[list[int]]]:
    """Where a group stands in a fixed order: by environment and number, else by its ids."""
    number = (group.group_overrides or {}).get("number")
    return group.env_id or 0, number if isinstance(number, int) else -1, group.tokens


def _rollout(batch: Batch) -> Metrics:
    """Mean return, length and success of the episodes that came in."""
    returns = [sum(e.turn_rewards) if e.turn_rewards else e.score for e in batch.played]
    finite = [value for value in returns if math.isfinite(value)]
    successes = [e.success for e in batch.played if e.success is not None]
    metrics = {
        "rollout/ep_rew_mean": float(np.mean(finite)) if finite else math.nan,
        "rollout/ep_len_mean": batch.turns / len(batch.played) if batch.played else math.nan,
    }
    if successes:
        metrics["rollout/success_rate"] = float(np.mean(successes))
    return metrics
