"""Describers: what a simulator shows, in words, and the words read back.

One file a simulator. ``find_describer`` knows which belongs to which; anything else is described by a
function of one's own or by the simulator's ``"ansi"`` rendering.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from atropos_gym.errors import ConfigError
from atropos_gym.wrappers.describers.base import Describer, FunctionDescriber, RenderDescriber
from atropos_gym.wrappers.describers.blackjack import BlackjackDescriber, TerseBlackjackDescriber
from atropos_gym.wrappers.describers.cliff_walking import (
    CliffWalkingDescriber,
    TerseCliffWalkingDescriber,
)
from atropos_gym.wrappers.describers.frozen_lake import FrozenLakeDescriber, TerseFrozenLakeDescriber
from atropos_gym.wrappers.describers.taxi import TaxiDescriber

__all__ = ["DESCRIBERS", "Describer", "find_describer"]

_TOY_TEXT = "gymnasium.envs.toy_text"

#: simulator's class -> name of a style -> describer; the first style is the default.
DESCRIBERS: dict[str, dict[str, Callable[[gymnasium.Env[Any, Any]], Describer]]] = {
    f"{_TOY_TEXT}.blackjack:BlackjackEnv": {"full": BlackjackDescriber, "terse": TerseBlackjackDescriber},
    f"{_TOY_TEXT}.frozen_lake:FrozenLakeEnv": {
        "full": FrozenLakeDescriber,
        "terse": TerseFrozenLakeDescriber,
    },
    f"{_TOY_TEXT}.cliffwalking:CliffWalkingEnv": {
        "full": CliffWalkingDescriber,
        "terse": TerseCliffWalkingDescriber,
    },
    f"{_TOY_TEXT}.taxi:TaxiEnv": {"full": TaxiDescriber},
}


def find_describer(
    simulator: gymnasium.Env[Any, Any], describe: str | Describer | Callable[[Any], str] | None = None
) -> Describer:
    """Returns the describer of a simulator.

    Args:
        simulator: the environment to describe; wrappers are looked through.
        describe: the name of a style, a describer, a function from observation to text, or None for the
            simulator's default style, else its ``"ansi"`` rendering.

    Raises:
        ConfigError: nothing is known about the simulator, or it has no such style.

    Example:
        >>> find_describer(gymnasium.make("Blackjack-v1"), "terse").describe((18, 6, 1))
        'soft 18 vs 6'
    """
    if isinstance(describe, Describer):
        return describe
    if callable(describe):
        return FunctionDescriber(describe)
    owner = type(simulator.unwrapped)
    for parent in owner.__mro__:
        styles = DESCRIBERS.get(f"{parent.__module__}:{parent.__qualname__}")
        if styles is not None:
            style = next(iter(styles)) if describe is None else describe
            if style not in styles:
                raise ConfigError(
                    f"describe must be one of {', '.join(styles)} for {owner.__name__}, got {style!r}"
                )
            return styles[style](simulator)
    if describe is None and simulator.render_mode == "ansi":
        return RenderDescriber(simulator)
    named = "" if describe is None else f" named {describe!r}"
    raise ConfigError(
        f"no describer is known for {owner.__name__}{named}: give describe=, a function from its observation "
        f"to text, or make it with render_mode='ansi'"
    )
