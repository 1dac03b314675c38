"""What the worker process runs: read a comparison, answer it, within a bound of CPU time.

A first process imports sympy once and then only forks: the fork answers until it overruns its time, is killed
by the kernel (which needs no help of the interpreter), and the next one is there in milliseconds. CPU time,
not wall-clock time, is limited, so that a verdict does not depend on the machine's load.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
from typing import Any

from atropos_gym.rewards._equality import equal_forms
from atropos_gym.rewards._forms import read_form, read_values
from atropos_gym.rewards._size import TooBig

__all__ = ["main"]

_CPU_SECONDS = 0.7
_MEMORY_BYTES = 2 << 30
_ANSWERS_PER_FORK = 2000
_AGAIN = 3
_WARM_UP = (
    (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("x + y = 1", "2x + 2y = 2"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\pi", "3.141593"),
    (r"\sqrt{3 + 2\sqrt{2}}", r"1 + \sqrt{2}"),
)


def main() -> None:
    """Serves the requests on standard input until it is closed; one line of JSON each, one line back."""
    replies = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a library that prints must not speak for us
    _heed_limits()
    try:
        algebra = importlib.import_module("atropos_gym.rewards._sympy")
        for gold, answer in _WARM_UP:
            _outcome({"gold": gold, "values": [answer]}, algebra)
    except Exception as error:
        _send(replies, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    _send(replies, {"ready": True})
    if not hasattr(os, "fork"):
        _serve(replies, algebra)
        return
    gc.freeze()
    while True:
        child = os.fork()
        if child == 0:
            _limit_memory()
            os._exit(_serve(replies, algebra))
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            overrun = os.WTERMSIG(status) == signal.SIGPROF
            _send(replies, {"outcome": "timeout" if overrun else "too_big"})
        elif os.WEXITSTATUS(status) != _AGAIN:
            return


def _serve(replies: int, algebra: Any) -> int:
    """Answers requests; returns 0 at their end, ``_AGAIN`` where a fresh process should go on."""
    for _ in range(_ANSWERS_PER_FORK):
        line = _read_line()
        if not line:
            return 0
        _limit_time(_CPU_SECONDS)
        outcome = _outcome(json.loads(line), algebra)
        _limit_time(0)
        _send(replies, {"outcome": outcome})
    return _AGAIN


def _outcome(request: dict[str, Any], algebra: Any) -> str:
    try:
        gold, answer = read_form(request["gold"]), read_values(tuple(request["values"]))
        return "equal" if equal_forms(gold, answer, algebra) else "not_equal"
    except (TooBig, MemoryError, RecursionError):
        return "too_big"
    except Exception:  # sympy raises nearly anything on what has no difference: it is then not equal
        return "not_equal"


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            return b""
        line += piece
    return line


def _send(fd: int, reply: dict[str, Any]) -> None:
    os.write(fd, json.dumps(reply).encode() + b"\n")


def _limit_time(seconds: float) -> None:
    """After so much CPU time the kernel ends this process; 0 takes the limit away."""
    if hasattr(signal, "ITIMER_PROF"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _heed_limits() -> None:
    """Undoes what a host that ignores or blocks the limit's signal would hand down."""
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        return
    if not sys.platform.startswith("linux"):  # elsewhere it is not kept, or refused
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
