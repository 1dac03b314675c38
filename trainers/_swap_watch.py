"""Watches over swaps: tests each update's samples for the weights that they should come from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from atropos_gym.errors import EngineError
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.scoring import score_rows
from atropos_gym.trainers.slope import FLOAT32_NOISE, LOW_PRECISION_NOISE, Slope, slope_test

if TYPE_CHECKING:
    from atropos_gym.trainers.grpo import GRPO

__all__ = ["SwapWatch"]

#: Noise of an engine above which it does not compute in float32.
FLOAT32_AT_MOST = 1e-4


class SwapWatch:
    """The slope test, update after update.

    It compares with the last version that was seen to be served: while a change is too small to be measured
    that version stays, and the changes of several updates add up.

    Args:
        noise: root mean square of engine minus learner; measured by the check at start, or as usual for the
            precision.
        both_float32: engine and learner compute in float32.
    """

    def __init__(self, noise: float = FLOAT32_NOISE, *, both_float32: bool = True) -> None:
        self.noise = noise
        self.both_float32 = both_float32
        self._previous: dict[str, Tensor] | None = None
        self._failed: dict[str, Tensor] | None = None  # the weights that were not served
        self._told = False

    @classmethod
    def of(cls, model: GRPO) -> SwapWatch | None:
        """Returns the learner's watch, made when the test is first on; None while it is off."""
        parts = model._parts
        if not model.tests_slope:
            return None
        if parts.watch is None:
            full = model.dtype in ("float32", "float64")
            noise = FLOAT32_NOISE if full else LOW_PRECISION_NOISE
            if parts.noise is not None:  # of a short text: longer ones round more than that
                noise = max(parts.noise, FLOAT32_NOISE)
            parts.watch = cls(noise, both_float32=full and noise < FLOAT32_AT_MOST)
        return parts.watch

    def look(
        self,
        model: GRPO,
        rows: Sequence[Row],
        became: Sequence[int],
        merged: Sequence[Row],
        new: Sequence[np.ndarray],
    ) -> tuple[bool, dict[str, float]]:
        """Returns whether a batch may be learned from, and what there is to log.

        Args:
            model: the learner, at the weights that the batch should come from.
            rows: of the batch.
            became: which merged row each of them is.
            merged: the distinct rows.
            new: the learner's logprobs of each merged row.

        Raises:
            EngineError: the second batch in a row that was sampled with other weights.
        """
        adapter = model.policy.adapter
        now = {name: tensor.clone() for name, tensor in adapter.state_dict().items()}
        if self._previous is None:
            self._previous = now
            return True, {}
        fresh = sorted({became[k] for k, row in enumerate(rows) if row.version in (None, model.version)})
        adapter.load_state_dict(self._previous)
        try:
            scored = score_rows(
                model._parts.scorer, [merged[k] for k in fresh], max_ids=model.max_ids, device=model.device
            )
        finally:
            adapter.load_state_dict(now)
        old = dict(zip(fresh, scored, strict=True))
        tested = [(row, became[k]) for k, row in enumerate(rows) if became[k] in old]
        nothing = np.zeros(0)
        found = slope_test(
            np.concatenate([nothing, *(row.logprobs for row, _ in tested)]),
            np.concatenate([nothing, *(new[k] for _, k in tested)]),
            np.concatenate([nothing, *(old[k] for _, k in tested)]),
            noise=self.noise,
            both_float32=self.both_float32,
        )
        return self._judge(found, now, model.version), _metrics(found)

    def _judge(self, found: Slope, now: dict[str, Tensor], version: int) -> bool:
        if found.verdict == "unmeasurable":
            if not self._told:
                warnings.warn(
                    f"version {version}: the swap is {found}; compared over more updates", stacklevel=4
                )
            self._told = True
            return True
        if found.verdict == "swapped":
            self._previous = now
            # A refused batch changes nothing: that the same weights arrive one swap later is no new swap.
            if self._failed is not None and any(bool((now[k] != v).any()) for k, v in self._failed.items()):
                self._failed = None
            return True
        if self._failed is not None:
            raise EngineError(
                f"version {version}: {found}, the second time in a row: a version needs an adapter name and "
                "a folder of its own, complete before it is loaded"
            )
        self._failed = now
        warnings.warn(f"version {version}: {found}; its batch is refused", stacklevel=4)
        return False


def _metrics(found: Slope) -> dict[str, float]:
    return {
        "train/slope": found.slope,
        "train/slope_stderr": found.stderr,
        "train/slope_rms": found.rms,
        "train/slope_unmeasurable": float(found.verdict == "unmeasurable"),
    }
