"""What rendering and bridging cost beside encoding the new text alone: both in one run.

``python -m tests.benchmarks.rendering_speed`` from the root. A conversation of 20 turns and about 8,000 ids:
each turn's observation is rendered, marked, encoded and cut; the text of the same observations is encoded,
and nothing else. The bar is 1.3 times that, as ``tokenizer.encode`` does it (transformers' own call; that of
``bytes`` is ours); the backend's call without transformers around it is shown beside it. Real tokenizers are
those that ``tests/tools/get_tokenizers.py`` and ``make_smollm2.py`` prepare; one that is missing is told.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import load_tokenizer

TURNS, SAMPLED, IDS, ROUNDS, BAR = 20, 40, 8000, 30, 1.3
CACHE = Path(os.environ.get("ATROPOS_GYM_CACHE") or Path.home() / ".cache" / "atropos_gym")
SOURCES = {
    "bytes": "bytes",
    "SmolLM2": str(CACHE / "smollm2"),
    "Qwen3": str(CACHE / "tokenizers" / "qwen3"),
    "Llama 3": str(CACHE / "tokenizers" / "llama3"),
    "Gemma 3": str(CACHE / "tokenizers" / "gemma3"),
    "DeepSeek-V3": str(CACHE / "tokenizers" / "deepseek_v3"),
}
Talk = list[list[dict[str, str]]]
WORDS = (
    "the room is dark and you see a door to the north, a lamp on the table; which of them do you take? "
    "Your score is 12 of 100 points. The guard says: 'Nobody leaves before sunrise!' It costs 3.50 coins."
).split()


def observation(chance: random.Random, length: int, encode: Callable[[str], list[int]]) -> str:
    """Returns text of about ``length`` ids that nobody has seen before."""
    words = [chance.choice(WORDS) for _ in range(length)]
    return " ".join(words[: max(1, round(length * length / len(encode(" ".join(words)))))])


def play(renderer: ChatRenderer, turn: list[int], talk: Talk) -> int:
    """Renders a conversation as it is played; returns the length of its row."""
    row = len(renderer.prompt(talk[0]))
    for said in talk[1:]:
        row += len(renderer.bridge(turn, said))
    return row + TURNS * len(turn)


def encode_all(call: Callable[[str], list[int]], talk: Talk) -> int:
    """Encodes the text of a conversation and nothing else."""
    return sum([len(call(said[0]["content"])) for said in talk])


def measure(name: str, source: str) -> None:
    """Prints one line."""
    tokenizer = load_tokenizer(source)
    renderer = ChatRenderer(tokenizer)
    hf, backend = getattr(tokenizer, "hf", None), getattr(tokenizer, "backend", None)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text) if hf is None else hf.encode(text, add_special_tokens=False)
        return ids

    def encode_bare(text: str) -> list[int]:
        ids: list[int] = (
            list(text.encode()) if backend is None else backend.encode(text, add_special_tokens=False).ids
        )
        return ids

    chance = random.Random(0)
    turn = [*range(64, 64 + SAMPLED - 1), renderer.stop_ids[0]]
    length = IDS // TURNS - SAMPLED
    times: list[list[float]] = [[], [], []]
    ids = 0
    for _ in range(ROUNDS):
        talk = [[{"role": "user", "content": observation(chance, length, encode)}] for _ in range(TURNS)]

        works = (
            partial(play, renderer, turn, talk),
            partial(encode_all, encode, talk),
            partial(encode_all, encode_bare, talk),
        )
        ids = [work() for work in works][0]  # all have seen the texts before they are timed
        for work, taken in zip(works, times, strict=True):
            started = time.process_time()
            work()
            taken.append(time.process_time() - started)
    ours, alone, bare = (min(taken) * 1e6 / TURNS for taken in times)  # other work only ever adds
    print(
        f"{name:12} {ids:5} ids   rendering and bridging {ours:7.1f} us a turn   "
        f"encoding alone {alone:7.1f}   ratio {ours / alone:.2f} (bar {BAR})   "
        f"backend alone {bare:7.1f}   ratio {ours / bare:.2f}"
    )


def main() -> None:
    for name, source in SOURCES.items():
        if source != "bytes" and not (Path(source) / "tokenizer.json").is_file():
            print(f"{name:12} not prepared: {source}")
            continue
        measure(name, source)


if __name__ == "__main__":
    main()
