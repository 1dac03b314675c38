"""What no application gets to see is refused as everything else is: with a ``detail``, in JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from atropos_gym.batch_server.http.protocol import MAX_HEAD_BYTES, BoundedProtocol


class Wire(asyncio.Transport):
    """A connection on which only writing and closing count."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def application(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("no request got so far")


def say(*pieces: bytes) -> Wire:
    """What a connection is like after these bytes have come."""

    async def talk() -> Wire:
        config = Config(application, http=BoundedProtocol, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        state.default_headers = [(b"date", b"today")]
        protocol = BoundedProtocol(config=config, server_state=state, app_state={})
        wire = Wire()
        protocol.connection_made(wire)
        for piece in pieces:
            if not wire.closed:
                protocol.data_received(piece)
        protocol.connection_lost(None)
        return wire

    return asyncio.run(talk())


HEAD = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ((b"no request at all\r\n\r\n",), "Invalid HTTP request"),
        ((b"GET /status HTTP/9.9\r\n\r\n",), "Invalid HTTP request"),
        ((HEAD + b"no colon\r\n\r\n",), "Invalid HTTP request"),
        ((HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",), "Invalid HTTP request"),
        ((HEAD + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",), f"longer than {MAX_HEAD_BYTES} bytes"),
        ((HEAD + b"X: ", b"x" * MAX_HEAD_BYTES), f"longer than {MAX_HEAD_BYTES} bytes"),
        ((b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",), f"longer than {MAX_HEAD_BYTES} bytes"),
    ],
)
def test_what_is_no_request_is_refused_in_json(pieces: tuple[bytes, ...], words: str) -> None:
    wire = say(*pieces)
    assert wire.closed
    head, _, body = wire.sent.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ") for line in lines)
    assert status == b"HTTP/1.1 400 Bad Request"
    assert headers == {
        b"date": b"today",
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
    }
    content = json.loads(body)
    assert list(content) == ["detail"] and words in content["detail"]
