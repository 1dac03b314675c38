"""When and how a service looks how well its engine plays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_gym.errors import ConfigError
from atropos_gym.rollout.evaluation import EvalResult

__all__ = ["Evaluation"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """When and how a service looks how well its engine plays.

    The first one is made at the step that the service begins with, and one more whenever a multiple of
    ``every`` was reached or passed since the last one, however far the step has jumped, and where the step
    went back beyond one, because a server or a trainer began anew. The service plays nothing for the trainer
    meanwhile; one version plays all episodes. A run that ends meanwhile is no reason to stop: the evaluation
    that is due at its last step is made too.

    Attributes:
        every: steps of the trainer from one to the next.
        episodes: of each.
        seed: of the starts, the same ones in each.
        deterministic: the most likely ids instead of sampled ones.
        env_kwargs: keywords for the environments that differ from the service's, such as ``split="test"``.
        on_result: told of step and result.
    """

    every: int
    episodes: int = 200
    seed: int = 0
    deterministic: bool = True
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    on_result: Callable[[int, EvalResult], None] = lambda step, result: None

    def __post_init__(self) -> None:
        for name in ("every", "episodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of an evaluation must be >= 1, got {getattr(self, name)}")

    def due(self, step: int, last: int | None) -> bool:
        """Whether one is to be made at ``step``, the last having been made at ``last``."""
        return last is None or step // self.every != last // self.every
