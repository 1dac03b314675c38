"""How far a learner and a vLLM server are apart, id for id, while versions are swapped under the episodes.

    python tests/benchmarks/vllm_agreement.py --python .venv-vllm/bin/python --swaps 10 --group-size 11

Plays what ``tests/vllm/test_hot_swap.py`` plays, with more: an update learns from two groups, one at each of
two temperatures, the next ones are begun before the swap or after it, and a last group crosses the last swap.
Ten swaps of groups of eleven are 209 episodes. The learner, in the server's dtype, scores every id under the
version that it names, under the one before, and under a control adapter. ``--dtypes float32 bfloat16`` starts
one server after the other. Rounding in bfloat16 is of the size of an update: the slope tells versions apart,
if anything does.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
from _vllm import arguments, engine_of
from numpy.typing import NDArray

from atropos_gym.trainers import _learning
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.slope import FLOAT32_NOISE, LOW_PRECISION_NOISE, slope_test
from tests.tools.swap_rounds import COLD, SwapRounds, Talk
from tests.tools.swap_scores import Sampled, score_groups


def played(options: Namespace, folder: Path) -> tuple[Sampled, str]:
    """Learns while it swaps; returns all ids with their logprobs, and what was played."""
    begin = time.perf_counter()
    with engine_of(options) as engine:
        rounds = SwapRounds(engine, group_size=options.group_size, last=options.swaps)
        with patch.object(_learning, "open_local", lambda model: rounds):
            model = GRPO(
                options.model,
                Talk,
                engine=engine,
                group_size=options.group_size,
                groups_per_update=2,
                temperature=COLD,
                learning_rate=3e-4,
                lora=Lora(rank=8, alpha=16),
                dtype=options.dtype,
                max_staleness=1,
                drop_equal=False,
                folder=folder,
                device="cpu",
                seed=0,
            )
            model.warm_up(2, batch_size=4)
            model.learn(updates=options.swaps - 1)
        lost = {
            name: count for name, count in engine.counters.items() if name.startswith(("lost/", "retry/"))
        }
        said = (
            f"{sum(len(group.episodes) for group in rounds.groups)} episodes, {engine.counters['published']} "
            f"swaps, {len(rounds.running)} under load, lost or retried: {lost or 'nothing'}, "
            f"{time.perf_counter() - begin:.0f} s"
        )
        sampled = score_groups(model, rounds.groups)
        model.close()
    return sampled, said


def report(dtype: str, sampled: Sampled) -> None:
    """Prints how far apart they are, and whether that would have shown other weights."""
    print(f"{dtype}, {len(sampled.engine_K)} ids, |learner - engine|:")
    for name, other_K in (
        ("version that sampled it", sampled.own_K),
        ("version before", sampled.previous_K),
        ("control adapter", sampled.control_K),
    ):
        mean, high, most = _spread(sampled.engine_K - other_K)
        print(f"  {name:<24} mean {mean:.1e}  p99 {high:.1e}  max {most:.1e}")
    full = dtype == "float32"
    noise = FLOAT32_NOISE if full else LOW_PRECISION_NOISE
    for version in range(1, int(sampled.version_K.max()) + 1):
        mine = sampled.version_K == version
        e, n, o = sampled.engine_K[mine], sampled.own_K[mine], sampled.previous_K[mine]
        print(f"  version {version}: {slope_test(e, n, o, noise=noise, both_float32=full)}")


def _spread(off_K: NDArray[np.float64]) -> tuple[float, float, float]:
    size_K = np.abs(off_K)
    return float(size_K.mean()), float(np.percentile(size_K, 99)), float(size_K.max())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", nargs="+", help="in place of --dtype: one server after the other")
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--group-size", type=int, default=11)
    options = parser.parse_args()
    for dtype in options.dtypes or [options.dtype]:
        options.dtype = dtype
        with TemporaryDirectory() as folder:
            sampled, said = played(options, Path(folder) / "run")
        print(said)
        report(dtype, sampled)


if __name__ == "__main__":
    main()
