"""Ready tasks, one file each, and their registration with Gymnasium.

Entry points are strings, so registering loads no simulator, no data set and no model.
"""

from __future__ import annotations

import gymnasium

if __name__ != "atropos_gym.envs":
    raise ImportError(f"import atropos_gym.envs, not {__name__!r}: it would load every class twice")

__all__ = ["ENVIRONMENTS", "register_environments"]

#: id -> entry point
ENVIRONMENTS: dict[str, str] = {
    "atropos/Blackjack-v0": "atropos_gym.envs.blackjack:Blackjack",
    "atropos/FrozenLake-v0": "atropos_gym.envs.frozen_lake:FrozenLake",
    "atropos/FrozenLake8x8-v0": "atropos_gym.envs.frozen_lake:FrozenLake8x8",
    "atropos/CliffWalking-v0": "atropos_gym.envs.cliff_walking:CliffWalking",
    "atropos/Taxi-v0": "atropos_gym.envs.taxi:Taxi",
    "atropos/Identity-v0": "atropos_gym.envs.identity:Identity",
    "atropos/Arithmetic-v0": "atropos_gym.envs.arithmetic:Arithmetic",
    "atropos/GSM8K-v0": "atropos_gym.envs.gsm8k:GSM8K",
}


def register_environments() -> None:
    """Registers every id of ``ENVIRONMENTS`` that Gymnasium does not know yet."""
    for env_id, entry_point in ENVIRONMENTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(id=env_id, entry_point=entry_point)
