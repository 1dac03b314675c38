"""What a run that goes on must be told again: its secrets, which are never written into its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from atropos_gym.batch_server.hosts import TOKEN_VARIABLE
from atropos_gym.cli.config import Config
from atropos_gym.cli.engines import SERVERS, kind_of
from atropos_gym.errors import ConfigError

__all__ = ["say_again"]


def say_again(config: Config, given: Mapping[str, Any], secrets: list[str], run: str) -> Config:
    """Returns a saved configuration with what was said again.

    Args:
        config: as it was written down.
        given: those of the settings in ``AGAIN`` that were said again; ``engine_args`` add to the saved ones.
        secrets: where secrets were that were not written down, as ``Config.secrets`` says it.
        run: the run's folder, for messages.

    Raises:
        ConfigError: another kind of engine or server than the run's, or a secret is missing.

    Example:
        >>> say_again(Config(), {}, ["engine_args.hub_token"], "runs/x")
        Traceback (most recent call last):
        ...
        atropos_gym.errors.ConfigError: runs/x needs its engine_args.hub_token again, which is never ...
    """
    kind = kind_of(config.engine)
    if "engine" in given and kind_of(given["engine"]) != kind:
        raise ConfigError(
            f"{run} has an engine of kind {kind}, not {kind_of(given['engine'])}: leave out --engine"
        )
    if given.get("server") is not None and config.server is None:
        raise ConfigError(f"{run} learns from no server of its own choice: leave out --server")
    arguments = dict(given.get("engine_args") or {})
    known = {*given, *(f"engine_args.{name}" for name in arguments)}
    if os.environ.get(SERVERS.get(kind, "")):
        known.add("engine_args.api_key")
    if os.environ.get(TOKEN_VARIABLE):
        known.add("server")
    for place in secrets:
        if ".".join(place.split(".")[:2]) not in known:
            raise ConfigError(f"{run} needs its {_missing(place, kind)}")
    changes = {**given, "engine_args": {**config.engine_args, **arguments}}
    return config.model_copy(update=changes)


def _missing(place: str, kind: str) -> str:
    """What is missing, and how to say it."""
    again = "again, which is never written down: give --resume"
    if place == "server":
        return f"server's token {again} the variable {TOKEN_VARIABLE}, or --server with it"
    if place == "engine":
        return f"engine's password {again} --engine {kind}:http://NAME:PASSWORD@host, as before"
    name = place.split(".")[1]
    variable = f", or the variable {SERVERS[kind]}" if name == "api_key" and kind in SERVERS else ""
    return f"{place} {again} --engine-arg {name}=...{variable}"
