"""Turns a second through the whole text bridge on FrozenLake, beside others: one core, one run.

``python -m tests.benchmarks.text_bridge`` from the root, with ``--textarena-python``,
``--verifiers-python`` and ``--agilerl-python`` for the interpreters of environments in which textarena
0.7.4, verifiers 0.3.1 (with gymnasium) and agilerl 2.58.0 (with its extra ``cpu-llm``) are installed; a peer
without one is left out, with the reason. Random legal replies are made before the clock starts, as ids here
and as what each peer takes there. Seconds are of CPU; the contestants play several rounds in turn, and the
fastest of each counts: other work on the machine only ever adds to them.

The second table is about growth: an episode of 200 turns with ``history="whole"``, by quarters. A turn may
cost its new text and one copy of the prompt, which is measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import atropos_gym  # noqa: F401  (registers the ids)
from atropos_gym.messages import Feedback, Reply
from atropos_gym.text_env import TextEnv

PEERS = Path(__file__).parent / "text_bridge_peers.py"
SMOLLM2 = Path("~/.cache/atropos_gym/smollm2").expanduser()
LEAST = 12_000
"""Turns a second with the bytes tokenizer."""


def make_env(tokenizer: str, **keywords: Any) -> TextEnv:
    """Returns the environment, bare: what the collector steps."""
    env = gymnasium.make("atropos/FrozenLake-v0", tokenizer=tokenizer, **keywords).unwrapped
    assert isinstance(env, TextEnv)
    return env


def make_task(turns: int, tokenizer: str) -> dict[str, Any]:
    """Returns what the peers play: the sentences of every state, the rules and the picks."""
    env: Any = make_env("bytes")
    env.reset(seed=0)
    start = env.messages[-1]["content"]
    state = env.describer.describe(0)
    assert start.startswith(state)
    return {
        "states": [env.describer.describe(cell) + start[len(state) :] for cell in range(16)],
        "rules": env.messages[0]["content"],
        "words": list(env.describer.names),
        "picks": np.random.default_rng(0).integers(4, size=turns).tolist(),
        "seed": 1,
        "tokenizer": tokenizer,
    }


def play(env: TextEnv, task: dict[str, Any]) -> dict[str, Any]:
    """Plays the picks through the bridge."""
    assert env.answers is not None
    said = [np.array(env.say(answer), np.int32) for answer in env.answers]
    picks = task["picks"]
    env.reset(seed=task["seed"])
    episodes = 0
    started = time.process_time()
    for pick in picks:
        _, _, ended, cut, _ = env.step(said[pick])
        if ended or cut:
            episodes += 1
            env.reset()
    return {"turns": len(picks), "episodes": episodes, "seconds": time.process_time() - started}


def play_peer(python: str, name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Plays the task in another interpreter; ``{"missing": reason}`` where that fails."""
    try:
        done = subprocess.run(
            [python, str(PEERS), name],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        told = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return {"missing": told[-1] if told else type(error).__name__}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(args: argparse.Namespace) -> None:
    """Prints the first table."""
    tokenizer = args.tokenizer or (str(SMOLLM2) if SMOLLM2.is_dir() else "")
    task = make_task(args.turns, tokenizer)
    ours: dict[str, tuple[TextEnv, str]] = {
        "this package, bytes": (make_env("bytes"), 'history="whole", ids in and out')
    }
    if tokenizer:
        ours["this package, fast tokenizer"] = (make_env(tokenizer), f"the same with {Path(tokenizer).name}")
    else:
        print(f"no fast tokenizer at {SMOLLM2}: give --tokenizer FOLDER")
    peers = {
        "Gymnasium, no text": ("gymnasium", sys.executable),
        "TextArena": ("textarena", args.textarena_python),
        "verifiers GymEnv": ("verifiers", args.verifiers_python),
        "AgileRL token harness": ("agilerl", args.agilerl_python),
    }
    rates: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for name, (peer, python) in peers.items():
        if python is None:
            notes[name] = f"left out: no --{peer}-python"
        elif peer == "agilerl" and not tokenizer:
            notes[name] = "left out: it needs a fast tokenizer"
    for _ in range(args.rounds):
        for name, (env, note) in ours.items():
            result = play(env, task)
            rates.setdefault(name, []).append(result["turns"] / result["seconds"])
            notes[name] = note
        for name, (peer, python) in peers.items():
            if name in notes and name not in rates:
                continue
            share = 10 if peer in ("verifiers", "agilerl") else 1
            result = play_peer(python, peer, {**task, "picks": task["picks"][: args.turns // share]})
            if "missing" in result:
                notes[name] = f"left out: {result['missing']}"
                continue
            rates.setdefault(name, []).append(result["turns"] / result["seconds"])
            notes[name] = f"{result['version']}: {result['configuration']}"
    base = max(rates["this package, bytes"])
    print(f"{'':30}{'turns/s':>9}{'ours is':>9}")
    for name in (*ours, *peers):
        if name not in rates:
            print(f"{name:30}{'-':>9}{'':9}  {notes[name]}")
            continue
        rate = max(rates[name])
        print(f"{name:30}{rate:9,.0f}{base / rate:8.2f}x  {notes[name]}")
    print(f"wanted: at least {LEAST:,} turns/s with bytes: {'yes' if base >= LEAST else 'NO'}")


class Talk(TextEnv):
    """Says one sentence of constant length, turn after turn."""

    max_turns = 201
    max_turn_tokens = 32
    max_feedback_tokens = 128

    def begin(self, options: dict[str, Any]) -> str:
        """Starts the talk."""
        return "Say something."

    def respond(self, reply: Reply) -> Feedback:
        """Answers with as much text in every turn."""
        return Feedback(f"Turn: {reply.content:10.10}" + "." * 100)


def growth(tokenizer: str, episodes: int = 20) -> None:
    """Prints the second table: microseconds a turn and bytes held, by quarter of an episode of 200 turns."""
    env = Talk(tokenizer=tokenizer)
    turn = np.array(env.renderer.say("word " * 4), np.int32)
    turns, quarter = 200, 50
    spent = np.zeros((turns // quarter, episodes))
    copies = np.zeros(turns // quarter)
    lengths = np.zeros(turns // quarter)
    for episode in range(episodes):
        env.reset(seed=0)
        for part in range(turns // quarter):
            started = time.process_time()
            for _ in range(quarter):
                observation, *_ = env.step(turn)
            spent[part, episode] = time.process_time() - started
            started = time.process_time()
            for _ in range(100):
                observation.copy()
            copies[part] += (time.process_time() - started) / 100 / episodes
            lengths[part] = observation.size
    tracemalloc.start()
    held = []
    env.reset(seed=0)
    for _ in range(turns // quarter):
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(quarter):
            env.step(turn)
        held.append((tracemalloc.get_traced_memory()[0] - before) / quarter)
    tracemalloc.stop()
    print(f"\n200 turns, {tokenizer if tokenizer == 'bytes' else Path(tokenizer).name}")
    print(f"{'turns':>10}{'prompt ids':>12}{'us a turn':>11}{'of it one copy':>16}{'bytes kept a turn':>19}")
    for part in range(turns // quarter):
        span = f"{part * quarter}-{(part + 1) * quarter}"
        cost = spent[part].min() / quarter * 1e6
        print(f"{span:>10}{lengths[part]:12,.0f}{cost:11.1f}{copies[part] * 1e6:16.1f}{held[part]:19,.0f}")


def main() -> None:
    """Runs both parts on one core."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer", help="folder of a fast tokenizer; SmolLM2's where it is there")
    for peer in ("textarena", "verifiers", "agilerl"):
        parser.add_argument(f"--{peer}-python", help=f"interpreter that has {peer}")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    compare(args)
    growth("bytes")
    if args.tokenizer or SMOLLM2.is_dir():
        growth(args.tokenizer or str(SMOLLM2))


if __name__ == "__main__":
    main()
