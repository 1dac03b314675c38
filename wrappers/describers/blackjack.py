"""Blackjack in words: a sentence, or four words for tiny models."""

from __future__ import annotations

import re

import gymnasium

from atropos_gym.wrappers.describers.base import Describer

__all__ = ["BlackjackDescriber", "TerseBlackjackDescriber"]

Observation = tuple[int, int, int]
"""(player's sum, dealer's card, whether an ace counts 11)"""

_SENTENCE = re.compile(r"You hold (\d+) with (a|no) usable ace\. The dealer shows (\d+|an ace)\.")
_TERSE = re.compile(r"(hard|soft) (\d+) vs (\d+)")


class BlackjackDescriber(Describer):
    """Full sentences.

    Example:
        >>> BlackjackDescriber(gymnasium.make("Blackjack-v1")).describe((15, 10, 0))
        'You hold 15 with no usable ace. The dealer shows 10.'
    """

    names = ("stick", "hit")

    def __init__(self, simulator: gymnasium.Env[Observation, int]) -> None:
        game = simulator.unwrapped
        self._pays_natural = bool(getattr(game, "natural", False)) and not getattr(game, "sab", False)

    def rules(self) -> str:
        """Returns the game's rules."""
        bonus = (
            " An ace and a ten dealt to you win one and a half times as much." if self._pays_natural else ""
        )
        return (
            "You play one hand of Blackjack against a dealer; cards are drawn with replacement. Jack, queen "
            "and king count 10. An ace counts 11 while that keeps you at 21 or less (a usable ace), else 1. "
            "hit: you take a card, and lose at once above 21. stick: you stop, the dealer takes cards up to "
            f"17 or more, and the higher sum of at most 21 wins.{bonus}"
        )

    def describe(self, observation: Observation) -> str:
        """Returns a hand in a sentence."""
        total, dealer, usable = observation
        card = "an ace" if dealer == 1 else str(dealer)
        return f"You hold {total} with {'a' if usable else 'no'} usable ace. The dealer shows {card}."

    def parse(self, text: str) -> Observation:
        """Returns the hand that a description tells of."""
        match = _SENTENCE.search(text)
        if match is None:
            raise ValueError(f"no hand of Blackjack in {text!r}")
        return int(match[1]), 1 if match[3] == "an ace" else int(match[3]), int(match[2] == "a")

    def success(self, observation: Observation, reward: float, terminated: bool) -> bool:
        """Returns whether the hand was won."""
        return reward > 0

    def outcome(self, observation: Observation, reward: float, terminated: bool) -> str:
        """Returns who won."""
        return "You win." if reward > 0 else "You lose." if reward < 0 else "Draw."


class TerseBlackjackDescriber(BlackjackDescriber):
    """The state alone, the same text in every turn: ``hard 15 vs 10``, ``soft 18 vs 6``, an ace as 1.

    Example:
        >>> TerseBlackjackDescriber(gymnasium.make("Blackjack-v1")).describe((18, 1, 1))
        'soft 18 vs 1'
    """

    terse = True

    def rules(self) -> str:
        """Returns nothing: the state is all that is said."""
        return ""

    def describe(self, observation: Observation) -> str:
        """Returns a hand in four words."""
        total, dealer, usable = observation
        return f"{'soft' if usable else 'hard'} {total} vs {dealer}"

    def parse(self, text: str) -> Observation:
        """Returns the hand that a description tells of."""
        match = _TERSE.fullmatch(text)
        if match is None:
            raise ValueError(f"no hand of Blackjack in {text!r}")
        return int(match[2]), int(match[3]), int(match[1] == "soft")
