"""Text tasks that count what reaches them, for tests of vector environments."""

from __future__ import annotations

from typing import Any

from atropos_gym.messages import Feedback, Reply
from atropos_gym.text_env import TextEnv


class Counting(TextEnv):
    """Ends after one to three turns, and remembers every reply that it was really played."""

    max_turns = 4
    max_turn_tokens = 16
    max_prompt_tokens = 64
    max_feedback_tokens = 64

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.heard: list[str] = []

    def begin(self, options: dict[str, Any]) -> str:
        self.length = int(options.get("length", self.np_random.integers(1, 4)))
        return f"An episode of {self.length}."

    def respond(self, reply: Reply) -> Feedback:
        self.heard.append(reply.content)
        self.length -= 1
        return Feedback(
            f"{self.length} left.",
            reward=float(len(self.heard)),
            terminated=self.length == 0,
            success=True,
            invalid=reply.content == "?",
            reward_terms={"heard": float(len(self.heard))},
            info={"left": [self.length] * self.length, "share": 0.5 * self.length, "word": reply.content},
        )
