"""``atropos-gym serve``: the batch server between environments and trainers, until Ctrl-C."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import partial

from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.serve import open_store, serve, state_file
from atropos_gym.cli.command import Command
from atropos_gym.cli.config import Config
from atropos_gym.errors import ServerError

__all__ = ["run"]


def run(command: Command) -> int:
    """Serves; the line that it prints says where."""
    config = command.config
    if command.options.get("reload"):
        print("--reload has no effect: this server runs the installed code; start it again after an update")
    where = config.store or (str(state_file(config.port)) if config.port else "memory")
    store = partial(open_store, where, fresh=config.fresh, fsync=config.fsync)
    origins = [one.strip() for one in (config.cors_origin or "").split(",") if one.strip()]
    access = Access.find(config.token, config.env_token, origins)
    limits = _limits(config)
    try:
        serve(
            config.host,
            config.port,
            store=store,
            limits=limits,
            access=access,
            insecure=config.insecure,
            tokenizer=config.tokenizer,
        )
    except ServerError as error:  # nobody's mistake: a supervisor starts it again, and it goes on
        print(f"atropos-gym: {error}", file=sys.stderr)
        return 1
    return 0


def _limits(config: Config) -> Limits:
    """What the server allows; a setting that is null leaves the server's own default."""
    names = {one.name for one in fields(Limits)} & set(Config.reads("serve"))
    values = {name: getattr(config, name) for name in names}
    return Limits(**{name: value for name, value in values.items() if value is not None})
