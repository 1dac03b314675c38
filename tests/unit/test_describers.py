"""Describers: what is said can be read back in every state, and says what the simulator does."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from atropos_gym.envs.blackjack_value import STATES
from atropos_gym.errors import ConfigError
from atropos_gym.wrappers.describers import DESCRIBERS, Describer, find_describer
from atropos_gym.wrappers.describers.base import strip_ansi

LAKES: list[dict[str, Any]] = [
    {},
    {"map_name": "8x8"},
    {"is_slippery": False},
    {"desc": ["SFH", "FFG"]},
]
TOWNS: list[dict[str, Any]] = [{}, {"is_rainy": True}, {"fickle_passenger": True}]


def bare(env_id: str, **keywords: Any) -> Any:
    return gymnasium.make(env_id, **keywords).unwrapped


# --- round trips ---


@pytest.mark.parametrize("style", ["full", "terse"])
def test_every_hand_of_blackjack_is_read_back(style: str) -> None:
    describer = find_describer(bare("Blackjack-v1"), style)
    texts = {state: describer.describe(state) for state in STATES}
    assert len(set(texts.values())) == len(STATES)
    assert all(describer.parse(text) == state for state, text in texts.items())


@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("keywords", LAKES, ids=str)
def test_every_place_on_the_lake_is_read_back(style: str, keywords: dict[str, Any]) -> None:
    lake = bare("FrozenLake-v1", **keywords)
    describer = find_describer(lake, style)
    for state in range(lake.observation_space.n):
        assert describer.parse(describer.describe(state)) == state


@pytest.mark.parametrize("keywords", TOWNS, ids=str)
def test_every_state_of_the_taxi_is_read_back(keywords: dict[str, Any]) -> None:
    taxi = bare("Taxi-v4", **keywords)
    describer = find_describer(taxi)
    texts = [describer.describe(state) for state in range(taxi.observation_space.n)]
    assert len(set(texts)) == 500
    assert [describer.parse(text) for text in texts] == list(range(500))


@pytest.mark.parametrize(
    "style", [(name, style) for name, styles in DESCRIBERS.items() for style in styles], ids=str
)
def test_other_texts_are_refused(style: tuple[str, str]) -> None:
    ids = {"BlackjackEnv": "Blackjack-v1", "FrozenLakeEnv": "FrozenLake-v1", "TaxiEnv": "Taxi-v4"}
    describer = find_describer(bare(ids[style[0].rpartition(":")[2]]), style[1])
    with pytest.raises(ValueError, match="nonsense"):
        describer.parse("nonsense")


# --- what the words mean ---


def test_blackjack_words_are_what_the_simulator_does() -> None:
    game = bare("Blackjack-v1")
    names = find_describer(game).names
    for seed in range(30):
        game.reset(seed=seed)
        cards = len(game.player)
        _, _, over, _, _ = game.step(names.index("hit"))
        assert len(game.player) == cards + 1
        if not over:
            cards = len(game.player)
            _, _, over, _, _ = game.step(names.index("stick"))
            assert over and len(game.player) == cards


def test_blackjack_tells_hard_from_soft_and_the_dealers_card() -> None:
    game = bare("Blackjack-v1")
    terse = find_describer(game, "terse")
    for seed in range(50):
        state, _ = game.reset(seed=seed)
        kind, total, _, dealer = terse.describe(state).split()
        assert int(dealer) == game.dealer[0]
        assert int(total) == sum(game.player) + (10 if kind == "soft" else 0)
        assert (kind == "soft") == (1 in game.player and sum(game.player) + 10 <= 21)


@pytest.mark.parametrize(
    "keywords", [{"is_slippery": False}, {"is_slippery": False, "map_name": "8x8"}], ids=str
)
def test_lake_words_move_as_they_say(keywords: dict[str, Any]) -> None:
    lake = bare("FrozenLake-v1", **keywords)
    describer = find_describer(lake)
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    assert describer.names == tuple(steps)
    height, width = lake.desc.shape
    for state in range(height * width):
        row, column = divmod(state, width)
        if lake.desc[row, column] in b"GH":
            continue
        around = dict(
            part.split(": ") for part in describer.describe(state).split(". ", 1)[1].rstrip(".").split(", ")
        )
        for action, name in enumerate(describer.names):
            ((_, after, _, over),) = lake.P[state][action]
            new_row, new_column = row + steps[name][0], column + steps[name][1]
            inside = 0 <= new_row < height and 0 <= new_column < width
            assert divmod(after, width) == ((new_row, new_column) if inside else (row, column))
            said = around[name]
            assert (said == "the edge") is (not inside)
            assert (said in ("a hole", "the goal")) is over
            if over:
                assert said == ("the goal" if lake.desc[new_row, new_column] == b"G" else "a hole")


def test_the_lake_says_whether_it_is_slippery() -> None:
    assert "is slippery" in find_describer(bare("FrozenLake-v1")).rules()
    assert "not slippery" in find_describer(bare("FrozenLake-v1", is_slippery=False)).rules()
    assert "SFFF\nFHFH\nFFFH\nHFFG" in find_describer(bare("FrozenLake-v1")).rules()


def test_taxi_words_are_what_the_simulator_does() -> None:
    taxi = bare("Taxi-v4")
    names = find_describer(taxi).names
    steps = {"south": (1, 0), "north": (-1, 0), "east": (0, 1), "west": (0, -1)}
    for state in range(500):
        row, column, passenger, goal = taxi.decode(state)
        for action, name in enumerate(names):
            if not taxi.action_mask(state)[action]:
                continue
            ((_, after, _, over),) = taxi.P[state][action]
            new = taxi.decode(after)
            if name in steps:
                assert new == (row + steps[name][0], column + steps[name][1], passenger, goal)
            elif name == "pickup":
                assert (passenger, new[2]) == (taxi.locs.index((row, column)), 4)
            else:
                assert name == "dropoff" and passenger == 4 and new[2] == taxi.locs.index((row, column))
                assert over is (new[2] == goal)


def test_taxi_aliases_mean_their_names() -> None:
    describer = find_describer(bare("Taxi-v4"))
    assert {text: describer.names[value] for text, value in describer.aliases.items()} == {
        "move south": "south",
        "move north": "north",
        "move east": "east",
        "move west": "west",
        "pick up": "pickup",
        "drop off": "dropoff",
    }


def test_taxi_names_the_places_where_the_simulator_has_them() -> None:
    taxi = bare("Taxi-v4")
    text = find_describer(taxi).describe(taxi.encode(3, 1, 2, 3))
    assert text == (
        "The taxi is at row 3, column 1. "
        "The passenger is at yellow (row 4, column 0) and wants to go to blue (row 4, column 3)."
    )
    # The letters on the simulator's map stand where the names say.
    for name, (row, column) in zip("RGYB", taxi.locs, strict=True):
        assert taxi.desc[1 + row, 1 + 2 * column].decode() == name


def test_taxi_tells_of_rain_and_of_a_change_of_mind() -> None:
    dry, wet, fickle = (find_describer(bare("Taxi-v4", **keywords)).rules() for keywords in TOWNS)
    assert "rains" in wet and "rains" not in dry
    assert "may change the destination" in fickle and "may change" not in dry


def test_outcomes() -> None:
    game = find_describer(bare("Blackjack-v1"), "terse")
    assert [game.outcome((20, 5, 0), reward, True) for reward in (1.5, 1.0, 0.0, -1.0)] == [
        "You win.",
        "You win.",
        "Draw.",
        "You lose.",
    ]
    lake = find_describer(bare("FrozenLake-v1", reward_schedule=(5, -1, 0)))
    assert lake.outcome(15, 5, True) == "You reach the goal." and lake.success(15, 5, True)
    assert lake.outcome(5, -1, True) == "You fall into a hole." and not lake.success(5, -1, True)
    taxi = find_describer(bare("Taxi-v4"))
    assert taxi.success(0, 20, True) and not taxi.success(0, -1, False)


# --- finding one ---


def test_a_subclass_and_a_wrapped_simulator_are_known() -> None:
    blackjack = type(bare("Blackjack-v1"))

    class House(blackjack):  # type: ignore[valid-type,misc]
        pass

    assert find_describer(House()).names == ("stick", "hit")
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("Taxi-v4"))
    assert len(find_describer(wrapped).names) == 6


def test_a_function_or_a_describer_of_ones_own() -> None:
    assert find_describer(bare("CliffWalking-v1"), lambda state: f"at {state}").describe(3) == "at 3"
    own = Describer()
    assert find_describer(bare("CliffWalking-v1"), own) is own


def test_rendering_is_the_last_resort_without_its_colours() -> None:
    cliff = gymnasium.make("CliffWalking-v1", render_mode="ansi")
    cliff.reset(seed=0)
    text = find_describer(cliff).describe(36)
    assert "x" in text and "\x1b" not in text
    assert strip_ansi("\x1b[1;31mred\x1b[0m\x1b[2K") == "red"


@pytest.mark.parametrize(
    ("env_id", "describe", "message"),
    [
        ("Blackjack-v1", "short", "describe must be one of full, terse for BlackjackEnv, got 'short'"),
        ("CliffWalking-v1", None, "no describer is known for CliffWalkingEnv: give describe="),
        ("CartPole-v1", "terse", "no describer is known for CartPoleEnv named 'terse'"),
    ],
)
def test_what_cannot_be_described_is_refused(env_id: str, describe: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_describer(bare(env_id), describe)


def test_numpy_observations_are_described_too() -> None:
    assert find_describer(bare("FrozenLake-v1"), "terse").describe(np.int64(6)) == "row 1 col 2"
