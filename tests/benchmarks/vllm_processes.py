"""A run of four processes (batch server, collector, vLLM, learner) in which some are killed with -9.

    python tests/benchmarks/vllm_processes.py --python .venv-vllm/bin/python --kill collect --updates 4

Real vLLM, a real model, Arithmetic. After each update from the second on one more process of ``--kill`` is
killed and started again. In the end it prints what the learner wrote of each update, what the server counted,
and which adapters and folders are left.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from _vllm import CACHE

from atropos_gym.engines.launch import server_flags

SHOWN = (
    "version",
    "train/alignment",
    "train/slope",
    "train/staleness",
    "rollout/ep_rew_mean",
    "time/collect",
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """Four processes by name, each with a log of its own."""

    def __init__(self, folder: Path, commands: dict[str, list[str]], key: str) -> None:
        self.folder = folder
        self.commands = commands
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            "VLLM_API_KEY": key,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.commands[name],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kills a process and what it has started."""
        process = self.running.pop(name)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Waits; a process that ends by itself meanwhile ends the run."""
        begin = time.monotonic()
        while not true():
            for name, process in self.running.items():
                if process.poll() is not None:
                    tail = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
                    sys.exit(f"{name} ended with {process.returncode}: {tail}")
            time.sleep(0.2)
        print(f"{what} after {time.monotonic() - begin:.0f} s", flush=True)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def updates_of(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def commands_of(options: argparse.Namespace, folder: Path, batches: int, vllm: int) -> dict[str, list[str]]:
    ours = [sys.executable, "-m", "atropos_gym"]
    model, server = str(options.model), f"http://127.0.0.1:{batches}"
    task = ["--env-arg", "max_turn_tokens=16", "--env-arg", "high=4", "--group-size", "8"]
    return {
        "serve": [*ours, "serve", "--port", str(batches), "--store", str(folder / "store.sqlite")],
        "vllm": [
            *(str(options.python), "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", "127.0.0.1", "--port", str(vllm), "--dtype", "float32", "--max-model-len", "512"),
            *("--block-size", "32", "--enforce-eager"),
            *server_flags(3, 16),
        ],
        "collect": [
            *(*ours, "collect", "atropos/Arithmetic-v0", "--engine", f"vllm:http://127.0.0.1:{vllm}"),
            *(
                "--policy",
                model,
                *task,
                "--concurrency",
                "8",
                "--to",
                server,
                "--spool",
                str(folder / "spool"),
            ),
        ],
        "learner": [
            *(*ours, "train", "--env", "atropos/Arithmetic-v0", "--policy", model, "--server", server, *task),
            *("--updates", str(options.updates), "--groups-per-update", "2", "--episodes", "8"),
            *("--checkpoint-every", "1", "--lora-rank", "8", "--learning-rate", "3e-4", "--no-drop-equal"),
            *("--name", "run", "--runs", str(folder / "runs")),
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CACHE / "smollm2")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of vLLM's own environment")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--kill", default="collect", help="names with commas, in order")
    options = parser.parse_args()
    options.python = options.python.absolute()
    folder = Path(tempfile.mkdtemp(prefix="atropos-gym-processes-"))
    print(folder, flush=True)
    batches, vllm = free_port(), free_port()
    key = secrets.token_urlsafe(16)
    processes = Processes(folder, commands_of(options, folder, batches, vllm), key)
    run = folder / "runs" / "run"
    try:
        for name in ("serve", "vllm"):
            processes.start(name)
        urls = [f"http://127.0.0.1:{port}" for port in (batches, vllm)]
        processes.until("both servers answer", lambda: all(map(healthy, urls)))
        for name in ("collect", "learner"):
            processes.start(name)
        for number, name in enumerate(filter(None, options.kill.split(",")), 2):
            processes.until(f"update {number}", lambda n=number: len(updates_of(run)) >= n)
            processes.kill(name)
            print(f"kill -9 of {name}", flush=True)
            if name == "learner":
                processes.commands[name] = [
                    sys.executable,
                    "-m",
                    "atropos_gym",
                    "train",
                    "--resume",
                    str(run),
                ]
            processes.start(name)
        processes.until("the last update", lambda: len(updates_of(run)) >= options.updates)
        for name in ("learner", "collect"):
            print(f"{name} left by itself with {processes.running.pop(name).wait(600)}", flush=True)
        for line in updates_of(run):
            print(line["update"], {key: line[key] for key in SHOWN if key in line})
        status = httpx.get(f"{urls[0]}/status", trust_env=False).json()
        print({key: value for key, value in status.items() if isinstance(value, (int, str))})
        headers = {"Authorization": f"Bearer {key}"}
        served = httpx.get(f"{urls[1]}/v1/models", headers=headers, trust_env=False).json()["data"]
        print("served:", [entry["id"] for entry in served])
        print("folders:", sorted(path.name for path in (run / "adapters").iterdir()))
    finally:
        for name in list(processes.running):
            processes.kill(name)


if __name__ == "__main__":
    main()
