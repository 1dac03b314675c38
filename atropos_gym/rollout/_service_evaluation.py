"""When and how a service looks how well its engine plays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_gym.engines.base import Engine
from atropos_gym.errors import CollectionFailed, ConfigError, EngineError
from atropos_gym.rollout._pool import EnvSource
from atropos_gym.rollout._position import Position
from atropos_gym.rollout.evaluation import EvalResult, aevaluate

__all__ = ["Evaluation", "Evaluator"]

log = logging.getLogger(__name__)


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


class Evaluator:
    """Makes a service's evaluations.

    Args:
        name: of the service.
        env: what is played.
        engine: who plays.
        evaluation: when and how; None for not at all.
        position: remembers when the last one was made.
        concurrency: episodes that are played side by side.
        env_kwargs: keywords for the environments, besides the evaluation's own.

    Attributes:
        results: of all evaluations, with the step at which each was made.
        busy: held while one is being made.
    """

    def __init__(
        self,
        name: str,
        env: EnvSource,
        engine: Engine,
        evaluation: Evaluation | None,
        position: Position,
        *,
        concurrency: int,
        env_kwargs: Mapping[str, Any],
    ) -> None:
        self.results: list[tuple[int, EvalResult]] = []
        self.busy = asyncio.Lock()
        self._name = name
        self._env = env
        self._engine = engine
        self._evaluation = evaluation
        self._position = position
        self._concurrency = concurrency
        self._env_kwargs = env_kwargs

    async def evaluate(self, step: int) -> bool:
        """Evaluates if that is due at this step; returns whether it was.

        Raises:
            CollectionFailed: the engine failed.
        """
        evaluation = self._evaluation
        if evaluation is None or not evaluation.due(step, self._position.evaluated_at):
            return False
        async with self.busy:
            try:
                result = await aevaluate(
                    self._env,
                    self._engine,
                    evaluation.episodes,
                    seed=evaluation.seed,
                    deterministic=evaluation.deterministic,
                    env_kwargs={**self._env_kwargs, **evaluation.env_kwargs},
                    concurrency=self._concurrency,
                )
            except EngineError as error:
                raise CollectionFailed(
                    f"{self._name}: the evaluation at step {step} failed: {error}"
                ) from error
            log.info("%s: step %d: %s", self._name, step, result)
            self.results.append((step, result))
            self._position.evaluated(step)
            evaluation.on_result(step, result)
        return True
