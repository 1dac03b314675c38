"""The learner behind a real server: leases, versions, the service that follows them, and going on."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.callbacks import BaseCallback

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.errors import ServerError
from atropos_gym.rollout.service import EnvironmentService, ServiceThread
from atropos_gym.trainers._sources import open_server
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO

pytestmark = pytest.mark.slow

ENV = "atropos/Identity-v0"
SMALL: dict[str, Any] = {
    "seed": 0,
    "lora": Lora(rank=2),
    "group_size": 4,
    "groups_per_update": 3,
    "drop_equal": False,
    "device": "cpu",
}


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


def learner(server: ServerProcess, folder: Path, **fields: Any) -> GRPO:
    model = GRPO("tiny", ENV, server=server.url, folder=folder, **{**SMALL, **fields})
    return model.warm_up(3, batch_size=4)


def service(model: GRPO, server: ServerProcess, **fields: Any) -> ServiceThread:
    made = EnvironmentService(ENV, model.engine, server.url, group_size=4, seed=0, **fields)
    return made.in_thread()


class Serve(BaseCallback):
    """Starts a service once the learner has posted: the server still shows the run before it until then."""

    def __init__(self, server: ServerProcess, **fields: Any) -> None:
        super().__init__()
        self.server, self.fields = server, fields
        self.thread: ServiceThread | None = None

    def _on_training_start(self) -> None:
        assert isinstance(self.model, GRPO)
        self.thread = service(self.model, self.server, **self.fields)
        self.thread.start()

    def _on_step(self) -> bool:
        return True

    def stop(self) -> None:
        assert self.thread is not None
        self.thread.stop()


def metrics_of(model: GRPO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (model.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_versions_and_batches_go_round(server: ServerProcess, tmp_path: Path) -> None:
    with learner(server, tmp_path) as model, BatchClient(server.url) as client:
        with service(model, server):
            model.learn(updates=3)
            assert model.version == 3
        lines = metrics_of(model)
        assert [line["version"] for line in lines] == [1, 2, 3]
        assert all(line["train/staleness"] == 0.0 and line["train/rows"] == 12.0 for line in lines)
        assert max(line["train/alignment_max"] for line in lines) < 2e-4
        policy = client.policy()
        assert (policy.version, policy.run, policy.finished) == (3, model.run, True)
        assert policy.adapter_path == str(model.adapter_dir / f"{model.run}-v3")
        assert policy.tokenizer_fingerprint == model.tokenizer.fingerprint
        assert client.status()["leased_groups"] == 0, "every batch was acknowledged"
        # The service published what the learner posted; the learner's own look finds it there.
        assert model.engine.newest == 3
        said, _ = model.predict(np.array([257, 260, 97, 261]), deterministic=True)
        assert len(said) >= 1


def test_what_no_checkpoint_contains_is_not_acknowledged(server: ServerProcess, tmp_path: Path) -> None:
    leased = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            with BatchClient(server.url) as client:
                leased.append(client.status()["leased_groups"])

    with learner(server, tmp_path, checkpoint_every=2) as model:
        with service(model, server):
            model.learn(updates=5, callback=Watch())
        assert leased == [0, 3, 0, 3, 0]
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["000002.zip", "000004.zip"]


def test_a_learner_that_was_loaded_goes_on_as_another_run(server: ServerProcess, tmp_path: Path) -> None:
    with learner(server, tmp_path / "first", checkpoint_every=2) as model:
        with service(model, server):
            model.learn(updates=2)
        first = model.run
    checkpoint = tmp_path / "first" / "checkpoints" / "000002.zip"
    with GRPO.load(checkpoint, env=ENV, server=server.url, folder=tmp_path / "second") as model:
        serve = Serve(server, first_number=6)
        model.learn(updates=2, callback=serve, reset_num_timesteps=False)
        serve.stop()
        with BatchClient(server.url) as client:
            policy = client.policy()
        # Version 3 is the first of the second run: checkpoint's 2 and the server's 2 are both taken.
        assert policy.run == model.run != first and policy.version == model.version == 5
        assert [line["update"] for line in metrics_of(model)] == [3, 4]


def test_learning_twice_on_one_server_makes_two_runs(server: ServerProcess, tmp_path: Path) -> None:
    with learner(server, tmp_path) as model:
        runs = []
        for _ in range(2):
            serve = Serve(server, first_number=3 * len(runs))
            model.learn(updates=1, callback=serve, reset_num_timesteps=False)
            serve.stop()
            runs.append(model.run)
        assert runs[0] != runs[1] and model.version == 3


def test_learning_again_from_the_start_is_the_same_trainers_business(
    server: ServerProcess, tmp_path: Path
) -> None:
    with learner(server, tmp_path) as model:
        for k in range(2):  # as SB3 counts: from 0 each time
            serve = Serve(server, first_number=3 * k)
            model.learn(updates=1 + k, callback=serve)
            serve.stop()
        assert model._n_updates == 2 and model.version == 4


def test_a_learner_that_is_turned_away_leaves_nothing_open(server: ServerProcess, tmp_path: Path) -> None:
    with learner(server, tmp_path) as model, BatchClient(server.url) as other:
        other.register(wandb_group="somebody else")
        with warnings.catch_warnings(), pytest.raises(ServerError, match="takeover"):
            warnings.simplefilter("error", ResourceWarning)
            model.learn(updates=1)
        other.register(wandb_group="somebody else", takeover=True)
        other.publish_policy(run="x", version=3, model_name="x-v3", tokenizer_fingerprint="sha256:other")
        model._parts.registered_at = server.url
        with pytest.raises(ServerError, match="tokenizer"):
            model.learn(updates=1)
        assert "leases" not in {thread.name for thread in threading.enumerate()}


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The dead run's name is still registered; who goes on in its folder is let in at once."""
    with learner(server, tmp_path / "run", checkpoint_every=10) as model:
        killed = open_server(model, 1)
        killed._stop.set()  # as a kill would, it leaves lease and registration
        killed._extender.join()
        with service(model, server):
            groups = killed.next(1)
    with learner(server, tmp_path / "another") as other, pytest.raises(ServerError, match="takeover"):
        open_server(other, 1)
    with learner(server, tmp_path / "run", checkpoint_every=10) as model, BatchClient(server.url) as client:
        assert client.status()["leased_groups"] == len(groups)
        source = open_server(model, 1)
        assert client.status()["leased_groups"] == 0, "the batch went back at once"
        assert model.version == 1 and client.policy().run == model.run
        source.close(finished=True)
        assert not (tmp_path / "run" / "leases.json").exists()
    killed._client.close()


def test_a_learner_that_only_knows_the_url(server: ServerProcess, tmp_path: Path) -> None:
    with (
        GRPO("tiny", server.url, folder=tmp_path, **SMALL) as model,
        pytest.warns(UserWarning, match="untrained"),
        service(model, server),
    ):
        model.learn(updates=1)
    assert model.num_timesteps == 12
