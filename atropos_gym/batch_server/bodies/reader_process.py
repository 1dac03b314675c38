"""Large bodies are read in a process of their own: here their parsing would keep everyone else waiting.

It is started with the first such body and kept, reads one body at a time, and ends with this process. What
travels between the two is a JSON object, behind its length, and then the bytes that it tells of.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json, to_json

from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.packed import PackedGroup

__all__ = ["Lost", "Reader", "main", "reader"]

LENGTH = struct.Struct("<Q")
KEPT_BYTES = 2**30
"""A process that has taken more than this is not kept: the exact validator needs a hundred bytes a number."""

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    " from atropos_gym.batch_server.bodies import reader_process, reading;"
    " reader_process.main(reading.answer)"
)


class Lost(Exception):
    """The process ended before it answered."""


class Reader:
    """Starts the process when it is needed, talks to it, and starts another after it was lost."""

    def __init__(self) -> None:
        # One thread: bodies queue up here, and not before the threads that write batches.
        self._thread = ThreadPoolExecutor(1, "reader")
        self._process: subprocess.Popen[bytes] | None = None

    async def read(self, body: bytes, question: dict[str, Any]) -> list[Incoming] | dict[str, Any]:
        """Reads a body.

        Args:
            body: as it came.
            question: what else is to be known of it.

        Returns:
            Its groups, or why it is refused.

        Raises:
            Lost: the process ended, as it does where memory is short.
        """
        return await asyncio.wrap_future(self._thread.submit(self._exchange, body, question))

    def close(self) -> None:
        """Ends the process, if one runs; the next body starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def interrupt(self) -> None:
        """Ends the process in the middle of a body: whoever posted it is told to try again."""
        if (process := self._process) is not None:
            process.kill()

    @property
    def pid(self) -> int | None:
        """Process id, or None while none runs."""
        return None if self._process is None else self._process.pid

    def _exchange(self, body: bytes, question: dict[str, Any]) -> list[Incoming] | dict[str, Any]:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            _send(process.stdin, {**question, "size": len(body)}, [body])
            answer = _receive(process.stdout)
            if "refusal" in answer:
                found: list[Incoming] | dict[str, Any] = answer["refusal"]
            else:
                found = [
                    Incoming.again(PackedGroup(_exactly(process.stdout, size)), tuple(unknown))
                    for size, unknown in answer["groups"]
                ]
        except (BrokenPipeError, EOFError):
            self.close()
            raise Lost(f"the process that reads large bodies ended with {process.returncode}") from None
        if answer["last"]:
            self.close()
        return found

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was ended from outside while it had nothing to do
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # an interrupt at the terminal is for the server to answer
            )
        return self._process


@cache
def reader() -> Reader:
    """The reader of this process."""
    reader = Reader()
    atexit.register(reader.close)
    return reader


Answer = Callable[[bytes, dict[str, Any]], Sequence[Incoming] | dict[str, Any]]


def main(answer: Answer) -> None:
    """What runs in the process: reads bodies until there are no more."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            question = _receive(questions)
        except EOFError:
            return
        found = answer(_exactly(questions, question["size"]), question)
        last = _taken_bytes() > KEPT_BYTES
        if isinstance(found, dict):
            _send(answers, {"last": last, "refusal": found}, [])
        else:
            heads = [(len(one.packed.data), one.unknown_fields) for one in found]
            _send(answers, {"last": last, "groups": heads}, [one.packed.data for one in found])


def _taken_bytes() -> int:
    """The most memory that this process has taken; 0 on a system that does not tell.

    Not by ``getrusage``: there Linux counts in what the process that started this one had at the time.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return 0 if peak is None else int(peak[1]) * 1024


def _send(pipe: IO[bytes], head: dict[str, Any], payloads: Sequence[bytes | memoryview]) -> None:
    text = to_json(head)
    for piece in (LENGTH.pack(len(text)), text, *payloads):
        pipe.write(piece)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> dict[str, Any]:
    (length,) = LENGTH.unpack(_exactly(pipe, LENGTH.size))
    head: dict[str, Any] = from_json(_exactly(pipe, length))
    return head


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
