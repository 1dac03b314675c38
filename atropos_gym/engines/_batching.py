"""Turns many concurrent ``generate`` calls into few batches, run by one worker thread.

Requests of one event loop are staged until the loop has nothing else to do, then handed over together; what
arrives while a batch runs forms the next one. Event loops and plain threads may call at the same time. Knows
no weights: the engine gives a function that answers a list of requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from atropos_gym.engines.base import Completion, SamplingParams
from atropos_gym.errors import EngineError

__all__ = ["Batcher", "Outcome", "Request"]

Outcome = list[Completion] | EngineError
"""What a request comes to: its completions, or why there are none."""

# Turns of an idle event loop before staged requests are handed over: a coroutine that was just answered may
# pass through a few awaits (a lock, a queue) before it asks again.
_QUIET_TURNS = 3


@dataclass(slots=True, eq=False)
class Request:
    """One ``generate`` call, checked and ready to run."""

    prompt: tuple[int, ...]
    params: SamplingParams
    n: int
    version: int
    seed: int
    max_tokens: int
    trainable: Literal[True] | str
    cut_by_context: bool = False
    cancelled: bool = False
    future: asyncio.Future[list[Completion]] | Future[list[Completion]] | None = None
    loop: asyncio.AbstractEventLoop | None = None


class _Stage:
    """Requests of one event loop that wait for it to become idle."""

    __slots__ = ("loop", "quiet", "requests", "scheduled", "seen")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.requests: list[Request] = []
        self.scheduled = False
        self.seen = 0
        self.quiet = 0


class Batcher:
    """Collects requests and answers them in batches.

    Args:
        run: answers a list of requests, one outcome each, in order; called on the worker thread.
        leave: told the versions of answered requests, with counts.
        max_rows: most rows (requests times ``n``) of a batch; one larger request is a batch of its own.
    """

    def __init__(
        self,
        run: Callable[[list[Request]], Sequence[Outcome]],
        leave: Callable[[Counter[int]], None],
        max_rows: int,
    ) -> None:
        self._run = run
        self._leave = leave
        self._max_rows = max_rows
        self._local = threading.local()  # .stage: one event loop runs in a thread at a time
        self._lock = threading.Lock()
        self._pending: deque[Request] = deque()
        self._draining: Future[None] | None = None
        self._closed = False

    async def ask(self, request: Request) -> list[Completion]:
        """Answers one request; other tasks of the loop run meanwhile."""
        loop = asyncio.get_running_loop()
        request.loop = loop
        future: asyncio.Future[list[Completion]] = loop.create_future()
        request.future = future
        stage: _Stage | None = getattr(self._local, "stage", None)
        if stage is None or stage.loop is not loop:
            stage = self._local.stage = _Stage(loop)
        stage.requests.append(request)
        if not stage.scheduled:
            stage.scheduled, stage.seen, stage.quiet = True, 0, 0
            loop.call_soon(self._flush_when_quiet, stage)
        try:
            return await future
        except asyncio.CancelledError:
            request.cancelled = True
            if request in stage.requests:  # still staged, and the loop may never turn again
                stage.requests.remove(request)
                self._leave(Counter((request.version,)))
            raise

    def ask_now(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Answers requests from a thread without an event loop; blocks."""
        futures: list[Future[list[Completion]]] = []
        for request in requests:
            future: Future[list[Completion]] = Future()
            request.future = future
            futures.append(future)
        self._submit(requests)
        try:
            return [future.result() for future in futures]
        except BaseException:
            for request in requests:
                request.cancelled = True
            raise

    def close(self) -> Future[None] | None:
        """Refuses what waits; returns the running batch's future, if one runs. Idempotent."""
        with self._lock:
            self._closed = True
            refused = list(self._pending)
            self._pending.clear()
            draining = self._draining
        self._answer(refused, [EngineError("the engine is closed")] * len(refused))
        return draining

    @property
    def stopping(self) -> bool:
        """Whether a running batch should give up: the engine is closed or the interpreter is leaving."""
        return self._closed or not threading.main_thread().is_alive()

    def _flush_when_quiet(self, stage: _Stage) -> None:
        count = len(stage.requests)
        stage.quiet = stage.quiet + 1 if count == stage.seen else 0
        stage.seen = count
        if stage.quiet < _QUIET_TURNS and count < self._max_rows:
            stage.loop.call_soon(self._flush_when_quiet, stage)
            return
        stage.scheduled = False
        requests, stage.requests = stage.requests, []
        self._submit(requests)

    def _submit(self, requests: Sequence[Request]) -> None:
        if not requests:
            return
        with self._lock:
            if not self._closed:
                self._pending.extend(requests)
                if self._draining is None:
                    # A thread lives as long as there is work: not a daemon, so that the interpreter waits for
                    # it instead of tearing torch down under it, and `stopping` makes that wait short.
                    done: Future[None] = Future()
                    self._draining = done
                    # Said outright: a thread started by a daemon thread would be a daemon too.
                    worker = threading.Thread(
                        target=self._drain, args=(done,), name="engine-batches", daemon=False
                    )
                    worker.start()
                return
        self._answer(list(requests), [EngineError("the engine is closed")] * len(requests))

    def _drain(self, done: Future[None]) -> None:
        """Worker thread: batch after batch until nothing waits."""
        while True:
            with self._lock:
                batch = self._take()
                if not batch:
                    self._draining = None
                    break
            cancelled = [request for request in batch if request.cancelled]
            if cancelled:
                self._leave(Counter(request.version for request in cancelled))
                gone = set(cancelled)
                batch = [request for request in batch if request not in gone]
            if batch:
                self._answer(batch, self._outcomes(batch))
        done.set_result(None)

    def _outcomes(self, batch: list[Request]) -> Sequence[Outcome]:
        try:
            outcomes = self._run(batch)
            if len(outcomes) != len(batch):
                raise EngineError(f"{len(batch)} requests were answered by {len(outcomes)} outcomes")
            return outcomes
        except Exception as error:  # whatever went wrong, every caller is told and the engine lives on
            return [_failure(error) for _ in batch]

    def _take(self) -> list[Request]:
        batch: list[Request] = []
        rows = 0
        while self._pending and (not batch or rows + self._pending[0].n <= self._max_rows):
            batch.append(self._pending.popleft())
            rows += batch[-1].n
        return batch

    def _answer(self, requests: list[Request], outcomes: Sequence[Outcome]) -> None:
        """Counts requests out, then wakes their callers: one call an event loop."""
        if not requests:
            return
        self._leave(Counter(request.version for request in requests))
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Outcome]]] = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            if request.loop is not None:
                by_loop.setdefault(request.loop, []).append((request, outcome))
            else:
                _resolve([(request, outcome)])
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, answers)
            except RuntimeError:  # the loop is closed, so nobody waits for these answers
                if not loop.is_closed():
                    raise


def _resolve(answers: list[tuple[Request, Outcome]]) -> None:
    for request, outcome in answers:
        future = request.future
        if future is None or future.done():  # cancelled while the answer was on its way
            continue
        if isinstance(outcome, EngineError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _failure(error: Exception) -> EngineError:
    """Returns an exception of one caller's own: tracebacks grow on shared ones."""
    if isinstance(error, EngineError):
        return type(error)(*error.args)
    failure = EngineError(f"the batch failed: {type(error).__name__}: {error}".splitlines()[0])
    failure.__cause__ = error
    return failure
