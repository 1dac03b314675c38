"""GRPO on grade-school mathematics: GSM8K answered by a model of your own.

    python examples/gsm8k.py MODEL [--data test.jsonl] [--updates 20]

``MODEL`` is a Hugging Face name or folder, such as ``HuggingFaceTB/SmolLM2-135M-Instruct``. The problems come
from the hub (``pip install 'atropos-gym[data]'``), or with ``--data`` from a file that holds one
``{"question": ..., "answer": "... #### 42"}`` a line. On a CPU a 135M model takes about a minute an update.
"""

from __future__ import annotations

import argparse

from atropos_gym import GRPO, evaluate


def main() -> None:
    """Trains and prints the share of right answers before and after."""
    parser = argparse.ArgumentParser(description="GRPO on GSM8K")
    parser.add_argument("model")
    parser.add_argument("--data", help="local JSONL in place of the hub")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--groups", type=int, default=4, help="groups of an update")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=32, help="problems of each evaluation")
    parser.add_argument("--max-turn-tokens", type=int, default=160)
    options = parser.parse_args()

    keywords = {"data": options.data, "max_turn_tokens": options.max_turn_tokens}
    with GRPO(
        options.model,
        "atropos/GSM8K-v0",
        env_kwargs=keywords,
        group_size=options.group_size,
        groups_per_update=options.groups,
        learning_rate=1e-4,
        seed=0,
    ) as model:
        before = evaluate("atropos/GSM8K-v0", model, options.episodes, seed=1, env_kwargs=keywords)
        print(f"right before: {before.mean:.3f} ± {before.stderr:.3f}", flush=True)
        model.learn(updates=options.updates, progress_bar=True)
        after = evaluate("atropos/GSM8K-v0", model, options.episodes, seed=1, env_kwargs=keywords)
        print(f"right after {options.updates} updates: {after.mean:.3f} ± {after.stderr:.3f}")


if __name__ == "__main__":
    main()
