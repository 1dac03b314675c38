"""What came and went over time, in three resolutions: minutes finely, days coarsely, never more memory.

A bin holds what happened within its seconds (groups, ids, scores and staleness by environment) and how things
stood when they were last looked at (queue, step, version).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["History", "LEVELS"]

LEVELS = ((2.0, 300), (30.0, 360), (600.0, 432))
"""Seconds of a bin and how many are kept: ten minutes, three hours, three days."""

MOST_ENVS = 32
"""Environments that are told apart within a bin; the rest counts as :data:`OTHERS`."""

OTHERS = "others"

MOST_SCORES = 1e300
"""Where scores sum to more, the sum is not told: it may be infinite, or become so with others."""

GAUGES = ("queue_groups", "queue_sequences", "leased_groups", "step", "version")
FLOWS = ("groups_in", "groups_out", "ids_in", "ids_out", "batches")


@dataclass(slots=True)
class _Env:
    """What one environment sent, and how old it was when a trainer got it."""

    groups: int = 0
    sequences: int = 0
    scores: float = 0.0
    aged: int = 0
    ages: int = 0


@dataclass(slots=True)
class _Bin:
    """What happened within some seconds; gauges are None until someone looked."""

    at: float
    gauges: Mapping[str, int | None] = field(default_factory=dict)
    flows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FLOWS, 0))
    envs: dict[str, _Env] = field(default_factory=dict)

    def env(self, name: str) -> _Env:
        if name not in self.envs and len(self.envs) >= MOST_ENVS:
            name = OTHERS
        return self.envs.setdefault(name, _Env())


class History:
    """Counts in bins.

    Attributes:
        received_at: when the last group came; None before the first.
        delivered_at: when the last batch went out; None before the first.

    Example:
        >>> history = History()
        >>> history.received("gsm8k", sequences=8, ids=4096, scores=6.0, now=10.0)
        >>> series = history.series(600, now=11.0)
        >>> series["at"], series["groups_in"], series["envs"]["gsm8k"]["scores"]
        ([10.0], [1.0], [6.0])
    """

    def __init__(self) -> None:
        self._levels: list[tuple[float, deque[_Bin]]] = [
            (seconds, deque(maxlen=count)) for seconds, count in LEVELS
        ]
        self.received_at: float | None = None
        self.delivered_at: float | None = None

    def received(self, env: str, *, sequences: int, ids: int, scores: float, now: float) -> None:
        """Counts a group that was accepted; ``scores`` is the sum over its sequences."""
        self.received_at = now
        for one in self._bins(now):
            one.flows["groups_in"] += 1
            one.flows["ids_in"] += ids
            tally = one.env(env)
            tally.groups += 1
            tally.sequences += sequences
            tally.scores += scores

    def delivered(self, groups: Iterable[tuple[str, int, int | None]], now: float) -> None:
        """Counts a batch that goes out.

        Args:
            groups: of each its environment, its ids, and how many versions it is behind, None where unknown.
            now: Unix seconds.
        """
        groups = list(groups)
        self.delivered_at = now
        for one in self._bins(now):
            one.flows["batches"] += 1
            one.flows["groups_out"] += len(groups)
            for env, ids, age in groups:
                one.flows["ids_out"] += ids
                if age is not None:
                    tally = one.env(env)
                    tally.aged += 1
                    tally.ages += age

    def look(self, gauges: Mapping[str, int | None], now: float) -> None:
        """Notes how things stand."""
        for one in self._bins(now):
            one.gauges = gauges

    def rate(self, flow: str, now: float, seconds: float = 30.0) -> float:
        """What came or went per second, lately."""
        bins = [one for one in self._levels[0][1] if one.at > now - seconds]
        if not bins:
            return 0.0
        return sum(one.flows[flow] for one in bins) / max(LEVELS[0][0], now - bins[0].at)

    def series(self, span: float, now: float) -> dict[str, Any]:
        """Returns the last ``span`` seconds as columns, one entry a bin, None where nothing is known.

        Flows are per second; scores and ages are sums, beside the numbers that they are sums over. A sum of
        scores beyond :data:`MOST_SCORES` is None.
        """
        seconds, bins = next(
            ((seconds, bins) for seconds, bins in self._levels if seconds * (bins.maxlen or 0) >= span),
            self._levels[-1],
        )
        shown = [one for one in bins if one.at > now - span - seconds]
        names = list(dict.fromkeys(name for one in shown for name in one.envs))
        found: dict[str, Any] = {"seconds": seconds, "span": span, "at": [one.at for one in shown]}
        found |= {name: [one.gauges.get(name) for one in shown] for name in GAUGES}
        for name in FLOWS:
            # The newest bin is not full yet: a part of its seconds has not happened.
            found[name] = [round(one.flows[name] / min(seconds, max(1.0, now - one.at)), 3) for one in shown]
        return found | {"envs": {name: _columns([one.envs.get(name) for one in shown]) for name in names}}

    def _bins(self, now: float) -> list[_Bin]:
        """The bin of this moment in each resolution; a clock that goes back stays in the newest one."""
        found = []
        for seconds, bins in self._levels:
            start = now - now % seconds
            if not bins or bins[-1].at < start:
                bins.append(_Bin(start, gauges=bins[-1].gauges if bins else {}))
            found.append(bins[-1])
        return found


def _columns(tallies: list[_Env | None]) -> dict[str, list[float | None]]:
    def told(value: float) -> float | None:
        return round(value, 6) if abs(value) <= MOST_SCORES else None

    return {
        name: [0 if tally is None else told(getattr(tally, name)) for tally in tallies]
        for name in ("groups", "sequences", "scores", "aged", "ages")
    }
