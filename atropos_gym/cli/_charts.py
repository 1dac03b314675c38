"""Inline SVG of the report: a learning curve with reference lines, and bars of seconds.

Plain strings; colours are classes of ``report.css``, so that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "bars", "learning_curve"]

WIDTH, HEIGHT = 920, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 178, 16, 44
LABEL_GAP = 15


@dataclass(frozen=True)
class Line:
    """One line of the chart.

    Attributes:
        name: what the legend says.
        points: (update, value) in order.
        kind: its class in the style sheet, ``exact``, ``rollout`` or ``played``.
        dots: draw each point, with its value on hover.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str
    dots: bool = False


def learning_curve(lines: Sequence[Line], references: dict[str, float], *, x_label: str, y_label: str) -> str:
    """Returns the chart as an SVG element.

    Args:
        lines: what was measured; lines without points are left out.
        references: horizontal lines by name, such as the value of random play.
        x_label: title of the x axis.
        y_label: title of the y axis.

    Raises:
        ValueError: there is nothing finite to draw.
    """
    lines = [line for line in lines if line.points]
    values = [y for line in lines for _, y in line.points] + list(references.values())
    values = [value for value in values if math.isfinite(value)]
    if not values:
        raise ValueError("nothing to draw: no line has a point and there is no reference")
    x_max = max([x for line in lines for x, _ in line.points] + [1.0])
    step, low, high = _ticks(min(values), max(values))

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_max
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
        return across, down

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">']
    right = WIDTH - RIGHT
    for k in range(round((high - low) / step) + 1):
        y = at(0, low + k * step)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">')
        parts.append(f"{_number(low + k * step, step)}</text>")
    x_step = max(1.0, _nice(x_max / 8))
    for k in range(int(x_max / x_step + 1e-9) + 1):
        x = at(k * x_step, low)[0]
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">')
        parts.append(f"{k * x_step:g}</text>")
    parts.append(f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">')
    parts.append(f"{escape(x_label)}</text>")
    parts += _references(references, at, right)
    for line in lines:
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line.points if math.isfinite(y))
        parts.append(f'<polyline class="line {line.kind}" points="{path}"/>')
        if line.dots:
            for x, y in line.points:
                cx, cy = at(x, y)
                parts.append(f'<circle class="dot {line.kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="3.5">')
                parts.append(
                    f"<title>{escape(line.name)}, {escape(x_label)} {x:g}: {_signed(y)}</title></circle>"
                )
    parts.append("</svg>")
    legend = "".join(f'<span class="key {line.kind}">{escape(line.name)}</span>' for line in lines)
    return f'<figure>{"".join(parts)}<figcaption class="legend">{legend}</figcaption></figure>'


def _references(references: dict[str, float], at: object, right: float) -> list[str]:
    """Dashed lines with their names on the right, moved apart where they would overlap."""
    assert callable(at)
    ordered = sorted(references.items(), key=lambda item: -item[1])
    heights = [at(0, value)[1] for _, value in ordered]
    labels: list[float] = []
    for height in heights:
        labels.append(max(height, labels[-1] + LABEL_GAP) if labels else height)
    parts = []
    for (name, value), y, label in zip(ordered, heights, labels, strict=True):
        parts.append(f'<line class="reference" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<polyline class="leader" points="{right},{y:.1f} {right + 8},{label:.1f}"/>')
        parts.append(f'<text class="reference" x="{right + 12}" y="{label + 4:.1f}">')
        parts.append(f"{escape(name)} {_signed(value)}</text>")
    return parts


def bars(seconds: dict[str, float]) -> str:
    """Returns seconds by phase as horizontal bars.

    Example:
        >>> "1.5 s" in bars({"lesson": 1.5})
        True
    """
    most = max([*seconds.values(), 1e-9])
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        f'<td class="bar"><span style="width:{100 * value / most:.1f}%"></span></td>'
        f'<td class="number">{value:.1f} s</td></tr>'
        for name, value in seconds.items()
    )
    return f'<table class="bars">{rows}</table>'


def _nice(step: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= step * (1 - 1e-9))


def _ticks(low: float, high: float) -> tuple[float, float, float]:
    """Step, first and last tick that hold the values, about six of them."""
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    step = _nice((high - low) / 6)
    return step, math.floor(low / step) * step, math.ceil(high / step) * step


def _number(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:.{digits}f}".replace("-", "−") if abs(value) > step / 1e6 else "0"


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")
