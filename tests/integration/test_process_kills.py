"""A run of four processes, each of which is killed with -9 in its midst: every group is accounted for.

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

from pathlib import Path

import pytest

from tests.tools.four_processes import FourProcesses
from tests.tools.group_account import Account, check_versions
from tests.tools.processes import ECHO, fake_vllm_python, ports, sharp_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

UPDATES = 12  # more than there can be groups for before the last kill
GROUPS = 2  # of an update
RANK, ALPHA = 2, 32
LAGS = {
    "ahead": 20,
    "exact": 0,
}  # in the one no group is too old, in the other only the newest version's count


@pytest.mark.parametrize("mode", ["ahead", "exact"])
def test_each_of_four_processes_is_killed_and_nothing_acknowledged_is_lost(mode: str, tmp_path: Path) -> None:
    """Where the collector plays ahead, and where it plays exactly what the newest version lacks."""
    model, python = sharp_base(tmp_path / "base"), fake_vllm_python(tmp_path / "site")
    (tmp_path / "task.py").write_text(ECHO)
    learn = [
        "--groups-per-update",
        str(GROUPS),
        "--episodes",
        "4",
        "--no-drop-equal",
        "--learning-rate",
        "1e-2",
    ]
    with ports(2) as numbers:
        run = FourProcesses(
            tmp_path,
            numbers,
            [
                *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
                *("--port", str(numbers[1]), "--enable-lora", "--max-lora-rank", "8"),
                *("--max-model-len", "512", "--logprobs-mode", "processed_logprobs"),
            ],
            model=model,
            task=["--env", "task:Echo", "--group-size", "4", "--policy", str(model)],
            play=["--concurrency", "8"],
            learn=[*learn, "--lora-rank", str(RANK), "--lora-alpha", str(ALPHA)],
            updates=UPDATES,
            lag=LAGS[mode],
            env={},
        )
        with run.processes:
            run.kill_each(["serve", "vllm", "collect", "learner"])
            run.until_ended()
            account = Account.of(run)
            run.end_servers()
    account.check(run, GROUPS)
    account.check_versions(run)
    largest, mean, neighbour = check_versions(run, ALPHA / RANK)
    assert largest < 2e-4 and mean < 2e-5 and neighbour > 100 * mean
    for name in ("serve", "collect", "learner"):
        assert "Traceback" not in (tmp_path / f"{name}.log").read_text()
