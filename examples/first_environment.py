"""A first environment: which of two digits is larger? Learned from scratch in under a minute.

Run it with ``python examples/first_environment.py``; it needs no network and no GPU.
"""

from __future__ import annotations

from atropos_gym import GRPO, Feedback, TextEnv, evaluate


class Larger(TextEnv):
    """Say the larger one of two digits."""

    answers = tuple("123456789")
    max_turn_tokens = 4

    def begin(self, options):
        self.pair = [str(digit) for digit in self.np_random.choice(9, 2, replace=False) + 1]
        return " ".join(self.pair)

    def respond(self, reply):
        right = reply.content == max(self.pair)
        # A line after the end is shown to nobody who plays; the format lesson reads it.
        said = "Right." if right else "Wrong."
        return Feedback(said, reward=float(right), terminated=True, success=right)

    def sample_reply(self):
        return str(self.np_random.choice(self.pair))


def main(updates: int = 60) -> None:
    """Trains it and prints how it plays before and after."""
    with GRPO("tiny", Larger, learning_rate=4e-3, group_size=8, groups_per_update=24, seed=0) as model:
        model.warm_up(100)
        before = evaluate(Larger, model, episodes=300, seed=1, deterministic=False)
        model.learn(updates=updates, progress_bar=True)
        after = evaluate(Larger, model, episodes=300, seed=1)
    print(f"right before: {before.mean:.2f}   after: {after.mean:.2f}   (a guess: 0.50)")


if __name__ == "__main__":
    main()
