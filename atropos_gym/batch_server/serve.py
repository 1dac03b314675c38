"""Runs the batch server: in the foreground, or as a child process that never outlives its parent."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import uvicorn

from atropos_gym.batch_server._malloc import keep_freed_memory, leave_alone
from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.app import create_app
from atropos_gym.batch_server.hosts import TOKEN_VARIABLE, is_loopback, listen
from atropos_gym.batch_server.http.protocol import BoundedProtocol
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.store import MemoryStore, SqliteStore, Store
from atropos_gym.errors import ConfigError, MissingData, ServerError

__all__ = ["ServerProcess", "main", "open_store", "serve", "state_file"]

READY = "Batch server ready on "
"""How the line begins that says where the server is."""

RESUMED = "Resumed "
"""How the line before it begins, where there is one."""

KEEP_ALIVE_SECONDS = 75
"""How long an idle connection stays open: longer than clients keep theirs, so that they close it."""

STOP_SECONDS = 1.0
"""How long requests in progress may take once the server is told to stop."""


def serve(
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    store: Store | Callable[[], Store] | None = None,
    limits: Limits | None = None,
    access: Access | None = None,
    insecure: bool = False,
    tokenizer: str | None = None,
    ready: Callable[[str], None] | None = None,
    ready_file: Path | None = None,
    log_level: str = "warning",
) -> None:
    """Serves until SIGTERM or SIGINT, or nothing can be saved any more; then answers whoever waits, and ends.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        store: what the server knows, or what makes it once the port is ours; it is closed at the end. In
            memory by default.
        limits: what it allows.
        access: tokens that callers must show, and foreign pages that may ask; nobody needs one by default.
        insecure: listen on an address that others can reach, without any token.
        tokenizer: name or folder of what the dashboard shows ids with; by number by default.
        ready: called with the URL once the server answers; prints a line by default.
        ready_file: gets the URL once the server answers; removed at the end.
        log_level: uvicorn's.

    Raises:
        ConfigError: address, store or tokenizer cannot be used; one line that says why and what to do.
        ServerError: what writes the store has ended: only another process can go on, from what is saved.
    """
    access = access or Access()
    if not is_loopback(host) and access.token is None and not insecure:
        raise ConfigError(
            f"host {host!r} can be reached from other machines and there is no token: set {TOKEN_VARIABLE} "
            "or --token, use 127.0.0.1, or --insecure (insecure=True) where the network is trusted"
        )
    if tokenizer is not None:
        from atropos_gym.tokenizers import load_tokenizer  # may bring transformers along

        load_tokenizer(tokenizer)  # a wrong name is told before anything is opened
    listener = listen(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    try:
        store = store() if callable(store) else store or MemoryStore(limits)
    except BaseException:
        listener.close()
        raise
    limits = limits or store.limits
    if insecure:
        limits = _any_host(limits)
    keep_freed_memory()
    app = create_app(store, limits, access=access, tokenizer=tokenizer)
    leave_alone()

    def announce() -> None:
        (ready or _print_ready)(url)
        _tell_systemd(f"READY=1\nSTATUS={READY}{url}")
        if ready_file is not None:
            temporary = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
            temporary.write_text(url + "\n")
            temporary.replace(ready_file)

    config = uvicorn.Config(
        app,
        log_level=log_level,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,  # type: ignore[arg-type]  # asyncio takes fractions
        lifespan="off",
        http=BoundedProtocol,
        ws="none",  # whatever is installed: there is none, and an upgrade must pass the guard too
        server_header=False,
    )
    try:
        with contextlib.closing(listener):
            _Server(config, announce, app.state.desk.close, partial(_lost, store)).run(sockets=[listener])
        if why := _lost(store):
            raise ServerError(f"the batch server has stopped: {why}")
    finally:
        store.close()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


def _lost(store: Store) -> str:
    """Why nothing will ever be saved again; "" while it may, also where the disk is full just now."""
    saved = store.save()
    error = saved.exception() if saved is not None and saved.done() else None
    return "" if error is None else str(error)


class _Server(uvicorn.Server):
    """Uvicorn, which says when it answers, lets held requests go when it stops, and stops if it is no use."""

    def __init__(
        self,
        config: uvicorn.Config,
        started: Callable[[], None],
        stopping: Callable[[], None],
        lost: Callable[[], str],
    ) -> None:
        super().__init__(config)
        self._on_started = started
        self._on_stopping = stopping
        self._lost = lost

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer."""
        await super().startup(sockets=sockets)
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Says ten times a second whether to stop; looks once a second whether all is lost."""
        return await super().on_tick(counter) or (counter % 10 == 0 and bool(self._lost()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops to answer."""
        _tell_systemd("STOPPING=1")
        self._on_stopping()
        await super().shutdown(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Asks the server to stop; unlike uvicorn's, the signal is not raised again afterwards."""
        self.force_exit = self.should_exit
        self.should_exit = True


def state_file(port: int) -> Path:
    """Where a server on this port keeps its state unless it is told otherwise."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "atropos_gym" / f"server-{port}.sqlite"


def open_store(
    where: str, limits: Limits | None = None, *, fresh: bool = False, fsync: bool = False
) -> Store:
    """Opens a store and says what was found in it.

    Args:
        where: ``"memory"``, or the path of a file.
        limits: times and bounds.
        fresh: forget what is in the file.
        fsync: survive a power failure too.

    Raises:
        ConfigError: the file cannot be used, or another server uses it.
    """
    if where == "memory":
        return MemoryStore(limits)
    store = SqliteStore(Path(where).expanduser(), limits, fresh=fresh, fsync=fsync)
    if store.recovered:
        print(f"{RESUMED}{where}: {store.recovered} (--fresh starts anew)", flush=True)
    return store


def _tell_systemd(state: str) -> None:
    """Tells a supervisor of ``Type=notify`` how things are, where there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    # A supervisor that does not listen is no reason to stop.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
        channel.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def _print_ready(url: str) -> None:
    print(f"{READY}{url}", flush=True)


def _any_host(limits: Limits) -> Limits:
    return replace(limits, allowed_hosts=(*limits.allowed_hosts, "*"))


class ServerProcess:
    """A batch server in a process of its own, on a free loopback port. It ends with its parent.

    Example:
        with ServerProcess() as server:
            client = BatchClient(server.url)

    Args:
        port: 0 takes a free one.
        store: ``"memory"``, or the path of a file.
        soft_groups: so many groups may be queued before posts are held; see :class:`Limits`.
        tokenizer: name or folder of what the dashboard shows ids with; by number by default.
        timeout: seconds within which it must answer.

    Attributes:
        url: where it answers.
        pid: its process.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        store: str | Path = "memory",
        soft_groups: int | None = None,
        tokenizer: str | Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        command = [
            sys.executable,
            "-m",
            "atropos_gym.batch_server",
            "--port",
            str(port),
            "--store",
            str(store),
            "--until-stdin-closes",
            *(() if soft_groups is None else ("--soft-groups", str(soft_groups))),
            *(() if tokenizer is None else ("--tokenizer", str(tokenizer))),
        ]
        # A session of its own: Ctrl-C at a terminal is for the parent, which then stops the server. Were the
        # parent killed, its end of the pipe would close, and the server would see that.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pid = self._process.pid
        alarm = threading.Timer(timeout, self._process.kill)
        alarm.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if line.startswith(RESUMED):
                line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line.startswith(READY):
            self.stop()
            raise ServerError(
                f"the batch server did not start on port {port} (exit {self._process.returncode})"
            )
        self.url = line.removeprefix(READY).strip()

    def ended(self) -> bool:
        """Whether the process has ended: nobody starts it again."""
        return self._process.poll() is not None

    def stop(self, timeout: float = 5.0) -> None:
        """Stops the server and waits for its end; more than once is no mistake."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _stop_when_stdin_closes() -> None:
    """Ends this process in an orderly way once the parent has gone."""

    def watch() -> None:
        while os.read(0, 4096):  # the descriptor itself: a reader object would be locked at exit
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m atropos_gym.batch_server``; ``atropos-gym serve`` is the one for people."""
    parser = argparse.ArgumentParser(prog="python -m atropos_gym.batch_server", description="Batch server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", default="memory", help="'memory', or the path of a file")
    parser.add_argument("--fresh", action="store_true", help="forget what is in the file")
    parser.add_argument("--fsync", action="store_true", help="survive a power failure too")
    parser.add_argument("--soft-groups", type=int, help="so many groups are queued before posts are held")
    parser.add_argument("--tokenizer", help="what the dashboard shows ids with, by name or folder")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when standard input ends")
    options = parser.parse_args(arguments)
    if options.until_stdin_closes:
        _stop_when_stdin_closes()
    try:
        store = partial(open_store, options.store, fresh=options.fresh, fsync=options.fsync)
        limits = Limits(**({} if options.soft_groups is None else {"soft_groups": options.soft_groups}))
        serve(
            options.host,
            options.port,
            store=store,
            limits=limits,
            access=Access.find(),
            tokenizer=options.tokenizer,
        )
    except (ConfigError, MissingData) as error:
        print(error, file=sys.stderr)
        return 2
    except ServerError as error:  # nobody's mistake: to be started again
        print(error, file=sys.stderr)
        return 1
    return 0
