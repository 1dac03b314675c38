"""What became of each group of a run, counted from the records of its processes and from the batch server.

A group is known by its number: the collector never plays one twice.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.spool import Spool
from atropos_gym.trainers._learning import KEPT_VERSIONS
from tests.tools.four_processes import FourProcesses
from tests.tools.recorded import number_of, versions_in

__all__ = ["Account", "check_versions"]


@dataclass
class Account:
    """What became of each group of a run, by number.

    Attributes:
        kept: versions of the groups that the collector had finished.
        answered: how often the server has acknowledged each.
        in_spool: those that lie in the collector's spool.
        used: those that each update learned from, by the checkpoints.
        acked: those whose batch the learner has acknowledged.
        again_after_ack: those that came to the learner after that.
        left: those that wait at the server.
        aside: how many the server has set aside, by reason.
        received: how many the server says that it has received.
        leased: how many the server says are handed out.
        newest: version at the end.
        finished: the server knows that the run has ended.
    """

    kept: dict[int, int]
    answered: Counter[int]
    in_spool: set[int]
    received: int
    aside: dict[str, int]
    leased: int
    newest: int
    finished: bool
    used: dict[int, list[int]] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    again_after_ack: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, run: FourProcesses) -> Account:
        """Reads the records of a run that has ended, and takes what is left from its batch server."""
        spool = Spool(run.folder / "spool")
        in_spool = {number_of(group) for group in spool.groups()}
        spool.close()
        with BatchClient(run.batches) as client:
            status, policy = client.status(), client.policy()
            envs = client._http.get("/envs").json()["envs"]
            metrics = client._http.get("/metrics").text.splitlines()
            left: list[int] = []
            while (batch := client.batch(groups=1)) is not None:
                left += map(number_of, batch.groups)
        aside = {
            line.split('"')[1]: int(float(line.split()[-1]))
            for line in metrics
            if line.startswith("atropos_groups_set_aside_total{")
        }
        kept = [event["versions"] for event in run.events("collect", "kept")]
        assert sum(map(len, kept)) == len(set().union(*kept)), "no number was played twice"
        account = cls(
            kept={int(number): version for versions in kept for number, version in versions.items()},
            answered=run.answered,
            in_spool=in_spool,
            received=sum(env["groups_received"] for env in envs),
            aside=aside,
            leased=status["leased_groups"],
            newest=policy.version or 0,
            finished=policy.finished,
            left=left,
        )
        account._follow(run.events("learner", "delivered", "checkpoint", "acked"))
        return account

    def _follow(self, events: list[dict[str, Any]]) -> None:
        """An update learned from the batch that was delivered last before its checkpoint."""
        batches: dict[str, list[int]] = {}
        last: list[int] = []
        for event in events:
            if event["event"] == "delivered":
                last = batches[event["batch"]] = [group["number"] for group in event["groups"]]
                self.again_after_ack |= self.acked & set(last)
            elif event["event"] == "acked":
                self.acked |= set(batches[event["batch"]])
            else:
                assert event["update"] not in self.used, "an update was made twice"
                self.used[event["update"]], last = last, []

    @cached_property
    def times_used(self) -> Counter[int]:
        """How often each group was learned from."""
        return Counter(number for numbers in self.used.values() for number in numbers)

    @property
    def gone(self) -> set[int]:
        """Those that the server had and that neither were used nor wait."""
        return self.answered.keys() - self.times_used.keys() - set(self.left)

    def check(self, run: FourProcesses, groups: int) -> None:
        """Asserts that nothing is lost, and nothing is used twice; ``groups`` make an update."""
        assert self.kept.keys() - self.answered.keys() == self.in_spool, "at the server, or in the spool"
        # What the collector had no answer for at its end may be there and in its spool.
        assert len(self.answered) <= self.received <= len(self.answered) + len(self.in_spool), "taken once"
        assert sorted(self.used) == list(range(1, run.updates + 1))
        assert [line["update"] for line in run.metrics] == list(range(1, run.updates + 1))
        assert {len(numbers) for numbers in self.used.values()} == {groups}
        assert set(self.times_used.values()) == {1}, "no group was learned from twice"
        assert self.acked == self.times_used.keys(), "all that was learned was acknowledged"
        assert not self.again_after_ack and self.leased == 0
        assert len(set(self.left)) == len(self.left) and not self.acked & set(self.left)
        assert self.acked | set(self.left) <= self.answered.keys() | self.in_spool
        # All the rest is what the server says it has set aside, and was as old as that.
        assert set(self.aside) <= {"older than max_policy_lag"}
        counted = sum(self.aside.values())
        assert len(self.gone) <= counted <= len(self.gone) + len(self.in_spool), (self.gone, self.aside)
        assert all(self.kept[number] < self.newest - run.lag for number in self.gone)

    def check_versions(self, run: FourProcesses) -> None:
        """Asserts that versions grow, and that the learner deleted only what nobody holds."""
        versions = [line["version"] for line in run.metrics]
        assert self.finished and versions == sorted(set(versions)) and self.newest == versions[-1]
        summary = json.loads((run.run / "summary.json").read_text())
        assert (summary["status"], summary["updates"]) == ("finished", run.updates)
        assert not (run.run / "leases.json").exists()
        held: set[int] = set()
        for event in run.events("learner", "held", "pruned"):
            if event["event"] == "held":
                held = set(event["versions"])
                continue
            used = held | set(range(event["newest"] - KEPT_VERSIONS - run.lag, event["newest"] + 1))
            assert set(event["left"]) == set(event["before"]) & used, "what is held stays, the rest goes"
        if run.lag == 0 and run.updates >= 2 * KEPT_VERSIONS:
            assert len(versions_in(run.run / "adapters")) < versions[-1], "some were deleted"

    def __str__(self) -> str:
        return (
            f"{len(self.kept)} groups finished, {len(self.answered)} acknowledged to the collector "
            f"({sum(self.answered.values()) - len(self.answered)} of them again), {len(self.in_spool)} in "
            f"its spool; {len(self.times_used)} learned from, {sum(self.times_used.values())} times in all, "
            f"{len(self.left)} wait, {sum(self.aside.values())} set aside {self.aside}; "
            f"{len(self.again_after_ack)} came again after an ack; version {self.newest}"
        )


def check_versions(
    run: FourProcesses, scale: float, *, rows: int | None = None
) -> tuple[float, float, float]:
    """Scores the delivered turns under the weights that they name, computed from that version's file.

    Args:
        run: one that has ended.
        scale: alpha / rank of its adapters.
        rows: of each group that are scored; None for all.

    Returns:
        Largest and mean difference of the logprobs, and the mean under the next version's weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tests.tools.tiny_llama import full_logprobs, with_adapter

    network = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32).eval()
    base = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    folders = {int(folder.name[1:]): folder for folder in (run.folder / "adapters").glob("v*")}
    turns: dict[int, list[tuple[list[int], int, int, list[float]]]] = {}
    for event in run.events("learner", "delivered"):
        for group in event["groups"]:
            for k, ids in list(enumerate(group["ids"]))[:rows]:
                for (start, end), version in zip(group["turns"][k], group["turn_versions"][k], strict=True):
                    turns.setdefault(version, []).append((ids, start, end, group["logprobs"][k][start:end]))
    right: list[np.ndarray] = []
    wrong: list[np.ndarray] = []
    for version in sorted({*turns, *(version + 1 for version in turns)}):
        if version and version not in folders:
            continue
        weights = base if version == 0 else with_adapter(base, folders[version], scale)
        network.load_state_dict(weights)
        for gaps, sampled in ((right, turns.get(version, [])), (wrong, turns.get(version - 1, []))):
            for ids, start, end, said in sampled:
                if end > start:
                    gaps.append(np.abs(full_logprobs(network, ids[:start], ids[start:end]) - np.array(said)))
    found = np.concatenate(right)
    return float(found.max()), float(found.mean()), float(np.concatenate(wrong).mean())
