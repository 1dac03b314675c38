"""Runs the model server: in the foreground, or in a thread beside what uses it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import uvicorn
from fastapi import FastAPI

from atropos_gym.batch_server.hosts import listen
from atropos_gym.engines.base import Engine
from atropos_gym.errors import ServerError
from atropos_gym.model_server.app import create_app

__all__ = ["ModelServer", "serve"]

STOP_SECONDS = 1.0
"""How long requests in progress may take once the server is told to stop."""


def serve(app: FastAPI, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT.

    Args:
        app: from ``create_app``.
        listener: from ``batch_server.hosts.listen``; stays open.
        ready: told the URL once the server answers.
    """
    server = _Server(_config(app), lambda: ready(_url(listener)))
    server.run(sockets=[listener])


class ModelServer:
    """A model server on a free loopback port, in a thread of its own, for as long as it is entered.

    The engine works in that thread's event loop: nothing else should ask it meanwhile, other than through
    the server.

    Args:
        engine: who speaks; it stays open.
        port: 0 takes a free one.
        settings: as ``create_app``'s.

    Attributes:
        app: the application; tests can call it without a port.
        url: where it answers, once entered.

    Example:
        with ModelServer(engine) as server:
            collector = AgentCollector(my_agent, server.url)
    """

    def __init__(self, engine: Engine, *, port: int = 0, **settings: Any) -> None:
        self.app = create_app(engine, **settings)
        self.url = ""
        self._port = port
        self._listener: socket.socket | None = None
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        """Starts to answer.

        Raises:
            ConfigError: the port cannot be used.
            ServerError: it did not start.
        """
        self._listener = listen("127.0.0.1", self._port)
        self.url = _url(self._listener)
        answers = threading.Event()
        self._server = _Server(_config(self.app), answers.set)
        self._thread = threading.Thread(target=self._run, args=(answers,), name="model-server", daemon=True)
        self._thread.start()
        answers.wait()
        if not self._server.started:
            self.stop()
            raise ServerError(f"the model server did not start on {self.url}")
        return self

    def stop(self) -> None:
        """Stops to answer; groups that were not finished are dropped. More than once is no mistake."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()
        if self._listener is not None:
            self._listener.close()

    def _run(self, answers: threading.Event) -> None:
        assert self._server is not None and self._listener is not None
        try:
            asyncio.run(self._server.serve(sockets=[self._listener]))
        finally:
            answers.set()  # also where it could not start: somebody waits

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Server(uvicorn.Server):
    """Uvicorn, which says when it answers."""

    def __init__(self, config: uvicorn.Config, answers: Callable[[], None]) -> None:
        super().__init__(config)
        self._answers = answers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer."""
        await super().startup(sockets=sockets)
        self._answers()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Asks the server to stop; unlike uvicorn's, the signal is not raised again afterwards."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STOP_SECONDS,  # type: ignore[arg-type]  # asyncio takes fractions
        server_header=False,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
