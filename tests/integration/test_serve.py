"""The server as a process: starting, stopping, and what only a socket can say.

The cases of area f that need a socket are here; the others are in ``tests/unit/test_server_cases.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import READY, ServerProcess, serve
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.wire import ScoredDataGroup

pytestmark = pytest.mark.slow

GROUP = {
    "tokens": [[1, 2, 3], [1, 2, 4]],
    "masks": [[-100, 2, 3], [-100, 2, 4]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.5, -0.75], [1.0, -0.5, -0.875]],
}
PATIENCE = 60.0  # seconds, on a machine that is busy with other things; what is held is held for longer
PROGRAM = """
from pathlib import Path
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.serve import serve
serve(port=0, limits=Limits(receive_seconds=3.0), ready_file=Path({ready_file!r}))
"""


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Polls until something holds."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[BatchClient]:
    with BatchClient(server.url) as client:
        client.register(batch_size=2, max_token_len=64, takeover=True)
        yield client


def read_in_thread(url: str, found: list[object]) -> threading.Thread:
    """Asks for a batch and waits for it."""

    def read() -> None:
        with BatchClient(url) as reader:
            found.append(reader.batch(wait_seconds=600))

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def address(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def request(body: bytes, **headers: object) -> bytes:
    lines = [b"POST /scored_data HTTP/1.1", b"Host: 127.0.0.1", b"Content-Type: application/json"]
    fields = {"Content-Length": len(body), **headers}
    lines += [f"{name}: {value}".encode() for name, value in fields.items()]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def talk(url: str, *pieces: bytes, replies: int = 1, close: bool = False) -> bytes:
    """Sends bytes; returns what comes back until so many replies, or the end, have come."""
    with socket.create_connection(address(url), timeout=PATIENCE) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if close:
            return b""
        received = b""
        while received.count(b"HTTP/1.1 ") < replies or not received.endswith(b"}"):
            try:
                chunk = connection.recv(65536)
            except ConnectionResetError:
                break
            if not chunk:
                break
            received += chunk
        return received


def test_groups_travel_through_a_real_server(client: BatchClient) -> None:
    group = ScoredDataGroup.model_validate(GROUP)
    client.post_groups([group])
    batch = client.batch(lease_seconds=60)
    assert batch is not None and batch.groups == [group]
    client.ack(str(batch.batch_id))


def test_a_held_request_is_answered_by_a_post(client: BatchClient, server: ServerProcess) -> None:
    found: list[object] = []
    reader = read_in_thread(server.url, found)
    client.post_group(ScoredDataGroup.model_validate(GROUP))
    reader.join(PATIENCE)
    assert len(found) == 1 and found[0] is not None


def test_content_length_too_long(client: BatchClient, server: ServerProcess) -> None:
    """f-content-length-too-long"""
    body = json.dumps(GROUP).encode()
    talk(server.url, request(body, **{"Content-Length": len(body) + 50}), close=True)
    client.post_group(ScoredDataGroup.model_validate(GROUP))
    assert client.status()["queue_sequences"] == 2
    assert client.batch() is not None


def test_pipelined(client: BatchClient, server: ServerProcess) -> None:
    """f-pipelined"""
    bodies = [json.dumps({**GROUP, "scores": [number, 0]}).encode() for number in range(3)]
    reply = talk(server.url, b"".join(map(request, bodies)), replies=3)
    assert reply.count(b"HTTP/1.1 200 OK") == 3
    assert reply.count(b'"status":"received"') == 3
    batches = [client.batch() for _ in range(3)]
    assert [batch.groups[0].scores[0] for batch in batches if batch] == [0, 1, 2]


def test_huge_header(client: BatchClient, server: ServerProcess) -> None:
    """f-huge-header"""
    head = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"
    try:
        reply = talk(server.url, head)
    except (BrokenPipeError, ConnectionResetError):
        reply = b""
    assert reply == b"" or reply.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert client.status()["queue_size"] == 0


def test_a_reader_that_hangs_up_loses_no_batch(client: BatchClient, server: ServerProcess) -> None:
    """The batch is larger than what the kernel buffers, so the server sees that nobody reads it."""
    big = {**GROUP, "messages": [[{"role": "user", "content": "x" * 8_000_000}]] * 2}
    client.post_group(ScoredDataGroup.model_validate(big))
    with socket.create_connection(address(server.url), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert connection.recv(100)
    until(lambda: client.status()["queue_size"] == 1)
    batch = client.batch()
    assert batch is not None and batch.sequences == 2


def test_a_port_in_use_is_one_line(server: ServerProcess) -> None:
    host, port = address(server.url)
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: .*choose another port"):
        serve(host, port)
    child = subprocess.run(
        [sys.executable, "-m", "atropos_gym.batch_server", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert child.returncode == 2
    assert len(child.stderr.splitlines()) == 1
    assert str(port) in child.stderr
    with pytest.raises(ServerError, match=f"did not start on port {port}"):
        ServerProcess(port)


def test_other_machines_are_not_served_by_mistake() -> None:
    with pytest.raises(ConfigError, match="host '0.0.0.0' can be reached from other machines"):
        serve("0.0.0.0", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stops_promptly_though_requests_are_held(tmp_path: Path, number: signal.Signals) -> None:
    ready_file = tmp_path / "url"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ready_file=str(ready_file))], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix(READY).strip()
        assert until(lambda: ready_file.is_file() and ready_file.read_text()) == url + "\n"
        # f-slow-body: one byte every 0.2 s would go on for minutes
        with socket.create_connection(address(url), timeout=PATIENCE) as connection:
            connection.sendall(request(b"", **{"Content-Length": 1000}))
            connection.settimeout(0.2)
            answer = b""
            for _ in range(300):
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(1000)
                    break
                with contextlib.suppress(ConnectionError):  # it has just been closed: the answer is there
                    connection.sendall(b"x")
            assert answer.startswith(b"HTTP/1.1 408")
        answers: list[object] = []
        with BatchClient(url) as client:
            client.register(batch_size=2)
            reader = read_in_thread(url, answers)
            until(lambda: client.health()["started"])
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        reader.join(PATIENCE)
        assert answers == [None]
        assert not ready_file.exists()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_server_process_ends_with_its_parent() -> None:
    code = (
        "from atropos_gym.batch_server.serve import ServerProcess\n"
        "import os, signal\n"
        "server = ServerProcess()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(parent.stdout)

    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(gone)


def test_stopping_twice_is_no_mistake() -> None:
    server = ServerProcess()
    assert not server.ended()
    server.stop(timeout=PATIENCE)
    assert server._process.returncode == 0, "it went by itself"
    assert server.ended()
    server.stop()


def start_serve(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Starts ``atropos-gym serve`` and reads what it says until it is ready."""
    command = [sys.executable, "-m", "atropos_gym", "serve", *arguments]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    lines = []
    while not (line := process.stdout.readline()).startswith(READY):
        assert line, "it ended before it was ready"
        lines.append(line.strip())
    return process, [*lines, line.removeprefix(READY).strip()]


@pytest.fixture
def port() -> Iterator[str]:
    """A port for a server that is started again and again: bound, not listened on, so nobody else gets it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield str(keeper.getsockname()[1])


def test_serve_resumes_what_it_had_and_fresh_forgets_it(tmp_path: Path, port: str) -> None:
    process, lines = start_serve(tmp_path, "--port", port)
    try:
        assert len(lines) == 1
        with BatchClient(lines[0]) as client:
            client.register(batch_size=2, max_token_len=64)
            client.post_group(ScoredDataGroup.model_validate(GROUP))
    finally:
        process.kill()
        process.communicate()
    file = tmp_path / "atropos_gym" / f"server-{port}.sqlite"
    process, lines = start_serve(tmp_path, "--port", port)
    try:
        assert lines[0] == f"Resumed {file}: 1 groups queued, step 0 (--fresh starts anew)"
        other = subprocess.run(
            [sys.executable, "-m", "atropos_gym", "serve", "--port", "0", "--store", str(file)],
            capture_output=True,
            text=True,
        )
        assert other.returncode == 2
        assert other.stderr.strip().endswith(
            f"store {file} is used by another server: stop that one, or choose another --store"
        )
        with BatchClient(lines[1]) as client:
            batch = client.batch()
            assert batch is not None and batch.groups == [ScoredDataGroup.model_validate(GROUP)]
            client.post_group(ScoredDataGroup.model_validate(GROUP))
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0
    process, lines = start_serve(tmp_path, "--port", port, "--fresh")
    try:
        with BatchClient(lines[-1]) as client:
            assert len(lines) == 1 and client.status()["queue_size"] == 0
    finally:
        process.terminate()
        process.communicate()


def test_serve_asks_for_its_token_and_lets_held_posts_go_when_it_stops(tmp_path: Path) -> None:
    store = tmp_path / "store.sqlite"
    flags = ["--port", "0", "--store", str(store), "--token", "secret", "--soft-groups", "0", "--reload"]
    flags += ["--hold-seconds", "240"]
    process, lines = start_serve(tmp_path, *flags)
    try:
        assert lines[0].startswith("--reload has no effect")
        host, port = address(lines[-1])
        assert int(port) > 0  # port 0 took a free one and says which
        with BatchClient(lines[-1], token="wrong") as stranger:  # noqa: S106
            with pytest.raises(ServerError, match="401"):
                stranger.status()
            assert stranger.health()["status"] == "ok"
        with BatchClient(f"http://x:secret@{host}:{port}") as client:
            client.register(batch_size=2, max_token_len=64)
            names: list[object] = []
            group = ScoredDataGroup.model_validate(GROUP)
            post = threading.Thread(target=lambda: names.append(client.post_group(group)))
            post.start()
            with BatchClient(lines[-1], token="secret") as reader:  # noqa: S106
                until(lambda: reader.status()["queue_size"] == 1)
            assert names == []  # the group is safe, its sender waits
            process.terminate()
            post.join(PATIENCE)  # for less than it is held otherwise
            assert names == ["g-1"]
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
    process, lines = start_serve(tmp_path, "--port", "0", "--store", str(store))
    try:
        assert "1 groups queued" in lines[0]
    finally:
        process.terminate()
        process.communicate()


WRITER_ENDS = """
import sys
from atropos_gym.batch_server.state import journal
from atropos_gym.cli import main

carry_out = journal._carry_out

def broken(statements, connection):
    if any("INTO groups" in sql for sql, _ in statements):
        raise IndexError("of ours")
    carry_out(statements, connection)

journal._carry_out = broken
sys.exit(main(sys.argv[1:]))
"""


def test_a_server_that_cannot_save_any_more_ends_and_another_goes_on(tmp_path: Path, port: str) -> None:
    store = ["--port", port, "--store", str(tmp_path / "store.sqlite")]
    command = [sys.executable, "-c", WRITER_ENDS, "serve", *store]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix(READY).strip()
        with BatchClient(url, retry_seconds=0) as client:
            client.register(batch_size=2, max_token_len=64)
            with pytest.raises(ServerError, match="nothing is saved until a restart"):
                client.post_group(ScoredDataGroup.model_validate(GROUP))
        assert process.wait(PATIENCE) == 1
    finally:
        process.kill()
        _, errors = process.communicate()
    line = errors.strip().splitlines()[-1]
    assert line.startswith("atropos-gym: the batch server has stopped: cannot write ")
    assert line.endswith("nothing is saved until a restart")
    process, lines = start_serve(tmp_path, *store)
    try:
        with BatchClient(lines[-1]) as client:
            assert client.info()["batch_size"] == 2, "what was saved is there"
    finally:
        process.terminate()
        process.communicate()
