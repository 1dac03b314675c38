"""A run as four processes (batch server, vLLM, collector, learner), of which some are killed with -9.

What they do with groups stands in their records (``recorded.py``), which also let a process wait between two
steps until it is killed; ``group_account.py`` says what became of each group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.tools.processes import ROOT, Processes, atropos, healthy, lines_of
from tests.tools.recorded import hold_of

__all__ = ["KEY", "FourProcesses"]

KEY = "a-key-of-the-test"

#: Who waits at which event for the kill of a process.
TURNS = {
    "serve": ("learner", "leased"),
    "vllm": ("vllm", "asked"),
    "collect": ("collect", "kept"),
    "learner": ("learner", "leased"),
}


class FourProcesses:
    """The processes of a run, by name: ``serve``, ``vllm``, ``collect`` and ``learner``.

    Args:
        folder: for everything that the run writes.
        ports: of batch server and vLLM.
        vllm: command that serves at the second port.
        model: the policy.
        task: flags of the environment, for collector and learner.
        play: further flags of the collector.
        learn: further flags of the learner.
        updates: after which it ends.
        lag: versions that a group may be old.
        env: further variables.

    Attributes:
        run: the learner's folder.
    """

    def __init__(
        self,
        folder: Path,
        ports: list[int],
        vllm: list[str],
        *,
        model: Path,
        task: list[str],
        play: list[str],
        learn: list[str],
        updates: int,
        lag: int,
        env: Mapping[str, str],
    ) -> None:
        self.folder, self.model, self.updates, self.lag = folder, model, updates, lag
        self.run = folder / "runs" / "x"
        self.batches, self.vllm = (f"http://127.0.0.1:{port}" for port in ports)
        learn = [*learn, "--server", self.batches, "--updates", str(updates), "--checkpoint-every", "1"]
        learn += ["--max-staleness", str(lag), "--name", "x", "--runs", str(folder / "runs")]
        play = [*play, "--engine", f"vllm:{self.vllm}", "--to", self.batches]
        commands = {
            "serve": atropos("serve", "--port", str(ports[0]), "--store", str(folder / "store.sqlite")),
            "vllm": vllm,
            "collect": self._recorded("collect", *task, *play, "--spool", str(folder / "spool")),
            "learner": self._recorded("train", *task, *learn),
        }
        ours = {"VLLM_API_KEY": KEY, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "OMP_NUM_THREADS": "1"}
        record = {"RECORDED_SERVER": str(self.record("vllm")), "PYTHONPATH": str(ROOT)}
        self.processes = Processes(folder, commands, {**ours, **record, **env})
        self._before: dict[str, int] = {}  # events that were there when a process was told to wait

    def _recorded(self, verb: str, *words: str) -> list[str]:
        name = "learner" if verb == "train" else verb
        return [sys.executable, "-m", "tests.tools.recorded", str(self.record(name)), verb, *words]

    def record(self, name: str) -> Path:
        """The file of a process's events."""
        return self.folder / f"{name}.jsonl"

    def events(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """A process's events, all or of some kinds."""
        return [event for event in lines_of(self.record(name)) if not kinds or event["event"] in kinds]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """What the learner says of each update."""
        return lines_of(self.run / "metrics.jsonl")

    # -- waiting and killing ---------------------------------------------------------------------------

    def hold(self, name: str, event: str) -> None:
        """From now on a process waits after its next such event."""
        file = hold_of(self.record(name))
        self._before[name] = len(self.events(name))
        file.with_name("hold").write_text(f"{event} {self._before[name]}")
        file.with_name("hold").rename(file)

    def until_held(self, name: str, event: str) -> dict[str, Any]:
        """Waits until a process waits after such an event, and returns that."""
        if not hold_of(self.record(name)).exists():
            self.hold(name, event)

        def held() -> dict[str, Any] | None:
            events = self.events(name)[self._before[name] :]
            return next((one for one in events if one["held"] and one["event"] == event), None)

        found: dict[str, Any] = self.processes.until(held)
        return found

    def kill(self, name: str) -> None:
        """Kills a process with -9; a learner is started again as one that goes on with its run."""
        self.processes.kill(name)
        hold_of(self.record(name)).unlink(missing_ok=True)
        if name == "learner":
            self.processes.commands[name] = self._recorded("train", "--resume", str(self.run))

    def kill_each(self, names: list[str]) -> None:
        """Starts the run and kills these processes in turn; each goes on from where it was.

        Who is to be killed next is told to wait before the one before it is let go, so that the run does not
        come to its end meanwhile, however slow this process is.
        """
        turns = [TURNS[name] for name in names]
        if turns:
            self.hold(*turns[0])
        for name in ("serve", "vllm"):
            self.processes.start(name)
        self.processes.until(lambda: healthy(self.batches) and healthy(self.vllm))
        for name in ("collect", "learner"):
            self.processes.start(name)
        kill = {"serve": self.kill_server, "vllm": self.kill_vllm}
        kill |= {"collect": self.kill_collector, "learner": self.kill_learner}
        for name, following in zip(names, [*turns[1:], None], strict=False):
            kill[name](lambda following=following: None if following is None else self.hold(*following))

    def kill_server(self, then: Callable[[], None]) -> None:
        """Kills the batch server while the learner has a batch."""
        self.until_held("learner", "leased")
        self.kill("serve")
        self.processes.start("serve")
        self.processes.until(lambda: healthy(self.batches))
        then()
        hold_of(self.record("learner")).unlink()

    def kill_vllm(self, then: Callable[[], None]) -> None:
        """Kills vLLM while it answers requests under an adapter, which it then does not know any more."""
        name = self.until_held("vllm", "asked")["name"]
        self.kill("vllm")
        then()
        self.processes.start("vllm")
        self.processes.until(lambda: [e["name"] for e in self.events("vllm", "loaded")].count(name) == 2)

    def kill_collector(self, then: Callable[[], None]) -> None:
        """Kills the collector with groups in its spool; and when the server has one that lies there still."""
        kept = self.until_held("collect", "kept")["versions"]
        self.kill("collect")
        self.hold("collect", "answered")
        self.processes.start("collect")
        number = self.until_held("collect", "answered")["number"]
        assert str(number) in kept, "what was left behind comes first"
        self.kill("collect")
        then()
        self.processes.start("collect")
        self.processes.until(lambda: self.answered[number] == 2)

    def kill_learner(self, then: Callable[[], None]) -> None:
        """Kills the learner before a step; and after a checkpoint whose batch it has not acknowledged yet."""
        update = self.until_held("learner", "leased")["update"]
        batch = self.events("learner", "delivered")[-1]
        self.kill("learner")
        self.hold("learner", "checkpoint")
        self.processes.start("learner")
        assert self.until_held("learner", "checkpoint")["update"] == update, "it went on at its checkpoint"
        again = self.events("learner", "delivered")[-1]
        if self.lag:
            assert [one["number"] for one in again["groups"]] == [one["number"] for one in batch["groups"]]
            assert again["delivery"] == 2, "it did not wait for the end of the lease"
        else:
            oldest = min(one["version"] for one in again["groups"])
            assert oldest > max(one["version"] for one in batch["groups"]), "only the newest version's count"
        self.kill("learner")
        then()
        self.processes.start("learner")

    @property
    def answered(self) -> Counter[int]:
        """How often the server has acknowledged each group to the collector."""
        return Counter(event["number"] for event in self.events("collect", "answered"))

    def until_ended(self) -> None:
        """Waits until learner and collector have ended by themselves."""
        for name in ("learner", "collect"):
            assert self.processes.ended(name) == 0, self.processes.said(name)

    def end_servers(self) -> None:
        """Ends what serves; then nothing is left."""
        for name in ("serve", "vllm"):
            self.processes.running[name].terminate()
            self.processes.ended(name)
        self.processes.until(lambda: not self.processes.alive())
