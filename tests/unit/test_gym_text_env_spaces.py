"""GymTextEnv for any simulator: every observation space in words, every action space in its formats.

Promises:
1. Every environment that Gymnasium itself brings works from its id alone: its checker passes without a
   warning, and replies of ``sample_reply`` are valid and play an episode.
2. What is said of an observation is its values; what cannot be said is refused when it is made, by name.
3. A reply that ``sample_reply`` writes reaches the simulator as a member of its action space, in every format
   that the space has, and leaves the simulator's chance alone.
4. Limits of ids fit what the simulator says and what a player answers.
"""

from __future__ import annotations

import enum
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Reply, ToolCall
from atropos_gym.parsing import describe_format
from atropos_gym.rendering import ChatRenderer
from atropos_gym.wrappers._spoken_actions import SpokenActions, default_format
from atropos_gym.wrappers.describers.spaces import MAX_NUMBERS
from atropos_gym.wrappers.gym_text_env import GymTextEnv

BARE = [
    "Blackjack-v1",
    "FrozenLake-v1",
    "FrozenLake8x8-v1",
    "CliffWalking-v1",
    "CliffWalkingSlippery-v1",
    "Taxi-v4",
    "CartPole-v0",
    "CartPole-v1",
    "MountainCar-v0",
    "MountainCarContinuous-v0",
    "Acrobot-v1",
    "Pendulum-v1",
]
"""Every id that needs nothing but Gymnasium."""

# Gymnasium says of some of its own ids that a newer one is there.
newer = pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")


def say(env: GymTextEnv, text: str) -> Any:
    return env.step(np.array(env.renderer.say(text), np.int32))


def told(env: GymTextEnv) -> str:
    return env.messages[-1]["content"]


class Mission(spaces.Space[str]):
    """A space that a package brings for itself, as minigrid does for its missions."""

    def __init__(self) -> None:
        super().__init__(dtype=str, shape=())

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return f"go to the {('red', 'blue')[int(self.np_random.integers(2))]} ball"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and x.startswith("go to the ")


class Opaque(spaces.Space[Any]):
    """A space whose members are nothing that can be said."""

    def sample(self, mask: Any = None, probability: Any = None) -> object:
        return object()


class Anything(gymnasium.Env[Any, Any]):
    """A simulator of any two spaces: it shows members of one and checks that it gets members of the other."""

    def __init__(self, sees: spaces.Space[Any], acts: spaces.Space[Any], length: int = 5) -> None:
        self.observation_space, self.action_space, self.length = sees, acts, length
        self.got: list[Any] = []

    def _show(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.shown = self.observation_space.sample()
        return self.shown

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.got = []
        return self._show(), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space, action
        self.got.append(action)
        return self._show(), 1.0, len(self.got) == self.length, False, {}


SEEN: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=-1),
    "box": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    "double": spaces.Box(-1e9, 1e9, (3,), np.float64),
    "scalar": spaces.Box(0, 1, (), np.float32),
    "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "ram": spaces.Box(0, 255, (128,), np.uint8),
    "board": spaces.Box(0, 9, (9, 9), np.int64),
    "multi_discrete": spaces.MultiDiscrete([6, 2]),
    "multi_binary": spaces.MultiBinary(4),
    "text": spaces.Text(12),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,)), spaces.Text(3)]),
    "minigrid": spaces.Dict(
        {
            "direction": spaces.Discrete(4),
            "image": spaces.Box(0, 255, (7, 7, 3), np.uint8),
            "mission": Mission(),
        }
    ),
    "nested": spaces.Dict({"a": spaces.Dict({"b": spaces.Discrete(2)}), "c": spaces.MultiBinary((2, 2))}),
    "sequence": spaces.Sequence(spaces.Discrete(5)),
    "stacked": spaces.Sequence(spaces.Box(0, 1, (2,)), stack=True),
    "one_of": spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
}
DISCRETE = ["tag", "bare_word", "number", "json", "tool_call"]
ARRAY = ["box", "json", "tool_call"]
PARTS = ["json", "tool_call"]
ACTED: dict[str, tuple[spaces.Space[Any], list[str]]] = {
    "discrete": (spaces.Discrete(3), ["tag", "number", "json", "tool_call"]),
    "starts elsewhere": (spaces.Discrete(3, start=-1), ["tag", "number", "json", "tool_call"]),
    "many": (spaces.Discrete(5000), ["tag", "number", "json"]),
    "box": (spaces.Box(-1, 1, (2,), np.float32), ARRAY),
    "one number": (spaces.Box(-2, 2, (1,), np.float32), ARRAY),
    "no bounds": (spaces.Box(-np.inf, np.inf, (3,), np.float64), ARRAY),
    "half bounds": (spaces.Box(0, np.inf, (2,), np.float32), ARRAY),
    "own bounds": (spaces.Box(np.float32([0, -1]), np.float32([1 / 3, 0.99999])), ARRAY),
    "bytes": (spaces.Box(0, 255, (3,), np.uint8), ARRAY),
    "matrix": (spaces.Box(-1, 1, (2, 3), np.float32), ARRAY),
    "humanoid": (spaces.Box(-0.4, 0.4, (17,), np.float32), ARRAY),
    "multi_discrete": (spaces.MultiDiscrete([6, 2]), ARRAY),
    "multi_binary": (spaces.MultiBinary(4), ARRAY),
    "dict": (
        spaces.Dict({"move": spaces.Discrete(4), "throttle": spaces.Box(0, 1, (1,), np.float32)}),
        PARTS,
    ),
    "tuple": (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(9), spaces.MultiBinary(2)]), PARTS),
}


# --- 1. what Gymnasium brings ---


@newer
@pytest.mark.parametrize("env_id", BARE)
def test_every_id_of_bare_gymnasium_works_by_its_id_alone(env_id: str) -> None:
    env = GymTextEnv(env_id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)


@newer
@pytest.mark.parametrize("describe", ["full", "terse"])
@pytest.mark.parametrize("env_id", BARE)
def test_random_replies_play_an_episode(env_id: str, describe: str) -> None:
    env = GymTextEnv(env_id, describe=describe, history="latest", max_turns=40)
    first, _ = env.reset(seed=5)
    assert first in env.observation_space
    over, turns, replies = False, 0, set()
    while not over:
        reply = env.sample_reply()
        assert reply is not None
        replies.add(reply)
        observation, _, terminated, truncated, info = say(env, reply)
        assert "invalid" not in info, (reply, info)
        over, turns = terminated or truncated, turns + 1
        assert observation in env.observation_space
    assert turns == info["turn"] and info["end_reason"] in ("terminated", "max_turns")
    assert len(replies) > 1 or turns < 5


@newer
@pytest.mark.parametrize("env_id", BARE)
def test_a_turn_and_its_feedback_fit_the_limits(env_id: str) -> None:
    """An episode of many turns ends by the simulator or its limit, never by a lack of room."""
    env = GymTextEnv(env_id, max_turns=12)
    env.reset(seed=0)
    over = False
    while not over:
        *_, terminated, truncated, info = say(env, env.sample_reply() or "")
        over = terminated or truncated
    assert info["end_reason"] in ("terminated", "max_turns")


def test_limits_of_time_are_the_simulators() -> None:
    assert GymTextEnv("CartPole-v1").max_turns == 500
    assert GymTextEnv("MountainCarContinuous-v0").max_turns == 999
    assert GymTextEnv("CliffWalking-v1").max_turns == 100


def test_a_pole_told_in_words() -> None:
    env = GymTextEnv("CartPole-v1")
    env.reset(seed=0)
    rules, state = (message["content"] for message in env.messages)
    assert "-0.2094 to 0.2094 radians" in rules and "-2.4 to 2.4" in rules
    assert state == (
        "cart position: 0.0137, cart velocity: -0.02302, pole angle: -0.0459, "
        "pole angular velocity: -0.04835\nPossible actions: left, right. Answer as <action>NAME</action>."
    )
    assert "invalid" not in say(env, "<action>push left</action>")[4]
    assert env.simulator.state[1] < 0


def test_the_pole_that_falls_is_a_failure_and_one_that_stands_is_unknown() -> None:
    env = GymTextEnv("CartPole-v1", history="latest")
    env.reset(seed=0)
    over = False
    while not over:
        *_, over, _, info = say(env, "<action>right</action>")
    assert info["success"] is False and told(env) == "The pole fell, or the cart left."
    short = GymTextEnv("CartPole-v1", max_turns=2)
    short.reset(seed=0)
    say(short, "<action>right</action>")
    assert "success" not in say(short, "<action>right</action>")[4]


def _follow(env_id: str, act: Any, **keywords: Any) -> tuple[float, bool, dict[str, Any]]:
    """Plays by a rule on the numbers that are told, as a reader of the text would."""
    env = GymTextEnv(env_id, history="latest", **keywords)
    env.reset(seed=1)
    total, over = 0.0, False
    while not over:
        numbers = [float(part.rsplit(" ", 1)[1]) for part in told(env).split("\n")[0].split(", ")]
        _, reward, terminated, truncated, info = say(env, act(*numbers))
        assert "invalid" not in info
        total, over = total + reward, terminated or truncated
    return total, terminated, info


def test_rules_that_one_can_say_in_words_reach_the_goal() -> None:
    """The scores of the rules in words that are known for these simulators, from the text alone."""
    total, reached, info = _follow(
        "MountainCar-v0", lambda _, speed: f"<action>{'right' if speed >= 0 else 'left'}</action>"
    )
    assert reached and info["success"] is True and total > -160
    total, reached, info = _follow(
        "MountainCarContinuous-v0", lambda _, speed: "[1.0]" if speed >= 0 else "[-1.0]"
    )
    assert reached and info["success"] is True and total > 88
    total, reached, info = _follow(
        "Acrobot-v1", lambda *seen: f"<action>{'positive' if seen[5] > 0 else 'negative'}</action>"
    )
    assert reached and info["success"] is True and total > -200
    total, fell, info = _follow(
        "CartPole-v1",
        lambda x, v, angle, speed: f"<action>{'right' if angle + speed > 0 else 'left'}</action>",
        max_turns=200,
    )
    assert total == 200 and not fell and info["end_reason"] == "max_turns"


# --- 2. observations ---


@pytest.mark.parametrize("describe", ["full", "terse"])
@pytest.mark.parametrize("name", SEEN)
def test_any_observation_is_told_and_fits(name: str, describe: str) -> None:
    env = GymTextEnv(Anything(SEEN[name], spaces.Discrete(2), length=12), describe=describe)
    check_env(env, skip_render_check=True)
    texts = set()
    for seed in range(3):
        env.reset(seed=seed)
        texts.add(told(env))
        over = False
        while not over:
            *_, over, truncated, info = say(env, "<action>1</action>")
            assert not truncated and "invalid" not in info
    if name not in ("discrete", "multi_binary", "nested", "one_of"):
        assert len(texts) == 3


def test_a_simulators_own_words_are_led_by_its_keys() -> None:
    env = GymTextEnv(Anything(SEEN["minigrid"], spaces.Discrete(7)))
    env.reset(seed=0)
    rules, state = (message["content"] for message in env.messages)
    assert rules.startswith("You act in Anything.")
    shown = env.simulator.shown
    assert state.startswith(f"direction: {shown['direction']}\nimage: [[[{shown['image'][0, 0, 0]}, ")
    assert f"\nmission: {shown['mission']}\nPossible actions: 0 to 6." in state


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(7), np.int64(3), "Observation: 3"),
        (
            spaces.Box(-9, 9, (3,)),
            np.array([0.123456, -2, 1e-7], np.float32),
            "Observation: [0.1235, -2, 1e-07]",
        ),
        (spaces.Box(-9e9, 9e9, (2,)), np.array([123456, np.inf]), "Observation: [123500, Infinity]"),
        (spaces.Box(0, 9, (2, 2), np.int8), np.array([[1, 2], [3, 4]]), "Observation: [[1, 2],\n [3, 4]]"),
        (spaces.MultiBinary(2), np.array([0, 1], np.int8), "Observation: [0, 1]"),
        (spaces.Text(9), "a door", "a door"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), (1, "ü"), 'Observation: [1, "ü"]'),
        (spaces.Sequence(spaces.Discrete(4)), (2, 0), "Observation: [2, 0]"),
        (
            spaces.OneOf([spaces.Discrete(2), spaces.Box(0, 1, (1,))]),
            (1, np.array([0.5])),
            "Observation: [1, [0.5]]",
        ),
        (
            spaces.Dict({"bag": spaces.Dict({"coins": spaces.Discrete(9)}), "note": spaces.Text(9)}),
            {"bag": {"coins": 3}, "note": "hi"},
            'bag: {"coins": 3}\nnote: hi',
        ),
    ],
    ids=str,
)
def test_observations_in_words(space: spaces.Space[Any], value: Any, text: str) -> None:
    env = GymTextEnv(Anything(space, spaces.Discrete(2)))
    assert env.describer.describe(value) == text
    terse = GymTextEnv(Anything(space, spaces.Discrete(2)), describe="terse")
    assert terse.describer.describe(value) == text.removeprefix("Observation: ")
    assert len(text.encode()) <= env.describer.max_chars


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (
            spaces.Box(0, 255, (210, 160, 3), np.uint8),
            f"has 100800 numbers, more than {MAX_NUMBERS}: give describe=",
        ),
        (spaces.Graph(spaces.Discrete(2), None), r"has no words for .*Graph\(.*: give describe="),
        (spaces.Dict({"a": Opaque()}), r"has no words for .*Opaque.*: give describe="),
    ],
    ids=["picture", "graph", "opaque"],
)
def test_an_observation_without_words_is_refused_by_name(space: spaces.Space[Any], message: str) -> None:
    simulator = Anything(space, spaces.Discrete(2))
    with pytest.raises(ConfigError, match=message) as caught:
        GymTextEnv(simulator)
    assert "\n" not in str(caught.value)
    GymTextEnv(simulator, describe=lambda observation: "something")


# --- 3. actions ---


@pytest.mark.parametrize(
    ("name", "format"), [(name, format) for name, (_, formats) in ACTED.items() for format in formats]
)
def test_random_replies_are_members_in_every_format(name: str, format: str) -> None:
    space = ACTED[name][0]
    env = GymTextEnv(Anything(spaces.Discrete(2), space), format=format)
    for seed in range(4):
        env.reset(seed=seed)
        over = False
        while not over:
            reply = env.sample_reply()
            assert reply is not None
            *_, over, _, info = say(env, reply)
            assert "invalid" not in info, (reply, info)
        assert len(env.simulator.got) == 5
    before = env.simulator.np_random.bit_generator.state
    drawn = space.np_random.bit_generator.state
    assert len({env.sample_reply() for _ in range(8)}) > 1
    assert env.simulator.np_random.bit_generator.state == before
    assert space.np_random.bit_generator.state == drawn


@pytest.mark.parametrize("name", ACTED)
def test_the_format_is_chosen_by_the_space(name: str) -> None:
    space, _ = ACTED[name]
    env = GymTextEnv(Anything(spaces.Discrete(2), space))
    wanted = "tag" if isinstance(space, spaces.Discrete) else "box"
    assert env.format == default_format(space) == ("json" if name in ("dict", "tuple") else wanted)
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize("format", ["json", "box"])
def test_a_pendulum_in_numbers(format: str) -> None:
    env = GymTextEnv("Pendulum-v1", format=format)
    env.reset(seed=0)
    asked = told(env).split("\n")[-1]
    assert asked == describe_format(format, env.simulator.action_space) and "from -2 to 2" in asked
    if format == "box":
        replies = {"[-1.5]": False, "[2.5]": True, "[1, 2]": True, "-1.5": False, "push": True}
    else:
        replies = {
            '{"action": [-1.5]}': False,
            '{"action": -1.5}': False,
            '{"action": [2.5]}': True,
            "[1]": True,
        }
    for reply, refused in replies.items():
        assert say(env, reply)[4].get("invalid", False) is refused, reply
    assert env.answers is None


def test_names_of_a_dict_mirror_it() -> None:
    space, _ = ACTED["dict"]
    names = {"move": ("left", "down", "right", "up")}
    env = GymTextEnv(Anything(spaces.Discrete(2), space), names=names)
    env.reset(seed=0)
    assert told(env).endswith(f"\n{describe_format('json', space, names=names)}")
    assert '"move": one of "left", "down", "right", "up"' in told(env)
    assert "invalid" not in say(env, '{"action": {"move": "right", "throttle": [0.5]}}')[4]
    (got,) = env.simulator.got
    assert got["move"] == 2 and got["throttle"].tolist() == [0.5]
    assert '"move": "' in (env.sample_reply() or "")


@pytest.mark.parametrize("format", DISCRETE)
def test_every_format_says_how_to_answer(format: str) -> None:
    env = GymTextEnv("CartPole-v1", format=format)
    env.reset(seed=0)
    hint = describe_format(format, spaces.Discrete(2), names=("left", "right"))
    assert told(env).endswith(f"\n{hint}") and "left" in hint and "right" in hint
    assert len(env.answers or ()) == 2
    for answer in env.answers or ():
        assert "invalid" not in say(env, answer)[4]


def test_a_call_is_written_as_the_template_writes_it() -> None:
    env = GymTextEnv("CartPole-v1", format="tool_call")
    env.reset(seed=0)
    written = '<tool_call>\n{"name": "act", "arguments": {"action": "left"}}\n</tool_call>'
    assert (env.answers or ())[0] == written
    assert written.replace("left", "ACTION") in env.messages[0]["content"]
    renderer = ChatRenderer("bytes")
    renderer.tool_dialect = "llama3_json"
    other = GymTextEnv("CartPole-v1", format="tool_call", renderer=renderer)
    other.reset(seed=0)
    assert (other.answers or ())[0] == '{"name": "act", "parameters": {"action": "left"}}'
    assert '{"name": "act", "parameters": {"action": "ACTION"}}' in other.messages[0]["content"]
    assert "invalid" not in say(other, other.sample_reply() or "")[4]


def test_calls_that_channels_carry_are_read_too() -> None:
    spoken = SpokenActions(spaces.Discrete(2), "tool_call", names=("left", "right"))
    call = ToolCall("act", {"action": "right"})
    for calls, value in (((call,), 1), ((call, call), None), ((ToolCall("walk", {"action": 1}),), None)):
        read = spoken.read(Reply(text="", content="", tool_calls=calls), None)
        assert (read.value, read.valid) == (value, value is not None)


def test_a_mask_holds_in_every_format() -> None:
    for format in ("tag", "bare_word", "number", "json", "tool_call"):
        env = GymTextEnv("Taxi-v4", format=format)
        _, info = env.reset(seed=0)
        legal = info["legal_actions"]
        assert "dropoff" not in legal and "dropoff" not in told(env).split("\n")[-1]
        assert all(word in told(env).split("\n")[-1] for word in legal)
        answers = env.answers or ()
        assert say(env, answers[5])[4]["invalid_reason"] == "not_legal"
        drawn = {env.sample_reply() for _ in range(60)}
        assert drawn == {answers[k] for k, allowed in enumerate(info["action_mask"]) if allowed}


@pytest.mark.parametrize(
    ("shape", "message"),
    [(3, "must have an entry for each of 2 actions, got 3"), ((1, 2), r"must have shape \(2,\), got array")],
)
def test_a_mask_of_another_shape_is_refused_by_name(shape: Any, message: str) -> None:
    class Wrong(Anything):
        def reset(self, **keywords: Any) -> Any:
            return super().reset(**keywords)[0], {"action_mask": np.ones(shape, np.int8)}

    env = GymTextEnv(Wrong(spaces.Discrete(2), spaces.Discrete(2)))
    with pytest.raises(ConfigError, match=message):
        env.reset(seed=0)


def test_nothing_legal_has_no_random_reply() -> None:
    class Stuck(Anything):
        def reset(self, **keywords: Any) -> Any:
            return super().reset(**keywords)[0], {"action_mask": np.zeros(2, np.int8)}

    env = GymTextEnv(Stuck(spaces.Discrete(2), spaces.Discrete(2)))
    _, info = env.reset(seed=0)
    assert (info["legal_actions"], env.sample_reply()) == ([], None)


@pytest.mark.parametrize("solved", [True, False])
def test_a_simulators_own_word_of_success_is_passed_on(solved: bool) -> None:
    class Robot(Anything):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], {"is_success": np.float32(solved)}

    env = GymTextEnv(Robot(spaces.Discrete(2), spaces.Discrete(2), length=1))
    env.reset(seed=0)
    info = say(env, env.sample_reply() or "")[4]
    assert info["success"] is info["is_success"] is solved
    cut = GymTextEnv(Robot(spaces.Discrete(2), spaces.Discrete(2)), max_turns=2)
    cut.reset(seed=0)
    say(cut, "<action>1</action>")
    assert say(cut, "nonsense")[4]["success"] is solved


def test_many_actions_are_told_as_a_range() -> None:
    env = GymTextEnv(Anything(spaces.Discrete(2), spaces.Discrete(5000, start=10)))
    env.reset(seed=0)
    assert "Possible actions: 10 to 5009." in told(env) and env.answers is None
    say(env, "<action>5009</action>")
    assert env.simulator.got == [5009]


def test_a_wrapper_that_changes_actions_loses_their_names() -> None:
    back = gymnasium.wrappers.TransformAction(
        gymnasium.make("CartPole-v1"), lambda action: int(action[0] > 0), spaces.Box(-1, 1, (1,))
    )
    env = GymTextEnv(back)
    env.reset(seed=0)
    assert env.format == "box" and told(env).startswith("cart position")
    assert "invalid" not in say(env, "[0.5]")[4]


class Moves(enum.IntEnum):
    LEFT = 0
    RIGHT = 1
    PICK_UP = 2


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ({"actions": Moves}, "left, right, pick_up"),
        ({"get_action_meanings": lambda: ["NOOP", "FIRE", "UP"]}, "noop, fire, up"),
        ({"get_action_meanings": lambda: ["UP", "UP", "UP"]}, "0 to 2"),
        ({"get_action_meanings": lambda: ["NOOP"]}, "0 to 2"),
        ({"actions": [0, 1, 2]}, "0 to 2"),
    ],
    ids=["enumeration", "meanings", "no two alike", "too few", "something else"],
)
def test_a_simulators_own_names_of_actions_are_used(own: dict[str, Any], asked: str) -> None:
    simulator = Anything(spaces.Discrete(2), spaces.Discrete(3))
    for name, value in own.items():
        setattr(simulator, name, value)
    env = GymTextEnv(simulator)
    env.reset(seed=0)
    assert f"Possible actions: {asked}. Answer as" in told(env)
    say(env, env.sample_reply() or "")
    assert len(simulator.got) == 1
    named = GymTextEnv(simulator, names=("a", "b", "c"))
    named.reset(seed=0)
    assert "Possible actions: a, b, c." in told(named)


@pytest.mark.parametrize(
    ("space", "format", "message"),
    [
        (spaces.Text(5), None, "Text.*: give parse="),
        (spaces.Sequence(spaces.Discrete(2)), None, "Sequence.*: give parse="),
        (spaces.Box(-1, 1, (2,)), "tag", "Box"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "box", "Dict"),
        (spaces.Discrete(2), "box", "Discrete"),
        (spaces.Dict({"a": spaces.Text(3)}), None, "Text"),
    ],
    ids=str,
)
def test_an_action_that_cannot_be_said_is_refused_by_name(
    space: spaces.Space[Any], format: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        GymTextEnv(Anything(spaces.Discrete(2), space), format=format)
    assert "\n" not in str(caught.value)


def test_a_parser_of_ones_own_reaches_a_space_without_a_format() -> None:
    env = GymTextEnv(Anything(spaces.Discrete(2), spaces.Text(5)), parse=lambda text: text.strip() or None)
    env.reset(seed=0)
    say(env, "hello")
    assert env.simulator.got == ["hello"] and env.sample_reply() is None and env.answers is None
    assert say(env, "too long!")[4]["invalid_reason"] == "not_an_action"


# --- 4. limits ---


def test_limits_grow_with_what_is_said_and_follow_what_is_asked() -> None:
    small = GymTextEnv("FrozenLake-v1")
    assert (small.max_turn_tokens, small.max_prompt_tokens, small.max_feedback_tokens) == (64, 1024, 256)
    big = GymTextEnv(Anything(SEEN["minigrid"], ACTED["humanoid"][0]))
    assert big.max_turn_tokens > 200 and big.max_feedback_tokens > 700 and big.max_prompt_tokens > 1024
    own = GymTextEnv("CartPole-v1", max_turn_tokens=32, max_feedback_tokens=300, max_prompt_tokens=2000)
    assert (own.max_turn_tokens, own.max_prompt_tokens, own.max_feedback_tokens) == (32, 2000, 300)


def test_a_long_reply_still_fits_one_turn() -> None:
    names = tuple(letter * 120 for letter in "ab")
    env = GymTextEnv(Anything(spaces.Discrete(2), spaces.Discrete(2)), names=names)
    env.reset(seed=0)
    assert "invalid" not in say(env, env.sample_reply() or "")[4]


def test_spoken_actions_copy_with_their_environment() -> None:
    import copy
    import pickle

    for twin in (copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))):
        env = GymTextEnv("Taxi-v4")
        env.reset(seed=0)
        other = twin(env)
        assert other.sample_reply() == env.sample_reply()
        np.testing.assert_array_equal(
            say(other, "<action>south</action>")[0], say(env, "<action>south</action>")[0]
        )
    assert isinstance(env._actions, SpokenActions)
