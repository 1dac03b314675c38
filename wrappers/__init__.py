"""Wrappers that bring any Gymnasium simulator into text, and compose with Gymnasium's own."""

from __future__ import annotations

if __name__ != "atropos_gym.wrappers":
    raise ImportError(f"import atropos_gym.wrappers, not {__name__!r}: it would load every class twice")

from atropos_gym.wrappers.describers import Describer, find_describer
from atropos_gym.wrappers.gym_text_env import GymTextEnv
from atropos_gym.wrappers.transitions import RecordTransitions, Transition

__all__ = ["Describer", "GymTextEnv", "RecordTransitions", "Transition", "find_describer"]
