"""What a check of an answer comes to: right, wrong, or no answer at all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Verdict", "VerdictValue", "right", "unparsed", "wrong"]


class VerdictValue(StrEnum):
    """The three values; equal to their names as strings."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSED = "unparsed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A verdict and why; true only where it is right.

    Attributes:
        value: ``right`` and ``wrong`` need a committed answer; ``unparsed`` means that there was none.
        reason: one word to count by. Right: ``equal``. Wrong: ``not_equal``, ``hedged`` (several answers),
            ``too_big`` (compared as text only), ``timeout``. Unparsed: ``no_commitment``, ``empty``,
            ``truncated``, ``too_long``, ``taken_back``, ``unclosed_think``.

    Example:
        >>> bool(Verdict(VerdictValue.RIGHT, "equal")), Verdict(VerdictValue.WRONG, "hedged").value == "wrong"
        (True, True)
    """

    value: VerdictValue
    reason: str

    def __bool__(self) -> bool:
        return self.value is VerdictValue.RIGHT


def right() -> Verdict:
    """The committed answer equals the gold."""
    return Verdict(VerdictValue.RIGHT, "equal")


def wrong(reason: str = "not_equal") -> Verdict:
    """An answer was committed and is not the gold."""
    return Verdict(VerdictValue.WRONG, reason)


def unparsed(reason: str) -> Verdict:
    """No answer was committed."""
    return Verdict(VerdictValue.UNPARSED, reason)
