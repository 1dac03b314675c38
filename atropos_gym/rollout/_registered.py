"""Environment ids: known ones pass, others are refused with the nearest names."""

from __future__ import annotations

import difflib
import importlib

import gymnasium

from atropos_gym.errors import ConfigError

__all__ = ["check_id"]


def check_id(name: str) -> None:
    """Refuses an id that Gymnasium does not know.

    Args:
        name: ``Name-v0``, ``space/Name-v0``, or ``module:id`` for ids that a module registers on import.

    Raises:
        ConfigError: the module cannot be imported, or nothing is registered under the id.

    Example:
        >>> import atropos_gym
        >>> check_id("atropos/Blackjack-v0")
        >>> check_id("atropos/FrozenLake-v7")
        Traceback (most recent call last):
        ...
        atropos_gym.errors.ConfigError: unknown environment 'atropos/FrozenLake-v7'; nearest: ...
    """
    module, colon, rest = name.partition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
                raise  # the module is there, what it imports is not
            raise ConfigError(
                f"environment {name!r} names the module {module!r}, which is not there"
            ) from None
    try:
        gymnasium.spec(rest if colon else name)
    except gymnasium.error.Error:
        ours = [known for known in gymnasium.registry if known.startswith("atropos/")]
        near = _near(name, ours) or _near(name, [*gymnasium.registry])
        hint = f"nearest: {', '.join(near)}" if near else f"ready ones: {', '.join(ours)}"
        raise ConfigError(f"unknown environment {name!r}; {hint}") from None


def _near(name: str, ids: list[str]) -> list[str]:
    """Returns the ids whose name without space and version is like this one's."""
    short = {known: known.rpartition("/")[2].partition("-v")[0].lower() for known in ids}
    word = name.rpartition("/")[2].partition("-v")[0].lower()
    close = difflib.get_close_matches(word, [*short.values()], n=3, cutoff=0.7)
    return [known for one in dict.fromkeys(close) for known in ids if short[known] == one][:3]
