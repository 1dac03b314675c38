"""Content codings: gzip and zstd, inflated piece by piece and squeezed as a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from isal import igzip_lib, isal_zlib

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["FEED_BYTES", "BrokenStream", "Inflater", "Squeezer", "squeezer"]

FEED_BYTES = 2**16
"""So much is looked at in one go: what lies behind the end of a short member is copied for the next one."""

FASTEST = 1
"""Level of both codings: a reply is made smaller at about the speed at which it is written."""


class BrokenStream(ValueError):
    """What came is not in the coding that it is said to be in."""


class _Stream(Protocol):
    """One gzip member or zstd frame, in the standard library's manner of bz2, lzma and zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class Squeezer(Protocol):
    """Makes a stream smaller."""

    def compress(self, data: bytes, /) -> bytes:
        """Takes the next piece; gives what is ready."""
        ...

    def flush(self) -> bytes:
        """Gives the rest."""
        ...


class Inflater:
    """Inflates one member behind the other, in small pieces: whoever takes them can stop at any time.

    Args:
        coding: ``gzip`` (or ``x-gzip``) or ``zstd``.

    >>> inflater = Inflater("zstd")
    >>> b"".join(inflater.feed(zstd.compress(b"ids ") + zstd.compress(b"and masks")))
    b'ids and masks'
    >>> inflater.complete
    True
    """

    PIECE_BYTES = 2**20

    def __init__(self, coding: str) -> None:
        self.coding = coding.removeprefix("x-")
        self._padding = {"gzip": b"\0", "zstd": b""}[self.coding]  # legal behind the last member
        self._stream = self._next()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yields what this chunk gives, at most ``PIECE_BYTES`` at a time.

        Raises:
            BrokenStream: it is not of this coding.
        """
        try:
            for start in range(0, len(chunk), FEED_BYTES):
                yield from self._feed(chunk[start : start + FEED_BYTES])
        except (igzip_lib.IsalError, zstd.ZstdError) as error:  # type: ignore[misc]  # isal's stub has an instance
            raise BrokenStream(f"invalid {self.coding} body") from error

    def _feed(self, data: bytes) -> Iterator[bytes]:
        while data or not (self._stream.eof or self._stream.needs_input):
            if self._stream.eof:
                data = data.lstrip(self._padding)
                if not data:
                    return
                self._stream = self._next()
            piece = self._stream.decompress(data, self.PIECE_BYTES)
            data = self._stream.unused_data if self._stream.eof else b""
            if piece:
                yield piece

    def _next(self) -> _Stream:
        if self.coding == "zstd":
            return zstd.ZstdDecompressor()
        return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)

    @property
    def complete(self) -> bool:
        """Whether the last member has ended."""
        return self._stream.eof


SQUEEZERS: dict[str, Callable[[], Squeezer]] = {
    "gzip": lambda: isal_zlib.compressobj(FASTEST, isal_zlib.DEFLATED, 31),
    "zstd": lambda: zstd.ZstdCompressor(FASTEST),
}


def squeezer(coding: str) -> Squeezer:
    """Starts a stream of this coding, ``gzip`` or ``zstd``."""
    return SQUEEZERS[coding]()
