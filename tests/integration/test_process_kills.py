"""A run of four processes, one of which is killed with -9 in its midst: every group is accounted for.

1. Every group that the batch server has acknowledged to the collector is learned from once, or waits, or is
   set aside and counted; none that was acknowledged by the learner comes again.
2. What lay in the collector's spool comes to the server once, also where it had come already.
3. A batch whose learner was killed before its step comes again, to the learner that goes on; one that is in
   the checkpoint does not.
4. Each row was sampled by the weights of the version that it names, computed anew from that version's file.
5. A vLLM server that forgot its adapters gets the live ones again. Folders of old versions are deleted, those
   in use are not. The run ends at its last update, each process by itself, with nothing left behind.

The server of vLLM is the fake one with a real (tiny) model behind it. Where a kill must come between two
steps, the process waits there (``tests/tools/recorded.py``).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.trainers._learning import KEPT_VERSIONS
from tests.tools.processes import (
    ECHO,
    Processes,
    atropos,
    fake_vllm_python,
    healthy,
    lines_of,
    models_of,
    ports,
    sharp_base,
)
from tests.tools.recorded import hold_of, versions_in
from tests.tools.tiny_llama import full_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = "a-key-of-the-test"
UPDATES = 12  # more than the groups that can be there before the last kill
GROUPS = 2  # of an update
RANK, ALPHA = 2, 32
LAG = 20  # versions that a group may be old, where the collector plays ahead: no group of these runs is older


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_base(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_vllm_python(tmp_path_factory.mktemp("site"))


class Run:
    """Four processes that learn ``task:Echo``, and what is known of them."""

    def __init__(self, folder: Path, model: Path, python: Path, numbers: list[int], lag: int) -> None:
        self.folder, self.model, self.lag = folder, model, lag
        self.run = folder / "runs" / "x"
        self.batches, self.vllm = (f"http://127.0.0.1:{number}" for number in numbers)
        (folder / "task.py").write_text(ECHO)
        recorded = [sys.executable, "-m", "tests.tools.recorded"]
        play = ["--engine", f"vllm:{self.vllm}", "--policy", str(model), "--concurrency", "8"]
        learn = ["--server", self.batches, "--updates", str(UPDATES), "--checkpoint-every", "1"]
        learn += ["--groups-per-update", str(GROUPS), "--episodes", "4", "--no-drop-equal"]
        learn += ["--max-staleness", str(lag), "--lora-rank", str(RANK), "--lora-alpha", str(ALPHA)]
        commands = {
            "serve": atropos("serve", "--port", str(numbers[0]), "--store", str(folder / "store.sqlite")),
            "vllm": [
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--port", str(numbers[1]), "--enable-lora", "--max-lora-rank", "8"),
                *("--max-model-len", "512", "--logprobs-mode", "processed_logprobs"),
            ],
            "collect": [
                *(*recorded, str(self.record("collect")), "collect", "task:Echo", *play, "--group-size", "4"),
                *("--to", self.batches, "--spool", str(folder / "spool")),
            ],
            "learner": [
                *(*recorded, str(self.record("learner")), "train", "--env", "task:Echo", "--group-size", "4"),
                *("--policy", str(model), *learn, "--learning-rate", "1e-2", "--name", "x", "--runs", "runs"),
            ],
        }
        env = {
            "VLLM_API_KEY": KEY,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "PYTHONPATH": f"{Path(__file__).parents[2]}",
            "RECORDED_SERVER": str(self.record("vllm")),
            "OMP_NUM_THREADS": "1",
        }
        self.processes = Processes(folder, commands, env)
        self._before: dict[str, int] = {}  # events that were there when a process was told to wait

    def record(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def hold(self, name: str, event: str) -> None:
        """From now on a process waits after its next such event."""
        file = hold_of(self.record(name))
        self._before[name] = len(self.events(name))
        file.with_name("hold").write_text(event)
        file.with_name("hold").rename(file)

    def let_go(self, name: str) -> None:
        hold_of(self.record(name)).unlink()

    def until_held(self, name: str, event: str) -> dict[str, Any]:
        """Waits until a process waits after such an event, and returns that."""

        def held() -> dict[str, Any] | None:
            events = self.events(name)[self._before[name] :]
            return next((one for one in events if one["held"] and one["event"] == event), None)

        found: dict[str, Any] = self.processes.until(held)
        return found

    def kill(self, name: str) -> None:
        """Kills a process with -9."""
        self.processes.kill(name)
        hold_of(self.record(name)).unlink(missing_ok=True)
        if name == "learner":  # whoever goes on with its run is another one
            words = ["train", "--resume", str(self.run)]
            recorded = [sys.executable, "-m", "tests.tools.recorded", str(self.record(name))]
            self.processes.commands[name] = [*recorded, *words]

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in lines_of(self.record(name)) if not kinds or event["event"] in kinds]

    @property
    def updates(self) -> int:
        return len(lines_of(self.run / "metrics.jsonl"))

    def finish(self) -> None:
        """Waits for the end of the run, and collects what the servers say then."""
        for name in ("learner", "collect"):
            assert self.processes.ended(name) == 0, self.processes.said(name)
        with BatchClient(self.batches) as client:
            self.status, self.policy = client.status(), client.policy()
            self.envs = client._http.get("/envs").json()["envs"]
            text = client._http.get("/metrics").text
            self.left: list[int] = []
            while (batch := client.batch(groups=1)) is not None:
                self.left += [int((group.group_overrides or {})["number"]) for group in batch.groups]
        self.aside = {
            line.split('"')[1]: int(float(line.split()[-1]))
            for line in text.splitlines()
            if line.startswith("atropos_groups_set_aside_total{")
        }
        self.served = models_of(self.vllm, KEY)
        for name in ("serve", "vllm"):
            self.processes.running[name].terminate()
            self.processes.ended(name)
        self.processes.until(lambda: not self.processes.alive())


@pytest.fixture
def numbers() -> Iterator[list[int]]:
    with ports(2) as found:
        yield found


# -- what holds after every run ------------------------------------------------------------------------


def used_of(run: Run) -> dict[int, list[int]]:
    """The numbers of the groups that each update learned from, by the checkpoints.

    An update is the batch that was delivered last before its checkpoint.
    """
    used: dict[int, list[int]] = {}
    batch: list[int] = []
    for event in run.events("learner", "delivered", "checkpoint"):
        if event["event"] == "delivered":
            batch = [group["number"] for group in event["groups"]]
        else:
            assert event["update"] not in used, "an update was made twice"
            used[event["update"]], batch = batch, []
    return used


def check_groups(run: Run) -> None:
    """Promises 1 and 2."""
    kept = {int(n): v for event in run.events("collect", "kept") for n, v in event["versions"].items()}
    assert len(kept) == sum(len(event["versions"]) for event in run.events("collect", "kept"))
    answered = Counter(event["number"] for event in run.events("collect", "answered"))
    in_spool = len(list((run.folder / "spool").glob("*.msgpack")))
    assert len(kept.keys() - answered.keys()) == in_spool, "what was kept is at the server or in the spool"
    used = Counter(number for numbers in used_of(run).values() for number in numbers)
    assert sorted(used_of(run)) == list(range(1, UPDATES + 1))
    assert [line["update"] for line in lines_of(run.run / "metrics.jsonl")] == list(range(1, UPDATES + 1))
    assert all(len(numbers) == GROUPS for numbers in used_of(run).values())
    assert set(used.values()) == {1}, "no group was learned from twice"
    assert max(Counter(run.left).values(), default=1) == 1 and not used.keys() & set(run.left)
    assert used.keys() | set(run.left) <= answered.keys()
    # What is neither used nor waiting is exactly what the server says it has set aside, as too old.
    gone = answered.keys() - used.keys() - set(run.left)
    assert len(gone) == sum(run.aside.values()), (gone, run.aside)
    assert set(run.aside) <= {"older than max_policy_lag"}
    newest = run.policy.version
    assert newest is not None and all(kept[number] < newest - run.lag for number in gone)
    received = sum(env["groups_received"] for env in run.envs)
    assert received == len(answered), "each group was taken once, however often it was posted"
    # After an ack, never again.
    acked: set[int] = set()
    batches: dict[str, list[int]] = {}
    for event in run.events("learner", "delivered", "acked"):
        if event["event"] == "delivered":
            batches[event["batch"]] = [group["number"] for group in event["groups"]]
            assert not acked & set(batches[event["batch"]])
        else:
            acked |= set(batches[event["batch"]])
    assert acked == used.keys(), "all that was learned was acknowledged"
    assert run.status["leased_groups"] == 0


def check_versions(run: Run) -> None:
    """Promise 4: the logprobs of each turn are those of the version that it names, not of its neighbour."""
    base = {name: tensor.clone() for name, tensor in network_of(run).state_dict().items()}
    weights = {0: base}
    for folder in (run.folder / "adapters").glob("v*"):
        weights[int(folder.name[1:])] = with_adapter(base, folder)
    network = network_of(run)
    right: list[np.ndarray] = []
    wrong: list[np.ndarray] = []
    for event in run.events("learner", "delivered"):
        for group in event["groups"]:
            for row in range(len(group["ids"])):
                for (start, end), version in zip(
                    group["turns"][row], group["turn_versions"][row], strict=True
                ):
                    said = np.array(group["logprobs"][row][start:end])
                    for gaps, number in ((right, version), (wrong, version + 1)):
                        if number in weights:
                            network.load_state_dict(weights[number])
                            ids = group["ids"][row]
                            gaps.append(np.abs(full_logprobs(network, ids[:start], ids[start:end]) - said))
    assert np.concatenate(right).max() < 2e-4
    assert np.concatenate(right).mean() < 2e-5
    assert np.concatenate(wrong).mean() > 100 * np.concatenate(right).mean()


def network_of(run: Run) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()


def with_adapter(base: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The base's weights with a LoRA adapter added, by its definition."""
    tensors, changed = load_file(folder / "adapter_model.safetensors"), dict(base)
    for key in tensors:
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            product = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
            changed[name] = base[name] + ALPHA / RANK * product
    return changed


def check_policies(run: Run) -> None:
    """Promise 5."""
    assert run.policy.finished
    versions = [line["version"] for line in lines_of(run.run / "metrics.jsonl")]
    assert versions == sorted(set(versions)) and run.policy.version == versions[-1]
    summary = json.loads((run.run / "summary.json").read_text())
    assert (summary["status"], summary["updates"]) == ("finished", UPDATES)
    held: set[int] = set()
    for event in run.events("learner", "held", "pruned"):
        if event["event"] == "held":
            held = set(event["versions"])
            continue
        before, left = set(event["before"]), set(event["left"])
        used = held | set(range(event["newest"] - KEPT_VERSIONS - run.lag, event["newest"] + 1))
        assert left == before & used, "what is held stays, what nobody can use goes"
    if not run.lag:
        assert len(versions_in(run.run / "adapters")) < versions[-1], "some were deleted"
    for name in ("serve", "collect", "learner"):
        assert "Traceback" not in (run.folder / f"{name}.log").read_text()
    assert not (run.run / "leases.json").exists()


def check(run: Run) -> None:
    run.finish()
    check_groups(run)
    check_versions(run)
    check_policies(run)


# -- the kills -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ahead", "exact"])
def test_each_of_four_processes_is_killed_and_nothing_acknowledged_is_lost(
    mode: str, model: Path, python: Path, tmp_path: Path, numbers: list[int]
) -> None:
    """Where the collector plays ahead, and where it plays exactly what the newest version lacks."""
    run = Run(tmp_path, model, python, numbers, lag=LAG if mode == "ahead" else 0)
    with run.processes:
        kill_server(run)
        kill_vllm(run)
        kill_collector(run)
        kill_learner(run)
        check(run)


def kill_server(run: Run) -> None:
    """While the learner has a batch and the collector goes on."""
    run.hold("learner", "leased")
    for name in ("serve", "vllm"):
        run.processes.start(name)
    run.processes.until(lambda: healthy(run.batches) and healthy(run.vllm))
    for name in ("collect", "learner"):
        run.processes.start(name)
    run.until_held("learner", "leased")
    run.kill("serve")
    run.processes.start("serve")
    run.processes.until(lambda: healthy(run.batches))


def kill_vllm(run: Run) -> None:
    """While it answers requests under an adapter, which it then does not know any more."""
    run.hold("vllm", "asked")
    run.let_go("learner")
    name = run.until_held("vllm", "asked")["name"]
    run.kill("vllm")
    run.hold("collect", "kept")
    run.processes.start("vllm")
    run.processes.until(lambda: [e["name"] for e in run.events("vllm", "loaded")].count(name) == 2)


def kill_collector(run: Run) -> None:
    """While groups lie in the spool; and after the server has taken one that lies there still."""
    kept = run.until_held("collect", "kept")["versions"]
    run.kill("collect")
    run.hold("collect", "answered")
    run.processes.start("collect")
    number = run.until_held("collect", "answered")["number"]
    assert str(number) in kept, "what was left behind comes first"
    run.kill("collect")
    run.hold("learner", "leased")
    run.processes.start("collect")
    run.processes.until(lambda: [e["number"] for e in run.events("collect", "answered")].count(number) == 2)


def kill_learner(run: Run) -> None:
    """Before a step; and after a checkpoint whose batch it has not acknowledged yet."""
    update = run.until_held("learner", "leased")["update"]
    batch = run.events("learner", "delivered")[-1]
    run.kill("learner")
    run.hold("learner", "checkpoint")
    run.processes.start("learner")
    assert run.until_held("learner", "checkpoint")["update"] == update, "it went on at its checkpoint"
    again = run.events("learner", "delivered")[-1]
    if run.lag:
        assert [one["number"] for one in again["groups"]] == [one["number"] for one in batch["groups"]]
        assert again["delivery"] == 2, "it did not wait for the end of the lease"
    else:
        oldest = min(one["version"] for one in again["groups"])
        assert oldest > max(one["version"] for one in batch["groups"]), "the newest version's alone are used"
    run.kill("learner")
    run.processes.start("learner")
