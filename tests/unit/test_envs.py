"""The ready tasks: registration, checkers, arguments, scores, and what each says."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import atropos_gym  # noqa: F401  (registers the ids)
from atropos_gym.envs import ENVIRONMENTS, register_environments
from atropos_gym.envs.arithmetic import LEVELS
from atropos_gym.errors import ConfigError, MissingData, UnusableGold
from atropos_gym.rewards import verify_number

PROBLEMS = [
    {"question": "Ana has 3 pens and buys 4. How many has she?", "answer": "She has 3 + 4 = 7 pens.\n#### 7"},
    {"question": "A shelf holds 1,200 books; half are sold. How many are left?", "answer": "#### 600"},
    {
        "question": "It is 2 degrees and gets 5 degrees colder. How warm is it?",
        "answer": "2 - 5 = -3\n#### -3",
    },
]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, PROBLEMS)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def make(problems: Path) -> Any:
    def make(env_id: str, **keywords: Any) -> gymnasium.Env[Any, Any]:
        if env_id == "atropos/GSM8K-v0":
            keywords = {"data": str(problems), **keywords}
        return gymnasium.make(env_id, **keywords)

    return make


def say(env: Any, text: str) -> Any:
    return env.step(np.array(env.unwrapped.renderer.say(text), np.int32))


def last(env: Any) -> str:
    return env.unwrapped.messages[-1]["content"]


# --- registration ---


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_gymnasiums_checker_passes_without_a_warning(make: Any, env_id: str) -> None:
    env = make(env_id)
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_stable_baselines_checker_passes(make: Any, env_id: str) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with pytest.warns(UserWarning, match="Sequence"):
        checker.check_env(make(env_id).unwrapped, warn=True, skip_render_check=True)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_random_play_runs_to_the_end_and_repeats(make: Any, env_id: str) -> None:
    def play() -> list[Any]:
        env = make(env_id)
        observation, info = env.reset(seed=7)
        seen = [(observation.tolist(), info)]
        over = False
        while not over and len(seen) < 30:
            reply = env.unwrapped.sample_reply() or "#### 7"
            observation, reward, terminated, truncated, info = say(env, reply)
            seen.append((observation.tolist(), reward, terminated, truncated, info))
            over = terminated or truncated
            assert "invalid" not in info
        return seen

    assert play() == play()


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_a_spec_can_be_pickled_and_made_again(make: Any, env_id: str) -> None:
    env = make(env_id)
    again = gymnasium.make(pickle.loads(pickle.dumps(env.spec)))
    assert env.reset(seed=1)[0].tolist() == again.reset(seed=1)[0].tolist()


def test_ids_are_registered_once() -> None:
    before = {env_id: gymnasium.registry[env_id] for env_id in ENVIRONMENTS}
    register_environments()
    assert all(gymnasium.registry[env_id] is spec for env_id, spec in before.items())


@pytest.mark.parametrize(
    "code",
    [
        "import gymnasium; gymnasium.make('atropos_gym:atropos/Blackjack-v0').reset(seed=0)",
        "import gymnasium, atropos_gym; gymnasium.make('atropos/Blackjack-v0').reset(seed=0)",
        "import pickle, sys, gymnasium as g; g.make(pickle.loads(bytes.fromhex(sys.argv[1]))).reset(seed=0)",
    ],
    ids=["module form", "after import", "pickled spec"],
)
def test_a_fresh_process_makes_it_without_torch(code: str) -> None:
    spec = pickle.dumps(gymnasium.spec("atropos/Blackjack-v0")).hex()
    check = "; import sys; assert not {'torch', 'transformers', 'math_verify', 'datasets'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + check, spec], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_spawned_workers_play_the_same_game() -> None:
    keywords = {"describe": "terse", "history": "latest"}
    sync = gymnasium.make_vec("atropos/Blackjack-v0", num_envs=2, vectorization_mode="sync", **keywords)
    spawned = gymnasium.make_vec(
        "atropos_gym:atropos/Blackjack-v0",
        num_envs=2,
        vectorization_mode="async",
        vector_kwargs={"shared_memory": False, "context": "spawn"},
        **keywords,
    )
    try:
        for env in (sync, spawned):
            env.first = [ids.tolist() for ids in env.reset(seed=5)[0]]
            hit = tuple(np.array([104, 105, 116, 258], np.int32) for _ in range(2))
            env.second = [part.tolist() if hasattr(part, "tolist") else part for part in env.step(hit)[:4]]
        assert sync.first == spawned.first
        assert str(sync.second) == str(spawned.second)
    finally:
        sync.close()
        spawned.close()


@pytest.mark.parametrize("format", ["tag", "bare_word", "number", "json", "tool_call"])
@pytest.mark.parametrize("task", ["Blackjack", "FrozenLake", "CliffWalking", "Taxi"])
def test_simulators_are_played_in_every_format_of_words(task: str, format: str) -> None:
    env = gymnasium.make(f"atropos/{task}-v0", format=format, max_turn_tokens=96).unwrapped
    env.reset(seed=2)
    over = False
    for _ in range(6):
        if not over:
            *_, terminated, truncated, info = say(env, env.sample_reply())
            over = terminated or truncated
            assert "invalid" not in info
    assert len(env.answers) == env.simulator.action_space.n
    env.reset(seed=2)
    *_, info = say(env, "none of these")
    assert info["invalid"] is True


# --- Blackjack ---


@pytest.mark.parametrize("keywords", [{}, {"sab": False}, {"sab": False, "natural": True}], ids=str)
def test_blackjack_arguments_reach_the_simulator_and_the_scores(keywords: dict[str, Any]) -> None:
    env = gymnasium.make("atropos/Blackjack-v0", **keywords).unwrapped
    rules = {"sab": True, "natural": False, **keywords}
    assert (env.simulator.sab, env.simulator.natural) == (rules["sab"], rules["natural"])
    known = {
        (True, False): (-0.3941746, -0.0431131),
        (False, False): (-0.3958960, -0.0465560),
        (False, True): (-0.3854826, -0.0257292),
    }[env.simulator.sab, env.simulator.natural]
    assert (env.scores["random"], env.scores["optimal"]) == pytest.approx(known, abs=5e-8)


def test_blackjack_limits_and_the_price_of_an_invalid_answer() -> None:
    env = gymnasium.make("atropos/Blackjack-v0").unwrapped
    assert (env.max_turns, env.max_turn_tokens, env.max_feedback_tokens) == (12, 16, 256)
    env.reset(seed=0)
    assert say(env, "fold")[1:3] == (-1.0, True)


def test_terse_blackjack_shows_the_latest_hand_alone() -> None:
    env = gymnasium.make("atropos/Blackjack-v0", describe="terse", history="latest").unwrapped
    observation, _ = env.reset(seed=0)
    kind, total, vs, dealer = env.tokenizer.decode(observation).split()
    assert kind in ("hard", "soft") and vs == "vs" and 1 <= int(dealer) <= 10 and 4 <= int(total) <= 21
    assert env.answers == ("stick", "hit")


def test_random_blackjack_earns_what_the_score_says() -> None:
    env = gymnasium.make("atropos/Blackjack-v0", describe="terse", history="latest").unwrapped
    returns = []
    for seed in range(1500):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, over, truncated, info = say(env, env.sample_reply())
            assert not truncated and "invalid" not in info
            total += reward
        returns.append(total)
    assert abs(np.mean(returns) - env.scores["random"]) < 4 * np.std(returns) / len(returns) ** 0.5


# --- FrozenLake and Taxi ---


@pytest.mark.parametrize(
    ("env_id", "keywords", "random", "optimal"),
    [
        ("FrozenLake", {}, 0.01394, 0.74419),
        ("FrozenLake", {"is_slippery": False}, 0.01394, 1.0),
        ("FrozenLake", {"map_name": "8x8"}, 0.00174, 0.64072),
        ("FrozenLake8x8", {}, 0.00190, 0.91322),
        ("FrozenLake8x8", {"is_slippery": False}, 0.00190, 1.0),
        ("FrozenLake8x8", {"map_name": "4x4"}, 0.01394, None),
        ("FrozenLake", {"desc": ["SFFF", "FHFH", "FFFH", "HFFG"]}, 0.01394, 0.74419),
        ("CliffWalking", {}, -1083.00308, -13.0),
        ("CliffWalking", {"max_turns": 25}, -325.37666, -13.0),
        ("CliffWalking", {"max_turns": 200}, -2079.11597, -13.0),
        ("CliffWalking", {"is_slippery": True}, -1083.00308, -63.01337),
        ("CliffWalking", {"is_slippery": True, "max_turns": 25}, -325.37666, -24.9906),
        ("Taxi", {}, -186.17946, 7.93),
        ("Taxi", {"is_rainy": True}, -187.24588, 3.95457),
        ("Taxi", {"fickle_passenger": True}, -183.19987, 8.38),
        ("Taxi", {"is_rainy": True, "fickle_passenger": True}, -184.30803, 4.57565),
    ],
)
def test_scores_are_exact(
    env_id: str, keywords: dict[str, Any], random: float, optimal: float | None
) -> None:
    env = gymnasium.make(f"atropos/{env_id}-v0", **keywords).unwrapped
    assert env.scores["random"] == pytest.approx(random, abs=6e-6)
    if optimal is not None:
        assert env.scores["optimal"] == pytest.approx(optimal, abs=6e-6)


def test_scores_agree_with_a_plain_walk_through_the_table() -> None:
    env = gymnasium.make("atropos/FrozenLake-v0", desc=["SFF", "FHF", "FFG"], max_turns=9).unwrapped
    table = env.simulator.P

    def value(state: int, turns: int, best: bool) -> float:
        if turns == 0:
            return 0.0
        each = [
            sum(
                p * (reward + (0 if over else walk(after, turns - 1, best)))
                for p, after, reward, over in ends
            )
            for ends in table[state].values()
        ]
        return max(each) if best else sum(each) / 4

    known: dict[Any, float] = {}

    def walk(*key: Any) -> float:
        if key not in known:
            known[key] = value(*key)
        return known[key]

    assert env.scores == {
        "random": pytest.approx(walk(0, 9, False)),
        "optimal": pytest.approx(walk(0, 9, True)),
    }


def test_scores_follow_the_map_and_the_turns() -> None:
    tiny = gymnasium.make("atropos/FrozenLake-v0", desc=["SG"], is_slippery=False, max_turns=1).unwrapped
    assert tiny.scores == {"random": 0.25, "optimal": 1.0}
    assert gymnasium.make("atropos/Taxi-v0", max_turns=3).unwrapped.scores["optimal"] < 7.93


def test_random_walks_at_the_cliff_earn_what_the_score_says() -> None:
    env = gymnasium.make(
        "atropos/CliffWalking-v0", describe="terse", history="latest", max_turns=25
    ).unwrapped
    returns = []
    for seed in range(120):
        env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, info = say(env, env.sample_reply())
            assert "invalid" not in info
            total, over = total + reward, terminated or truncated
        returns.append(total)
    assert abs(np.mean(returns) - env.scores["random"]) < 4 * np.std(returns) / len(returns) ** 0.5


def test_the_best_walk_along_the_cliff_earns_the_optimum() -> None:
    env = gymnasium.make("atropos/CliffWalking-v0").unwrapped
    assert (env.max_turns, env.max_turn_tokens, env.max_feedback_tokens) == (100, 64, 256)
    env.reset(seed=0)
    total = 0.0
    for word in ("up", *["right"] * 11, "down"):
        _, reward, terminated, truncated, info = say(env, f"<action>{word}</action>")
        total += reward
    assert (total, terminated, truncated) == (env.scores["optimal"], True, False)
    assert info["success"] is True and last(env) == "You reach the goal."


def test_the_cliff_costs_and_puts_back() -> None:
    env = gymnasium.make("atropos/CliffWalking-v0").unwrapped
    env.reset(seed=0)
    start = last(env)
    _, reward, terminated, _, info = say(env, "<action>right</action>")
    assert (reward, terminated, last(env)) == (-100.0, False, start)
    _, reward, _, _, info = say(env, "right")  # no container: a turn is lost, and nothing else
    assert (reward, info["invalid"], info["turn"]) == (-1.0, True, 2)
    assert gymnasium.make("atropos/CliffWalking-v0", is_slippery=True).unwrapped.simulator.is_slippery


def test_lake_arguments_reach_the_simulator() -> None:
    env = gymnasium.make(
        "atropos/FrozenLake-v0", desc=["SF", "HG"], is_slippery=False, reward_schedule=(5, -2, -1)
    )
    env.reset(seed=0)
    assert "SF\nHG" in env.unwrapped.messages[0]["content"]
    assert say(env, "<action>right</action>")[1] == -1
    _, reward, terminated, _, info = say(env, "<action>down</action>")
    assert (reward, terminated, info["success"]) == (5.0, True, True)
    assert env.unwrapped.max_turns == 100
    assert gymnasium.make("atropos/FrozenLake8x8-v0").unwrapped.max_turns == 200


def test_a_taxi_ride_by_the_best_moves_earns_the_optimum_of_its_start() -> None:
    env = gymnasium.make("atropos/Taxi-v0")
    _, info = env.reset(seed=0)
    taxi = env.unwrapped.simulator
    total, over = 0.0, False
    distance = _ride_lengths(taxi)
    expected = 21 - distance[taxi.s]
    while not over:
        action = min(
            (a for a, allowed in enumerate(info["action_mask"]) if allowed),
            key=lambda a: distance.get(taxi.P[taxi.s][a][0][1], 0) if not taxi.P[taxi.s][a][0][3] else -1,
        )
        _, reward, over, _, info = say(env, f"<action>{env.unwrapped.describer.names[action]}</action>")
        total += reward
    assert total == expected and info["success"] is True
    assert last(env) == "You delivered the passenger."


def _ride_lengths(taxi: Any) -> dict[int, int]:
    """Moves to the delivery from each state, by sweeps over the table."""
    length: dict[int, int] = {}
    changed = True
    while changed:
        changed = False
        for state in range(500):
            after = [
                1 if ends[0][3] else 1 + length.get(ends[0][1], 10**6) for ends in taxi.P[state].values()
            ]
            if min(after) < min(10**6, length.get(state, 10**6)):
                length[state], changed = min(after), True
    return length


# --- Identity and Arithmetic ---


def test_identity_wants_its_word() -> None:
    env = gymnasium.make("atropos/Identity-v0", words=("up", "down")).unwrapped
    env.reset(seed=0)
    assert last(env) == f"say {env.word}" and env.answers == ("up", "down") and env.scores["random"] == 0.5
    assert say(env, f" {env.word}\n")[1:4] == (1.0, True, False)
    env.reset(seed=0)
    _, reward, *_, info = say(env, f"I say {env.word}")
    assert reward == 0.0 and info["success"] is False


@pytest.mark.parametrize("words", [(), ("a", "a"), ("a", " ")])
def test_identity_refuses_words_that_cannot_be_told_apart(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="words must be different and not blank"):
        gymnasium.make("atropos/Identity-v0", words=words)


@pytest.mark.parametrize("difficulty", LEVELS)
def test_arithmetic_asks_what_it_checks(difficulty: int) -> None:
    env = gymnasium.make("atropos/Arithmetic-v0", difficulty=difficulty).unwrapped
    _, low, high = LEVELS[difficulty]
    for seed in range(40):
        env.reset(seed=seed)
        question = last(env).removeprefix("What is ").split("?")[0]
        assert eval(question, {"__builtins__": {}}) == env.answer  # noqa: S307  (our own sum)
        assert all(low <= int(n.strip("()")) <= high for n in question.split(" ")[::2])
        _, reward, terminated, _, info = say(env, f"The answer is {env.answer}.")
        assert (reward, terminated, info["success"], info["verdict"]) == (1.0, True, True, "right")
        assert last(env) == f"It is {env.answer}."
        env.reset(seed=seed)
        assert say(env, str(env.answer + 1))[1] == 0.0


def test_arithmetic_arguments() -> None:
    env = gymnasium.make("atropos/Arithmetic-v0", operations="*", low=2, high=3, describe="terse").unwrapped
    env.reset(seed=0)
    assert last(env) in {"2*2", "2*3", "3*2", "3*3"}
    assert env.answers == ("4", "5", "6", "7", "8", "9") and env.scores["random"] == pytest.approx(1 / 6)
    assert gymnasium.make("atropos/Arithmetic-v0").unwrapped.scores["random"] == pytest.approx(1 / 19)
    assert gymnasium.make("atropos/Arithmetic-v0", difficulty=5).unwrapped.answers is None
    one = gymnasium.make("atropos/Arithmetic-v0", describe="terse").unwrapped
    one.reset(seed=0)
    assert one.sample_reply() in one.answers


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"difficulty": 6}, "difficulty must be one of 1, 2, 3, 4, 5; got 6"),
        ({"operations": "/"}, "operations must be some of"),
        ({"low": 5, "high": 4}, "low must be <= high"),
        ({"describe": "long"}, "describe must be 'full' or 'terse'"),
    ],
)
def test_arithmetic_refuses(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gymnasium.make("atropos/Arithmetic-v0", **keywords)


# --- GSM8K ---


def test_gsm8k_from_a_file(problems: Path) -> None:
    env = gymnasium.make("atropos/GSM8K-v0", data=str(problems)).unwrapped
    assert env.items == 3
    for item, problem in enumerate(PROBLEMS):
        _, info = env.reset(seed=0, options={"item": item})
        assert info["item"] == item and last(env).startswith(problem["question"])
        _, reward, terminated, _, info = say(env, problem["answer"])
        assert (reward, terminated, info["item"], info["verdict"]) == (1.0, True, item, "right")
        env.reset(options={"item": item})
        _, reward, *_, info = say(env, "I do not know 7.")
        assert (reward, info["verdict"], info["verdict_reason"]) == (0.0, "unparsed", "no_commitment")


def test_gsm8k_draws_every_problem(problems: Path) -> None:
    env = gymnasium.make("atropos/GSM8K-v0", data=str(problems)).unwrapped
    assert {env.reset(seed=seed)[1]["item"] for seed in range(30)} == {0, 1, 2}


def test_gsm8k_says_how_to_answer_so_that_it_is_read(problems: Path) -> None:
    env = gymnasium.make("atropos/GSM8K-v0", data=str(problems)).unwrapped
    env.reset(seed=0)
    assert "####" in last(env) and verify_number("so\n#### 7", "#### 7")


def test_gsm8k_refuses_an_item_that_is_not_there(problems: Path) -> None:
    env = gymnasium.make("atropos/GSM8K-v0", data=str(problems)).unwrapped
    for item in (3, -1, "x"):
        with pytest.raises(ConfigError, match="item must be an int from 0 to 2"):
            env.reset(options={"item": item})


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", MissingData, "holds no problem"),
        ("{", MissingData, "line 1 of .* is no JSON"),
        ("[1]", MissingData, "line 1 of .* must be an object, got list"),
        ('{"question": "?"}', MissingData, "row 1 of .* must have the texts question and answer"),
        ('{"question": "?", "answer": "#### none"}', UnusableGold, "row 1 of .*exactly one number"),
    ],
)
def test_gsm8k_names_the_bad_row(tmp_path: Path, content: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=message):
        gymnasium.make("atropos/GSM8K-v0", data=str(path))


def test_gsm8k_without_data_names_both_remedies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="cannot be read .*: give the path of a JSONL file"):
        gymnasium.make("atropos/GSM8K-v0", data=str(tmp_path / "none.jsonl"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingData, match=r"pip install 'atropos-gym\[data\]', or give data=FILE.jsonl"):
        gymnasium.make("atropos/GSM8K-v0")

    def offline(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    with pytest.raises(
        MissingData, match=r"\(ConnectionError\): connect to a network, or give data=FILE.jsonl"
    ):
        gymnasium.make("atropos/GSM8K-v0")


def test_gsm8k_reads_the_hubs_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **keywords: Any) -> Any:
        asked.append((arguments, keywords))
        return PROBLEMS

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    from atropos_gym.envs import gsm8k

    gsm8k._from_hub.cache_clear()
    try:
        env = gymnasium.make("atropos/GSM8K-v0", split="test").unwrapped
        gymnasium.make("atropos/GSM8K-v0", split="test")
        assert env.items == 3 and asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    finally:
        gsm8k._from_hub.cache_clear()
    with pytest.raises(ConfigError, match="split must be 'train' or 'test', got 'dev'"):
        gymnasium.make("atropos/GSM8K-v0", split="dev")
