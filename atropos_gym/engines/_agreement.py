"""How well an engine's logprobs are the learner's, and what a difference means. Pure functions on numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_gym.findings import Finding

__all__ = ["Agreement", "Logprobs", "judge_adapter", "judge_agreement"]

Logprobs = NDArray[np.float64]

#: Mean and most difference of two float32 computations of one logprob, in nats: measured 5.6e-6 and 5e-5.
FLOAT32_LIMITS = (1e-4, 1e-3)
#: Mean difference that a lower precision explains, in nats: bfloat16 measured 0.034. Above: other weights.
COARSE_LIMIT = 0.1


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well an engine's logprobs are the learner's.

    Attributes:
        mean: of the differences' sizes, in nats.
        largest: of them.
        rms: root of their mean square: the engine's noise.
        ids: how many were compared.
    """

    mean: float
    largest: float
    rms: float
    ids: int

    @classmethod
    def of(cls, engine_K: Logprobs, learner_K: Logprobs) -> Agreement:
        """Compares one by one.

        Example:
            >>> Agreement.of(np.array([-1.0, -2.0]), np.array([-1.0, -2.5])).largest
            0.5
        """
        difference_K = np.abs(engine_K - learner_K)
        if not len(difference_K):
            return cls(math.nan, math.nan, math.nan, 0)
        rms = math.sqrt(float(difference_K @ difference_K) / len(difference_K))
        return cls(float(difference_K.mean()), float(difference_K.max()), rms, len(difference_K))

    @property
    def exact(self) -> bool:
        """Whether both computed in float32."""
        return self.mean <= FLOAT32_LIMITS[0] and self.largest <= FLOAT32_LIMITS[1]

    def __str__(self) -> str:
        """Says it in a few words."""
        return f"mean {self.mean:.1e}, at most {self.largest:.1e} nats over {self.ids} ids"


def judge_agreement(
    engine_K: Logprobs,
    learner_K: Logprobs,
    unscaled_K: Logprobs,
    *,
    temperature: float = 1.0,
    dtype: str = "float32",
) -> Finding:
    """Says whether the engine's logprobs are the learner's, and where they are not, why.

    Args:
        engine_K: logprobs that came with the samples.
        learner_K: the learner's of the same ids, at the sampling's temperature.
        unscaled_K: the learner's at temperature 1.
        temperature: of the sampling.
        dtype: the precision that the user declared.

    Example:
        >>> cold, warm = np.array([-0.1, -3.0]), np.array([-0.4, -2.0])
        >>> judge_agreement(warm, cold, warm, temperature=0.5).remedy[:49]
        'start the server with --logprobs-mode processed_l'
    """
    name = "agreement"
    scaled, raw = Agreement.of(engine_K, learner_K), Agreement.of(engine_K, unscaled_K)
    if scaled.exact:
        return Finding(name, "ok", f"engine and learner agree: {scaled}")
    if temperature != 1 and raw.mean < scaled.mean / 3 and raw.mean <= COARSE_LIMIT:
        return Finding(
            name,
            "wrong",
            f"logprobs are raw, from before temperature {temperature:g}: they are the learner's at "
            f"temperature 1 ({raw.mean:.1e} in the mean) and not at {temperature:g} ({scaled.mean:.1e})",
            "start the server with --logprobs-mode processed_logprobs; dividing them afterwards is no repair",
        )
    if scaled.mean <= COARSE_LIMIT:
        declared = dtype not in ("float32", "float64")
        return Finding(
            name,
            "note" if declared else "wrong",
            f"engine and learner agree only roughly: {scaled}; {dtype} was declared, and float32 on both "
            f"sides is within {FLOAT32_LIMITS[0]:.0e} and {FLOAT32_LIMITS[1]:.0e}",
            "the learner corrects for it"
            if declared
            else "start the engine with --dtype float32, or declare its precision with --dtype bfloat16",
        )
    return Finding(
        name,
        "wrong",
        f"engine and learner disagree: {scaled}",
        "give both the same model folder (--model, --policy): the engine has other weights or other ids",
    )


def judge_adapter(
    engine_K: Logprobs,
    base_K: Logprobs,
    adapted_K: Logprobs,
    *,
    noise: float = 0.0,
    dtype: str = "float32",
) -> Finding:
    """Says whether the engine applies an adapter as the learner does.

    Args:
        engine_K: logprobs that came with samples under the adapter.
        base_K: the learner's of the same ids without it.
        adapted_K: the learner's with it.
        noise: mean difference of the two on the base, in nats.
        dtype: the precision that the user declared.

    Example:
        >>> base, adapted = np.array([-1.0, -2.0]), np.array([-3.0, -1.0])
        >>> judge_adapter(base, base, adapted).detail
        'the adapter has no effect: accepted, and the base model answers (the learner moves by 1.50 nats)'
        >>> judge_adapter(base, base, base).status  # a fresh adapter changes nothing, here or there
        'ok'
    """
    name = "adapter"
    now, before = Agreement.of(engine_K, adapted_K), Agreement.of(engine_K, base_K)
    move = Agreement.of(adapted_K, base_K)
    limit = max(FLOAT32_LIMITS[0], 5 * noise)
    if now.exact or now.mean <= min(limit, 0.25 * move.mean):
        return Finding(name, "ok", f"it moves logprobs by {move.mean:.2f} nats in engine and learner: {now}")
    if before.mean <= max(limit, 0.05 * move.mean):
        return Finding(
            name,
            "wrong",
            "the adapter has no effect: accepted, and the base model answers "
            f"(the learner moves by {move.mean:.2f} nats)",
            "the names of its layers match nothing in the engine: use target modules that it can adapt, and "
            "a release of the server that applies them",
        )
    change_K = adapted_K - base_K
    slope = float(change_K @ (engine_K - base_K)) / float(change_K @ change_K) if move.mean else math.nan
    # Rounding grows with the weights: SmolLM2 in bfloat16 is 0.4 to 0.6 nats off where it moves by 6.
    if dtype not in ("float32", "float64") and now.mean <= 0.25 * move.mean and abs(slope - 1) <= 0.1:
        far = f"it moves logprobs by {move.mean:.2f} nats, {slope:.2f} times as far in the engine"
        return Finding(name, "note", f"engine and learner agree roughly under it: {now}; {far}", "")
    return Finding(
        name,
        "wrong",
        f"engine and learner disagree under the adapter: {now}; the engine moves {slope:.2f} times as far",
        "compare its rank, lora_alpha, use_rslora and target_modules with what the server supports",
    )
