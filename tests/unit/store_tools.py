"""A store with a trainer, environments and groups, in a line each. Times are passed in; nobody waits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.batch_server.state.memory import MemoryStore
from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.wire import EnvRegistration, PolicyUpdate, Registration, ScoredDataGroup

NOW = 1000.0
PLAIN = Request()
LEASE = Request(lease_seconds=60)


def registration(batch_size: int = 8, **fields: Any) -> Registration:
    defaults = {
        "wandb_group": "g",
        "wandb_project": "p",
        "max_token_len": 64,
        "checkpoint_dir": "c",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10,
    }
    return Registration.model_validate({**defaults, "batch_size": batch_size, **fields})


def make_store(batch_size: int = 8, limits: Limits | None = None, **fields: Any) -> MemoryStore:
    """A store whose trainer has asked for its first batch."""
    store = MemoryStore(limits)
    store.register(registration(batch_size, **fields), NOW)
    assert store.take(PLAIN, NOW) is None
    return store


def add_env(store: MemoryStore, now: float = NOW, **fields: Any) -> int:
    settings_ = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4, **fields}
    env = store.register_env(EnvRegistration.model_validate(settings_), now)
    assert env is not None
    return env.env_id


def add(store: MemoryStore, sequences: int = 4, now: float = NOW, **fields: Any) -> str:
    """Adds one group; returns its name."""
    whole = {"tokens": [[1, 2]] * sequences, "masks": [[-100, 2]] * sequences, "scores": [0.0] * sequences}
    group = ScoredDataGroup.model_validate(whole | fields)
    return store.add_groups([Incoming.of(group)], now)[0].group_id


def version(number: int | None, **fields: Any) -> dict[str, Any]:
    return {"group_overrides": {"policy_version": number, **fields}}


def names(lease: Lease | None) -> list[str]:
    assert lease is not None
    return [group.group_id for group in lease.groups]


def taken(store: MemoryStore, request: Request = PLAIN, now: float = NOW) -> list[str] | None:
    """Reads a batch to the end; returns the names of its groups."""
    lease = store.take(request, now)
    if lease is None:
        return None
    found = names(lease)
    store.delivered(lease)
    return found


def leased(store: MemoryStore, now: float = NOW, seconds: float = 60) -> Lease:
    lease = store.take(Request(lease_seconds=seconds), now)
    assert lease is not None
    store.delivered(lease)
    return lease


def publish(store: MemoryStore, number: int, run: str = "r", **fields: Any) -> None:
    update = PolicyUpdate(run=run, version=number, model_name=f"{run}-v{number}", **fields)
    store.publish(update, NOW, force=False)


def saved(store: MemoryStore) -> None:
    """Waits until everything is in the file."""
    if (future := store.save()) is not None:
        future.result(20)


def crash(store: SqliteStore, copy: Path, limits: Limits | None = None, now: float = NOW) -> SqliteStore:
    """A new process on what a killed one leaves behind."""
    path = store._journal.path
    for suffix in ("", "-wal"):
        if Path(f"{path}{suffix}").exists():
            shutil.copyfile(f"{path}{suffix}", f"{copy}{suffix}")
    store.close()
    return SqliteStore(copy, limits, now=now)


def readable(store: MemoryStore, now: float) -> dict[str, Any]:
    """All that can be read from outside, without clocks."""
    envs = [{name: value for name, value in env.items() if name != "last_seen"} for env in store.envs()]
    return {
        "status": {**store.status(), "reason": ""},  # it tells of silence, which a restart ends
        "envs": envs,
        "info": store.info(),
        "wandb": store.wandb_info(),
        "policy": store.policy(now).model_dump(),
        "health": {**store.health(), "warnings": store._tallies.warnings()},
        "queue": [
            ([group.group_id for group in unit.groups], unit.deliveries) for unit in store._stock.queue
        ],
        "wanted": store._stock.groups_wanted,
    }
