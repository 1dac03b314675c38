"""The exact value of Blackjack policies: known numbers, and agreement with the simulator itself."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from atropos_gym.envs.blackjack_value import (
    HIT,
    STATES,
    STICK,
    blackjack_action_values,
    blackjack_optimal,
    blackjack_value,
    stick_on,
    textbook,
)

REGISTERED = {"natural": False, "sab": True}
CLASS_DEFAULT = {"natural": False, "sab": False}
NATURAL = {"natural": True, "sab": False}


def random_play(total: int, dealer: int, usable: int) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("policy", "registered", "class_default", "with_natural"),
    [
        (textbook, -0.0431131, -0.0465560, -0.0257292),
        (stick_on(13), -0.0893402, -0.0927831, -0.0719563),
        (stick_on(16), -0.0717675, -0.0752103, -0.0543836),
        (stick_on(17), -0.0758517, -0.0792945, -0.0584677),
        (stick_on(20), -0.3501111, -0.3535540, -0.3327272),
        (stick_on(0), -0.1829248, -0.1863677, -0.1655409),
        (random_play, -0.3941746, -0.3958960, -0.3854826),
        (stick_on(99), -1, -1, -1),
    ],
)
def test_known_values(policy, registered: float, class_default: float, with_natural: float) -> None:
    assert blackjack_value(policy, **REGISTERED) == pytest.approx(registered, abs=5e-8)
    assert blackjack_value(policy, **CLASS_DEFAULT) == pytest.approx(class_default, abs=5e-8)
    assert blackjack_value(policy, **NATURAL) == pytest.approx(with_natural, abs=5e-8)


def test_the_registered_game_is_the_default() -> None:
    assert blackjack_value(textbook) == blackjack_value(textbook, **REGISTERED)
    spec = gymnasium.spec("Blackjack-v1")
    assert {"natural": False, **spec.kwargs} == REGISTERED


@pytest.mark.parametrize("rules", [REGISTERED, CLASS_DEFAULT, NATURAL])
def test_the_optimal_table_is_textbook(rules) -> None:
    value, table = blackjack_optimal(**rules)
    assert table == {state: textbook(*state) for state in STATES}
    assert value == blackjack_value(textbook, **rules)


def test_closest_calls_by_action_values() -> None:
    values = blackjack_action_values(**CLASS_DEFAULT)
    gaps = {
        (12, 4, 0): 0.0025,
        (16, 10, 0): -0.0065,
        (13, 2, 0): 0.0150,
        (12, 6, 0): 0.0168,
        (12, 3, 0): -0.0186,
    }
    assert {state: round(values[state][0] - values[state][1], 4) for state in gaps} == gaps


def test_mapping_array_and_callable_say_the_same() -> None:
    table = {state: textbook(*state) for state in STATES}
    array = np.zeros((22, 11, 2))
    pairs = {}
    for state, action in table.items():
        array[state] = action
        pairs[state] = (float(action == STICK), float(action == HIT))
    expected = blackjack_value(textbook)
    assert blackjack_value(table) == blackjack_value(array) == blackjack_value(pairs) == expected
    assert blackjack_value({state: np.array(pair) for state, pair in pairs.items()}) == expected


def test_an_invalid_answer_ends_the_hand_with_its_reward() -> None:
    assert blackjack_value(lambda *_: (0.0, 0.0)) == pytest.approx(-1)
    assert blackjack_value(lambda *_: (0.0, 0.0), invalid_reward=-0.25) == pytest.approx(-0.25)
    always_stick = blackjack_value(stick_on(0))
    assert blackjack_value(lambda *_: (0.9, 0.0)) == pytest.approx(0.9 * always_stick - 0.1)


def test_all_states_are_reached_and_no_other() -> None:
    seen = set()

    def spy(total: int, dealer: int, usable: int) -> float:
        seen.add((total, dealer, usable))
        return 0.5

    blackjack_value(spy)
    assert seen == set(STATES) and len(STATES) == 280


@pytest.mark.parametrize("entry", [1.5, -0.1, float("nan"), (0.7, 0.7), (-0.5, 0.5)])
def test_what_is_no_probability_is_refused(entry) -> None:
    with pytest.raises(ValueError, match="must be a probability of hitting or a pair"):
        blackjack_value(lambda *_: entry)


def test_a_missing_state_is_named() -> None:
    with pytest.raises(KeyError, match=r"no entry for \(\d+, \d+, \d\)"):
        blackjack_value({(20, 10, 0): 0})


@pytest.mark.parametrize("rules", [REGISTERED, CLASS_DEFAULT, NATURAL])
def test_the_simulator_pays_what_the_tree_says(rules) -> None:
    simulator = gymnasium.make("Blackjack-v1", **rules).unwrapped
    player = np.random.default_rng(0)
    returns = []
    for episode in range(3000):
        state, _ = simulator.reset(seed=episode)
        over, total = False, 0.0
        while not over:
            state, reward, over, _, _ = simulator.step(int(player.random() < 0.3))
            total += reward
        returns.append(total)
    stderr = np.std(returns) / len(returns) ** 0.5
    assert abs(np.mean(returns) - blackjack_value(lambda *_: 0.3, **rules)) < 4 * stderr
