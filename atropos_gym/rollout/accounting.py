"""What became of every group that was started: counts that add up.

A started group ends as exactly one of delivered, filtered (by which filter) or failed (by reason).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Accounting"]


@dataclass(slots=True)
class Accounting:
    """Counts of groups, and of what happened to episodes on the way.

    Attributes:
        started: groups that were begun.
        delivered: groups handed over.
        filtered: groups that a filter took out, by the filter's name.
        failed: groups that could not be finished, by reason.
        episodes: episodes played to their end.
        episodes_failed: episodes that were not, by reason; with ``on_partial="retry"`` an episode counts once
            for each failed try.
        untrainable: episodes played whose samples cannot be trained on, by reason.
        unscored: members that left their group because the score was None.
        aborted: completions that the engine aborted and that were asked for again.
        messages: the latest error by reason, for people.

    Example:
        >>> counts = Accounting()
        >>> counts.begin(); counts.begin(); counts.deliver(); counts.fail("deadline")
        >>> counts.in_flight, counts.report()["failed"]
        (0, {'deadline': 1})
    """

    started: int = 0
    delivered: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    episodes_failed: Counter[str] = field(default_factory=Counter)
    untrainable: Counter[str] = field(default_factory=Counter)
    unscored: int = 0
    aborted: int = 0
    messages: dict[str, str] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Groups that were started and have not ended."""
        return self.started - self.delivered - self.filtered.total() - self.failed.total()

    def begin(self) -> None:
        """Counts a group that starts."""
        self.started += 1

    def deliver(self) -> None:
        """Counts a group that is handed over."""
        self.delivered += 1

    def filter(self, name: str) -> None:
        """Counts a group that the filter ``name`` took out."""
        self.filtered[name] += 1

    def fail(self, reason: str, message: str = "") -> None:
        """Counts a group that could not be finished."""
        self.failed[reason] += 1
        if message:
            self.messages[reason] = message

    def fail_episode(self, reason: str, message: str = "") -> None:
        """Counts an episode that could not be finished."""
        self.episodes_failed[reason] += 1
        if message:
            self.messages[reason] = message

    def report(self) -> dict[str, Any]:
        """Returns the counts as JSON data; groups started = delivered + filtered + failed + in flight."""
        return {
            "started": self.started,
            "delivered": self.delivered,
            "filtered": dict(self.filtered),
            "failed": dict(self.failed),
            "in_flight": self.in_flight,
            "episodes": {
                "played": self.episodes,
                "failed": dict(self.episodes_failed),
                "untrainable": dict(self.untrainable),
                "unscored": self.unscored,
                "aborted_completions": self.aborted,
            },
            "messages": dict(self.messages),
        }
