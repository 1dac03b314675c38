"""The slope test: did the engine sample with the weights that were published last?

The learner scores the sampled ids under the new weights (n) and under the previous version (o); the
engine's own logprob is e. The slope of ``e - o`` on ``n - o`` through the origin is 1 after an honest swap, 0
where the engine still serves the old weights, and something else where an adapter is half applied or wrongly
scaled. It needs no further call to the engine, and it also sees a stale prefix cache, which a fresh probe
does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOAT32_NOISE", "LOW_PRECISION_NOISE", "Slope", "slope_test"]

#: Root mean square of engine minus learner on the same float32 weights.
FLOAT32_NOISE = 8e-6
#: The same of an engine in bfloat16.
LOW_PRECISION_NOISE = 0.045


@dataclass(frozen=True, slots=True)
class Slope:
    """What the test found.

    Attributes:
        verdict: ``swapped``, ``not_swapped``, or ``unmeasurable``: the update changed too little to tell.
        slope: 1 means the new weights, 0 the old ones.
        stderr: standard error of the slope.
        rms: root mean square of ``n - o``: how far the update moved the logprobs, in nats.
        ids: how many ids it rests on.
        noise: root mean square of the engine's rounding that was reckoned with.
    """

    verdict: Literal["swapped", "not_swapped", "unmeasurable"]
    slope: float
    stderr: float
    rms: float
    ids: int
    noise: float = FLOAT32_NOISE

    def __str__(self) -> str:
        """Says it in a line.

        Example:
            >>> print(Slope("not_swapped", 0.0, 0.0004, 5.6e-3, 250))
            engine serves old weights (slope 0.00 ± 0.0004, rms x 5.6e-03, N 250)
        """
        numbers = f"rms x {self.rms:.1e}, N {self.ids}"
        if self.verdict == "unmeasurable":
            return f"unmeasurable: update too small ({numbers}, sigma_e {self.noise:.1e})"
        slope = f"slope {round(self.slope, 2) + 0.0:.2f} ± {self.stderr:.1g}, {numbers}"
        if self.verdict == "swapped":
            return f"engine serves the new weights ({slope})"
        if abs(self.slope) <= max(0.1, 5 * self.stderr):
            return f"engine serves old weights ({slope})"
        return f"engine mixes versions ({slope})"


def slope_test(
    engine_K: NDArray[np.float64],
    new_K: NDArray[np.float64],
    old_K: NDArray[np.float64],
    *,
    noise: float = FLOAT32_NOISE,
    both_float32: bool = True,
) -> Slope:
    """Returns whether ids were sampled under the new weights.

    ``s = sum(xy) / sum(xx)`` with ``x = n - o`` and ``y = e - o``. Its standard error is the larger of the
    regression's and ``noise / (sqrt(K) rms(x))``. Fails when ``|s - 1| > max(0.1, 5 stderr)``; says
    "unmeasurable" where the standard error exceeds 0.1 (unless it is that large because the slope is so far
    from 1), or where the learner's own rounding biases x.

    Args:
        engine_K: the engine's logprobs of the sampled ids.
        new_K: the learner's under the new weights.
        old_K: the learner's under the previous version's.
        noise: root mean square of the engine's rounding.
        both_float32: engine and learner compute in float32.

    Example:
        >>> new, old = np.array([-1.0, -2.0]), np.array([-1.1, -1.8])
        >>> slope_test(new, new, old).verdict, slope_test(old, new, old).verdict
        ('swapped', 'not_swapped')
    """
    x_K, y_K = new_K - old_K, engine_K - old_K
    count = len(x_K)
    square = float(x_K @ x_K)
    rms = math.sqrt(square / count) if count else 0.0
    if square == 0.0:
        return Slope("unmeasurable", math.nan, math.inf, rms, count, noise)
    slope = float(x_K @ y_K) / square
    residual_K = y_K - slope * x_K
    regression = math.sqrt(float(residual_K @ residual_K) / max(1, count - 1) / square)
    stderr = max(regression, noise / (math.sqrt(count) * rms))
    # A slope far from 1 with much scatter is a half-stale engine, not an unmeasurable one: judge the noise.
    too_small = noise / (math.sqrt(count) * rms) > 0.1 or (both_float32 and rms < 10 * noise)
    if too_small or (stderr > 0.1 and abs(slope - 1) <= 5 * stderr):
        return Slope("unmeasurable", slope, stderr, rms, count, noise)
    verdict: Literal["swapped", "not_swapped"] = (
        "not_swapped" if abs(slope - 1) > max(0.1, 5 * stderr) else "swapped"
    )
    return Slope(verdict, slope, stderr, rms, count, noise)
