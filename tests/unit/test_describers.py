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


TOYS = {
    "BlackjackEnv": "Blackjack-v1",
    "FrozenLakeEnv": "FrozenLake-v1",
    "CliffWalkingEnv": "CliffWalking-v1",
    "TaxiEnv": "Taxi-v4",
}
"""Simulators whose descriptions are read back."""


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


@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("slippery", [False, True])
def test_every_place_at_the_cliff_is_read_back(style: str, slippery: bool) -> None:
    cliff = bare("CliffWalking-v1", is_slippery=slippery)
    describer = find_describer(cliff, style)
    texts = [describer.describe(state) for state in range(cliff.observation_space.n)]
    assert len(set(texts)) == 48
    assert [describer.parse(text) for text in texts] == list(range(48))


@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("keywords", TOWNS, ids=str)
def test_every_state_of_the_taxi_is_read_back(keywords: dict[str, Any], style: str) -> None:
    taxi = bare("Taxi-v4", **keywords)
    describer = find_describer(taxi, style)
    texts = [describer.describe(state) for state in range(taxi.observation_space.n)]
    assert len(set(texts)) == 500
    assert [describer.parse(text) for text in texts] == list(range(500))


@pytest.mark.parametrize("style", ["full", "terse"])
@pytest.mark.parametrize("toy", TOYS)
def test_other_texts_are_refused(toy: str, style: str) -> None:
    describer = find_describer(bare(TOYS[toy]), style)
    with pytest.raises(ValueError, match="nonsense"):
        describer.parse("nonsense")


def test_every_simulator_that_is_known_has_both_styles() -> None:
    assert all(list(styles)[0] == "full" and "terse" in styles for styles in DESCRIBERS.values())
    assert {name.rpartition(":")[2] for name in DESCRIBERS} >= set(TOYS)


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


def test_cliff_words_move_as_they_say() -> None:
    """Every word in every place, against the simulator's table."""
    cliff = bare("CliffWalking-v1")
    describer = find_describer(cliff)
    steps = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
    assert describer.names == tuple(steps)
    for state in range(48):
        row, column = divmod(state, 12)
        around = dict(
            part.split(": ") for part in describer.describe(state).split(". ", 1)[1].rstrip(".").split(", ")
        )
        for action, name in enumerate(describer.names):
            ((_, after, reward, over),) = cliff.P[state][action]
            new_row, new_column = row + steps[name][0], column + steps[name][1]
            inside = 0 <= new_row < 4 and 0 <= new_column < 12
            assert (around[name] == "the edge") is (not inside)
            # At the edge one stays, which on the cliff itself (never a state of play) is another fall.
            if inside:
                assert (around[name] == "the cliff") is (reward == -100)
                assert (around[name] == "the goal") is over
                fell = around[name] == "the cliff"
                assert divmod(after, 12) == ((3, 0) if fell else (new_row, new_column))
            elif describer.letter(state) != "C":
                assert after == state and reward == -1


def test_cliff_words_turn_the_simulator() -> None:
    cliff = bare("CliffWalking-v1")
    names = find_describer(cliff).names
    cliff.reset(seed=0)
    seen = [cliff.step(names.index(name))[:3] for name in ("up", "right", "left", "down", "right")]
    assert seen == [(24, -1, False), (25, -1, False), (24, -1, False), (36, -1, False), (36, -100, False)]


def test_the_cliff_says_whether_it_is_slippery_and_shows_its_map() -> None:
    dry, wet = (find_describer(bare("CliffWalking-v1", is_slippery=is_wet)).rules() for is_wet in (0, 1))
    assert "slippery" in wet and "slippery" not in dry
    assert dry.endswith("............\n............\n............\nSCCCCCCCCCCG")
    # The map is the simulator's own picture, in other letters.
    drawn = bare("CliffWalking-v1", render_mode="ansi")
    drawn.reset(seed=0)
    cells = "".join(strip_ansi(drawn.render()).split())
    assert cells.translate(str.maketrans("xoCT", "S.CG")) == "".join(dry.split("\n")[1:])


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


class Drawn(gymnasium.Env[int, int]):
    """A simulator that nobody knows, with a picture in colours."""

    observation_space = gymnasium.spaces.Discrete(3)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> str:
        return "\x1b[41mx\x1b[0m..\n"


def test_a_rendering_is_used_where_asked_for_without_its_colours() -> None:
    assert find_describer(Drawn("ansi")).describe(1) == "x.."
    assert find_describer(Drawn("ansi"), "full").describe(1) == "Observation: 1"
    assert find_describer(Drawn()).describe(1) == "Observation: 1"
    assert strip_ansi("\x1b[1;31mred\x1b[0m\x1b[2K") == "red"


def test_what_a_wrapper_shows_is_described_by_its_own_space() -> None:
    flat = gymnasium.wrappers.FlattenObservation(gymnasium.make("Blackjack-v1"))
    assert find_describer(flat).describe(np.array([0, 1])) == "Observation: [0, 1]"


@pytest.mark.parametrize(
    ("env_id", "describe", "message"),
    [
        ("Blackjack-v1", "short", "describe must be one of full, terse for BlackjackEnv, got 'short'"),
        ("CartPole-v1", "short", "describe must be one of full, terse for CartPoleEnv, got 'short'"),
    ],
)
def test_a_style_that_is_not_there_is_refused(env_id: str, describe: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_describer(bare(env_id), describe)


def test_numpy_observations_are_described_too() -> None:
    assert find_describer(bare("FrozenLake-v1"), "terse").describe(np.int64(6)) == "row 1 col 2"
