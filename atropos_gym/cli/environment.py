"""The environment that a configuration names, made with errors for people."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from atropos_gym.envs import ENVIRONMENTS
from atropos_gym.errors import AtroposError, ConfigError
from atropos_gym.rollout._registered import check_id
from atropos_gym.text_env import TextEnv

__all__ = ["find_env", "find_function", "make_env", "short_name"]


def find_env(name: str) -> str | type[TextEnv]:
    """Returns what collectors and learners take as ``env``: a registered id, or a class.

    Args:
        name: an id, ``module:id``, or ``module:Class`` for a TextEnv in a file of one's own; modules of the
            working folder are found.

    Raises:
        ConfigError: nothing has this name; the nearest ones are said.

    Example:
        >>> find_env("atropos/Blackjack-v0")
        'atropos/Blackjack-v0'
    """
    module, colon, rest = name.partition(":")
    if colon:
        found = getattr(_module(module, name), rest, None)
        if isinstance(found, type) and issubclass(found, TextEnv):
            return found
        if rest.isidentifier() and rest not in gymnasium.registry:
            what = f"has no {rest!r}" if found is None else f"has {rest!r}, which is no class of TextEnv"
            raise ConfigError(f"{name!r}: the module {module!r} {what}, and registers no such environment")
        name = rest
    check_id(name)
    return name


def make_env(name: str, kwargs: Mapping[str, Any]) -> TextEnv:
    """Makes the environment and returns it without Gymnasium's wrappers.

    Raises:
        ConfigError: unknown name or keyword, or not an environment in token ids.
    """
    found = find_env(name)
    try:
        env = gymnasium.make(found, **kwargs).unwrapped if isinstance(found, str) else found(**kwargs)
    except AtroposError:
        raise
    except gymnasium.error.Error as error:
        raise ConfigError(f"{name} cannot be made: {error}") from error
    except TypeError as error:
        if "keyword argument" not in str(error):
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        what = (
            f"the argument {unknown[1]!r}" if unknown else f"these arguments ({', '.join(kwargs)}): {error}"
        )
        raise ConfigError(f"{name} does not take {what}; correct or leave out its --env-arg") from None
    if not isinstance(env, TextEnv):
        raise ConfigError(
            f"{name!r} is a {type(env).__name__}, whose observations are no token ids; "
            f"wrap it with GymTextEnv, or take one of {', '.join(ENVIRONMENTS)}"
        )
    return env


def find_function(name: str) -> Callable[..., Any]:
    """Returns what ``module:name`` names; a class is called without arguments.

    Raises:
        ConfigError: there is no such module or name, or nothing that can be called.
    """
    module, _, word = name.partition(":")
    if not module or not word.isidentifier():
        raise ConfigError(f"{name!r} must be module:name, such as my_tasks:harder")
    found = getattr(_module(module, name), word, None)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        what = f"has no {word!r}" if found is None else f"has {word!r}, which cannot be called"
        raise ConfigError(f"{name!r}: the module {module!r} {what}")
    function: Callable[..., Any] = found
    return function


def short_name(name: str) -> str:
    """Returns a word for folders: ``atropos/Blackjack-v0`` is ``blackjack``.

    Example:
        >>> short_name("atropos/FrozenLake8x8-v0"), short_name("my_tasks:Reverse")
        ('frozenlake8x8', 'reverse')
    """
    word = name.split(":")[-1].split("/")[-1]
    head, dash, version = word.rpartition("-v")
    word = head if dash and version.isdigit() else word
    return "".join(letter if letter.isalnum() else "-" for letter in word.lower()) or "run"


def _module(module: str, name: str) -> Any:
    """Imports a module, of the working folder too: a console script does not look there by itself."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise
        raise ConfigError(
            f"{name!r} names the module {module!r}, which cannot be imported from {here}"
        ) from None
