"""HTTP/1.1 over httptools, with an end to how long the head of a request may be, and refusals in JSON."""

from __future__ import annotations

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers. The parser itself would collect them without end."""


class _HeadTooLong(Exception):
    """The parser turns it into its own error, uvicorn that into a 400."""


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, which answers 400 and hangs up where a head is longer than 64 KiB.

    What no application gets to see is refused here, with a ``detail`` as everywhere else.
    """

    _head_bytes: int | None = None  # of the head that is being read; None between two heads

    def data_received(self, data: bytes) -> None:
        """Parses what came."""
        super().data_received(data)
        if self._head_bytes is None or self.transport.is_closing():
            return
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

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no request, and hangs up; says what is wrong where the parser does not know."""
        if (self._head_bytes or 0) > MAX_HEAD_BYTES:
            msg = f"request head is longer than {MAX_HEAD_BYTES} bytes"
        body = to_json({"detail": msg})
        lines = [b"HTTP/1.1 400 Bad Request", *(b"%s: %s" % one for one in self.server_state.default_headers)]
        lines += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()
