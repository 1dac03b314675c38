"""Describers: what a simulator shows, in words, and the words read back.

One file a family of simulators. ``find_describer`` knows which belongs to which; anything else is described
by a function of one's own, by the simulator's ``"ansi"`` rendering, or by its observation space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium

from atropos_gym.errors import ConfigError
from atropos_gym.wrappers.describers.base import Describer, FunctionDescriber, RenderDescriber
from atropos_gym.wrappers.describers.blackjack import BlackjackDescriber, TerseBlackjackDescriber
from atropos_gym.wrappers.describers.classic_control import (
    AcrobotDescriber,
    CartPoleDescriber,
    ContinuousMountainCarDescriber,
    MountainCarDescriber,
    PendulumDescriber,
)
from atropos_gym.wrappers.describers.cliff_walking import (
    CliffWalkingDescriber,
    TerseCliffWalkingDescriber,
)
from atropos_gym.wrappers.describers.frozen_lake import FrozenLakeDescriber, TerseFrozenLakeDescriber
from atropos_gym.wrappers.describers.spaces import SpaceDescriber, TerseSpaceDescriber
from atropos_gym.wrappers.describers.taxi import TaxiDescriber, TerseTaxiDescriber

__all__ = ["DESCRIBERS", "Describer", "find_describer"]

_CONTROL = "gymnasium.envs.classic_control"
_TOY_TEXT = "gymnasium.envs.toy_text"

Styles = dict[str, Callable[[gymnasium.Env[Any, Any]], Describer]]
"""name of a style -> describer; the first style is the default"""

_ANY: Styles = {"full": SpaceDescriber, "terse": TerseSpaceDescriber}

#: simulator's class -> its styles
DESCRIBERS: dict[str, Styles] = {
    f"{_TOY_TEXT}.blackjack:BlackjackEnv": {"full": BlackjackDescriber, "terse": TerseBlackjackDescriber},
    f"{_TOY_TEXT}.frozen_lake:FrozenLakeEnv": {
        "full": FrozenLakeDescriber,
        "terse": TerseFrozenLakeDescriber,
    },
    f"{_TOY_TEXT}.cliffwalking:CliffWalkingEnv": {
        "full": CliffWalkingDescriber,
        "terse": TerseCliffWalkingDescriber,
    },
    f"{_TOY_TEXT}.taxi:TaxiEnv": {"full": TaxiDescriber, "terse": TerseTaxiDescriber},
    f"{_CONTROL}.cartpole:CartPoleEnv": {**_ANY, "full": CartPoleDescriber},
    f"{_CONTROL}.mountain_car:MountainCarEnv": {**_ANY, "full": MountainCarDescriber},
    f"{_CONTROL}.continuous_mountain_car:Continuous_MountainCarEnv": {
        **_ANY,
        "full": ContinuousMountainCarDescriber,
    },
    f"{_CONTROL}.acrobot:AcrobotEnv": {**_ANY, "full": AcrobotDescriber},
    f"{_CONTROL}.pendulum:PendulumEnv": {**_ANY, "full": PendulumDescriber},
}


def find_describer(
    simulator: gymnasium.Env[Any, Any], describe: str | Describer | Callable[[Any], str] | None = None
) -> Describer:
    """Returns the describer of a simulator.

    Args:
        simulator: the environment to describe; wrappers are looked through.
        describe: the name of a style (``"full"`` or ``"terse"``), a describer, a function from observation to
            text, or None: the simulator's own default style, else its ``"ansi"`` rendering where it was made
            so, else what its observation space says.

    Raises:
        ConfigError: there is no such style, or the observation space cannot be put into words.

    Example:
        >>> find_describer(gymnasium.make("Blackjack-v1"), "terse").describe((18, 6, 1))
        'soft 18 vs 6'
    """
    if isinstance(describe, Describer):
        return describe
    if callable(describe):
        return FunctionDescriber(describe)
    styles = _own_styles(simulator)
    if styles is None:
        if describe is None and simulator.render_mode == "ansi":
            return RenderDescriber(simulator)
        styles = _ANY
    style = next(iter(styles)) if describe is None else describe
    if style not in styles:
        owner = type(simulator.unwrapped).__name__
        raise ConfigError(f"describe must be one of {', '.join(styles)} for {owner}, got {style!r}")
    return styles[style](simulator)


def _own_styles(simulator: gymnasium.Env[Any, Any]) -> Styles | None:
    """Returns the styles of the simulator's class or of the nearest parent that has some."""
    if simulator.observation_space != simulator.unwrapped.observation_space:
        return None  # a wrapper shows something else than what they know
    for parent in type(simulator.unwrapped).__mro__:
        styles = DESCRIBERS.get(f"{parent.__module__}:{parent.__qualname__}")
        if styles is not None:
            return styles
    return None
