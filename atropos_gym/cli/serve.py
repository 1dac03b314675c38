"""``atropos-gym serve``: the batch server between environments and trainers, until Ctrl-C."""

from __future__ import annotations

from atropos_gym.batch_server.serve import serve
from atropos_gym.cli.command import Command

__all__ = ["run"]


def run(command: Command) -> int:
    """Serves; the line that it prints says where."""
    config = command.config
    serve(config.host, config.port, insecure=config.insecure)
    return 0
