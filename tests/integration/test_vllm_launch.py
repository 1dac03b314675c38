"""VLLMServer as it is used: a process that is started, found broken, restarted, and never left behind.

The server is the fake one, under the real one's module name: what is tested is the launching.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_gym.engines import VLLMEngine, VLLMServer, make_engine
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import EngineUnreachable, MissingData
from tests.tools.tiny_llama import adapter_tensors, tiny_llama, write_adapter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=8, seed=7)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Returns variables under which `python -m vllm.entrypoints.openai.api_server` is the fake server."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    (package / "api_server.py").write_text(f"{child}\nfrom tests.tools.fake_vllm import main\nmain()\n")
    return {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}


def group(pid: int) -> list[int]:
    """Returns the processes of a group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while group(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not group(pid)


def test_an_engine_that_launches_its_server(tmp_path: Path, env: dict[str, str]) -> None:
    model, log = tmp_path / "model", tmp_path / "logs" / "vllm.log"
    model.mkdir()
    engine = make_engine(
        "vllm", model=model, tokenizer="bytes", env=env, log=log, max_model_len=200, python=sys.executable
    )
    assert isinstance(engine, VLLMEngine)
    server = engine._server
    assert server is not None and len(group(server.pid)) == 2, "the server and its child"
    assert (engine.model, engine.max_context) == (str(model), 200)

    async def main() -> None:
        await engine.publish(1, write_adapter(tmp_path / "v1", adapter_tensors(tiny_llama())))
        before = await engine.generate([1, 2, 3], PARAMS)
        running = [asyncio.ensure_future(engine.generate([1, 2, 3], PARAMS)) for _ in range(5)]
        await asyncio.gather(*running)
        os.kill(server.pid, signal.SIGKILL)
        waiting = [asyncio.ensure_future(engine.generate([1, 2, 3], PARAMS.with_(seed=i))) for i in range(20)]
        await asyncio.to_thread(server.restart)
        assert all(len(completion.ids) == 8 for [completion] in await asyncio.gather(*waiting))
        assert await engine.generate([1, 2, 3], PARAMS) == before, "version 1 is there again"
        assert engine.counters["restored"] == 1
        await engine.close()

    first = server.pid
    asyncio.run(main())
    assert gone(first) and gone(server.pid) and not server.alive
    assert log.is_file()
    command = server._command
    for flag, value in (
        ("--max-loras", "3"),
        ("--max-cpu-loras", "5"),
        ("--logprobs-mode", "processed_logprobs"),
    ):
        assert command[command.index(flag) + 1] == value
    assert server.api_key not in " ".join(command), "others on the machine can read a command line"


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    with pytest.raises(EngineUnreachable, match="(?s)ended with code 1.*torchvision::nms does not exist"):
        VLLMServer.launch(tmp_path, env=env, log=tmp_path / "log")


def test_a_server_that_never_serves_is_ended(tmp_path: Path, env: dict[str, str]) -> None:
    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(script)
    with pytest.raises(EngineUnreachable, match="does not serve after startup_timeout=3 s.*is empty"):
        VLLMServer.launch(tmp_path, env=env, log=tmp_path / "log", startup_timeout=3)
    if (tmp_path / "pid").exists():
        assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("end", ["kill", "exit", "exception"])
def test_no_server_outlives_its_owner(tmp_path: Path, env: dict[str, str], end: str) -> None:
    endings = {"kill": "os.kill(os.getpid(), 9)", "exit": "os._exit(0)", "exception": "raise SystemExit(3)"}
    owner = (
        "import os\nfrom atropos_gym.engines import VLLMServer\n"
        f"server = VLLMServer.launch({str(tmp_path)!r}, env={env!r}, log={str(tmp_path / 'log')!r})\n"
        f"print(server.pid, flush=True)\n{endings[end]}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", owner], capture_output=True, text=True, timeout=120, check=False
    )
    pid = int(done.stdout)
    assert gone(pid), done.stderr


def test_no_server_outlives_its_guard(tmp_path: Path, env: dict[str, str]) -> None:
    with VLLMServer.launch(tmp_path, env=env, log=tmp_path / "log") as server:
        assert server._guard is not None
        server._guard.kill()
        deadline = time.monotonic() + 60
        while server.pid in group(server.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.pid not in group(server.pid)
        for pid in group(server.pid):  # the fake's child, which knows nothing of its parent's end
            os.kill(pid, signal.SIGKILL)


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="has no vLLM: give python= .--vllm-python. the interpreter"):
        bare = tmp_path / "python"
        bare.write_text("""#!/bin/sh\necho '{"vllm": false, "cpu": false}'\n""")
        bare.chmod(0o755)
        VLLMServer.launch(tmp_path, python=bare)
    with pytest.raises(MissingData, match="is no interpreter that runs"):
        VLLMServer.launch(tmp_path, python=tmp_path / "nothing")
