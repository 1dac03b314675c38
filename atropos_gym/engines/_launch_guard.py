"""Runs a server and ends its whole process group when the process that launched it closes the pipe or dies.

Started by path in an interpreter of its own; standard library only. Arguments: seconds of grace, log file,
command. Writes the server's process id to standard output, and exits with the server's code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Starts the server, waits for its end or its owner's, leaves nothing of it behind."""
    grace, log, command = float(arguments[0]), arguments[1], arguments[2:]
    owner = os.getppid()
    with open(log, "ab", buffering=0) as stream:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_guard if sys.platform == "linux" else None,
        )
    print(server.pid, flush=True)
    while server.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], _LOOK_SECONDS)
        # A fork of the owner may keep the pipe open after its death.
        if (ready and not os.read(0, 1)) or os.getppid() != owner:
            _signal_group(server.pid, signal.SIGTERM)
            break
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and _signal_group(server.pid, 0):
        server.poll()
        time.sleep(0.05)
    _signal_group(server.pid, signal.SIGKILL)
    return server.wait()


def _signal_group(group: int, number: int) -> bool:
    """Sends a signal; returns whether anybody of the group is there."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _die_with_guard() -> None:
    """In the server, before it starts: SIGTERM if the guard itself is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if sys.platform == "linux":
    _LIBC = ctypes.CDLL(None)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
