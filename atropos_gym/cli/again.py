"""What a run that goes on must be told again: its secrets, which are never written into its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from atropos_gym._secrets import is_secret, without_secrets
from atropos_gym._urls import without_token
from atropos_gym.batch_server.hosts import TOKEN_VARIABLE
from atropos_gym.cli.config import AGAIN, Config
from atropos_gym.cli.engines import SERVERS, kind_of
from atropos_gym.errors import ConfigError

__all__ = ["say_again"]

_FLAGS = {"engine_args": "--engine-arg", "env_args": "--env-arg"}
_NOTHING = object()


def say_again(config: Config, given: Mapping[str, Any], secrets: list[str], run: str) -> Config:
    """Returns a saved configuration with what was said again.

    Args:
        config: as it was written down.
        given: those of the settings in ``AGAIN`` that were said again; ``engine_args`` add to the saved ones,
            and so do ``env_args``, which must be secret: mappings are merged, lists are appended.
        secrets: where secrets were that were not written down, as ``Config.secrets`` says it.
        run: the run's folder, for messages.

    Raises:
        ConfigError: another kind of engine, server or environment than the run's, or a secret is missing.

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
    if "server" in given:
        _same_server(config.server, given["server"], run)
    changes = {name: _merged(getattr(config, name), given.get(name) or {}) for name in _FLAGS}
    _same_environment(config.env_args, changes["env_args"], run)
    known = {place for name in given for place in _said(given[name], getattr(config, name), name)}
    if os.environ.get(SERVERS.get(kind, "")):
        known.add("engine_args.api_key")
    if os.environ.get(TOKEN_VARIABLE):
        known.add("server")
    for place in secrets:
        if place not in known and place.partition(".")[0] in AGAIN:
            raise ConfigError(f"{run} needs its {_missing(place, kind)}")
    return config.model_copy(update={**given, **changes})


def _same_server(saved: str | None, given: str | None, run: str) -> None:
    """Refuses another server: leases, position and versions of the run are at its own."""
    if saved is None and given is not None:
        raise ConfigError(f"{run} learns from no server of its own choice: leave out --server")
    if saved is not None and (given is None or _shown(given) != _shown(saved)):
        other = "none" if given is None else _shown(given)
        raise ConfigError(
            f"{run} learns from {_shown(saved)}, not from {other}: leave out --server, or, where that server "
            f"has moved, write its new URL into {run}/config.yaml"
        )


def _shown(url: str) -> str:
    return without_token(without_secrets(url))


def _same_environment(saved: Mapping[str, Any], merged: Mapping[str, Any], run: str) -> None:
    """Refuses another environment: what was said again may only be secret."""
    before, now = without_secrets(saved), without_secrets(merged)
    changed = [name for name in now if name not in before or now[name] != before[name]]
    if changed:
        raise ConfigError(
            f"{run} takes its env_args from config.yaml, except what is secret in them: leave out "
            + ", ".join(f"--env-arg {name}=..." for name in changed)
        )


def _merged(kept: Any, given: Any) -> Any:
    """What was kept with what is given beside it.

    >>> _merged({"env": {"A": 1}, "flags": ["--seed", "1"]}, {"env": {"B": 2}, "flags": ["--api-key", "s"]})
    {'env': {'A': 1, 'B': 2}, 'flags': ['--seed', '1', '--api-key', 's']}
    """
    if isinstance(kept, Mapping) and isinstance(given, Mapping):
        return {**kept, **{key: _merged(kept.get(key), value) for key, value in given.items()}}
    if isinstance(kept, list) and isinstance(given, list) and without_secrets(given) != kept:
        return [*kept, *given]
    return given  # a list that is the kept one with its secrets stands for the whole


def _said(given: Any, kept: Any, name: str) -> Iterator[str]:
    """Where something was given that was not kept; a list counts only if it has a secret."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            place = f"{name}.{key}"
            if is_secret(str(key)):
                yield place
            else:
                before = kept.get(key, _NOTHING) if isinstance(kept, Mapping) else _NOTHING
                yield from _said(value, before, place)
    elif without_secrets(given) is not given or (not isinstance(given, list) and given != kept):
        yield name


def _missing(place: str, kind: str) -> str:
    """What is missing, and how to say it."""
    again = "again, which is never written down: give --resume"
    if place == "server":
        return f"server's token {again} the variable {TOKEN_VARIABLE}, or --server with it"
    if place == "engine":
        return f"engine's password {again} --engine {kind}:http://NAME:PASSWORD@host, as before"
    setting, name, *inner = place.split(".")
    word = f"{name}=..."
    if inner:
        word = f"'{name}={{" + ": {".join(inner) + ": ..." + "}" * len(inner) + "'"
    variable = (
        f", or the variable {SERVERS[kind]}" if place == "engine_args.api_key" and kind in SERVERS else ""
    )
    return f"{place} {again} {_FLAGS[setting]} {word}{variable}"
