"""atropos/Blackjack-v0: Gymnasium's Blackjack-v1, told and played in words."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from atropos_gym.envs.blackjack_value import blackjack_optimal, blackjack_value
from atropos_gym.wrappers.gym_text_env import GymTextEnv

__all__ = ["Blackjack"]


class Blackjack(GymTextEnv):
    """One hand of Blackjack.

    Description:
        The player takes cards (hit) or stops (stick) against a dealer who draws to 17. The deck is infinite.

    Actions:
        ``hit`` or ``stick`` as a bare word. Anything else ends the hand with -1.

    Observations:
        Rules and hand in sentences; with ``describe="terse"`` the hand alone (``hard 15 vs 10``), the same
        text in every turn, for models too small to read.

    Rewards:
        Won 1, drawn 0, lost -1.

    Episode end:
        The player sticks or goes above 21, or says something else.

    Arguments:
        natural: a natural that wins pays 1.5 (only without ``sab``).
        sab: the book's rules, as ``gymnasium.make("Blackjack-v1")`` has them.
        describe: ``"full"`` or ``"terse"``.
        keywords: those of ``GymTextEnv``.

    Version history:
        v0: first version.
    """

    max_turns = 12
    max_turn_tokens = 16
    max_feedback_tokens = 256

    def __init__(self, *, natural: bool = False, sab: bool = True, **keywords: Any) -> None:
        self._rules = (bool(natural), bool(sab))
        settings = {"format": "bare_word", "on_invalid": "end", **keywords}
        super().__init__("Blackjack-v1", simulator_kwargs={"natural": natural, "sab": sab}, **settings)

    @property
    def scores(self) -> Mapping[str, float]:  # type: ignore[override]
        """Exact mean returns of random and of optimal play under these rules."""
        return _scores(*self._rules)


@cache
def _scores(natural: bool, sab: bool) -> Mapping[str, float]:
    return {
        "random": blackjack_value(lambda *_: 0.5, natural=natural, sab=sab),
        "optimal": blackjack_optimal(natural=natural, sab=sab)[0],
    }
