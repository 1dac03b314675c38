"""A learner and stock vLLM: every sampled id has the learner's logprob, under the version that it names.

What is promised:
1. Engine and learner agree on each id to 2e-4 nats, 2e-5 in the mean, at two temperatures, over four swaps.
2. Under a control adapter the same ids differ a hundred times more: the comparison can fail.
3. Neighbouring versions are told apart: the slope is 1 for the version that an id names, 0 for its neighbour.
4. Each turn names the version that sampled it, whatever was in flight when the next one came.
5. No request fails, and later turns find their earlier ones in the server's prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from atropos_gym.engines import VLLMEngine
from atropos_gym.trainers import _learning
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.slope import slope_test
from tests.tools.swap_rounds import COLD, WARM, SwapRounds, Talk
from tests.tools.swap_scores import score_groups

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

GROUP_SIZE = 4
UPDATES = 3
#: First and later versions of each group: two an update, then one that a swap crosses. The first group of the
#: second and third update is begun before the swap and holds what it began with.
VERSIONS = [[1], [1], [1], [2], [2], [3], [3, 4]]
BLOCK = 32


def test_every_id_has_the_learners_logprob_while_versions_are_swapped(
    smollm2_folder: Path,
    connect: Callable[..., VLLMEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = connect()
    rounds = SwapRounds(engine, group_size=GROUP_SIZE, last=4)
    monkeypatch.setattr(_learning, "open_local", lambda model: rounds)
    model = GRPO(
        smollm2_folder,
        Talk,
        engine=engine,
        group_size=GROUP_SIZE,
        groups_per_update=2,
        temperature=COLD,
        learning_rate=3e-4,
        lora=Lora(rank=8, alpha=16),
        max_staleness=1,
        drop_equal=False,
        folder=tmp_path / "run",
        device="cpu",
        seed=0,
    )
    model.warm_up(2, batch_size=4)
    model.learn(updates=UPDATES)

    assert [group.temperature for group in rounds.groups] == [COLD, WARM] * UPDATES + [WARM]
    for group, versions in zip(rounds.groups, VERSIONS, strict=True):
        for episode in group.episodes:
            assert len(episode.turns) in (2, 3)
            assert episode.versions == versions[:1] + versions[-1:] * (len(episode.turns) - 1)
    assert {len(episode.turns) for group in rounds.groups for episode in group.episodes} == {2, 3}
    assert engine.counters["published"] == 4 and engine.counters["version_expired"] == 0
    assert set(rounds.running) == {2, 3, 4} and all(rounds.running.values())
    _nothing_failed(rounds)
    _later_turns_are_cached(rounds)

    sampled = score_groups(model, rounds.groups)
    off, control = np.abs(sampled.engine_K - sampled.own_K), np.abs(sampled.engine_K - sampled.control_K)
    print(f"\n{len(off)} ids: mean {off.mean():.2e}, max {off.max():.2e}; control {control.mean():.2e}")
    assert off.max() <= 2e-4
    assert off.mean() <= 2e-5
    assert control.mean() >= 100 * off.mean()
    for version in (1, 2, 3, 4):
        mine = sampled.version_K == version
        e, n, o = sampled.engine_K[mine], sampled.own_K[mine], sampled.previous_K[mine]
        found, mistaken = slope_test(e, n, o), slope_test(e, o, n)
        print(f"version {version}: {found}; taken for {version - 1}: {mistaken}")
        assert found.verdict == "swapped" and found.slope == pytest.approx(1, abs=0.05)
        assert mistaken.verdict == "not_swapped" and mistaken.slope == pytest.approx(0, abs=0.05)

    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in log] == [2, 3, 4]
    for line in log:  # what the learner itself saw of it, on the rows of its newest version
        assert line["train/alignment"] <= 2e-5 and line["train/alignment_max"] <= 2e-4
        assert line["train/grad_norm"] > 0
    assert [line["train/slope"] for line in log[1:]] == pytest.approx([1, 1], abs=0.05)
    model.close()


def _nothing_failed(rounds: SwapRounds) -> None:
    assert [(r["started"], r["delivered"]) for r in rounds.reports] == [(3, 3), (3, 3), (1, 1)]
    assert not [name for name in rounds.engine.counters if name.startswith(("lost/", "retry/"))]


def _later_turns_are_cached(rounds: SwapRounds) -> None:
    """The first update's groups were played alone: what the server says of its cache is theirs."""
    turns = [
        (before, after)
        for group in rounds.groups[:2]
        for episode in group.episodes
        for before, after in zip(episode.turns, episode.turns[1:], strict=False)
    ]
    # All full blocks of the earlier turn; its last id was sampled, and not yet read.
    possible = sum((before.end - 1) // BLOCK * BLOCK for before, _ in turns)
    print(f"\n{len(turns)} later turns have {possible} ids of earlier blocks; hits {rounds.hits[0]:.0f}")
    assert possible > 0
    assert rounds.hits[0] >= possible
