"""A process of its own in which formulas are compared, because only a process can be stopped from outside.

It is started with the first comparison that needs algebra and then kept: one per host process, one comparison
at a time, from any thread. What overruns its CPU time is killed there (see ``_worker_main``); a wall-clock
limit stands behind that. A fork of the host starts its own.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any

from atropos_gym.errors import VerifierError

__all__ = ["Worker", "compare", "start"]

_START_SECONDS = 300.0
_STARTS = 5
_ANSWER_SECONDS = 60.0
"""Wall-clock time after which an answer is no longer waited for; CPU time is limited by the worker itself."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from atropos_gym.rewards import _worker_main; _worker_main.main()"
)


class Worker:
    """Starts the process when it is needed, talks to it, and starts it again after it was lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id, or None while none runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process if none runs, and waits until it is ready.

        Raises:
            VerifierError: it cannot be started.
        """
        with self._lock:
            self._start()

    def compare(self, gold: str, values: tuple[str, ...]) -> str:
        """Returns ``equal``, ``not_equal``, ``too_big`` or ``timeout``.

        Raises:
            VerifierError: the process cannot be started.
        """
        request = {"gold": gold, "values": values}
        with self._lock:
            reply = self._exchange(request)
            if reply is None and self._closed:
                raise SystemExit  # the program is ending, and with it the daemon thread that waited here
            if reply is None:  # it was lost while it had nothing to do, as to a kill from outside
                reply = self._exchange(request)
        return "timeout" if reply is None else str(reply["outcome"])

    def close(self) -> None:
        """At the program's end: ends the process and starts no other, whoever is waiting for an answer."""
        self._closed = True
        process = self._process
        if process is not None:
            _kill(process)
            process.wait()

    def stop(self) -> None:
        """Ends the process, if one runs, and waits for its end; the next comparison starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        process.wait()
        os.close(self._requests)
        os.close(self._replies)

    def forget(self) -> None:
        """In a fork: leaves the parent's process alone and starts afresh."""
        process, self._process = self._process, None
        self._lock = threading.Lock()
        self._closed = False
        if process is not None:
            process.returncode = 0  # not ours to wait for
            os.close(self._requests)
            os.close(self._replies)

    def _start(self) -> None:
        begun = time.monotonic()
        starts = 0
        while self._process is None:
            starts += 1
            why = self._launch()
            # What was killed from outside while it started, as for memory, is started again.
            was_killed = why is not None and why[0] < 0 and time.monotonic() - begun < _START_SECONDS
            if why is not None and (self._closed or not was_killed or starts == _STARTS):
                raise VerifierError(_unstartable(why[1]))

    def _launch(self) -> tuple[int, str] | None:
        """Starts the process and waits until it is ready; returns its exit code and why it is not."""
        if self._closed:
            raise VerifierError("the program is ending: formulas are no longer compared")
        theirs_in, self._requests = os.pipe()
        self._replies, theirs_out = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=theirs_in,
                stdout=theirs_out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, TypeError, ValueError) as error:
            os.close(self._requests)
            os.close(self._replies)
            raise VerifierError(_unstartable(str(error))) from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            reply = self._receive(_START_SECONDS)
        except BaseException:
            self.stop()
            raise
        if reply is not None and "error" not in reply:
            return None
        process = self._process
        self.stop()
        code = process.returncode
        return (1, str(reply["error"])) if reply is not None else (code, f"it ended with {code}")

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the reply; None where the process was lost, after which it is stopped."""
        self._start()
        try:
            _write_all(self._requests, json.dumps(request).encode() + b"\n")
            reply = self._receive(_ANSWER_SECONDS)
        except BrokenPipeError:
            reply = None
        except BaseException:  # such as an interrupt: a late reply must not meet the next request
            self.stop()
            raise
        if reply is None:
            self.stop()
        return reply

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next line; None where the process ended or had to be ended first."""
        assert self._process is not None
        watch = threading.Timer(seconds, _kill, (self._process,))
        watch.daemon = True
        watch.start()
        line = b""
        try:
            while not line.endswith(b"\n"):
                piece = os.read(self._replies, 65536)
                if not piece:
                    return None
                line += piece
        finally:
            watch.cancel()
        reply: dict[str, Any] = json.loads(line)
        return reply


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            pass
    else:
        process.kill()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _unstartable(why: str) -> str:
    return (
        "the process that compares formulas cannot be started with"
        f" {sys.executable or 'no interpreter'} ({why}): check that math-verify is installed there"
    )


_WORKER = Worker()
atexit.register(_WORKER.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_WORKER.forget)


def start() -> None:
    """Starts the host's worker, so that the first comparison does not wait for it.

    Raises:
        VerifierError: it cannot be started.
    """
    _WORKER.start()


@lru_cache(maxsize=4096)
def compare(gold: str, values: tuple[str, ...]) -> str:
    r"""Compares what a text commits to with the gold, symbolically; the latest results are kept.

    Returns:
        ``equal``, ``not_equal``, ``too_big`` or ``timeout``.

    Raises:
        VerifierError: the worker cannot be started.

    Example:
        >>> compare(r"\sqrt{2}", (r"\frac{\sqrt{8}}{2}",)), compare("x^2", ("x^3",))
        ('equal', 'not_equal')
    """
    return _WORKER.compare(gold, values)
