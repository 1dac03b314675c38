"""HTTP/1.1 over httptools: bodies in large pieces, short answers in one packet, heads with an end."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers. The parser itself would collect them without end."""

PIECE_BYTES = 2**20
"""So much of a body is collected before anyone is told of it: to be told of each packet costs more than to
read it."""

PACKET_BYTES = 64 * 1024
"""Up to here what is written in one turn of the loop is sent as one."""


class _HeadTooLong(Exception):
    """The parser turns it into its own error, uvicorn that into a 400."""


class _Packets:
    """What came of a body, put together when it is asked for: a bytearray would be moved as it grows."""

    def __init__(self) -> None:
        self._packets: list[bytes] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iadd__(self, packet: bytes) -> Self:
        self._packets.append(packet)
        self._size += len(packet)
        return self

    def __bytes__(self) -> bytes:
        return b"".join(self._packets)


class _Corked:
    """A transport that sends what is written in one turn of the loop at once: a short answer's head and body.

    To send on loopback also wakes the reader, which costs more than all else in a short answer.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Keeps little, sends much."""
        if self._size + len(data) > PACKET_BYTES:
            self._flush()
            self._transport.write(data)
            return
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        self._size += len(data)

    def close(self) -> None:
        """Hangs up once everything is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, which answers 400 and hangs up where a head is longer than 64 KiB.

    What no application gets to see is refused here, with a ``detail`` as everywhere else.
    """

    _head_bytes: int | None = None  # of the head that is being read; None between two heads
    _ended = False  # a message ended in what is being parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        super().connection_made(_Corked(transport, self.loop))  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        """Parses what came."""
        self._ended = False
        super().data_received(data)
        if self._head_bytes is None or self.transport.is_closing():
            return
        if not self._ended:  # else the parser does not tell how much of it is of the next head
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLong
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request has come whole; what follows is of the next one."""
        self._ended = True
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body has come; the last one is told of with the end of the message."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        if not cycle.body:
            cycle.body = _Packets()  # type: ignore[assignment]
        cycle.body += body
        if len(cycle.body) >= PIECE_BYTES:
            self.flow.pause_reading()
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, and hangs up; says what is wrong where the parser does not know."""
        if (self._head_bytes or 0) > MAX_HEAD_BYTES:
            msg = f"request head is longer than {MAX_HEAD_BYTES} bytes"
        body = to_json({"detail": msg})
        lines = [b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % one for one in self.server_state.default_headers)]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
