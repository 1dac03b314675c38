"""``atropos-gym serve``: the batch server between environments and trainers, until Ctrl-C."""

from __future__ import annotations

from functools import partial

from atropos_gym.batch_server.serve import open_store, serve, state_file
from atropos_gym.cli.command import Command

__all__ = ["run"]


def run(command: Command) -> int:
    """Serves; the line that it prints says where."""
    config = command.config
    where = config.store or (str(state_file(config.port)) if config.port else "memory")
    store = partial(open_store, where, fresh=config.fresh, fsync=config.fsync)
    serve(config.host, config.port, store=store, insecure=config.insecure)
    return 0
