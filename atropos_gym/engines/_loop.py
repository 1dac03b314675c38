"""An event loop in a thread of its own, for state that several loops and threads share.

An engine over HTTP is called from collectors' loops, a learner's thread and code without any loop.
Connections, limits and locks of asyncio belong to one loop, so they all live here; callers only wait.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from atropos_gym.errors import EngineError

__all__ = ["LoopThread"]

T = TypeVar("T")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for every system
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_cancel_all())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_all() -> None:
    """Ends whatever still runs, so that nobody waits for it for ever."""
    while running := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)


class LoopThread:
    """Runs coroutines of any thread on one event loop.

    Args:
        name: of the thread.

    Example:
        >>> import asyncio
        >>> thread = LoopThread("doctest")
        >>> thread.wait(asyncio.sleep(0, "done"))
        'done'
        >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=_turn, args=(self.loop,), name=name, daemon=True)
        self._thread.start()
        self._stop = weakref.finalize(self, _stop, self.loop)
        self._lock = (
            threading.RLock()
        )  # what is submitted is on the loop before it is told to stop, or refused

    @property
    def closed(self) -> bool:
        """Whether nothing can be run any more."""
        return not self._stop.alive

    def submit(
        self, work: Coroutine[Any, Any, T], done: Callable[[asyncio.Task[T]], None] | None = None
    ) -> Future[T]:
        """Starts ``work``; cancelling the future cancels it. ``done`` is called on the loop at its end."""
        future: Future[T] = Future()

        def start() -> None:
            task = self.loop.create_task(work)
            if done is not None:
                task.add_done_callback(done)
            task.add_done_callback(lambda task: _hand_over(task, future))
            future.add_done_callback(lambda future: self._cancel(task) if future.cancelled() else None)

        if not self._call(start):
            work.close()
            raise EngineError("the engine is closed")
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Runs ``work`` and returns what to await for its result, in the caller's own loop."""
        return asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` and blocks the calling thread, which must not be the loop's own."""
        return self.submit(work).result()

    def close(self) -> None:
        """Ends loop and thread; what still runs is cancelled. Idempotent."""
        with self._lock:
            self._stop()
        self._thread.join(timeout=10)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        self._call(task.cancel)  # a closed loop has cancelled it

    def _call(self, function: Callable[[], object]) -> bool:
        """Calls ``function`` on the loop; returns whether it will be called."""
        with self._lock:
            if self.closed:
                return False
            self.loop.call_soon_threadsafe(function)
            return True


def _hand_over(task: asyncio.Task[T], future: Future[T]) -> None:
    # A task that was cancelled though its caller still waits: the loop is being closed.
    error = EngineError("the engine is closed") if task.cancelled() else task.exception()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
