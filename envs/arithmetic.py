"""atropos/Arithmetic-v0: sums made on the spot, as hard as wanted."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rewards import verify_number
from atropos_gym.text_env import TextEnv

__all__ = ["Arithmetic"]

_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}

#: difficulty -> (operations, least operand, greatest operand)
LEVELS: dict[int, tuple[str, int, int]] = {
    1: ("+", 0, 9),
    2: ("+-", 0, 99),
    3: ("+-*", 0, 99),
    4: ("+-*", 0, 999),
    5: ("+-*", -9999, 9999),
}

_FEW_ANSWERS = 256


class Arithmetic(TextEnv):
    r"""One sum, one answer.

    Description:
        ``What is 7 + 5?`` Operands and operation are drawn uniformly.

    Actions:
        A text that commits to one number: the number alone, ``The answer is 12``, ``#### 12``,
        ``\boxed{12}``.

    Observations:
        The question; with ``describe="terse"`` the sum alone (``7+5``).

    Rewards:
        1 for the right number, else 0.

    Episode end:
        After the only turn.

    Info:
        ``verdict`` (``right``, ``wrong``, ``unparsed``) and ``verdict_reason``.

    Arguments:
        difficulty: 1 (``7 + 5``) to 5 (``-4711 * 815``).
        operations: some of ``+-*``, in place of the difficulty's.
        low: least operand, in place of the difficulty's.
        high: greatest operand, likewise.
        describe: ``"full"`` or ``"terse"``.
        keywords: those of ``TextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 1
    max_turn_tokens = 64
    max_prompt_tokens = 128

    def __init__(
        self,
        *,
        difficulty: int = 1,
        operations: str | None = None,
        low: int | None = None,
        high: int | None = None,
        describe: str = "full",
        **keywords: Any,
    ) -> None:
        super().__init__(**keywords)
        if difficulty not in LEVELS:
            raise ConfigError(f"difficulty must be one of {', '.join(map(str, LEVELS))}; got {difficulty!r}")
        if describe not in ("full", "terse"):
            raise ConfigError(f"describe must be 'full' or 'terse', got {describe!r}")
        own_operations, own_low, own_high = LEVELS[difficulty]
        self.operations = own_operations if operations is None else operations
        self.low = own_low if low is None else int(low)
        self.high = own_high if high is None else int(high)
        if not self.operations or set(self.operations) - set(_OPERATIONS):
            raise ConfigError(f"operations must be some of +-*, got {self.operations!r}")
        if self.low > self.high:
            raise ConfigError(f"low must be <= high, got low={self.low}, high={self.high}")
        self.describe = describe
        corners = [
            _OPERATIONS[sign](a, b)
            for sign in self.operations
            for a in (self.low, self.high)
            for b in (self.low, self.high)
        ]
        self._least, self._greatest = min(corners), max(corners)
        self.answer = 0
        self._player: np.random.Generator | None = None

    @property
    def answers(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """All numbers from the least to the greatest result, where they are few."""
        count = self._greatest - self._least + 1
        return tuple(map(str, range(self._least, self._greatest + 1))) if count <= _FEW_ANSWERS else None

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of guessing between the least and the greatest result, and of knowing."""
        return {"random": 1 / (self._greatest - self._least + 1), "optimal": 1.0}

    def begin(self, options: dict[str, Any]) -> str:
        """Draws a sum."""
        self._player = None
        first, second = (int(n) for n in self.np_random.integers(self.low, self.high + 1, size=2))
        sign = self.operations[int(self.np_random.integers(len(self.operations)))]
        self.answer = _OPERATIONS[sign](first, second)
        if self.describe == "terse":
            return f"{first}{sign}{second}"
        right = f"({second})" if second < 0 else str(second)
        return f"What is {first} {sign} {right}? Answer with the number."

    def respond(self, reply: Reply) -> Feedback:
        """Checks the number."""
        verdict = verify_number(reply.content, str(self.answer))
        return Feedback(
            f"It is {self.answer}.",
            reward=float(bool(verdict)),
            terminated=True,
            success=bool(verdict),
            info={"verdict": str(verdict.value), "verdict_reason": verdict.reason},
        )

    def sample_reply(self) -> str:
        """Returns a number between the least and the greatest result, drawn uniformly."""
        if self._player is None:
            self._player = self.np_random.spawn(1)[0]
        return str(int(self._player.integers(self._least, self._greatest + 1)))
