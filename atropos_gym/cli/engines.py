"""The engine that a configuration names: what fits together, and what it is told."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from atropos_gym._urls import without_token
from atropos_gym.cli.config import Config
from atropos_gym.cli.models import find_model
from atropos_gym.engines import make_engine
from atropos_gym.engines.base import SERVERS, Engine
from atropos_gym.errors import ConfigError, EngineUnfit
from atropos_gym.findings import faults

__all__ = ["SERVERS", "check_engine_settings", "kind_of", "open_named", "require_fit"]


def kind_of(spec: str) -> str:
    """Returns the engine's kind.

    Example:
        >>> kind_of("vllm:http://127.0.0.1:8000")
        'vllm'
    """
    return spec.partition(":")[0]


def check_engine_settings(config: Config) -> None:
    """Refuses settings of the engine that do not fit together, before anything is loaded.

    Raises:
        ConfigError: named, with what to do.

    Example:
        >>> check_engine_settings(Config(engine="vllm"))
        Traceback (most recent call last):
        ...
        atropos_gym.errors.ConfigError: --engine vllm starts a server: give --vllm-python, the interpreter ...
    """
    kind, launched = kind_of(config.engine), config.engine == "vllm"
    shown = without_token(config.engine)
    if launched and config.vllm_python is None:
        raise ConfigError(
            "--engine vllm starts a server: give --vllm-python, the interpreter of vLLM's own environment "
            "(or --engine vllm:URL for one that runs)"
        )
    if config.vllm_python is not None and not launched:
        raise ConfigError(f"--vllm-python belongs to --engine vllm, not to {shown}: leave it out")
    if kind != "hf" and config.policy == "tiny":
        raise ConfigError(
            f"--engine {shown} cannot serve --policy tiny, whose base the run makes: use --engine hf"
        )
    if config.swap == "restart" and kind in SERVERS and not launched:
        raise ConfigError(f"--swap restart starts the server anew: it needs --engine vllm, not {kind}:URL")
    if config.swap == "in_place" and kind in SERVERS:
        raise ConfigError("--swap in_place mixes versions in a server's prefix cache, for good: use hot_swap")


def open_named(config: Config) -> Engine:
    """Makes the engine of a configuration whose ``policy`` is a model."""
    check_engine_settings(config)
    spec, kind = config.engine, kind_of(config.engine)
    options: dict[str, Any] = dict(config.engine_kwargs)
    model: str | None = config.policy
    if kind == "hf":
        options |= {"dtype": config.dtype, "seed": config.seed}
        model = find_model(spec.partition(":")[2]) if ":" in spec else model
        spec = f"hf:{model}"
        model = None
    elif kind in SERVERS and ":" in spec:
        options.setdefault("api_key", os.environ.get(SERVERS[kind]))
        # Adapters of two services at one server have names of their own: each unloads what it has loaded.
        options.setdefault("run", f"{config.name or 'collect'}-{uuid.uuid4().hex[:6]}")
    elif kind == "vllm":
        options.setdefault("dtype", config.dtype)
    return make_engine(spec, model=model, **options)


def require_fit(engine: Engine) -> None:
    """Tries an engine in another process as far as that goes without a learner.

    Raises:
        EngineUnfit: training with it would be wrong; the message has every finding and remedy.
    """
    if getattr(engine, "in_process", False):
        return
    if said := faults(asyncio.run(engine.check())):
        raise EngineUnfit(f"engine {engine.model} is not fit to train with: {said}")
