"""A run of four processes (batch server, collector, vLLM, learner), each killed with -9; its groups counted.

    python tests/benchmarks/vllm_processes.py --python .venv-vllm/bin/python

Real vLLM, a real model, Arithmetic. What ``--kill`` names is killed in its order: the batch server while the
learner has a batch; vLLM while it samples under an adapter; the collector with groups in its spool, and again
when the server has one that lies there still; the learner before a step, and again after a checkpoint whose
batch it has not acknowledged. Then every group is counted (``tests/tools/group_account.py``): none that was
acknowledged may be lost, or be learned from twice. Two starts of vLLM take most of the time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests.tools, from wherever this is started

from _vllm import CACHE  # noqa: E402

from atropos_gym.engines.launch import server_flags  # noqa: E402
from tests.tools.four_processes import KEY, FourProcesses  # noqa: E402
from tests.tools.group_account import Account, check_versions  # noqa: E402
from tests.tools.processes import healthy, models_of, ports  # noqa: E402
from tests.tools.recorded import hold_of  # noqa: E402

RANK, ALPHA = 8, 16
GROUPS = 2  # of an update
SHOWN = (
    "version",
    "train/alignment",
    "train/alignment_max",
    "train/staleness",
    "rollout/ep_rew_mean",
    "time/collect",
)


class RealVLLM(FourProcesses):
    """The run with a server that is not ours to record: what it does shows from outside."""

    def kill_vllm(self, then: Callable[[], None]) -> None:
        """Kills vLLM while it samples, and looks for the adapters that it had."""
        self.processes.until(lambda: self.adapters() and self.samples())
        before, group = self.adapters(), self.processes.running["vllm"].pid
        self.kill("vllm")
        self.hold("learner", "leased")  # else it ends meanwhile with what is queued
        print(f"vLLM had {sorted(before)}; its children are {ended(group)}", flush=True)
        start = time.monotonic()
        self.processes.start("vllm")
        self.processes.until(lambda: healthy(self.vllm))
        print(f"vLLM serves again after {time.monotonic() - start:.0f} s", flush=True)
        self.processes.until(lambda: self.adapters())
        print(f"vLLM has {sorted(self.adapters())} again", flush=True)
        hold_of(self.record("learner")).unlink()
        then()

    def adapters(self) -> set[str]:
        """Versions that the collector has loaded."""
        return {entry["id"] for entry in models_of(self.vllm, KEY) if "-v" in entry["id"]}

    def samples(self) -> bool:
        """Whether the server works on a request."""
        lines = httpx.get(f"{self.vllm}/metrics", trust_env=False).text.splitlines()
        running = [line for line in lines if line.startswith("vllm:num_requests_running")]
        return any(float(line.split()[-1]) > 0 for line in running)


def ended(group: int) -> str:
    """Waits for the end of a killed process's group; ends what does not end by itself."""
    deadline = time.monotonic() + 20
    while running := members(group):
        if time.monotonic() > deadline:
            os.killpg(group, signal.SIGKILL)
            return f"not gone after 20 s, {running}: killed"
        time.sleep(0.2)
    return "gone"


def members(group: int) -> list[str]:
    """Names of the processes of a group that run, and have not only left their exit code."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = file.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, _, of_group = rest.split()[:3]
        if int(of_group) == group and state != "Z":
            found.append(name)
    return found


def run_of(options: argparse.Namespace, folder: Path, numbers: list[int]) -> RealVLLM:
    model = str(options.model)
    task = ["--env", "atropos/Arithmetic-v0", "--env-arg", "max_turn_tokens=8", "--env-arg", "high=4"]
    return RealVLLM(
        folder,
        numbers,
        [
            *(str(options.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", "127.0.0.1", "--port", str(numbers[1]), "--dtype", "float32"),
            *("--max-model-len", "512", "--block-size", "32", "--enforce-eager"),
            *server_flags(3, RANK),
        ],
        model=options.model,
        task=[*task, "--policy", model, "--group-size", "4"],
        play=["--concurrency", "8"],
        learn=[
            *("--groups-per-update", str(GROUPS), "--episodes", "4", "--no-drop-equal"),
            # So that every update changes the weights, whether or not anything was right.
            *("--entropy", "0.01", "--learning-rate", "3e-4"),
            *("--lora-rank", str(RANK), "--lora-alpha", str(ALPHA)),
        ],
        updates=options.updates,
        lag=options.lag,
        env={
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CACHE / "smollm2")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of vLLM's own environment")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--lag", type=int, default=20, help="versions that a group may be old; 0: none")
    parser.add_argument("--kill", default="serve,vllm,collect,learner", help="names with commas, in order")
    options = parser.parse_args()
    options.python = options.python.absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # and leave no process
    folder = Path(tempfile.mkdtemp(prefix="atropos-gym-processes-"))
    print(folder, flush=True)
    begin = time.monotonic()
    with ports(2) as numbers:
        run = run_of(options, folder, numbers)
        with run.processes:
            run.kill_each(list(filter(None, options.kill.split(","))))
            print(f"all of {options.kill} killed after {time.monotonic() - begin:.0f} s", flush=True)
            run.until_ended()
            account = Account.of(run)
            print("vLLM lists:", sorted(entry["id"] for entry in models_of(run.vllm, KEY)))
            run.end_servers()
    print(f"the run has ended after {time.monotonic() - begin:.0f} s")
    for line in run.metrics:
        print(line["update"], {key: line[key] for key in SHOWN if key in line})
    print(account)
    print("folders:", sorted(path.name for path in (run.run / "adapters").iterdir()))
    account.check(run, GROUPS)
    account.check_versions(run)
    largest, mean, neighbour = check_versions(run, ALPHA / RANK, rows=1)
    print(
        f"|learner - vLLM| under the version that a row names: mean {mean:.1e}, max {largest:.1e}; ", end=""
    )
    print(f"under the next one: mean {neighbour:.1e}")
    print("nothing that was acknowledged is lost, nothing was learned from twice")


if __name__ == "__main__":
    main()
