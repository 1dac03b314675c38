"""A service in a thread of its own, beside a learner in the main thread."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

__all__ = ["ServiceThread"]

#: Seconds that ``stop`` waits for the service to take its leave.
STOP = 10.0


class ServiceThread:
    """Runs a coroutine function in a thread with an event loop of its own.

    A learner would wait for ever for the groups of a service that failed. So a failure interrupts the main
    thread as Ctrl-C does, and leaving the ``with`` block raises what really happened.

    Args:
        run: what to run, to be cancelled for stopping.
        name: of the thread.
        interrupt_main: interrupt the main thread when ``run`` fails.

    Attributes:
        error: what ``run`` failed with, or None.

    Example:
        >>> async def serve(): await asyncio.Event().wait()
        >>> with ServiceThread(serve) as thread:
        ...     thread.alive
        True
        >>> thread.alive
        False
    """

    def __init__(
        self,
        run: Callable[[], Awaitable[None]],
        *,
        name: str = "service",
        interrupt_main: bool = True,
    ) -> None:
        self.error: BaseException | None = None
        self._run = run
        self._interrupt_main = interrupt_main
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._started = threading.Event()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def alive(self) -> bool:
        """Whether the service runs."""
        return self._thread.is_alive()

    def start(self) -> ServiceThread:
        """Starts the thread and returns once its loop runs."""
        self._thread.start()
        self._started.wait()
        return self

    def stop(self) -> None:
        """Cancels the service, waits for it to take its leave, and raises what it failed with; idempotent."""
        self._stopping = True
        if self._thread.is_alive() and self._loop is not None and self._task is not None:
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:  # the loop has just ended by itself
                if not self._loop.is_closed():
                    raise
        if self._thread.ident is not None:
            self._thread.join(STOP)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def __enter__(self) -> ServiceThread:
        try:
            return self.start()
        except KeyboardInterrupt:  # there is no __exit__ to say why
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _main(self) -> None:
        async def main() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._started.set()
            await self._run()

        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error
            if self._interrupt_main and not self._stopping and threading.main_thread().is_alive():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        finally:
            self._started.set()
