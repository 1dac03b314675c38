"""Who plays in ``eval`` and ``collect``: an engine made from a model's path or from a saved run."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atropos_gym.cli.command import Command
from atropos_gym.cli.config import Config
from atropos_gym.cli.engines import open_named
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.models import find_model, set_threads
from atropos_gym.engines.base import Engine
from atropos_gym.errors import ConfigError, MissingData

__all__ = ["find_function", "open_engine", "with_saved_run"]


def with_saved_run(command: Command) -> Config:
    """Returns the configuration, with model, adapter and task of a saved run where ``policy`` names one.

    Values that were given as flags stay.

    Raises:
        ConfigError: no policy was named, or one that is no model.
        MissingData: a run without an adapter.
    """
    config = command.config
    if config.policy == "tiny":
        raise ConfigError(
            f"{command.verb} needs --policy: a model's name or path, or a saved run such as runs/blackjack-1"
            + (", or random" if command.verb == "eval" else "")
        )
    if config.policy == "random":
        raise ConfigError(f"{command.verb} --policy random: it has no logprobs to keep; `eval` measures it")
    path = Path(config.policy)
    if not (path / "config.yaml").is_file():
        return config.model_copy(update={"policy": find_model(config.policy)})
    run = RunFolder.open(path)
    base = path / "base"
    model = str(base) if base.is_dir() else run.config.policy
    if model == "tiny":
        raise MissingData(f"{path} has no base model yet; go on with `atropos-gym train --resume {path}`")
    changes: dict[str, Any] = {"policy": find_model(model), "dtype": run.config.dtype}
    if config.threads is None and run.config.policy == "tiny":
        changes["threads"] = 1
    if "adapter" not in command.given and (path / "adapter").is_dir():
        changes["adapter"] = path / "adapter"
    if "env" not in command.given:
        changes |= {"env": run.config.env, "env_args": run.config.env_args | config.env_args}
        if "history" not in command.given:
            changes["history"] = run.config.history
    return config.model_copy(update=changes)


@contextmanager
def open_engine(config: Config) -> Iterator[Engine]:
    """Makes the engine of a model's path, with the adapter as its version 1, and closes it."""
    adapter = config.adapter
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise MissingData(
            f"no adapter in {str(adapter)!r} (it has no adapter_config.json); name a folder in PEFT's form"
        )
    set_threads(config.threads)
    engine = open_named(config)
    try:
        if adapter is not None:
            asyncio.run(engine.publish(1, adapter.resolve()))
        yield engine
    finally:
        asyncio.run(engine.close())


def find_function(name: str) -> Callable[..., Any] | None:
    """Returns a policy that is a function ``f(obs, info) -> ids``, named ``module:function``, or None."""
    module, colon, attribute = name.partition(":")
    if not colon or not module.replace(".", "").isidentifier() or not attribute.isidentifier():
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        return None
    return found if callable(found) else None
