"""Which batch could be formed now: what the trainer wants, looked for in the queue without changing it."""

from __future__ import annotations

from dataclasses import dataclass

from atropos_gym.batch_server.batching import Plan, plan_batch
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.env_book import EnvBook, EnvRecord
from atropos_gym.batch_server.state.group_queue import GroupQueue, Place, Unit
from atropos_gym.wire import Registration

__all__ = ["Sought", "seek"]


@dataclass(frozen=True, slots=True)
class Sought:
    """What was found.

    Attributes:
        plan: the batch, or why there is none.
        units: what is in it, oldest first.
        silent: environments with a minimum that sent nothing and are not waited for any more.
    """

    plan: Plan
    units: tuple[Unit, ...] = ()
    silent: tuple[EnvRecord, ...] = ()


def seek(
    queue: GroupQueue,
    envs: EnvBook,
    config: Registration,
    limits: Limits,
    *,
    count: int | None,
    turn: int,
    now: float,
    known: tuple[Unit, ...] = (),
) -> Sought:
    """Looks for a batch.

    Args:
        queue: where to look.
        envs: whose minimums are to be met.
        config: the trainer's settings.
        limits: how long to wait for whom.
        count: so many groups; None for the trainer's number of sequences.
        turn: how many batches were planned before: each begins with another environment's minimum.
        now: Unix seconds.
        known: units of an exact batch that was found before, where it only matters whether there is one:
            while all of them are queued, what came since needs no look.
    """
    wanted = config.batch_size if count is None else count
    queued = queue.sequences if count is None else queue.groups
    noun = "sequences" if count is None else "groups"
    if queued < wanted:
        return Sought(Plan(reason=f"{queued} of {wanted} {noun} queued"))
    asking = _asking(envs, config, turn) if count is None else []
    silent = [env for env in asking if not queue.sequences_of[env.env_id]]
    for env in silent:
        left = limits.min_wait_seconds - (now - env.had_data_at)
        if left > 0:
            reason = f"{env.wandb_name} has a minimum but nothing queued, for {left:.0f} s more"
            return Sought(Plan(reason=reason))
    if known and all(unit.place is Place.QUEUED for unit in known):
        if wanted == sum(unit.sequences if count is None else len(unit.groups) for unit in known):
            return Sought(Plan(), known, tuple(silent))
    units = list(queue)
    oldest = units[0]
    passed = 0.0 if oldest.passed_at is None else now - oldest.passed_at
    plan = plan_batch(
        [unit.sequences if count is None else len(unit.groups) for unit in units],
        [unit.env_id for unit in units],
        wanted,
        minimums={env.env_id: env.minimum for env in asking if env not in silent},
        exact=config.exact_batches,
        overdue=oldest.passed_at is not None and passed >= limits.short_batch_seconds,
        noun=noun,
    )
    return Sought(plan, tuple(units[position] for position in plan.chosen), tuple(silent))


def _asking(envs: EnvBook, config: Registration, turn: int) -> list[EnvRecord]:
    """Connected environments with a minimum; another one stands first at each batch."""
    asking = [env for env in envs.connected if int(env.minimum * config.batch_size) > 0]
    first = turn % len(asking) if asking else 0
    return asking[first:] + asking[:first]
