"""A simulator of your own becomes a text environment, and a language model learns to play it.

The simulator is ordinary Gymnasium code that knows nothing of text. A describer says its states in words;
``GymTextEnv`` reads an action out of every reply.
"""

from __future__ import annotations

import gymnasium
from gymnasium.spaces import Discrete

from atropos_gym import GRPO, GymTextEnv, evaluate
from atropos_gym.wrappers.describers import Describer

LIGHTS = ("red", "amber", "green")


class Crossing(gymnasium.Env):
    """Cross a street: whoever waits sees another light and is a little later; green is safe, red is not."""

    observation_space = Discrete(len(LIGHTS))
    action_space = Discrete(2)
    metadata = {"render_modes": []}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.light = int(self.np_random.integers(3))
        return self.light, {}

    def step(self, action):
        if action == 1:
            return self.light, (-1.0, 0.0, 1.0)[self.light], True, False, {}
        self.light = int(self.np_random.integers(3))
        return self.light, -0.05, False, False, {}


class Lights(Describer):
    """Says what a traveller sees. ``terse``: that word alone, which even a tiny model can read."""

    names = ("wait", "go")
    terse = True

    def describe(self, observation):
        return LIGHTS[observation]

    def outcome(self, observation, reward, terminated):
        return {1.0: "Safe.", 0.0: "Phew.", -1.0: "Crash."}[reward]


def crossing(**keywords) -> GymTextEnv:
    """Makes the text environment."""
    settings = {"format": "bare_word", "on_invalid": "end", "max_turns": 8, "max_turn_tokens": 8}
    return GymTextEnv(Crossing(), describe=Lights(), history="latest", **settings, **keywords)


def main(updates: int = 40) -> None:
    """Trains it and prints the mean return of a random player and of the model."""
    settings = {"learning_rate": 4e-3, "entropy": (0.02, "answers"), "drop_equal": False}
    with GRPO("tiny", crossing, group_size=8, groups_per_update=16, seed=0, **settings) as model:
        model.warm_up(100)
        model.learn(updates=updates, progress_bar=True)
        trained = evaluate(crossing, model, episodes=300, seed=1)
    guess = evaluate(crossing, "random", episodes=300, seed=1)
    print(f"mean return of a random player: {guess.mean:.2f}   of the model: {trained.mean:.2f}")


if __name__ == "__main__":
    main()
