"""CPU time of terse Blackjack, by part: ``python -m tests.benchmarks.blackjack_turns`` from the root.

Budgets of the main job: 300 microseconds a seeded reset, 100 a step, 10 to read an exact reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import gymnasium
import numpy as np

import atropos_gym  # noqa: F401  (registers the ids)
from atropos_gym.parsing import parse_action

ROUNDS = 5000


def microseconds(work: Callable[[int], object]) -> float:
    work(0)
    started = time.process_time()
    for k in range(ROUNDS):
        work(k)
    return (time.process_time() - started) / ROUNDS * 1e6


def main() -> None:
    env = gymnasium.make("atropos/Blackjack-v0", describe="terse", history="latest").unwrapped
    space, names = env.simulator.action_space, env.describer.names
    stick = np.array(env.renderer.say("stick"), np.int32)
    reset = microseconds(lambda k: env.reset(seed=k))
    both = microseconds(lambda k: (env.reset(seed=k), env.step(stick)))
    parse = microseconds(lambda k: parse_action("hit", space, "bare_word", names=names))
    make = microseconds(lambda k: type(env)(describe="terse") if k % 100 == 0 else None) * 100
    step = both - reset
    print(f"reset(seed) {reset:.0f} us, last step {step:.0f} us, parse {parse:.1f} us, new {make:.0f} us")


if __name__ == "__main__":
    main()
