"""Processes of a test by name: started, killed, started again, and none left at the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

__all__ = [
    "ECHO",
    "PATIENCE",
    "Processes",
    "atropos",
    "fake_vllm_python",
    "healthy",
    "lines_of",
    "models_of",
    "ports",
    "sharp_base",
]

ROOT = Path(__file__).parents[2]
#: Seconds; a machine may be slow.
PATIENCE = 600.0

#: The fake server under the real one's module name, with a model behind it; it can hang at a request.
SERVER = """
import asyncio, os
from pathlib import Path
from atropos_gym.engines.hf import HFEngine
from tests.tools import fake_vllm
from tests.tools.recorded import Recorder

record = os.environ.get("RECORDED_SERVER")
recorder = None if record is None else Recorder(Path(record))

class WithModel(fake_vllm.FakeVLLM):
    def __init__(self, **options):
        super().__init__(**options, backend=HFEngine(options["root"], max_live_versions=64))

    def _load(self, body):
        if recorder is not None:
            recorder.note("loaded", name=body.get("lora_name"))
        return super()._load(body)

    async def _complete(self, body):
        if recorder is not None and body.get("model") in self.adapters:
            await asyncio.to_thread(recorder.note, "asked", name=body["model"])
        return await super()._complete(body)

fake_vllm.FakeVLLM = WithModel
fake_vllm.main()
"""


#: Pays for the first id, so that an untrained model has something to learn: ``task:Echo`` beside ``task.py``.
ECHO = """
from atropos_gym import Feedback, TextEnv

class Echo(TextEnv):
    max_turns = 2
    max_turn_tokens = 6
    max_prompt_tokens = 8
    max_feedback_tokens = 8

    def begin(self, options):
        self.turn = 0
        return str(self.np_random.choice(["a", "b", "c"]))

    def respond(self, reply):
        self.turn += 1
        return Feedback("on", reward=reply.ids[0] % 16 / 16 if reply.ids else 0.0, terminated=self.turn == 2)
"""


def sharp_base(folder: Path) -> Path:
    """Writes a tiny model whose logprobs an adapter moves, and returns its folder."""
    from atropos_gym.trainers.tiny import save_base, tiny_model

    network = tiny_model()
    for name, tensor in network.state_dict().items():
        if "norm" not in name:
            tensor *= 4
    return save_base(network, folder, network.state_dict())


def fake_vllm_python(site: Path) -> Path:
    """Makes an interpreter whose vLLM is the fake one, and returns its path."""
    package = site / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(SERVER)
    interpreter = site / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH={site}:{ROOT} exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    return interpreter


@contextmanager
def ports(count: int) -> Iterator[list[int]]:
    """Yields ports that nobody else gets meanwhile: bound, not listened on."""
    with ExitStack() as stack:
        keepers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for keeper in keepers:
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            keeper.bind(("127.0.0.1", 0))
        yield [keeper.getsockname()[1] for keeper in keepers]


class Processes:
    """The processes of a test by name; each can be killed and started again. A context manager.

    Args:
        folder: where they run, and write ``<name>.log``.
        commands: by name.
        env: variables beside those of this process.
    """

    def __init__(
        self, folder: Path, commands: Mapping[str, list[str]], env: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.commands = dict(commands)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._mark = f"ATROPOS_GYM_TEST_{uuid.uuid4().hex}"  # children inherit it, whatever they are called
        self._env = {**os.environ, **(env or {}), "HF_HUB_OFFLINE": "1", self._mark: "1"}

    def start(self, name: str, **env: str) -> None:
        """Starts one; ``env`` is for this start only."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self.commands[name],
                cwd=self.folder,
                env={**self._env, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kills one with -9, and only that process: its children are its own business."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def ended(self, name: str) -> int:
        """Waits until one ends by itself; returns its exit code."""
        process = self.running.pop(name)
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.running[name] = process
            raise AssertionError(f"{name} does not end: {self.said(name)}") from None

    def until(self, condition: Callable[[], Any]) -> Any:
        """Polls until something holds; a process that ends by itself meanwhile is a failure."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            for name, process in self.running.items():
                assert process.poll() is None, f"{name} ended: {self.said(name)}"
            assert time.monotonic() < deadline, {name: self.said(name) for name in self.commands}
            time.sleep(0.05)
        return found

    def said(self, name: str) -> str:
        """The end of what one has written."""
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def alive(self) -> list[int]:
        """Process ids of everything that was started here, or by what was started here, and still runs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.running):
            self.kill(name)
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def atropos(*words: str) -> list[str]:
    """The command with these words."""
    return [sys.executable, "-m", "atropos_gym", *words]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file that may still be written to."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def healthy(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def models_of(url: str, key: str) -> list[dict[str, Any]]:
    """What a vLLM server lists: the base model, and adapters."""
    answer = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
    return list(answer.json()["data"])
