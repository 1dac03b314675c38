"""``report.html``: one self-contained page about a run, made from the files in its folder.

``write_report`` can be called at any time; what is not there yet is left out. No script, no font and no image
is fetched, and the page follows the reader's light or dark setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from atropos_gym.cli._charts import Line, bars, learning_curve
from atropos_gym.html import STYLE

__all__ = ["read_metrics", "references", "render_report", "stage_titles", "write_report"]

#: Updates that the smooth line of the curve averages over.
WINDOW = 9

DEALER = "A 2 3 4 5 6 7 8 9 10".split()


def write_report(run: Path) -> Path:
    """Makes ``report.html`` of a run's folder and returns its path.

    Args:
        run: folder with ``summary.json``; ``metrics.jsonl``, ``config.yaml`` and ``rollouts/`` are optional.
    """
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    config = run / "config.yaml"
    samples = run / "rollouts" / "samples.html"
    page = render_report(
        summary,
        read_metrics(run),
        samples=samples.read_text(encoding="utf-8") if samples.is_file() else "",
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
    )
    path = run / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of ``metrics.jsonl``; a last line cut by a crash is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()]


def render_report(
    summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], *, samples: str = "", config: str = ""
) -> str:
    """Returns the page.

    Args:
        summary: the content of ``summary.json``.
        metrics: one mapping an update, with ``update`` and ``rollout/ep_rew_mean``.
        samples: HTML of sample episodes.
        config: the configuration as YAML.

    Example:
        >>> after = {"mean": 1.0, "stderr": 0.0, "episodes": 2}
        >>> "after GRPO" in render_report({"env": "x", "after": after}, [])
        True
    """
    css = resources.files("atropos_gym.cli").joinpath("report.css").read_text(encoding="utf-8")
    css += STYLE if samples else ""
    title = f"A language model learns {str(summary['env']).split('/')[-1].rsplit('-v', 1)[0]}"
    sections = [
        _stages(summary),
        _curve(summary, metrics),
        _tables(summary),
        _section("Sample episodes", samples, "episodes") if samples else "",
        _timings(summary),
        _details("Configuration", config) if config else "",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body><main>"
        f"<h1>{escape(title)}</h1>{_subtitle(summary)}{_tiles(summary)}"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _subtitle(summary: Mapping[str, Any]) -> str:
    words = [
        f"Environment <code>{escape(str(summary['env']))}</code>",
        f"policy <code>{escape(str(summary.get('policy', '?')))}</code>",
        f"seed {summary.get('seed', '?')}",
    ]
    if summary.get("status") not in (None, "finished"):
        words.append(f"<b>{escape(str(summary['status']))}</b>")
    return f'<p class="quiet">{" · ".join(words)}</p>'


def _tiles(summary: Mapping[str, Any]) -> str:
    after = summary.get("after") or {}
    tiles = []
    if after.get("exact") is not None:
        tiles.append((_signed(after["exact"]), "exact value of its greedy play, per episode"))
    if after:
        what = f"± {after['stderr']:.4f} played, {after['episodes']:,} episodes"
        tiles.append((_signed(after["mean"]), what))
    if summary.get("optimal") is not None:
        tiles.append((_signed(summary["optimal"]), "optimal play"))
    if summary.get("episodes_trained"):
        updates, episodes = summary.get("updates", 0), summary["episodes_trained"]
        tiles.append(
            (f"{episodes:,}", f"training episodes in {updates} updates, {summary.get('swaps', 0)} swaps")
        )
    seconds = sum((summary.get("seconds") or {}).values())
    if seconds:
        cpu = f", {summary['cpu_seconds']:.0f} CPU seconds" if summary.get("cpu_seconds") else ""
        tiles.append((f"{int(seconds) // 60}:{int(seconds) % 60:02d}", f"minutes in all{cpu}"))
    inner = "".join(
        f'<div class="tile"><b>{value}</b><span>{escape(what)}</span></div>' for value, what in tiles
    )
    return f'<div class="tiles">{inner}</div>' if tiles else ""


def _stages(summary: Mapping[str, Any]) -> str:
    stages = stage_titles(summary)
    exact = any(summary[stage].get("exact") is not None for stage in stages)
    head = ["stage", "play", "return ± standard error", "episodes", "valid"]
    head += ["exact, greedy", "exact, sampled"] if exact else []
    rows = []
    for stage, title in stages.items():
        row = summary[stage]
        cells = [
            title,
            str(row.get("play", "")),
            f"{_signed(row['mean'])} ± {row['stderr']:.4f}",
            f"{row['episodes']:,}",
            "–" if row.get("valid") is None else f"{100 * row['valid']:.1f} %",
        ]
        cells += [_signed(row.get(key)) for key in ("exact", "exact_sampled")] if exact else []
        rows.append(_row(cells, "best" if stage == "after" else ""))
    first = " first"
    for name, value in references(summary).items():
        blanks = ["", "", "", ""]
        rows.append(
            _row(
                [name, *blanks, _signed(value), ""] if exact else [name, "", _signed(value), "", ""],
                f"beside{first}",
            )
        )
        first = ""
    header = "".join(f"<th>{escape(word)}</th>" for word in head)
    return _section(
        "Three stages" if len(stages) == 3 else "Before and after",
        f'<table class="stages"><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        + (
            '<p class="quiet">Exact values are computed by dynamic programming over the answer that the '
            "policy gives in every state; an answer that is neither hit nor stick counts −1.</p>"
            if exact
            else ""
        ),
    )


def stage_titles(summary: Mapping[str, Any]) -> dict[str, str]:
    """Returns the stages that were evaluated, in order, with what people call them.

    Example:
        >>> stage_titles({"before": {"mean": 0.1}, "after": {"mean": 0.2}})
        {'before': 'before GRPO', 'after': 'after GRPO'}
    """
    lesson = "after the format lesson" if summary.get("untrained") else "before GRPO"
    titles = {"untrained": "untrained weights", "before": lesson, "after": "after GRPO"}
    return {stage: title for stage, title in titles.items() if summary.get(stage)}


def references(summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns the known values beside the run's, best first.

    Example:
        >>> references({"random": -0.39, "optimal": -0.04})
        {'optimal': -0.04, 'random': -0.39}
    """
    found = dict(summary.get("references") or {})
    if not found:
        found = {name: summary[name] for name in ("optimal", "random") if summary.get(name) is not None}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _curve(summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    rollout = [
        (m["update"], m["rollout/ep_rew_mean"]) for m in metrics if m.get("rollout/ep_rew_mean") is not None
    ]
    exact = [(point["update"], point["exact"]) for point in summary.get("curve") or []]
    if not rollout and not exact:
        return ""
    lines = [
        Line("return of sampled episodes, mean of each update", rollout, "update"),
        Line(f"the same, mean of {WINDOW} updates", moving_mean(rollout, WINDOW), "rollout"),
        Line("exact value of greedy play", exact, "exact", dots=True),
    ]
    if not exact and summary.get("after"):
        played = [(0, summary["before"]["mean"])] if summary.get("before") else []
        played.append((summary.get("updates", 0), summary["after"]["mean"]))
        lines.append(Line("evaluation", played, "played", dots=True))
    chart = learning_curve(lines, references(summary), x_label="update", y_label="return per episode")
    return _section("Learning curve", chart)


def moving_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Returns each point's mean with its neighbours, fewer at the ends; nothing for few points.

    Example:
        >>> moving_mean([(1, 0.0), (2, 3.0), (3, 6.0)], 3)
        [(1, 1.5), (2, 3.0), (3, 4.5)]
    """
    if len(points) < window:
        return []
    half = window // 2
    means = []
    for k, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, k - half) : k + half + 1]]
        means.append((x, sum(near) / len(near)))
    return means


def _tables(summary: Mapping[str, Any]) -> str:
    tables = summary.get("tables")
    if not tables:
        return ""
    learned, textbook = tables["learned"], tables["textbook"]
    grids, same, cells = [], 0, 0
    for kind in ("hard", "soft"):
        for name, table in (("learned", learned), ("textbook", textbook)):
            grids.append(
                f"<div><h3>{kind.capitalize()} hands, {name}</h3>{_grid(table[kind], textbook[kind])}</div>"
            )
        for total, row in learned[kind].items():
            same += sum(a == b for a, b in zip(row, textbook[kind][total], strict=True))
            cells += len(row)
    swatches = "".join(
        f'<span><span class="swatch {kind}"></span>{text}</span>'
        for kind, text in (
            ("hit", "hit"),
            ("stick", "stick"),
            ("invalid", "neither"),
            ("differs", "not textbook"),
        )
    )
    return _section(
        "What it learned to do",
        f"<p>Greedy play in every state, rows by the player's sum and columns by the dealer's card: "
        f"{same} of {cells} answers are those of textbook play.</p>"
        f'<div class="swatches">{swatches}</div><div class="tables">{"".join(grids)}</div>',
    )


def _grid(table: Mapping[str, str], textbook: Mapping[str, str]) -> str:
    rows = ["<tr><th></th>" + "".join(f"<th>{card}</th>" for card in DEALER) + "</tr>"]
    for total in sorted(table, key=int, reverse=True):
        cells = []
        for letter, right in zip(table[total], textbook[total], strict=True):
            kind = {"H": "hit", "S": "stick"}.get(letter, "invalid")
            differs = "" if letter == right else " differs"
            cells.append(f'<td class="{kind}{differs}">{escape(letter)}</td>')
        rows.append(f"<tr><th>{total}</th>{''.join(cells)}</tr>")
    return f'<table class="play">{"".join(rows)}</table>'


def _timings(summary: Mapping[str, Any]) -> str:
    seconds = {name: value for name, value in (summary.get("seconds") or {}).items() if value}
    if not seconds:
        return ""
    return _section("Seconds by phase", bars(seconds))


def _section(title: str, inner: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<section{attribute}><h2>{escape(title)}</h2>{inner}</section>"


def _details(title: str, text: str) -> str:
    return (
        f"<section><details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details></section>"
    )


def _row(cells: Sequence[str], kind: str) -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<tr{attribute}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.4f}".replace("-", "−")
