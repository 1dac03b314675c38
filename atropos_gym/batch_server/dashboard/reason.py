"""Why nothing moves, when nothing moves: one sentence for people, from what the server knows anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Situation", "duration", "why"]

Tone = Literal["good", "wait", "bad"]

QUIET_SECONDS = 30.0
"""After so long without a group or a request, the sentence says who is quiet."""


@dataclass(frozen=True, slots=True)
class Situation:
    """How things stand. Times are seconds ago, None where it never happened.

    Attributes:
        failing: why nothing can be saved; "" where all is well.
        registered: a trainer has registered.
        started: it has asked for a batch.
        finished: the run has ended.
        connected: environments that are connected.
        known: environments that ever registered.
        queue_groups: groups that wait.
        leased_groups: groups that a trainer has and has not acked.
        held_posts: posts that wait because too much is queued.
        reason: why the trainer, which asks, gets no batch; "" where it got one.
        received: when the last group came.
        delivered: when the last batch went out.
        trainer: when the trainer was last heard of.
    """

    failing: str = ""
    registered: bool = False
    started: bool = False
    finished: bool = False
    connected: int = 0
    known: int = 0
    queue_groups: int = 0
    leased_groups: int = 0
    held_posts: int = 0
    reason: str = ""
    received: float | None = None
    delivered: float | None = None
    trainer: float | None = None


def why(now: Situation) -> tuple[Tone, str]:
    """Returns the sentence, and whether things move, wait, or need someone.

    Example:
        >>> why(Situation(queue_groups=3))
        ('wait', 'No trainer has registered yet; 3 groups wait for one.')
    """
    if now.failing:
        return "bad", f"Nothing can be saved, so nothing is accepted: {now.failing}."
    if not now.registered:
        waiting = f"; {_groups(now.queue_groups)} for one" if now.queue_groups else ""
        return "wait", f"No trainer has registered yet{waiting}."
    if now.finished:
        return "good", "The run has finished: the trainer said so, and environments stop."
    if not now.started:
        return "wait", "A trainer has registered but not asked for a batch yet; environments wait for that."
    if now.reason and not _quiet(now.trainer):
        return _no_batch(now)
    if now.held_posts:
        return "wait", (
            f"More is queued than the trainer takes, so {now.held_posts} posts are held until it has taken a "
            f"batch; it was last heard of {duration(now.trainer)} ago."
        )
    if _quiet(now.trainer):
        held = f" and holds {now.leased_groups} groups under a lease" if now.leased_groups else ""
        tone: Tone = "wait" if now.leased_groups else "bad"
        return tone, (
            f"The trainer was last heard of {duration(now.trainer)} ago{held}; "
            f"{_groups(now.queue_groups)} in the queue."
        )
    if not now.connected and not now.queue_groups:
        return "bad", f"No environment is connected{_ever(now)}: nothing will come."
    if _quiet(now.received) and not now.queue_groups:
        return "bad", f"No group has come for {duration(now.received)}, though {_envs(now.connected)}."
    if now.leased_groups:
        waiting = f"; {_groups(now.queue_groups)}" if now.queue_groups else ""
        return "good", f"The trainer works on a batch of {now.leased_groups} groups{waiting}."
    return "good", "Groups come in and batches go out."


def _no_batch(now: Situation) -> tuple[Tone, str]:
    """The trainer asked and got nothing: the server's own reason, and who is behind it."""
    sentence = f"The trainer waits for a batch: {now.reason}"
    if not now.connected:
        said = "" if "no environment is connected" in sentence else "; no environment is connected"
        return "bad", f"{sentence}{said}{_ever(now)}."
    if _quiet(now.received) or now.received is None:
        since = "no group has come yet" if now.received is None else f"none for {duration(now.received)}"
        return (
            "bad" if now.received is not None else "wait",
            f"{sentence}; {since}, though {_envs(now.connected)}.",
        )
    return "good", f"{sentence}; the last group came {duration(now.received)} ago."


def duration(seconds: float | None) -> str:
    """Says a duration as people do.

    >>> [duration(s) for s in (0.4, 59, 600, 7200, 200000)]
    ['1 s', '59 s', '10 min', '2 h', '2 d']
    """
    left = max(1.0, seconds or 0.0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if left >= 1.5 * size:
            return f"{left / size:.0f} {unit}"
    return f"{left:.0f} s"


def _quiet(seconds: float | None) -> bool:
    return seconds is not None and seconds >= QUIET_SECONDS


def _groups(count: int) -> str:
    return f"{count} group{' waits' if count == 1 else 's wait'}"


def _envs(count: int) -> str:
    return f"{count} environment{' is' if count == 1 else 's are'} connected"


def _ever(now: Situation) -> str:
    return f" ({now.known} registered before)" if now.known else ""
