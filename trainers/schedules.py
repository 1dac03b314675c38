"""Schedules: numbers that follow the run's progress. SB3's convention: remaining progress goes from 1 to 0.

A linear one is Stable-Baselines3's own ``LinearSchedule(start, end, end_fraction)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atropos_gym.errors import ConfigError

__all__ = ["Geometric", "Schedule", "as_schedule"]

Schedule = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Geometric:
    """Falls (or rises) by the same factor each update, from ``start`` to ``end``.

    Raises:
        ConfigError: a value that is not positive.

    Example:
        >>> round(Geometric(0.4, 0.1)(0.5), 6)
        0.2
    """

    start: float
    end: float

    def __post_init__(self) -> None:
        if not (self.start > 0 and self.end > 0):
            raise ConfigError(
                f"a geometric schedule needs two values > 0, got {self.start} and {self.end}; "
                "use stable_baselines3's LinearSchedule to reach 0"
            )

    def __call__(self, progress_remaining: float) -> float:
        """Returns the value when ``progress_remaining`` (1 to 0) of the run is left."""
        return float(self.start * (self.end / self.start) ** (1.0 - progress_remaining))


@dataclass(frozen=True, slots=True)
class _Constant:
    value: float

    def __call__(self, progress_remaining: float) -> float:
        return self.value


def as_schedule(value: float | Schedule) -> Schedule:
    """Returns a schedule: a number becomes a constant one.

    Example:
        >>> as_schedule(0.1)(0.5)
        0.1
    """
    return value if callable(value) else _Constant(float(value))
