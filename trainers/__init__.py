"""The learner: losses, advantages, rows, adapters and GRPO with Stable-Baselines3's ``learn()``."""

from __future__ import annotations

if __name__ != "atropos_gym.trainers":
    raise ImportError(f"import atropos_gym.trainers, not {__name__!r}: it would load every class twice")
