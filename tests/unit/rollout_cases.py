"""Small tasks and helpers shared by the tests of rollout."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Sequence
from typing import Any

from atropos_gym.engines import Completion, SamplingParams, ScriptedEngine
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.text_env import TextEnv

END = 258


class Countdown(TextEnv):
    """Says how many turns are left, in characters of one to four bytes; pays for what was said."""

    max_turns = 6
    max_turn_tokens = 12
    max_prompt_tokens = 64
    max_feedback_tokens = 64

    def begin(self, options: dict[str, Any]) -> Sequence[Message]:
        self.left = int(options.get("turns", self.np_random.integers(1, 5)))
        return [Message(role="system", content="Zähle."), Message(role="user", content=self.says())]

    def respond(self, reply: Reply) -> Feedback:
        self.left -= 1
        reward = float(self.np_random.integers(0, 100)) + len(reply.ids) / 64
        if self.left == 0:
            return Feedback("Fertig 🎲", reward=reward, terminated=True, success=reply.complete)
        return Feedback(self.says(), reward=reward, invalid=not reply.complete)

    def says(self) -> str:
        return f"noch {self.left} € {self.np_random.integers(0, 100)} 🎲"


class Restarting(Countdown):
    """Opens a new segment in the middle, as a task that summarises its history does."""

    def respond(self, reply: Reply) -> Feedback:
        feedback = super().respond(reply)
        if not feedback.terminated and self.left % 2:
            feedback.restart = [Message(role="user", content=f"bisher: {reply.text}")]
        return feedback


def say(text: str) -> list[int]:
    return [*text.encode(), END]


def saying(text: str, **options: Any) -> ScriptedEngine:
    """An engine that always says ``text``."""
    return ScriptedEngine(lambda prompt, params, number: say(text), **options)


def exactly(completions: Sequence[Completion]) -> ScriptedEngine:
    """An engine that hands on completions as they are, in turn."""

    def script(prompt: tuple[int, ...], params: SamplingParams, number: int) -> Completion:
        return completions[number % len(completions)]

    return ScriptedEngine(script)


class MovedClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still but where it would wait: then it jumps to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.DefaultSelector):
    loop: MovedClock

    def __init__(self, loop: MovedClock) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing will ever happen: every task waits and no timer runs")
        # Rounded up: a timer must not be missed by the last bit.
        self.loop.now += timeout * (1 + 1e-12)
        return super().select(0)


def run_moved(work: Any) -> Any:
    """Runs a coroutine on a clock that is moved by its timers."""
    with asyncio.Runner(loop_factory=MovedClock) as runner:
        return runner.run(work)
