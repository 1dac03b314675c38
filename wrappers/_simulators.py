"""Making a simulator from its id, without Gymnasium's checking layers and its own time limit."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from atropos_gym.errors import ConfigError

__all__ = ["make_simulator"]


def make_simulator(env_id: str, keywords: Mapping[str, Any]) -> tuple[gymnasium.Env[Any, Any], int | None]:
    """Returns a bare simulator and the time limit that its registration names.

    ``TextEnv`` checks the order of calls and counts turns itself, so Gymnasium's layers for that are left
    out; other wrappers that a registration adds are kept.

    Raises:
        ConfigError: Gymnasium does not know the id, or refuses it or the keywords; its own words are in it.

    Example:
        >>> lake, limit = make_simulator("FrozenLake-v1", {"is_slippery": False})
        >>> type(lake).__name__, limit
        ('FrozenLakeEnv', 100)
    """
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        spec = gymnasium.spec(name)
        simulator = gymnasium.make(spec, max_episode_steps=-1, disable_env_checker=True, **keywords)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        given = f" with {dict(keywords)}" if isinstance(error, TypeError) else ""
        raise ConfigError(f"simulator {env_id!r} cannot be made{given}: {error}") from error
    while isinstance(simulator, OrderEnforcing | PassiveEnvChecker | TimeLimit):
        simulator = simulator.env
    return simulator, spec.max_episode_steps
