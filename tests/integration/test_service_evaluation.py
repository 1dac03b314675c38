"""A service that evaluates beside a learner, with a real engine whose versions change meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from stable_baselines3.common.callbacks import BaseCallback

from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.rollout.service import EnvironmentService, Evaluation
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO

pytestmark = pytest.mark.slow

ENV = "atropos/Identity-v0"
UPDATES, GROUPS = 5, 3


class Counted(BaseCallback):
    """Lets the learner go on once the service knows that what the learner has got was taken.

    The run ends with the last update, and the service with it: also where it has not yet read the answer to
    its last post.
    """

    def __init__(self, service: EnvironmentService) -> None:
        super().__init__()
        self.service = service
        self.batches = 0

    def _on_rollout_end(self) -> None:
        self.batches += 1
        deadline = time.monotonic() + 60
        while self.service.report["posted"] < self.batches * GROUPS:
            assert time.monotonic() < deadline, "groups came that nobody has posted"
            time.sleep(0.01)

    def _on_step(self) -> bool:
        return True


def test_evaluations_at_every_second_step(tmp_path: Path) -> None:
    settings = {
        "group_size": 4,
        "groups_per_update": GROUPS,
        "drop_equal": False,
        "lora": Lora(rank=2),
        "seed": 0,
    }
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
            model.learn(updates=UPDATES, callback=Counted(service))
    report = service.report
    assert [step for step, _ in report["evaluations"]] == [0, 2, 4]
    assert all(result.episodes == 16 for _, result in report["evaluations"])
    # The last version is published a moment before the run ends: the service may hear of it, load it, and
    # even play for it still.
    assert report["versions"] in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5])
    assert UPDATES * GROUPS <= report["posted"] <= (UPDATES + 1) * GROUPS
    written = json.loads(state.read_text())
    assert UPDATES * GROUPS <= written.pop("next_number") <= (UPDATES + 1) * GROUPS
    assert written == {"env": ENV, "seed": 0, "evaluated_at": 4}
