"""Settings that cannot work are refused in the constructor, by name, with what to do."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, get_args

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.advantages import Baseline, Scale
from atropos_gym.trainers.losses import Reduction

if TYPE_CHECKING:
    from atropos_gym.trainers.grpo import GRPO

__all__ = ["check_count", "check_settings"]


def check_count(name: str, value: Any, least: int = 0) -> None:
    """Refuses what is no number of steps.

    Example:
        >>> check_count("updates", -1)
        Traceback (most recent call last):
        ...
        atropos_gym.errors.ConfigError: updates must be a whole number >= 0, got -1
    """
    if not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_settings(model: GRPO) -> None:
    """Refuses settings that cannot work."""
    _check_numbers(model)
    known = {"reduction": get_args(Reduction), "baseline": get_args(Baseline), "scale": get_args(Scale)}
    for name, values in known.items():
        if getattr(model, name) not in values:
            raise ConfigError(f"{name} must be one of {', '.join(values)}; got {getattr(model, name)!r}")
    if model._entropy[1] not in ("ids", "answers"):
        raise ConfigError(
            f'entropy must be a number or (coefficient, "ids" | "answers"), got {model.entropy!r}'
        )


def _check_numbers(model: GRPO) -> None:
    at_least_one = ("group_size", "groups_per_update", "concurrency", "n_epochs", "sub_batches")
    for name in at_least_one:
        if getattr(model, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(model, name)}")
    if model.group_size < 2:
        raise ConfigError("group_size must be >= 2: a group of one has no baseline")
    rate = model.learning_rate
    if not callable(rate) and not (isinstance(rate, int | float) and rate >= 0):
        raise ConfigError(f"learning_rate must be a number >= 0 or a schedule, got {rate!r}")
    if model.seed is not None:
        check_count("seed", model.seed)
    for name in ("max_staleness", "warm_up_updates", "kl_coef", "weight_decay"):
        if getattr(model, name) < 0:
            raise ConfigError(f"{name} must be >= 0, got {getattr(model, name)}")
    if not model.temperature > 0:
        raise ConfigError(f"temperature must be > 0, got {model.temperature}: greedy samples teach nothing")
    if model.threads is not None and model.threads < 1:
        raise ConfigError(f"threads must be >= 1 or None, got {model.threads}")
    if model.checkpoint_every is not None and model.checkpoint_every < 1:
        raise ConfigError(f"checkpoint_every must be >= 1 or None, got {model.checkpoint_every}")
