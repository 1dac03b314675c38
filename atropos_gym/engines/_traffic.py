"""What goes through an engine over HTTP, in numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["Traffic"]


class Traffic:
    """Counts requests, ids and seconds. Requests on one event loop, publishes on any thread.

    Args:
        clock: seconds that only grow.

    Example:
        >>> times = iter([0.0, 2.0])
        >>> traffic = Traffic(lambda: next(times))
        >>> with traffic.request() as ids:
        ...     ids.append(10)
        >>> traffic.metrics({})["tokens_per_second"]
        5.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.queued = 0
        self.running = 0
        self._requests = 0
        self._ids = 0
        self._prompt_ids = 0
        self._cached_ids = 0
        self._busy = 0.0  # seconds in which at least one request ran
        self._busy_since = 0.0
        self._latency = 0.0
        self._longest = 0.0
        self._publishes = 0
        self._publish_wait = 0.0
        self._longest_publish = 0.0

    @contextmanager
    def request(self) -> Iterator[list[int]]:
        """Measures one request; the caller appends how many ids came back."""
        start = self._clock()
        if self.running == 0:
            self._busy_since = start
        self.running += 1
        counts: list[int] = []
        try:
            yield counts
        finally:
            end = self._clock()
            self.running -= 1
            if self.running == 0:
                self._busy += end - self._busy_since
            self._requests += 1
            self._ids += sum(counts)
            self._latency += end - start
            self._longest = max(self._longest, end - start)

    def prompt(self, ids: int, cached: int) -> None:
        """Counts a prompt, and how much of it the server had in its prefix cache."""
        self._prompt_ids += ids
        self._cached_ids += cached

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Measures one publish, from asking to announcing."""
        start = self._clock()
        try:
            yield
        finally:
            waited = self._clock() - start
            self._publishes += 1
            self._publish_wait += waited
            self._longest_publish = max(self._longest_publish, waited)

    def metrics(self, counters: Mapping[str, int]) -> dict[str, float]:
        """Returns all numbers; durations in seconds, ``tokens`` are sampled ids."""
        busy = self._busy + (self._clock() - self._busy_since if self.running else 0.0)
        return {
            "requests": self._requests,
            "running": self.running,
            "queued": self.queued,
            "tokens": self._ids,
            "tokens_per_second": self._ids / busy if busy else 0.0,
            "prompt_tokens": self._prompt_ids,
            "cached_tokens": self._cached_ids,
            "latency_mean": self._latency / self._requests if self._requests else 0.0,
            "latency_max": self._longest,
            "retries": _sum(counters, "retry/"),
            "lost": _sum(counters, "lost/"),
            "publishes": self._publishes,
            "publish_wait_mean": self._publish_wait / self._publishes if self._publishes else 0.0,
            "publish_wait_max": self._longest_publish,
        }


def _sum(counters: Mapping[str, int], prefix: str) -> int:
    return sum(count for name, count in counters.items() if name.startswith(prefix))
