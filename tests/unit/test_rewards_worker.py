"""The process that compares formulas: it can be stopped, is used from anywhere, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.errors import VerifierError
from atropos_gym.rewards import _worker, verify_math, verify_number

HANGS = r"\int_0^1 \sin(x^{\sin(x^{\sin x})}) e^{x^{x}} dx"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="no /proc on this system")


@pytest.fixture
def worker() -> _worker.Worker:
    """The one of this process: to start another for each test takes a second each."""
    return _worker._WORKER


def root(k: int) -> tuple[str, tuple[str, ...]]:
    """A comparison that needs algebra, is true, and is no other test's."""
    return rf"{k}\sqrt{{3}}", (rf"\sqrt{{{3 * k * k}}}",)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_overruns_is_stopped_and_the_next_is_answered(worker: _worker.Worker) -> None:
    worker.start()
    pid = worker.pid
    assert verify_math(rf"\boxed{{{HANGS}}}", "1").reason == "timeout"
    assert worker.compare(*root(2)) == "equal"
    assert worker.pid == pid  # nothing had to be imported again


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="no such signal on this system")
def test_a_host_that_blocks_the_limits_signal_does_not_lift_the_limit() -> None:
    own = _worker.Worker()
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})
    try:
        assert own.compare("1", (HANGS,)) == "timeout"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGPROF, before)
        own.stop()


def test_a_tower_is_wrong_and_says_why() -> None:
    assert verify_math(rf"\boxed{{{'9^{' * 5}9{'}' * 5}}}", "1").reason == "too_big"


@needs_proc
def test_a_killed_worker_is_started_again_without_a_leak(worker: _worker.Worker) -> None:
    worker.start()
    before = len(os.listdir("/proc/self/fd"))
    assert worker.pid is not None
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.compare(*root(3)) == "equal"
    assert len(os.listdir("/proc/self/fd")) == before


@needs_proc
@pytest.mark.slow
def test_a_worker_killed_while_it_starts_is_started_again(
    worker: _worker.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.stop()
    killed: list[int] = []
    receive = worker._receive

    def killed_first(seconds: float) -> dict[str, Any] | None:
        """Waits for what it says once it is ready; two of them never get so far."""
        if len(killed) < 2:
            assert worker.pid is not None
            os.killpg(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)
        return receive(seconds)

    monkeypatch.setattr(worker, "_receive", killed_first)
    assert worker.compare(*root(7)) == "equal"
    assert len(killed) == 2 and worker.pid not in killed


def test_an_interrupt_ends_the_process_and_leaves_no_answer_for_the_next_request(
    worker: _worker.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.start()
    first = worker.pid
    assert first is not None

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(worker, "_receive", interrupted)
        worker.compare(*root(5))
    assert worker.pid is None
    assert not is_alive(first)
    worker.stop()  # once more does no harm
    assert worker.compare("x", ("y",)) == "not_equal"
    assert worker.pid != first


def test_fifty_threads() -> None:
    verdicts: list[bool] = []

    def work(k: int) -> None:
        gold, (answer,) = root(10 + k)
        said = answer if k % 2 else f"{answer}+1"
        verdicts.append(bool(verify_math(rf"\boxed{{{said}}}", gold)) is bool(k % 2))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(verdicts) == 50
    assert all(verdicts)


def test_inside_a_running_event_loop() -> None:
    async def work() -> bool:
        return bool(verify_math(r"\boxed{\sqrt{507}}", r"13\sqrt{3}"))

    assert asyncio.run(work())


def answers(k: int) -> tuple[str, bool]:
    gold, values = root(k)
    return _worker.compare(gold, values), bool(verify_number("#### 4", "4"))


@pytest.mark.slow
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
# Forking beside threads is the caller's choice; what counts here is that the fork works.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_child_process(method: str) -> None:
    _worker.start()
    parent = _worker._WORKER.pid
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(answers, (400,)) == ("equal", True)
    assert answers(401) == ("equal", True)
    assert parent == _worker._WORKER.pid


@needs_fork
def test_a_fork_starts_its_own_worker_and_leaves_the_parents_alone() -> None:
    _worker.start()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"{_worker._WORKER.pid} {_worker.compare(*root(410))} {_worker._WORKER.pid}"
            os.write(writing, said.encode())
        finally:
            _worker._WORKER.stop()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        before, outcome, after = file.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert (before, outcome) == ("None", "equal")
    assert int(after) != _worker._WORKER.pid
    assert _worker.compare(*root(411)) == "equal"


def run_program(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "use",
    [
        "print(_worker.compare('2', ('1',))); print(_worker._WORKER.pid)",
        # a thread is waiting for an answer when the program ends
        "_worker.start(); print('not_equal'); print(_worker._WORKER.pid);"
        f"threading.Thread(target=_worker.compare, args=('1', ({HANGS!r},)), daemon=True).start()",
    ],
    ids=["idle", "busy"],
)
def test_a_program_ends_at_once_and_its_worker_with_it(use: str) -> None:
    done = run_program(f"import threading\nfrom atropos_gym.rewards import _worker\n{use}")
    assert (done.returncode, done.stderr) == (0, "")
    outcome, pid = done.stdout.split()
    assert outcome == "not_equal"
    assert not is_alive(int(pid))


@pytest.mark.slow
def test_the_worker_of_a_killed_program_ends_too() -> None:
    done = run_program(
        """
        import os, signal
        from atropos_gym.rewards import _worker
        _worker.start()
        print(_worker._WORKER.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    pid = int(done.stdout)
    ended = threading.Event()
    for _ in range(600):  # its end of file reaches it a moment later
        if not is_alive(pid) or _is_zombie(pid):
            return
        ended.wait(0.1)
    pytest.fail(f"process {pid} outlived its program by a minute")


def _is_zombie(pid: int) -> bool:
    """Ended, but not yet reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


@pytest.mark.parametrize("interpreter", ["/nowhere/python", "", None])
def test_an_interpreter_that_cannot_be_started_is_named(
    monkeypatch: pytest.MonkeyPatch, interpreter: str | None
) -> None:
    worker = _worker.Worker()
    monkeypatch.setattr(sys, "executable", interpreter)
    with pytest.raises(VerifierError, match="cannot be started with (/nowhere/python|no interpreter)"):
        worker.compare("1", ("x",))


@pytest.mark.slow
def test_an_interpreter_without_math_verify_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker = _worker.Worker()
    (tmp_path / "latex2sympy2_extended.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(VerifierError, match="ImportError: not here.*check that math-verify is installed"):
        worker.start()
    assert worker.pid is None


def test_the_fast_path_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> str:
        raise AssertionError(f"asked the worker: {arguments}")

    monkeypatch.setattr(_worker, "compare", refuse)
    same: list[tuple[str, str]] = [
        ("72", "72"), ("0.5", r"\frac{1}{2}"), ("1,234", "1234"), ("2 1/2", "2.5"), ("50\\%", "1/2"),
        (r"\{1,2\}", r"\{2,1\}"), ("(1,2]", "(1, 2]"), ("x=5", "5"),
        ("x < 3", r"(-\infty,3)"), ("Monday", "monday"), ("10 cm", "10"), (r"\sqrt{2}", r"\sqrt{2}"),
        (r"x^2+1", "x^2 + 1"),
        (r"\pm 3", "3,-3"),
    ]  # fmt: skip
    for answer, gold in same:
        assert verify_math(rf"\boxed{{{answer}}}", gold), answer
    assert not verify_math(r"\boxed{7}", "72")
    assert not verify_math(r"\boxed{Tuesday}", "Monday")


class _Reader:
    """Stands for the algebra where a case is judged without a process."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        raise MemoryError


def test_what_takes_too_much_memory_is_too_big() -> None:
    from atropos_gym.rewards._worker_main import _outcome

    assert _outcome({"gold": "x", "values": ["y"]}, _Reader()) == "too_big"
