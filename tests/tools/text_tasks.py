"""Small text tasks that the tests of environments, collectors and vector environments play."""

from __future__ import annotations

from typing import Any

from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.text_env import TextEnv


class Reverse(TextEnv):
    """One turn: write a word backwards. The design's own example, as a user would write it."""

    def begin(self, options):  # type: ignore[no-untyped-def]
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        return f"Write {self.word} backwards."

    def respond(self, reply):  # type: ignore[no-untyped-def]
        return Feedback(reward=float(reply.content.strip() == self.word[::-1]), terminated=True)


class Guess(TextEnv):
    """Several turns: guess a digit; every feedback echoes what was said. Chance goes on after the start."""

    max_turns = 4
    max_turn_tokens = 16
    max_prompt_tokens = 64
    max_feedback_tokens = 64

    def begin(self, options: dict[str, Any]) -> list[Message]:
        self.target = int(options.get("target", self.np_random.integers(10)))
        return [Message(role="user", content="Rules."), Message(role="user", content="Guess 0-9.")]

    def respond(self, reply: Reply) -> Feedback:
        said = reply.content.strip()
        right = said == str(self.target)
        valid = said.isdigit()
        return Feedback(
            f"Not {reply.content}, luck {int(self.np_random.integers(100))}.",
            reward=float(right),
            terminated=right,
            success=right,
            invalid=not valid,
            reward_terms={"right": float(right)},
        )

    def sample_reply(self) -> str:
        return str(self.np_random.integers(10))

    def extra_info(self) -> dict[str, Any]:
        return {"legal_actions": [str(i) for i in range(10)]}


class Scripted(TextEnv):
    """Says what a list of Feedback says, one a turn."""

    max_turns = 8
    max_turn_tokens = 8
    max_prompt_tokens = 64
    max_feedback_tokens = 16

    def __init__(self, start: Any = "go", script: tuple[Any, ...] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.start = start
        self.script = script

    def begin(self, options: dict[str, Any]) -> Any:
        self.options = options
        self.replies: list[Reply] = []
        return self.start

    def respond(self, reply: Reply) -> Any:
        self.replies.append(reply)
        position = len(self.replies) - 1
        return self.script[position] if position < len(self.script) else Feedback("more")
