"""Exact values of ways to play ``Blackjack-v1``, by dynamic programming over the whole game tree.

The deck is infinite: every card is drawn with replacement, ten with probability 4/13, so the player's sum,
the dealer's card and the usable ace are all there is to know. One thing is hidden: the observation
(21, card, ace) may be a natural (two cards), which pays differently when the player sticks.

A *policy* is a mapping from observations ``(sum, dealer, usable ace)``, an array indexed in that order, or a
callable of those three numbers. Each entry is the probability of hitting (0, 1, a bool or between), or a pair
``(P(stick), P(hit))`` whose rest is an invalid answer, which ends the hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

__all__ = [
    "HIT",
    "STATES",
    "STICK",
    "Policy",
    "blackjack_action_values",
    "blackjack_optimal",
    "blackjack_value",
    "stick_on",
    "textbook",
]

STICK, HIT = 0, 1

State = tuple[int, int, int]
Policy = Callable[[int, int, int], Any] | Mapping[State, Any] | Any

STATES: tuple[State, ...] = tuple(
    (total, dealer, usable)
    for usable in (0, 1)
    for total in range(12 if usable else 4, 22)
    for dealer in range(1, 11)
)
"""Every observation in which the player has a choice."""

_CARDS = tuple((card, (4 if card == 10 else 1) / 13) for card in range(1, 11))
_ROUNDING = 1e-6


def _shown(hard_total: int, has_ace: bool) -> tuple[int, int]:
    """(sum, usable ace) of a hand whose aces all count 1."""
    return (hard_total + 10, 1) if has_ace and hard_total <= 11 else (hard_total, 0)


def _draw(total: int, usable: int, card: int) -> tuple[int, int]:
    """(sum, usable ace) after one more card; a sum above 21 is a bust.

    An ace that counts 1 can never count 11 again, so only a usable one and the new card matter.
    """
    return _shown(total - 10 * usable + card, bool(usable) or card == 1)


@cache
def _dealer_ends(card: int) -> tuple[tuple[int, bool, float], ...]:
    """(final sum, is a natural, probability) of a dealer who shows ``card``; a bust counts 0."""
    ends: dict[tuple[int, bool], float] = {}

    def play(total: int, usable: int, cards: int, probability: float) -> None:
        if total >= 17:
            key = (total if total <= 21 else 0, cards == 2 and total == 21)
            ends[key] = ends.get(key, 0.0) + probability
            return
        for drawn, chance in _CARDS:
            play(*_draw(total, usable, drawn), cards + 1, probability * chance)

    play(*_shown(card, card == 1), 1, 1.0)
    return tuple((total, is_natural, p) for (total, is_natural), p in ends.items())


@cache
def _stick_value(total: int, dealer: int, is_natural: bool, natural: bool, sab: bool) -> float:
    value = 0.0
    for dealer_total, dealer_natural, p in _dealer_ends(dealer):
        reward = float((total > dealer_total) - (total < dealer_total))
        if sab and is_natural and not dealer_natural:
            reward = 1.0
        elif natural and not sab and is_natural and reward == 1.0:
            reward = 1.5
        value += p * reward
    return value


@cache
def _first_hands() -> tuple[tuple[int, int, bool, float], ...]:
    """(sum, usable ace, is a natural, probability) of the player's first two cards."""
    hands: dict[tuple[int, int, bool], float] = {}
    for first, p in _CARDS:
        for second, q in _CARDS:
            key = (*_shown(first + second, 1 in (first, second)), {first, second} == {1, 10})
            hands[key] = hands.get(key, 0.0) + p * q
    return tuple((*hand, p) for hand, p in hands.items())


def _entry(policy: Policy, total: int, dealer: int, usable: int) -> Any:
    if isinstance(policy, Mapping):
        try:
            return policy[total, dealer, usable]
        except KeyError:
            raise KeyError(
                f"the table has no entry for {(total, dealer, usable)}; it must hold all of STATES"
            ) from None
    return policy(total, dealer, usable) if callable(policy) else policy[total][dealer][usable]


def _chances(policy: Policy, total: int, dealer: int, usable: int) -> tuple[float, float]:
    """(P(stick), P(hit)) of a policy in one state; what is left to 1 is invalid."""
    entry = _entry(policy, total, dealer, usable)
    if getattr(entry, "ndim", 0) == 1 or isinstance(entry, tuple | list):
        stick, hit = (float(p) for p in entry)
    else:
        hit = float(entry)
        stick = 1.0 - hit
    if not (stick >= -_ROUNDING and hit >= -_ROUNDING and stick + hit <= 1 + _ROUNDING):
        raise ValueError(
            f"the entry for {(total, dealer, usable)} must be a probability of hitting or a pair "
            f"(P(stick), P(hit)), got {entry!r}"
        )
    return stick, hit


def blackjack_value(
    policy: Policy, *, natural: bool = False, sab: bool = True, invalid_reward: float = -1.0
) -> float:
    """Returns the exact mean return of a policy.

    Args:
        policy: mapping, array or callable of ``(sum, dealer, usable ace)``; see the module's text.
        natural: a natural that beats the dealer pays 1.5 (only without ``sab``).
        sab: the book's rules, as ``gymnasium.make("Blackjack-v1")`` has them: a natural wins 1 unless the
            dealer has one too.
        invalid_reward: what an invalid answer pays; it ends the hand.

    Raises:
        KeyError: a mapping lacks a state that is reached.
        ValueError: an entry is no probability.

    Example:
        >>> round(blackjack_value(stick_on(17)), 4)
        -0.0759
        >>> round(blackjack_value(lambda total, dealer, usable: (0.25, 0.25)), 4)  # half of it invalid
        -0.7517
    """

    def value(total: int, dealer: int, usable: int, is_natural: bool) -> float:
        if total > 21:
            return -1.0
        stick, hit = _chances(policy, total, dealer, usable)
        out = (1.0 - stick - hit) * invalid_reward
        if stick:
            out += stick * _stick_value(total, dealer, is_natural, natural, sab)
        if hit:
            out += hit * hit_value(total, dealer, usable)
        return out

    @cache
    def hit_value(total: int, dealer: int, usable: int) -> float:
        after = ((p, _draw(total, usable, card)) for card, p in _CARDS)
        return sum(p * value(new_total, dealer, new_usable, False) for p, (new_total, new_usable) in after)

    return sum(
        p_dealer * p_hand * value(total, dealer, usable, is_natural)
        for dealer, p_dealer in _CARDS
        for total, usable, is_natural, p_hand in _first_hands()
    )


def blackjack_action_values(*, natural: bool = False, sab: bool = True) -> dict[State, tuple[float, float]]:
    """Returns (value of sticking, value of hitting and then playing best) for each of ``STATES``.

    In (21, card, ace) the value of a hand that is no natural is given; sticking is best for both.

    Example:
        >>> stick, hit = blackjack_action_values()[16, 10, 0]
        >>> round(stick - hit, 4)
        -0.0065
    """

    @cache
    def both(total: int, dealer: int, usable: int) -> tuple[float, float]:
        hit = 0.0
        for card, p in _CARDS:
            new_total, new_usable = _draw(total, usable, card)
            hit += p * (-1.0 if new_total > 21 else max(both(new_total, dealer, new_usable)))
        return _stick_value(total, dealer, False, natural, sab), hit

    return {state: both(*state) for state in STATES}


def blackjack_optimal(*, natural: bool = False, sab: bool = True) -> tuple[float, dict[State, int]]:
    """Returns the best mean return and a table of actions that reaches it.

    Example:
        >>> value, table = blackjack_optimal()
        >>> round(value, 4), table[12, 4, 0], table[18, 9, 1]
        (-0.0431, 0, 1)
    """
    actions = blackjack_action_values(natural=natural, sab=sab)
    table = {state: HIT if hit > stick else STICK for state, (stick, hit) in actions.items()}
    return blackjack_value(table, natural=natural, sab=sab), table


def stick_on(least: int) -> Callable[[int, int, int], int]:
    """Returns the policy that sticks on any sum of at least ``least``.

    Example:
        >>> stick_on(17)(16, 10, 0), stick_on(17)(17, 10, 0)
        (1, 0)
    """
    return lambda total, dealer, usable: HIT if total < least else STICK


def textbook(total: int, dealer: int, usable: int) -> int:
    """Casino basic strategy without doubling and splitting; here it is also optimal.

    Example:
        >>> textbook(16, 7, 0), textbook(16, 6, 0)
        (1, 0)
    """
    if usable:
        return HIT if total <= 17 or (total == 18 and dealer in (9, 10, 1)) else STICK
    if total <= 11:
        return HIT
    if total >= 17:
        return STICK
    weak = (4, 5, 6) if total == 12 else (2, 3, 4, 5, 6)
    return STICK if dealer in weak else HIT
