"""What a describer is, and the two that fit any simulator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

__all__ = ["Describer", "FunctionDescriber", "RenderDescriber", "strip_ansi"]

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def strip_ansi(text: str) -> str:
    r"""Removes terminal colours and other control sequences.

    Example:
        >>> strip_ansi("\x1b[41mS\x1b[0mFFF")
        'SFFF'
    """
    return _ANSI.sub("", text)


class Describer:
    """Says what a simulator shows in words; every fact that it says comes from the simulator.

    Attributes:
        names: one word for each discrete action, in order; empty where actions have none.
        aliases: further texts and the actions they stand for.
        terse: the state is all that is ever said: no rules, no reminder of the format.
        max_chars: most UTF-8 bytes that ``describe`` takes; 0 where that is unknown.
    """

    names: tuple[str, ...] = ()
    aliases: Mapping[str, int] = {}
    terse: bool = False
    max_chars: int = 0

    def rules(self) -> str:
        """Returns the task in words; it does not change during an episode."""
        return ""

    def describe(self, observation: Any) -> str:
        """Returns a state in words."""
        raise NotImplementedError(f"{type(self).__name__} must define describe(self, observation)")

    def parse(self, text: str) -> Any:
        """Returns the observation that ``describe`` put into ``text``.

        Raises:
            ValueError: the text is no description of this describer.
        """
        raise NotImplementedError(f"{type(self).__name__} does not read its descriptions back")

    def success(self, observation: Any, reward: float, terminated: bool) -> bool | None:
        """Returns whether an episode that ended so was a success; None where that is unknown."""
        return None

    def outcome(self, observation: Any, reward: float, terminated: bool) -> str:
        """Returns one line that tells how the episode ended; "" says nothing."""
        return ""


class FunctionDescriber(Describer):
    """A describer made of one function from observation to text."""

    def __init__(self, describe: Callable[[Any], str]) -> None:
        self._describe = describe

    def describe(self, observation: Any) -> str:
        """Returns what the function says."""
        return self._describe(observation)


class RenderDescriber(Describer):
    """A simulator's own ``"ansi"`` rendering, without colours."""

    def __init__(self, simulator: gymnasium.Env[Any, Any]) -> None:
        self._simulator = simulator

    def describe(self, observation: Any) -> str:
        """Returns the rendering of the present state."""
        return strip_ansi(str(self._simulator.render())).strip("\n")
