"""GymTextEnv: simulators told and played in words.

Promises:
1. The episode is the simulator's: same seed, same play, same rewards and ends.
2. ``begin`` says rules and state, every feedback the state and the format; terse says the state alone.
3. A reply that is no legal action never reaches the simulator; it costs ``invalid_reward`` and is counted.
4. Legal actions in the text, in ``info`` and in the mask are the same.
5. Chance after the start is set by ``reseed``; drawing a random reply changes none of it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from atropos_gym.errors import ConfigError
from atropos_gym.parsing import ParsedAction
from atropos_gym.wrappers.gym_text_env import GymTextEnv


def say(env: GymTextEnv, text: str) -> Any:
    return env.step(np.array(env.renderer.say(text), np.int32))


def contents(env: GymTextEnv, role: str = "user") -> list[str]:
    return [message["content"] for message in env.messages if message["role"] == role]


class Corridor(gymnasium.Env[int, int]):
    """Five places in a row, one of them the goal; actions start at 1; the mask forbids walls."""

    observation_space = gymnasium.spaces.Discrete(5)
    action_space = gymnasium.spaces.Discrete(2, start=1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = int((options or {}).get("place", self.np_random.integers(4)))
        self.steps = 0
        return self.place, self._info()

    def _info(self) -> dict[str, Any]:
        return {
            "action_mask": np.array([self.place > 0, self.place < 4], dtype=np.int8),
            "noise": np.zeros(3),
        }

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        assert type(action) is int and action in (1, 2)
        self.place += 1 if action == 2 else -1
        self.steps += 1
        return self.place, np.float32(-0.5), self.place == 4, False, self._info()


def corridor(**keywords: Any) -> GymTextEnv:
    return GymTextEnv(
        Corridor(), describe=lambda place: f"place {place}", names=("back", "forth"), **keywords
    )


# --- 1. the simulator's own episode ---


@pytest.mark.parametrize("env_id", ["Blackjack-v1", "FrozenLake-v1", "Taxi-v4"])
def test_same_seed_and_play_give_the_simulators_episode(env_id: str) -> None:
    env = GymTextEnv(env_id)
    bare = gymnasium.make(env_id)
    player = np.random.default_rng(0)
    for seed in range(5):
        env.reset(seed=seed)
        observation, info = bare.reset(seed=seed)
        over = False
        while not over:
            assert env.describer.parse(contents(env)[-1]) == observation
            mask = info.get("action_mask", np.ones(bare.action_space.n))
            action = int(player.choice(np.flatnonzero(mask)))
            _, reward, terminated, truncated, _ = say(env, env.answers[action])
            observation, expected, *ends, info = bare.step(action)
            assert (reward, terminated, truncated) == (float(expected), *ends)
            assert type(reward) is float
            over = terminated or truncated


def test_without_a_seed_episodes_go_on_from_the_last_seed() -> None:
    def deals(env: GymTextEnv) -> list[str]:
        env.reset(seed=3)
        said = []
        for _ in range(4):
            env.reset()
            said.append(contents(env)[-1])
        return said

    first = deals(GymTextEnv("Blackjack-v1"))
    assert first == deals(GymTextEnv("Blackjack-v1")) and len(set(first)) > 1


def test_an_id_is_made_bare_and_its_limit_becomes_max_turns() -> None:
    assert GymTextEnv("FrozenLake-v1").max_turns == 100
    assert GymTextEnv("Taxi-v4").max_turns == 200
    assert GymTextEnv("Blackjack-v1").max_turns == 100
    assert GymTextEnv("Taxi-v4", max_turns=7).max_turns == 7
    env = GymTextEnv("Taxi-v4")
    assert env.simulator is env.simulator.unwrapped


def test_an_environment_keeps_its_wrappers_and_its_limit() -> None:
    taxi = gymnasium.make("Taxi-v4", max_episode_steps=3)
    env = GymTextEnv(taxi)
    assert env.simulator is taxi and env.max_turns == 3
    _, info = env.reset(seed=0)
    for _ in range(3):
        *_, terminated, truncated, info = say(env, f"<action>{info['legal_actions'][0]}</action>")
    assert (terminated, truncated, info["turn"]) == (False, True, 3)
    assert info["success"] is False and "You run out of time." in contents(env)


def test_a_simulators_truncation_is_told_apart_from_max_turns() -> None:
    env = GymTextEnv(gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=2), max_turns=50)
    env.reset(seed=0)
    say(env, "<action>left</action>")
    *_, terminated, truncated, info = say(env, "<action>left</action>")
    assert (terminated, truncated, info["end_reason"]) == (False, True, "truncated")


def test_options_reach_the_simulator() -> None:
    env = corridor()
    env.reset(seed=0, options={"place": 2})
    assert contents(env)[-1].startswith("place 2\n")


def test_a_finished_episode_refuses_to_step() -> None:
    env = GymTextEnv("Blackjack-v1", format="bare_word")
    env.reset(seed=0)
    say(env, "stick")
    with pytest.raises(ResetNeeded):
        say(env, "stick")


# --- 2. what is said ---


def test_begin_says_rules_and_state_and_feedback_repeats_state_and_format() -> None:
    env = GymTextEnv("FrozenLake-v1", simulator_kwargs={"is_slippery": False})
    env.reset(seed=0)
    rules, state = env.messages
    assert rules["role"] == "system" and "SFFF\nFHFH" in rules["content"]
    hint = "Possible actions: left, down, right, up. Answer as <action>NAME</action>."
    place = "You are at row 0, column 0. left: the edge, down: ice, right: ice, up: the edge."
    assert state == {"role": "user", "content": f"{place}\n{hint}"}
    say(env, "<action>down</action>")
    assert contents(env)[-1].startswith("You are at row 1, column 0.") and contents(env)[-1].endswith(hint)


def test_bare_word_names_the_words() -> None:
    env = GymTextEnv("Blackjack-v1", format="bare_word")
    env.reset(seed=0)
    assert contents(env)[-1].endswith("Answer with one of these words: stick, hit.")


def test_terse_says_the_state_alone_in_every_turn() -> None:
    env = GymTextEnv("Blackjack-v1", describe="terse", format="bare_word", history="latest")
    total, seed = 21, -1
    while total > 11:  # a hand that one card cannot bust
        seed += 1
        env.reset(seed=seed)
        total = env.describer.parse(contents(env)[-1])[0]
    assert [message["role"] for message in env.messages] == ["user"]
    before = env.messages[-1]["content"]
    observation, _, over, _, info = say(env, "hit")
    assert not over and info["segment"] == 1
    state = contents(env)[-1]
    assert state != before and env.describer.parse(state)
    assert env.tokenizer.decode(observation) == state


def test_the_outcome_is_said_in_messages_and_never_read_by_the_policy() -> None:
    env = GymTextEnv("Blackjack-v1", describe="terse", format="bare_word")
    lines = {1.0: "You win.", 0.0: "Draw.", -1.0: "You lose."}
    seen = set()
    for seed in range(40):
        first, _ = env.reset(seed=seed)
        last, reward, *_, info = say(env, "stick")
        assert env.messages[-1] == {"role": "user", "content": lines[reward]}
        assert last.tolist() == [*first.tolist(), *env.renderer.say("stick")]
        assert info["success"] is info["is_success"] is (reward > 0)
        seen.add(reward)
    assert seen == set(lines)


def test_a_system_prompt_goes_before_the_rules() -> None:
    env = GymTextEnv("FrozenLake-v1", system_prompt="Be brief.")
    env.reset(seed=0)
    (system,) = contents(env, "system")
    assert system.startswith("Be brief.\n\nYou cross a frozen lake")
    terse = GymTextEnv("FrozenLake-v1", system_prompt="Be brief.", describe="terse")
    terse.reset(seed=0)
    assert contents(terse, "system") == ["Be brief."]


# --- 3. invalid replies ---


@pytest.mark.parametrize(
    "reply",
    ["down", "<action>jump</action>", "<action>down", "<action>down</action> <action>up</action>", ""],
)
def test_retry_costs_a_turn_and_leaves_the_simulator_alone(reply: str) -> None:
    env = GymTextEnv("FrozenLake-v1", simulator_kwargs={"is_slippery": False}, invalid_reward=-0.25)
    env.reset(seed=0)
    state = contents(env)[-1]
    _, reward, terminated, truncated, info = say(env, reply)
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert info["invalid"] is True and info["turn"] == 1 and isinstance(info["invalid_reason"], str)
    assert contents(env)[-1].startswith("Your answer is not valid: ") and contents(env)[-1].endswith(state)
    assert env.simulator.s == 0
    *_, info = say(env, "<action>down</action>")
    assert env.simulator.s == 4 and "invalid" not in info


def test_terse_retry_says_the_state_again() -> None:
    env = GymTextEnv("FrozenLake-v1", describe="terse")
    env.reset(seed=0)
    say(env, "hm")
    assert contents(env) == ["row 0 col 0", "row 0 col 0"]


def test_end_ends_the_episode_with_its_reward() -> None:
    env = GymTextEnv("Blackjack-v1", format="bare_word", on_invalid="end", invalid_reward=-3)
    env.reset(seed=0)
    _, reward, terminated, truncated, info = say(env, "double down")
    assert (reward, terminated, truncated) == (-3.0, True, False)
    assert info["end_reason"] == "invalid" and info["invalid"] is True and info["success"] is False
    assert info["invalid_reason"] == "not_an_action"


def test_retries_end_at_max_turns() -> None:
    env = GymTextEnv("FrozenLake-v1", max_turns=2)
    env.reset(seed=0)
    say(env, "?")
    *_, terminated, truncated, info = say(env, "?")
    assert (terminated, truncated, info["end_reason"]) == (False, True, "max_turns")


def test_a_reply_whose_thinking_is_cut_off_is_no_action() -> None:
    env = GymTextEnv("FrozenLake-v1")
    env.reset(seed=0)
    *_, info = say(env, "<think>maybe <action>down</action>")
    assert info["invalid"] is True


# --- 4. what is legal ---


def test_legal_actions_in_text_info_and_mask_agree_in_every_taxi_state() -> None:
    env = GymTextEnv("Taxi-v4")
    env.reset(seed=0)
    taxi = env.simulator
    for state in range(500):
        mask = taxi.action_mask(state)
        text = env._tell(state, {"action_mask": mask})
        words = [name for name, allowed in zip(env.describer.names, mask, strict=True) if allowed]
        assert f"Possible actions: {', '.join(words)}." in text
        assert env.extra_info() == {"action_mask": mask.tolist(), "legal_actions": words}


def test_an_illegal_action_never_reaches_the_simulator() -> None:
    env = GymTextEnv("Taxi-v4")
    _, info = env.reset(seed=0)
    illegal = next(name for name in env.describer.names if name not in info["legal_actions"])
    state = env.simulator.s
    _, reward, *_, info = say(env, f"<action>{illegal}</action>")
    assert (reward, info["invalid_reason"], env.simulator.s) == (-1.0, "not_legal", state)


def test_a_mask_follows_actions_that_start_elsewhere() -> None:
    env = corridor()
    _, info = env.reset(seed=0, options={"place": 0})
    assert (info["action_mask"], info["legal_actions"]) == ([0, 1], ["forth"])
    assert "noise" not in info
    *_, info = say(env, "<action>back</action>")
    assert info["invalid_reason"] == "not_legal"
    *_, info = say(env, "<action>2</action>")
    assert env.simulator.place == 1 and info["legal_actions"] == ["back", "forth"]
    say(env, "<action>forth</action>")
    say(env, "<action>forth</action>")
    _, reward, terminated, _, info = say(env, "<action>forth</action>")
    assert (reward, terminated) == (-0.5, True)
    assert "success" not in info and "legal_actions" not in info


def test_answers_are_all_replies() -> None:
    assert corridor().answers == ("<action>back</action>", "<action>forth</action>")
    assert GymTextEnv("Blackjack-v1", format="bare_word").answers == ("stick", "hit")
    assert GymTextEnv("FrozenLake-v1", names="abcd").answers[0] == "<action>a</action>"


@pytest.mark.parametrize(
    "names",
    [["back", "forth"], np.array(["back", "forth"]), {"forth": 2, "back": 1}, {1: "back", 2: "forth"}],
)
def test_names_come_in_any_container(names: Any) -> None:
    env = GymTextEnv(Corridor(), describe=lambda place: f"place {place}", names=names)
    _, info = env.reset(seed=0, options={"place": 0})
    assert info["legal_actions"] == ["forth"]
    assert env.answers == ("<action>back</action>", "<action>forth</action>")
    assert not say(env, "<action>forth</action>")[4].get("invalid")
    assert contents(env)[-1].startswith("place 1")


def test_without_names_actions_are_numbers() -> None:
    env = GymTextEnv(Corridor(), describe=str)
    env.reset(seed=0, options={"place": 1})
    assert env.answers == ("<action>1</action>", "<action>2</action>")
    say(env, "<action>2</action>")
    assert env.simulator.place == 2


# --- 5. chance ---


def test_random_replies_are_legal_uniform_and_free() -> None:
    env = GymTextEnv("Taxi-v4")
    _, info = env.reset(seed=1)
    state = env.np_random.bit_generator.state
    simulator_state = env.simulator.np_random.bit_generator.state
    counts = dict.fromkeys(info["legal_actions"], 0)
    for _ in range(3000):
        counts[env.sample_reply().removeprefix("<action>").removesuffix("</action>")] += 1
    expected = 3000 / len(counts)
    assert len(counts) > 1 and all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())
    assert env.np_random.bit_generator.state == state
    assert env.simulator.np_random.bit_generator.state == simulator_state


def test_random_replies_repeat_with_the_seed() -> None:
    def replies(seed: int) -> list[str | None]:
        env = GymTextEnv("FrozenLake-v1")
        env.reset(seed=seed)
        return [env.sample_reply() for _ in range(20)]

    assert replies(0) == replies(0) != replies(1)


def test_reseed_sets_what_comes_after_the_start() -> None:
    def play(start: int, later: int | None) -> list[str]:
        env = GymTextEnv("FrozenLake-v1")
        env.reset(seed=start)
        if later is not None:
            env.reseed(later)
        over = False
        while not over:
            _, _, terminated, truncated, _ = say(env, "<action>right</action>")
            over = terminated or truncated
        return contents(env)

    assert play(0, 5) == play(0, 5)
    assert len({tuple(play(0, later)) for later in range(8)}) > 1
    assert play(0, 5)[0] == play(0, None)[0]


# --- other spaces, and mistakes ---


def test_a_parser_of_ones_own_reaches_any_action_space() -> None:
    def force(text: str) -> Any:
        try:
            return np.array([float(text)], np.float32)
        except ValueError:
            return None

    env = GymTextEnv(
        "Pendulum-v1",
        describe=lambda seen: f"cos {seen[0]:.2f}, sin {seen[1]:.2f}, speed {seen[2]:.2f}",
        parse=force,
    )
    assert env.answers is None and env.sample_reply() is None and env.max_turns == 200
    env.reset(seed=0)
    assert "Answer" not in contents(env)[-1]
    assert "invalid" not in say(env, "-1.5")[4]
    assert say(env, "9")[4]["invalid"] and say(env, "push")[4]["invalid"]


def test_a_parser_of_ones_own_may_return_a_parsed_action() -> None:
    env = corridor(
        parse=lambda text: ParsedAction(2, True) if text == "go" else ParsedAction(None, False, "mumbled")
    )
    env.reset(seed=0, options={"place": 1})
    assert say(env, "eh")[4]["invalid_reason"] == "mumbled"
    say(env, "go")
    assert env.simulator.place == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Taxi-v3",), "Environment version v3 for `Taxi` is deprecated. Please use `Taxi-v4` instead"),
        (("Taksi-v4",), "simulator 'Taksi-v4' cannot be made"),
        (("no_such_module:Taxi-v4",), "No module named 'no_such_module'"),
        ((3,), "simulator must be an id or a gymnasium.Env, got int"),
        (("Taxi-v4", {"format": "xml"}), "format must be one of .*bare_word.*; got 'xml'"),
        (("Taxi-v4", {"on_invalid": "ignore"}), "on_invalid must be 'retry' or 'end', got 'ignore'"),
        (("Taxi-v4", {"names": ("a", "b")}), "one word for each of the 6 actions"),
        (("Taxi-v4", {"simulator_kwargs": {"snow": 1}}), r"cannot be made with \{'snow': 1\}"),
        (("Taxi-v4", {"max_turns": 0}), "max_turns must be >= 1"),
    ],
)
def test_a_mistake_is_one_line_with_a_remedy(arguments: tuple[Any, ...], message: str) -> None:
    simulator, keywords = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with pytest.raises(ConfigError, match=message) as caught:
        GymTextEnv(simulator, **keywords)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("env_id", ["Taxi-v4", "FrozenLake-v1", "Blackjack-v1"])
def test_gymnasiums_checker_passes_for_one_wrapped_by_hand(env_id: str) -> None:
    check_env(GymTextEnv(gymnasium.make(env_id)), skip_render_check=True)


def test_keywords_for_an_id_are_refused_beside_an_environment() -> None:
    with pytest.raises(ConfigError, match="simulator_kwargs belong to an id"):
        GymTextEnv(gymnasium.make("Taxi-v4"), simulator_kwargs={"is_rainy": True})
    with pytest.raises(ConfigError, match="must not be a text environment already"):
        GymTextEnv(GymTextEnv("Taxi-v4"))


def test_close_closes_the_simulator_and_may_be_called_twice() -> None:
    simulator = Corridor()
    closed = []
    simulator.close = lambda: closed.append(1)  # type: ignore[method-assign]
    env = GymTextEnv(simulator, describe=str)
    env.close()
    env.close()
    assert closed


@pytest.mark.parametrize("reply", ["<action>left</action>", "nonsense"])
def test_an_episode_cut_off_by_max_turns_counts_as_unsolved(reply: str) -> None:
    env = GymTextEnv("FrozenLake-v1", max_turns=2, simulator_kwargs={"is_slippery": False})
    env.reset(seed=0)
    assert "success" not in say(env, reply)[4]
    _, _, terminated, truncated, info = say(env, reply)
    assert (terminated, truncated) == (False, True)
    assert info["success"] is False
    assert info["is_success"] is False


def test_what_no_describer_knows_stays_unknown_at_max_turns() -> None:
    env = GymTextEnv(Corridor(), describe=str, max_turns=2)
    env.reset(seed=0)
    say(env, "nonsense")
    assert "success" not in say(env, "nonsense")[4]
