"""A simulator of your own becomes a text environment, and a language model learns to play it.

The simulator is ordinary Gymnasium code that knows nothing of text. ``GymTextEnv`` tells its states in words
and reads an action out of every reply.
"""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete

from atropos_gym import GRPO, GymTextEnv, evaluate


class Ferry(gymnasium.Env):
    """Bring a ferry to its berth on a river of nine places; every move costs a little."""

    observation_space = Discrete(81)
    action_space = Discrete(2)
    metadata = {"render_modes": []}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.berth = (int(place) for place in self.np_random.choice(9, 2, replace=False))
        return self.place * 9 + self.berth, {}

    def step(self, action):
        self.place = int(np.clip(self.place + (1 if action else -1), 0, 8))
        home = self.place == self.berth
        return self.place * 9 + self.berth, 1.0 if home else -0.05, home, False, {}


def ferry(**keywords) -> GymTextEnv:
    """Makes the text environment: a sentence for each state, a word for each action."""
    return GymTextEnv(
        Ferry(),
        describe=lambda state: f"at {state // 9} berth {state % 9}",
        format="bare_word",
        names=("down", "up"),
        on_invalid="end",
        max_turns=12,
        max_turn_tokens=8,
        history="latest",
        **keywords,
    )


def main(updates: int = 40) -> None:
    """Trains it and prints the mean return of a random player and of the model."""
    settings = {"learning_rate": 4e-3, "entropy": (0.02, "answers"), "drop_equal": False}
    with GRPO("tiny", ferry, group_size=8, groups_per_update=24, seed=0, **settings) as model:
        model.warm_up(60)
        model.learn(updates=updates, progress_bar=True)
        trained = evaluate(ferry, model, episodes=300, seed=1)
    guess = evaluate(ferry, "random", episodes=300, seed=1)
    print(f"mean return of a random player: {guess.mean:.2f}   of the model: {trained.mean:.2f}")


if __name__ == "__main__":
    main()
