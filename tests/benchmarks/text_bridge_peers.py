"""FrozenLake played through one text bridge: ``python text_bridge_peers.py NAME < task.json``.

Run by ``text_bridge.py``, with the interpreter of the environment that the bridge is installed in, so it
imports nothing of this package. Every bridge but TextArena, which has a lake of its own, plays Gymnasium's
simulator in the same sentences and gets the same replies. Prints one JSON object: turns, episodes, seconds of
CPU (all threads of the process) and the configuration.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import sys
import time
import warnings
from typing import Any

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

Task = dict[str, Any]
Result = tuple[int, int, float]
"""(turns, episodes, seconds)"""

_ACTION = re.compile(r"<action>(\w+)</action>")


class Lake:
    """Gymnasium's FrozenLake in the task's sentences, in the plain reset/step form of text environments."""

    system_prompt = ""

    def __init__(self, task: Task) -> None:
        import gymnasium

        self._states: list[str] = task["states"]
        self._words: list[str] = task["words"]
        self._simulator = gymnasium.make("FrozenLake-v1").unwrapped

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a walk."""
        state, info = self._simulator.reset(seed=seed)
        return self._states[state], dict(info)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays the action in a reply."""
        found = _ACTION.search(text)
        assert found is not None, f"the benchmark's replies are all legal: {text!r}"
        state, reward, ended, cut, info = self._simulator.step(self._words.index(found[1]))
        return self._states[state], float(reward), bool(ended), bool(cut), dict(info)


def play_gymnasium(task: Task) -> Result:
    """The bare simulator with numbers for actions: no text at all."""
    import gymnasium

    simulator = gymnasium.make("FrozenLake-v1").unwrapped
    picks = task["picks"]
    simulator.reset(seed=task["seed"])
    episodes = 0
    started = time.process_time()
    for pick in picks:
        _, _, ended, _, _ = simulator.step(pick)
        if ended:
            episodes += 1
            simulator.reset()
    return len(picks), episodes, time.process_time() - started


def play_textarena(task: Task) -> Result:
    """TextArena's own FrozenLake, default wrappers, a fresh environment an episode (it keeps its logs)."""
    import textarena

    said = [f"[{word}]" for word in task["words"]]
    picks = task["picks"]
    turns = episodes = 0
    started = time.process_time()
    while turns < len(picks):
        env = textarena.make("FrozenLake-v0")
        env.reset(num_players=1, seed=task["seed"] + episodes)
        done = False
        while not done:
            env.get_observation()
            done, _ = env.step(said[picks[turns % len(picks)]])
            turns += 1
        env.close()
        episodes += 1
    return turns, episodes, time.process_time() - started


def play_verifiers(task: Task) -> Result:
    """GymEnv with a client that answers at once; ``rollout`` alone, without scoring."""
    import verifiers.legacy as vf
    from verifiers.legacy.clients import Client
    from verifiers.legacy.envs.experimental.gym_env import GymEnv
    from verifiers.legacy.types import Response, ResponseMessage

    said = [f"<action>{word}</action>" for word in task["words"]]
    picks = iter(task["picks"] * 2)

    class Ready(Client):  # type: ignore[misc, type-arg]
        """Says the next of the prepared replies."""

        def setup_client(self, config: Any) -> None:
            return None

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            return messages, {}

        async def get_native_response(self, prompt: Any, *_: Any, **__: Any) -> str:
            return said[next(picks)]

        async def raise_from_native_response(self, response: Any) -> None:
            return None

        async def from_native_response(self, response: str) -> Any:
            message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
            return Response(id="0", created=0, model="none", message=message)

        async def close(self) -> None:
            return None

    env = GymEnv(
        env_cls=lambda: Lake(task),  # type: ignore[arg-type]
        num_train_episodes=64,
        num_eval_episodes=1,
        max_episode_steps=100,
        system_prompt=task["rules"],
        parser=vf.Parser(),
    )
    rows = list(env.get_dataset())
    client = Ready(None)

    async def run() -> Result:
        turns = episodes = 0
        started = time.process_time()
        while turns < len(task["picks"]):
            state = await env.rollout(rows[episodes % len(rows)], client, "none", {})
            assert state.get("error") is None, state["error"]
            turns += len(state["trajectory"])
            episodes += 1
        return turns, episodes, time.process_time() - started

    return asyncio.run(run())


def play_agilerl(task: Task) -> Result:
    """RolloutHarness.local: an in-process text environment, the folder's tokenizer and chat template."""
    import torch
    from agilerl.llm_envs.harness import RolloutHarness
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    said = [
        torch.tensor([tokenizer.encode(f"<action>{word}</action>") + [tokenizer.eos_token_id]])
        for word in task["words"]
    ]
    env = RolloutHarness.local(Lake(task), tokenizer, max_turns=100, system_prompt=task["rules"])
    picks = task["picks"]
    prompt, _ = env.reset(seed=task["seed"])
    episodes = 0
    started = time.process_time()
    for pick in picks:
        sampled = torch.cat([prompt["input_ids"], said[pick]], dim=1)  # an engine gives back both
        prompt, _, ended, cut, _ = env.step(sampled)
        if ended or cut:
            episodes += 1
            prompt, _ = env.reset(seed=task["seed"] + episodes)
    return len(picks), episodes, time.process_time() - started


PEERS = {
    "gymnasium": (play_gymnasium, "gymnasium"),
    "textarena": (play_textarena, "textarena"),
    "verifiers": (play_verifiers, "verifiers"),
    "agilerl": (play_agilerl, "agilerl"),
}


def main() -> None:
    """Plays the task on standard input and prints what it took."""
    play, distribution = PEERS[sys.argv[1]]
    task: Task = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    play({**task, "picks": task["picks"][: len(task["picks"]) // 10]})  # imports, caches
    turns, episodes, seconds = play(task)
    print(
        json.dumps(
            {
                "turns": turns,
                "episodes": episodes,
                "seconds": seconds,
                "version": importlib.metadata.version(distribution),
                "configuration": str(play.__doc__),
            }
        )
    )


if __name__ == "__main__":
    main()
