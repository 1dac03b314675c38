"""A service that evaluates beside a learner, with a real engine whose versions change meanwhile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.rollout.service import EnvironmentService, Evaluation
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO

pytestmark = pytest.mark.slow

ENV = "atropos/Identity-v0"


def test_evaluations_at_every_second_step(tmp_path: Path) -> None:
    settings = {"group_size": 4, "groups_per_update": 3, "drop_equal": False, "lora": Lora(rank=2), "seed": 0}
    state = tmp_path / "service.json"
    with (
        ServerProcess() as server,
        GRPO("tiny", ENV, server=server.url, folder=tmp_path / "run", device="cpu", **settings) as model,
    ):
        model.warm_up(3, batch_size=4)
        service = EnvironmentService(
            ENV,
            model.engine,
            server.url,
            group_size=4,
            state=state,
            evaluation=Evaluation(every=2, episodes=16),
        )
        with service.in_thread():
            model.learn(updates=5)
    report = service.report
    assert [step for step, _ in report["evaluations"]] == [0, 2, 4]
    assert all(result.episodes == 16 for _, result in report["evaluations"])
    assert report["posted"] == 15
    # The last version is published as the run ends: the service may or may not hear of it still.
    assert report["versions"][:5] == [0, 1, 2, 3, 4] and report["versions"][5:] in ([], [5])
    assert json.loads(state.read_text()) == {"env": ENV, "seed": 0, "next_number": 15, "evaluated_at": 4}
