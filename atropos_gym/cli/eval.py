"""``atropos-gym eval``: mean return with its standard error, beside random and optimal play."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from gymnasium.error import ResetNeeded

from atropos_gym.cli.command import Command
from atropos_gym.cli.config import Config
from atropos_gym.cli.environment import find_env, make_env
from atropos_gym.cli.envs import table
from atropos_gym.cli.player import find_function, open_engine, with_saved_run
from atropos_gym.cli.progress import Show
from atropos_gym.errors import ConfigError
from atropos_gym.rollout.evaluation import EvalResult, evaluate

__all__ = ["run"]


def run(command: Command) -> int:
    """Plays the episodes and prints one row for the policy and one for each known score."""
    show = Show()
    if command.config.policy == "random":
        config = _without_adapter(command.config)
        make_env(config.env, config.env_kwargs).close()
        result = _play(config, "random", show)
    else:
        function = find_function(command.config.policy)
        config = with_saved_run(command) if function is None else _without_adapter(command.config)
        make_env(config.env, config.env_kwargs).close()
        result = _play_function(config, function, show) if function is not None else _play_model(config, show)
    name = {"random": "random, played"}.get(command.config.policy, command.config.policy)
    _print(name, result, make_env(config.env, config.env_kwargs).scores)
    return 0


def _without_adapter(config: Config) -> Config:
    if config.adapter is not None:
        raise ConfigError(f"--adapter {config.adapter}: {config.policy} is no model; leave it out")
    return config


def _play_model(config: Config, show: Show) -> EvalResult:
    with ExitStack() as parts:
        return _play(config, parts.enter_context(open_engine(config)), show)


def _play_function(config: Config, function: Any, show: Show) -> EvalResult:
    """Plays a function of the user's own, whose ids the environment checks."""
    try:
        return _play(config, function, show)
    except (TypeError, ValueError, ResetNeeded) as error:
        raise ConfigError(f"policy {config.policy}: {error}") from error


def _play(config: Config, policy: Any, show: Show) -> EvalResult:
    with show.bar(f"{config.env}", config.episodes) as update:
        return evaluate(
            find_env(config.env),
            policy,
            config.episodes,
            seed=config.seed,
            deterministic=config.deterministic,
            env_kwargs=config.env_kwargs,
            concurrency=config.concurrency,
            progress=update,
            legal_only=config.legal_only,
        )


def _print(name: str, result: EvalResult, scores: Any) -> None:
    rows = [
        (
            name,
            f"{result.mean:.4f}",
            f"{result.stderr:.4f}",
            str(result.episodes),
            f"{100 * result.valid:.1f} %",
            "–" if result.success is None else f"{100 * result.success:.1f} %",
        )
    ]
    known = sorted(scores.items(), key=lambda item: -item[1])
    rows += [(f"{key}, exact", f"{value:.4f}", "", "", "", "") for key, value in known]
    print(table(rows, ("policy", "mean return", "stderr", "episodes", "valid", "solved")))
