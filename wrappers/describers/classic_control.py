"""Gymnasium's classic control in words: the task, and its quantities by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from atropos_gym.wrappers.describers.base import Describer
from atropos_gym.wrappers.describers.spaces import say_number

__all__ = [
    "AcrobotDescriber",
    "CartPoleDescriber",
    "ContinuousMountainCarDescriber",
    "MountainCarDescriber",
    "PendulumDescriber",
]


class QuantityDescriber(Describer):
    """Base for simulators that show a few named numbers.

    Attributes:
        quantities: the name of each number, in order.
    """

    quantities: tuple[str, ...] = ()

    def __init__(self, simulator: gymnasium.Env[Any, Any]) -> None:
        self._simulator: Any = simulator.unwrapped
        self.max_chars = sum(len(name) + 14 for name in self.quantities)

    def describe(self, observation: Any) -> str:
        """Returns each quantity's name and value."""
        values = map(say_number, np.asarray(observation).tolist())
        return ", ".join(f"{name}: {value}" for name, value in zip(self.quantities, values, strict=True))


class CartPoleDescriber(QuantityDescriber):
    """CartPole.

    Example:
        >>> cart = CartPoleDescriber(gymnasium.make("CartPole-v1"))
        >>> cart.describe(np.array([0.01, -0.5, 0.02, 1]))
        'cart position: 0.01, cart velocity: -0.5, pole angle: 0.02, pole angular velocity: 1'
    """

    quantities = ("cart position", "cart velocity", "pole angle", "pole angular velocity")
    names = ("left", "right")
    aliases = {"push left": 0, "push right": 1}

    def rules(self) -> str:
        """Returns the task and when it fails."""
        cart = self._simulator
        return (
            "A pole stands on a cart. Each turn you push the cart to the left or to the right. Keep the pole "
            "upright as long as you can: it has fallen when its angle leaves -"
            f"{cart.theta_threshold_radians:.4g} to {cart.theta_threshold_radians:.4g} radians, and the cart "
            f"must stay within -{cart.x_threshold:.4g} to {cart.x_threshold:.4g}. Positive is to the right."
        )

    def success(self, observation: Any, reward: float, terminated: bool) -> bool | None:
        """Returns False where the pole fell or the cart left; how long is long enough is not known here."""
        return False if terminated else None

    def outcome(self, observation: Any, reward: float, terminated: bool) -> str:
        """Returns how the episode ended."""
        return (
            "The pole fell, or the cart left." if terminated else "The time is over; the pole still stands."
        )


class MountainCarDescriber(QuantityDescriber):
    """MountainCar."""

    quantities = ("position", "velocity")
    names: tuple[str, ...] = ("left", "idle", "right")
    aliases: Mapping[str, int] = {"push left": 0, "no push": 1, "push right": 2}
    push = "Each turn you push it to the left, to the right, or not at all (idle)."

    def rules(self) -> str:
        """Returns the task."""
        car = self._simulator
        return (
            f"A car stands in a valley between two hills. {self.push} It is too weak to drive straight up: "
            "swing back and forth to gain speed. Reach the top of the right hill, position "
            f"{car.goal_position:.4g}, in as few turns as you can; the road ends at {car.min_position:.4g} "
            "on the left. Positive is to the right."
        )

    def success(self, observation: Any, reward: float, terminated: bool) -> bool:
        """Returns whether the top was reached: nothing else ends the drive by itself."""
        return terminated

    def outcome(self, observation: Any, reward: float, terminated: bool) -> str:
        """Returns how the drive ended."""
        return "You reach the top." if terminated else "You run out of time."


class ContinuousMountainCarDescriber(MountainCarDescriber):
    """MountainCarContinuous: the action is a force."""

    names = ()
    aliases = {}
    push = "Each turn you choose a force from -1 (left) to 1 (right); force costs energy."


class AcrobotDescriber(QuantityDescriber):
    """Acrobot."""

    quantities = (
        "cosine of the first angle",
        "sine of the first angle",
        "cosine of the second angle",
        "sine of the second angle",
        "first angular velocity",
        "second angular velocity",
    )
    names = ("negative", "zero", "positive")

    def rules(self) -> str:
        """Returns the task."""
        return (
            "Two links hang from a fixed point, one below the other. Each turn you apply a negative, zero or "
            "positive torque to the joint between them. Swing the free end above the height of one link over "
            "the fixed point, in as few turns as you can. The first angle is zero where the first link hangs "
            "down; the second is measured from the first link."
        )

    def success(self, observation: Any, reward: float, terminated: bool) -> bool:
        """Returns whether the height was reached: nothing else ends the swing by itself."""
        return terminated

    def outcome(self, observation: Any, reward: float, terminated: bool) -> str:
        """Returns how the swing ended."""
        return "You reach the height." if terminated else "You run out of time."


class PendulumDescriber(QuantityDescriber):
    """Pendulum: the action is a torque."""

    quantities = ("cosine of the angle", "sine of the angle", "angular velocity")

    def rules(self) -> str:
        """Returns the task."""
        most = self._simulator.max_torque
        return (
            "A pendulum swings freely about a fixed point. Each turn you choose a torque from "
            f"-{most:.4g} to {most:.4g}. Swing it upright, where the angle is zero, and hold it there with "
            "little torque and little speed."
        )
