"""Memory of a process that serves: what comes and goes is kept, what stays is left alone."""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["keep_freed_memory", "leave_alone"]

MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2  # glibc's numbers of these settings
LARGEST_KEPT = 64 * 2**20
FREE_KEPT = 128 * 2**20
GROW_BY = 16 * 2**20


def keep_freed_memory() -> bool:
    """Lets the allocator reuse the memory of large bodies; returns whether it could be told.

    Left alone, glibc asks the system for every block above 128 KiB and gives it back when it is freed. The
    system fills such memory with zeros, page by page: for a body of 1 MB that costs more than reading it. Up
    to 128 MiB of free memory stay with the process instead. Elsewhere than on Linux nothing happens.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl
        return False
    settings = ((MMAP_THRESHOLD, LARGEST_KEPT), (TRIM_THRESHOLD, FREE_KEPT), (TOP_PAD, GROW_BY))
    return all([mallopt(name, value) == 1 for name, value in settings])


def leave_alone() -> None:
    """Tells the garbage collector to look no more at what is there now.

    Code, routes and schemas are 70,000 objects that stay. To walk through them takes 0.1 s, in which nobody
    is answered, and it would be done again and again.
    """
    gc.collect()
    gc.freeze()
