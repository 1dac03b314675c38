"""Where an environment service is: its next group, its last evaluation, what its curriculum remembers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from atropos_gym.errors import ConfigError

__all__ = ["Position"]


class Position:
    """What a service that goes on must know; kept in a small file, if there is one.

    Starts, items, chance and samples of a group follow from the seed and its number, so the next number is
    all the random state there is. What was in flight at the end is left out, as is what was played and
    waited until the server had room; nothing that was posted is played again.

    Args:
        path: of the file; None keeps nothing.
        env: name of the environment.
        seed: of the run.
        next_number: of the first group where there is no file yet.

    Attributes:
        next_number: one above the highest number that was posted.
        evaluated_at: the step at which the last evaluation was made; None before the first.
        curriculum: what a curriculum is to remember; None where there is none.

    Raises:
        ConfigError: the file is of another environment or seed, or no such file at all.

    >>> position = Position(None, "atropos/Blackjack-v0", seed=0, next_number=5)
    >>> position.posted([7, 6])
    >>> position.next_number
    8
    """

    def __init__(self, path: str | Path | None, env: str, *, seed: int, next_number: int = 0) -> None:
        self._path = None if path is None else Path(path)
        self._fixed = {"env": env, "seed": seed}
        self.next_number = next_number
        self.evaluated_at: int | None = None
        self.curriculum: dict[str, Any] | None = None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._load(self._path)

    def posted(self, numbers: list[int]) -> None:
        """These groups are on their way to the server; where there is a spool, they lie in it."""
        self.next_number = max([self.next_number, *(number + 1 for number in numbers)])
        self._save()

    def evaluated(self, step: int) -> None:
        """An evaluation was made at this step."""
        self.evaluated_at = step
        self._save()

    def taught(self, curriculum: dict[str, Any] | None) -> None:
        """A curriculum has moved on."""
        self.curriculum = curriculum
        self._save()

    def _load(self, path: Path) -> None:
        try:
            state: dict[str, Any] = json.loads(path.read_text())
            self.next_number = int(state["next_number"])
            self.evaluated_at = state["evaluated_at"]
            self.curriculum = state.get("curriculum")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not the state of a service: {error}; choose another file") from None
        for name, value in self._fixed.items():
            if state.get(name) != value:
                raise ConfigError(
                    f"{path} is the state of a service with {name} {state.get(name)!r}, not {value!r}: "
                    "choose another file, or remove it to start anew"
                )

    def _save(self) -> None:
        if self._path is None:
            return
        state = {**self._fixed, "next_number": self.next_number, "evaluated_at": self.evaluated_at}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(state) + "\n")
        temporary.replace(self._path)
