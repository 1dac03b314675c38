"""HTTP/1.1 over httptools, with an end to how long the head of a request may be."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

MAX_HEAD_BYTES = 64 * 1024
"""Longest request line and headers. The parser itself would collect them without end."""


class _HeadTooLong(Exception):
    """The parser turns it into its own error, uvicorn that into a 400."""


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, which answers 400 and hangs up where a head is longer than 64 KiB."""

    _head_bytes: int | None = None  # of the head that is being read; None between two heads

    def data_received(self, data: bytes) -> None:
        """Parses what came."""
        super().data_received(data)
        if self._head_bytes is None or self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.send_400_response("Request head is too long.")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self._head_bytes = None
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            raise _HeadTooLong
        super().on_headers_complete()
