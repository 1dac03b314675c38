"""Why the store says no. The HTTP layer turns each of these into its status; a refusal changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from atropos_gym.errors import AtroposError

__all__ = ["Conflict", "NotSaved", "Problem", "Refused", "Unknown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One bad place of a body.

    Attributes:
        kind: a word for programs, such as ``too_long``.
        path: where, from the group's root: ``("tokens", 3)``.
        message: what came and what is wanted.
        index: which group of a list.
    """

    kind: str
    path: tuple[str | int, ...]
    message: str
    index: int = 0


class Refused(AtroposError):
    """The content cannot be used (422).

    Attributes:
        problems: the bad places.
    """

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


class Conflict(AtroposError):
    """The request contradicts the server's state (409)."""


class NotSaved(AtroposError):
    """What was asked for is done in memory but could not be made to last (503): asked again, it may be."""


class Unknown(AtroposError):
    """Nothing of this name or number was ever issued (404)."""
