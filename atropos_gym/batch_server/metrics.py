"""Numbers in the text form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["CONTENT_TYPE", "Metric", "counter", "exposition", "gauge", "histogram"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

PREFIX = "atropos_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One number, or one for each value of a label.

    Attributes:
        name: without the prefix.
        kind: ``counter``, ``gauge`` or ``histogram``.
        about: what it counts, in a sentence.
        lines: its samples as they are printed, without the prefix.
    """

    name: str
    kind: str
    about: str
    lines: tuple[str, ...]


def gauge(name: str, about: str, value: float) -> Metric:
    """A number that goes up and down."""
    return Metric(name, "gauge", about, (f"{name} {_number(value)}",))


def counter(name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
    """A number that only grows, or one for each value of ``label``."""
    if not isinstance(value, Mapping):
        return Metric(name, "counter", about, (f"{name} {_number(value)}",))
    lines = (f'{name}{{{label}="{_escaped(key)}"}} {_number(count)}' for key, count in value.items())
    return Metric(name, "counter", about, tuple(lines))


def histogram(name: str, about: str, counts: Mapping[int, int], ends: Sequence[int]) -> Metric:
    """How often which number came.

    Args:
        name: without the prefix.
        about: what it counts.
        counts: how often each number came.
        ends: upper ends of the buckets, each included in its bucket.

    >>> histogram("lag", "How late.", {0: 2, 3: 1}, (0, 2)).lines
    ('lag_bucket{le="0"} 2', 'lag_bucket{le="2"} 2', 'lag_bucket{le="+Inf"} 3', 'lag_sum 3', 'lag_count 3')
    """
    total = sum(counts.values())
    within = [(str(end), sum(count for number, count in counts.items() if number <= end)) for end in ends]
    buckets = [f'{name}_bucket{{le="{end}"}} {count}' for end, count in [*within, ("+Inf", total)]]
    summed = sum(number * count for number, count in counts.items())
    return Metric(name, "histogram", about, (*buckets, f"{name}_sum {summed}", f"{name}_count {total}"))


def exposition(metrics: Iterable[Metric]) -> str:
    """All metrics as one text.

    >>> print(exposition([gauge("queue_groups", "Groups that wait.", 3)]), end="")
    # HELP atropos_queue_groups Groups that wait.
    # TYPE atropos_queue_groups gauge
    atropos_queue_groups 3
    """
    lines: list[str] = []
    for one in metrics:
        lines += [f"# HELP {PREFIX}{one.name} {one.about}", f"# TYPE {PREFIX}{one.name} {one.kind}"]
        lines += [PREFIX + line for line in one.lines]
    return "".join(f"{line}\n" for line in lines)


def _number(value: float) -> str:
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
