"""Environments of `atroposlib` 0.4.0 as people wrote them; a program of its own, run by a Python that has it.

    python atropos_envs.py KIND --url URL --items N --journal FILE --tokenizer FOLDER [--workers N] [...]

Nothing of `atroposlib` is changed: its manager, its workers and its sender run, over an engine that answers
from a seeded generator. The journal gets a line when a group is finished (``begun``) and one when its post
was answered (``answered``); the program ends when no item is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BOS, END, USER, ASSISTANT = 257, 258, 260, 261
CONTROL = ["<pad>", "<bos>", "<end>", "<system>", "<user>", "<assistant>", "<tool>", "<spare>"]
TEMPLATE = (
    "<bos>{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """Bytes as ids 0 to 255 and eight control ids, in the form that transformers loads."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [b for b in range(256) if chr(b) in alphabet]
    others = [b for b in range(256) if chr(b) not in alphabet]
    vocab = {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(others)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(name, special=True) for name in CONTROL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


class FakeEngine(APIServer):
    """Says a few letters and an end id, with logprobs that nobody computed."""

    def __init__(self, config: APIServerConfig, reasoning_config: Any = None) -> None:
        super().__init__(config, reasoning_config=reasoning_config)
        self.random = random.Random(0)

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def _completion_wrapper(self, **kwargs: Any) -> Any:
        raise NotImplementedError

    async def _tokens_and_logprobs_completion_wrapper(
        self, *, input_ids: list[int], n: int = 1, **kwargs: Any
    ) -> tuple[list, list, list, list]:
        await asyncio.sleep(0)
        said = []
        for _ in range(n):
            letters = [self.random.randrange(97, 123) for _ in range(self.random.randrange(1, 9))]
            said.append([*letters, END])
        logprobs = [[-6 * self.random.random() for _ in ids] for ids in said]
        return input_ids, said, logprobs, ["stop"] * n


class Journaled(BaseEnv):
    """What the test needs to know of every group, beside what people's environments have."""

    server_cls = FakeEngine
    kind: str
    items: int
    journal: Any

    async def setup(self) -> None:
        self.issued = 0
        self.samples = 0
        self.answered: set[int] = set()
        self.evaluations = 0

    async def get_next_item(self) -> Any:
        if self.issued == self.items:
            return None
        self.issued += 1
        return {"item": self.issued - 1}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluations += 1

    def sample(self) -> int:
        self.samples += 1
        return self.samples - 1

    def scores(self, n: int) -> list[float]:
        return [1.0, *(0.25 * (k % 3) for k in range(n - 1))]

    def note(self, what: str, groups: Any) -> None:
        for group in groups if isinstance(groups, list) else [groups]:
            overrides = group["group_overrides"]
            line = {"what": what, "sample": overrides["sample"], "item": overrides["item"]}
            self.journal.write(json.dumps({**line, "size": len(group["tokens"])}) + "\n")
        self.journal.flush()

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, **options: Any) -> None:
        self.note("begun", scored_data)
        await super().handle_send_to_api(scored_data, item, **options)

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        await super()._send_scored_data_to_api(scored_data)
        self.note("answered", scored_data)
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            self.answered.add(group["group_overrides"]["item"])


def group_of(nodes: list[Any], scores: list[float], **overrides: Any) -> dict[str, Any]:
    """A group as `atroposlib`'s own environments build it from the sequences of its managed server."""
    return {
        "tokens": [node.tokens for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "inference_logprobs": [node.logprobs for node in nodes],
        "scores": scores,
        "generation_params": {"temperature": 1.0},
        "group_overrides": overrides,
    }


class SingleTurn(Journaled):
    """One prompt, n answers."""

    async def ask(self, item: Any, n: int, **overrides: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{self.kind} {item['item']}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(messages=messages, n=n, max_tokens=16, temperature=1.0)
            nodes = managed.get_state()["nodes"]
        return group_of(nodes, self.scores(n), sample=self.sample(), **item, **overrides)

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        return await self.ask(item, self.config.group_size), []


class MultiTurn(Journaled):
    """Two turns a member; the second prompt extends the first answer, id for id."""

    async def talk(self, item: Any) -> Any:
        messages = [{"role": "user", "content": f"{self.kind} {item['item']}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for question in ("why?", None):
                said = await managed.chat_completion(messages=messages, n=1, max_tokens=16)
                messages.append({"role": "assistant", "content": said.choices[0].message.content})
                if question is not None:
                    messages.append({"role": "user", "content": question})
            (node,) = managed.get_state()["nodes"]
        return node

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        nodes = await asyncio.gather(*(self.talk(item) for _ in range(self.config.group_size)))
        return group_of(nodes, self.scores(len(nodes)), sample=self.sample(), **item), []


class Default(SingleTurn):
    """The default path: an environment that writes one trajectory and leaves grouping to the base class."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        group = await self.ask(item, 1)
        self.said = getattr(self, "said", 0) + 1
        return {
            "tokens": group["tokens"][0],
            "masks": group["masks"][0],
            "scores": 0.25 * (self.said % self.config.group_size),
            "group_overrides": group["group_overrides"],
        }, []

    collect_trajectories = BaseEnv.collect_trajectories


class Mixed(SingleTurn):
    """Groups of other sizes than it registered, two to a list, each declared complete."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        sizes = random.Random(item["item"]).sample([2, 3, 4, 6, 8], 2)
        return [await self.ask(item, size, group_size=size) for size in sizes], []


KINDS = {"single": SingleTurn, "multi": MultiTurn, "default": Default, "minimum": SingleTurn, "mixed": Mixed}


async def watch_loop(env: Journaled) -> None:
    """Runs the original's manager until no item is left; it drops those whose post it cancels itself."""
    manager = asyncio.create_task(env.env_manager())
    idle = 0
    while len(getattr(env, "answered", ())) < env.items and idle < 100:
        if manager.done():
            manager.result()
            raise SystemExit("the manager ended before every item was answered")
        left = getattr(env, "issued", 0) < env.items or env.workers or env.backlog
        idle = 0 if left else idle + 1
        await asyncio.sleep(0.05)
    manager.cancel()


async def send_burst(env: Journaled) -> None:
    """Registers, then lets the original's sender post everything at once, with none of its throttling."""
    await env.setup()
    await env.register_env()
    await env.get_server_info()
    groups = [await env.collect_trajectories(await env.get_next_item()) for _ in range(env.items)]
    await asyncio.gather(*(env.handle_send_to_api(group) for group, _ in groups))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minimum", type=float)
    parser.add_argument("--total-steps", type=int, default=100_000)
    parser.add_argument("--burst", action="store_true", help="post everything at once")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    log = logging.StreamHandler(sys.stderr)
    log.setLevel(logging.INFO if options.verbose else logging.WARNING)  # its loggers let everything through
    logging.basicConfig(handlers=[log])
    config = BaseEnvConfig(
        group_size=4,
        max_num_workers=options.workers,
        max_token_length=64,
        steps_per_eval=2,
        use_wandb=False,
        tokenizer_name=str(options.tokenizer),
        rollout_server_url=options.url,
        total_steps=options.total_steps,
        wandb_name=options.kind,
        min_batch_allocation=options.minimum,
    )
    env = KINDS[options.kind](config, [APIServerConfig(model_name="fake", health_check=False)])
    env.kind, env.items, env.journal = options.kind, options.items, options.journal.open("w")
    asyncio.run(send_burst(env) if options.burst else watch_loop(env))


if __name__ == "__main__":
    if sys.argv[1:2] == ["tokenizer"]:
        write_tokenizer(Path(sys.argv[2]))
    else:
        main()
