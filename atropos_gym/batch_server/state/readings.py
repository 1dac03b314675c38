"""What people and programs read of a store. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.metrics import Metric, counter, gauge, histogram
from atropos_gym.batch_server.state.env_book import EnvBook, EnvRecord
from atropos_gym.batch_server.state.policies import PolicyBoard
from atropos_gym.batch_server.state.refusals import Unknown
from atropos_gym.batch_server.state.stock import Stock
from atropos_gym.batch_server.state.tallies import Tallies

__all__ = ["Readings"]

LAG_BUCKETS = (0, 1, 2, 4, 8, 16)
"""Upper ends of the buckets of ``atropos_policy_lag``, in versions."""


class Readings:
    """The reading half of a store; what it reads is set by the other half."""

    _limits: Limits
    _envs: EnvBook
    _tallies: Tallies
    _stock: Stock
    _policies: PolicyBoard
    _started: bool
    _trainer_seen_at: float
    _now: float

    @property
    def registered(self) -> bool:
        """Whether a trainer has registered."""
        return self._stock.config is not None

    @property
    def failing(self) -> str:
        """Why nothing can be saved; "" where all is well."""
        return ""

    @property
    def reason(self) -> str:
        """Why the last request got no batch; "" where it got one."""
        return self._stock.reason

    def why_none(self) -> str:
        """Why no batch goes out now, in a sentence; "" where one can."""
        if self._stock.config is None:
            return "no trainer has registered"
        if not self._started:
            return "the trainer has not asked for one yet, and environments wait for that"
        silent = self._now - self._trainer_seen_at
        if reason := self._stock.why_none(self._now):
            return "".join((reason, *self._circumstances()))
        if silent > self._limits.trainer_timeout:
            return f"one is ready, but the trainer has not asked for {silent:.0f} s"
        return ""

    def _circumstances(self) -> Iterator[str]:
        """What may be behind it that too little is queued."""
        if parts := sum(env.buffered_sequences for env in self._envs):
            yield f"; {parts} sequences wait for the rest of their groups"
        if leased := self._stock.leases.groups:
            yield f"; {leased} groups are handed out and not acknowledged"
        if len(self._envs) and not self._envs.connected:
            yield "; no environment is connected"

    def _find_env(self, env_id: int) -> EnvRecord:
        env = self._envs.find(env_id)
        if env is None:
            raise Unknown(f"unknown env_id {env_id}: register first")
        return env

    def metrics(self) -> list[Metric]:
        """What GET ``/metrics`` shows of a store."""
        stock, tallies, queue = self._stock, self._tallies, self._stock.queue
        received = {env.wandb_name: env.groups_received for env in self._envs}
        received |= {"unknown": tallies.unknown_env, "none": tallies.no_env}
        buffered = sum(len(env.buffer) for env in self._envs)
        version = self._policies.version
        found = [
            gauge("queue_groups", "Groups that wait for a trainer.", queue.groups),
            gauge("queue_sequences", "Sequences of these groups.", queue.sequences),
            gauge("queue_tokens", "Token ids of these groups.", queue.tokens),
            gauge("queue_bytes", "Bytes that these groups take.", queue.bytes),
            gauge("leased_groups", "Groups handed out and not yet acknowledged.", stock.leases.groups),
            gauge("buffered_groups", "Parts of groups that wait for the others.", buffered),
            gauge("current_step", "Batches handed out so far.", stock.step),
        ]
        if version is not None:
            found.append(gauge("policy_version", "Newest version of the policy.", version))
        return [
            *found,
            gauge("connected_envs", "Environments that were heard of lately.", len(self._envs.connected)),
            counter("groups_received_total", "Groups that were accepted.", received, label="env"),
            counter("groups_refused_total", "Groups that were refused.", tallies.refused, label="reason"),
            counter("groups_set_aside_total", "Groups nobody will get.", tallies.set_aside, label="reason"),
            counter("foreign_masks_total", "Groups with odd masks, kept as sent.", tallies.foreign_masks),
            counter("batches_delivered_total", "Batches that were handed over.", tallies.batches),
            counter("batches_redelivered_total", "Batches handed over again.", tallies.redelivered),
            counter("short_batches_total", "Batches below the batch size.", tallies.short_batches),
            counter("policy_lag_unknown_total", "Delivered groups of no known version.", tallies.lag_unknown),
            histogram(
                "policy_lag",
                "Versions that groups were behind the newest one when they were handed over.",
                {int(lag): count for lag, count in tallies.policy_lag.items()},
                LAG_BUCKETS,
            ),
        ]

    def wandb_info(self) -> dict[str, Any]:
        """Body of GET ``/wandb_info``."""
        config = self._stock.config
        return {
            "group": config.wandb_group if config else None,
            "project": config.wandb_project if config else None,
        }

    def info(self) -> dict[str, Any]:
        """Body of GET ``/info``."""
        config = self._stock.config
        if config is None:
            return {"batch_size": -1, "max_token_len": -1}
        return {"batch_size": config.batch_size, "max_token_len": config.max_token_len, **self._by_groups()}

    def _by_groups(self) -> dict[str, Any]:
        """What a trainer that counts in groups asks of the environments."""
        config = self._stock.config
        if config is None or (config.groups_per_update is None and config.max_policy_lag is None):
            return {}
        return {
            "groups_per_update": config.groups_per_update,
            "max_policy_lag": config.max_policy_lag,
            "groups_wanted": self._stock.groups_wanted,
        }

    def env_reply(self, env: EnvRecord) -> dict[str, Any]:
        """Body of POST ``/register-env`` for a registered environment."""
        config = self._stock.config
        assert config is not None, "environments register after the trainer"
        return {
            "status": "success",
            "env_id": env.env_id,
            "wandb_name": env.wandb_name,
            "checkpoint_dir": config.checkpoint_dir,
            "starting_step": self._stock.step,
            "checkpoint_interval": config.save_checkpoint_interval,
            "num_steps": config.num_steps,
        }

    def registration(self, env_id: int) -> str:
        """The name of an environment's registration."""
        return self._find_env(env_id).registration

    def gauges(self) -> dict[str, Any]:
        """What of ``/status`` costs nothing to read."""
        return {
            "current_step": self._stock.step,
            "queue_size": self._stock.queue.groups,
            "queue_sequences": self._stock.queue.sequences,
            "leased_groups": self._stock.leases.groups,
            **self._policy(),
        }

    def _policy(self) -> dict[str, Any]:
        """The newest version, and whose it is no more."""
        superseded = {"superseded": True} if self._policies.superseded else {}
        version, finished = self._policies.version, self._policies.finished
        return {"policy_version": version, "finished": finished, **superseded}

    def status(self) -> dict[str, Any]:
        """Body of GET ``/status``."""
        return {**self.gauges(), "reason": self.why_none()}

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Body of GET ``/status-env``; its ``queue_size`` counts in groups of the asking environment."""
        env, queue, config = self._find_env(env_id), self._stock.queue, self._stock.config
        return {
            "current_step": self._stock.step,
            "queue_size": queue.sequences // env.settings.group_size,
            "unallocated_fraction": self._envs.unallocated_fraction,
            "self_queue_size": queue.sequences_of[env_id] // env.settings.group_size,
            "max_group_size": max(1, queue.largest_group),
            "env_weight": self._envs.weight(env),
            "queue_groups": queue.groups,
            "self_queue_groups": queue.groups_of[env_id],
            **self._policy(),
            "num_steps": -1 if config is None else config.num_steps,
            "batch_size": -1 if config is None else config.batch_size,
            "wandb_name": env.wandb_name,
            **self._by_groups(),
        }

    def envs(self) -> list[dict[str, Any]]:
        """Items of GET ``/envs``."""
        queue = self._stock.queue
        return [
            {
                "env_id": env.env_id,
                "name": env.settings.desired_name,
                "wandb_name": env.wandb_name,
                "connected": env.connected,
                "weight": env.settings.weight,
                "group_size": env.settings.group_size,
                "max_token_length": env.settings.max_token_length,
                "min_batch_allocation": env.settings.min_batch_allocation,
                "last_seen": env.last_seen,
                "queue_groups": queue.groups_of[env.env_id],
                "queue_sequences": queue.sequences_of[env.env_id],
                "buffered_sequences": env.buffered_sequences,
                "groups_received": env.groups_received,
                "groups_refused": env.groups_refused,
                "score_mean": env.score_mean,
            }
            for env in self._envs
        ]

    def trainer(self) -> dict[str, Any]:
        """Whether a trainer has registered, with what, and when it was last heard of."""
        config = self._stock.config
        return {
            "registered": config is not None,
            "last_seen": self._trainer_seen_at if config else None,
            "settings": config.model_dump(exclude_none=True) if config else {},
        }

    def leases(self) -> list[dict[str, Any]]:
        """The batches that are handed out and not acked, oldest first."""
        return [
            {
                "batch_id": lease.batch_id,
                "step": lease.step,
                "groups": lease.group_count,
                "sequences": lease.sequences,
                "delivery": lease.delivery,
                "expires_at": None if lease.seconds is None else lease.expires_at,
            }
            for lease in self._stock.leases
        ]

    def health(self) -> dict[str, Any]:
        """Body of GET ``/health``."""
        warnings = self._tallies.warnings()
        if self.failing:
            warnings.insert(0, self.failing)
        if sentence := self.why_none():
            warnings.append(f"no batch: {sentence}")
        return {
            "status": "failing" if self.failing else "ok",
            "registered": self.registered,
            "started": self._started,
            "current_step": self._stock.step,
            "queue_groups": self._stock.queue.groups,
            "warnings": warnings,
        }
