"""atropos/Identity-v0: say the word you were told. Learners prove themselves on it in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rewards import exact_match
from atropos_gym.text_env import TextEnv

__all__ = ["Identity"]


class Identity(TextEnv):
    """Say the word you were told.

    Description:
        The policy reads ``say red`` and is right when it says ``red`` and nothing else.

    Actions:
        A word; blanks at both ends do not matter.

    Observations:
        The prompt with the word.

    Rewards:
        1 for the word, else 0.

    Episode end:
        After the only turn.

    Arguments:
        words: what can be asked for, each equally often.
        keywords: those of ``TextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 1
    max_turn_tokens = 16
    max_prompt_tokens = 64

    def __init__(self, *, words: Sequence[str] = ("red", "green", "blue", "white"), **keywords: Any) -> None:
        super().__init__(**keywords)
        self.words = tuple(words)
        if not self.words or len(set(self.words)) < len(self.words) or not all(map(str.strip, self.words)):
            raise ConfigError(f"words must be different and not blank, got {list(self.words)}")
        self._player: np.random.Generator | None = None
        self.word = ""

    @property
    def answers(self) -> tuple[str, ...]:  # type: ignore[override]
        """All words."""
        return self.words

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of guessing and of reading."""
        return {"random": 1 / len(self.words), "optimal": 1.0}

    def begin(self, options: dict[str, Any]) -> str:
        """Draws a word."""
        self._player = None
        self.word = self.words[int(self.np_random.integers(len(self.words)))]
        return f"say {self.word}"

    def respond(self, reply: Reply) -> Feedback:
        """Compares the reply with the word."""
        verdict = exact_match(reply.content, self.word)
        return Feedback(
            "Right." if verdict else f"It was {self.word}.",
            reward=float(bool(verdict)),
            terminated=True,
            success=bool(verdict),
        )

    def sample_reply(self) -> str:
        """Returns a word, drawn uniformly."""
        if self._player is None:
            self._player = self.np_random.spawn(1)[0]
        return self.words[int(self._player.integers(len(self.words)))]
