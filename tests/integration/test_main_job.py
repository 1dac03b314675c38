"""The main job and its verbs in processes of their own, small: every part is real, only the numbers are less.

A dead proxy stands in the environment throughout: nothing here may go through it.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_gym.cli.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = "--groups-per-update 8 --warm-up 40 --no-check-lesson --episodes 64 --final-episodes 64".split()
DEAD = "http://127.0.0.1:9"
PROXIES = {
    name: DEAD
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
}


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """What a test that failed has left running does not compute on."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def environment() -> dict[str, str]:
    return {**os.environ, **PROXIES, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_gym", *words],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that was started in the background ignores interrupts, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    STARTED.append(process)
    return process


def run(folder: Path, *words: str) -> tuple[int, str, str]:
    process = start(folder, *words)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def summary(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "summary.json").read_text()))


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 200) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
    return found


def cpu_seconds(pid: int) -> float:
    """What a running process has computed so far."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    return [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if (fields := _stat(stat)) and fields[1] == str(pid)
    ]


def _stat(path: Path) -> list[str]:
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


def gone(pid: int) -> bool:
    return not (fields := _stat(Path(f"/proc/{pid}/stat"))) or fields[0] == "Z"


def wait_until_gone(pids: list[int], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"left behind: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, str]]:
    folder = tmp_path_factory.mktemp("jobs")
    code, out, err = run(folder, "train", "--name", "small", "--updates", "3", *SMALL)
    assert code == 0, err
    yield folder, out, err


def test_it_writes_all_that_it_promises(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    path = folder / "runs/small"
    written = summary(path)
    assert written["status"] == "finished"
    for stage in ("untrained", "before", "after"):
        row = written[stage]
        assert {"mean", "stderr", "episodes", "valid", "exact", "exact_sampled"} <= row.keys()
        assert -1 - 1e-9 <= row["exact"] <= written["optimal"]
        assert row["episodes"] == 64
    assert written["untrained"]["valid"] == 0
    assert abs(written["random"] + 0.3942) < 1e-4
    assert abs(written["optimal"] + 0.0431) < 1e-4
    assert (written["updates"], written["seed"]) == (3, 0)
    assert written["swaps"] >= 3
    assert written["cpu_seconds"] > 0
    assert set(written["seconds"]) == {"set-up", "evaluation", "format lesson", "GRPO"}
    assert [line["update"] for line in lines(path / "metrics.jsonl")] == [1, 2, 3]
    assert [point["update"] for point in written["curve"]] == [0, 3]
    assert Config.model_validate(yaml.safe_load((path / "config.yaml").read_text())).updates == 3
    for stage in ("untrained", "before", "after"):
        assert len(lines(path / f"rollouts/{stage}.jsonl")) == 2
    assert sorted(p.name for p in (path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not list(path.rglob("*.tmp"))


def test_it_prints_three_rows_beside_the_known_values(finished: tuple[Path, str, str]) -> None:
    _, out, err = finished
    starts = ["untrained weights", "after the format lesson", "after GRPO", "textbook", "stick on 17"]
    assert [line for line in starts if f"\n{line}" in out] == starts
    assert out.strip().splitlines()[-1] == "report: runs/small/report.html"
    assert "Traceback" not in err


def test_its_report_shows_every_part(finished: tuple[Path, str, str]) -> None:
    page = (finished[0] / "runs/small/report.html").read_text()
    for part in (
        "Three stages",
        "Learning curve",
        "What it learned to do",
        "Sample episodes",
        "Seconds by phase",
    ):
        assert part in page
    assert '<b class="s y p' in page  # sampled ids stand out


def test_its_adapter_is_what_peft_loads(finished: tuple[Path, str, str]) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    path = finished[0] / "runs/small"
    base = transformers.LlamaForCausalLM.from_pretrained(path / "base")
    model = peft.PeftModel.from_pretrained(base, path / "adapter")
    weights = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert weights
    assert any(bool(p.abs().sum() > 0) for p in weights)


def test_it_can_be_evaluated_and_collected_from(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    code, out, err = run(folder, "eval", "--policy", "runs/small", "--episodes", "64")
    assert code == 0, err
    mean = float(out.splitlines()[1].split()[1])
    assert mean == pytest.approx(summary(folder / "runs/small")["after"]["mean"], abs=1e-4)
    words = ["--policy", "runs/small", "--groups", "3", "--group-size", "2"]
    for name in ("a.jsonl", "a.html"):
        code, out, err = run(folder, "collect", *words, "--out", name)
        assert code == 0, err
        assert f"{name}: 3 groups, 6 episodes" in out
    assert len(lines(folder / "a.jsonl")) == 3
    assert "<!doctype html>" in (folder / "a.html").read_text()


def test_a_finished_run_is_not_repeated(finished: tuple[Path, str, str]) -> None:
    code, out, err = run(finished[0], "train", "--resume", "runs/small")
    assert code == 0
    assert "is finished" in err
    assert "after GRPO" in out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_an_interrupt_ends_it_soon_and_in_order(tmp_path: Path, sent: signal.Signals) -> None:
    finished_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = start(tmp_path, "train", "--name", "cut", "--updates", "5000", *SMALL)
    metrics = tmp_path / "runs/cut/metrics.jsonl"
    wait_for(lambda: len(lines(metrics)) >= 2, process)
    below = children(process.pid)
    assert below  # the batch server
    before = sum(map(cpu_seconds, (process.pid, *below)))
    process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = sum(finished[:2]) - sum(finished_before[:2])  # of the job and its server
    assert process.returncode == 128 + sent
    assert whole - before < 5, "seconds of computing, however busy the machine is"
    assert "Traceback" not in err
    assert all(map(gone, below))
    assert "train --resume runs/cut" in err
    assert summary(tmp_path / "runs/cut")["status"] == "interrupted"
    assert (tmp_path / "runs/cut/report.html").read_text().rstrip().endswith("</html>")
    assert len(lines(metrics)) >= 2


def test_an_interrupt_in_the_lesson_ends_it_too(tmp_path: Path) -> None:
    process = start(tmp_path, "train", "--name", "cut", "--warm-up", "100000", "--episodes", "16")
    wait_for(lambda: "untrained" in _text(tmp_path / "runs/cut/summary.json"), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_after_kill_9_resume_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    words = ["--updates", "8", "--checkpoint-every", "2", "--eval-every", "2"]
    process = start(tmp_path, "train", "--name", "killed", *words, *SMALL)
    path = tmp_path / "runs/killed"
    wait_for(lambda: len(lines(path / "metrics.jsonl")) >= 3, process)
    below = children(process.pid)
    process.kill()
    process.communicate()
    wait_until_gone(below)
    before = summary(path)
    assert before["status"] == "running"
    code, out, err = run(tmp_path, "train", "--resume", "runs/killed")
    assert code == 0, err
    after = summary(path)
    assert after["status"] == "finished"
    assert after["untrained"] == before["untrained"]  # finished stages are not repeated
    assert after["before"] == before["before"]
    assert "format lesson" not in err
    metrics = lines(path / "metrics.jsonl")
    assert [line["update"] for line in metrics] == list(range(1, 9))
    versions = [line["version"] for line in metrics]
    assert versions == sorted(set(versions))
    assert [point["update"] for point in after["curve"]] == [0, 2, 4, 6, 8]
    rates = [line["train/learning_rate"] for line in metrics]
    assert rates[-1] < rates[4]  # the schedule goes on where it was


def test_a_lesson_that_failed_fails_the_job(tmp_path: Path) -> None:
    words = ["--name", "short", "--warm-up", "2", "--episodes", "64"]
    code, out, err = run(tmp_path, "train", *words)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("atropos-gym: after the format lesson 0.0 % of replies are valid")
    assert "--warm-up" in last
    assert summary(tmp_path / "runs/short")["status"].startswith("failed: after the format lesson")


def test_any_other_environment_is_the_same_verb(tmp_path: Path) -> None:
    words = (
        "--env atropos/Arithmetic-v0 --env-arg describe=terse --warm-up 20 --updates 3 --episodes 32".split()
    )
    code, out, err = run(tmp_path, "train", *words)
    assert code == 0, err
    path = tmp_path / "runs/arithmetic-1"
    written = summary(path)
    assert {"mean", "stderr", "episodes"} <= written["before"].keys() & written["after"].keys()
    assert "exact" not in written["after"]
    assert "Learning curve" in (path / "report.html").read_text()
    assert len(lines(path / "metrics.jsonl")) == 3


def test_server_service_and_trainer_in_three_processes(tmp_path: Path) -> None:
    server = start(tmp_path, "serve", "--port", "0")
    started = [server]
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        task = ["--env", "atropos/Blackjack-v0", "--env-arg", "describe=terse", "--history", "latest"]
        trainer = start(
            tmp_path, "train", *task, "--server", url, "--name", "far", "--updates", "2", *SMALL[:3], "40",
            "--episodes", "32",
        )  # fmt: skip
        started.append(trainer)
        wait_for(lambda: "before" in _text(tmp_path / "runs/far/summary.json"), trainer)
        service = start(tmp_path, "collect", "--policy", "runs/far", "--to", url)
        started.append(service)
        out, err = trainer.communicate(timeout=200)
        assert trainer.returncode == 0, err
        out, err = service.communicate(timeout=120)
        assert service.returncode == 0, err
        posted = re.search(r"the trainer has finished: (\d+) groups posted", out)
        assert posted is not None
        assert int(posted[1]) >= 16
    finally:
        for process in reversed(started):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
    assert server.returncode == 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
