"""The report page: what it shows, that it is self-contained and well formed, and the chart's arithmetic."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.cli._charts import Line, bars, learning_curve
from atropos_gym.cli.report import read_metrics, references, render_report, write_report

HARD = {str(total): "SSSSSSSSSS" for total in range(4, 22)}
SOFT = {str(total): "HHHHHHHHHH" for total in range(12, 22)}
VOID = {"meta", "line", "polyline", "circle", "br"}


def summary(**changes: Any) -> dict[str, Any]:
    stage = {
        "mean": -0.4,
        "stderr": 0.01,
        "episodes": 4096,
        "valid": 0.99,
        "exact": -0.5,
        "exact_sampled": -0.41,
    }
    learned = {"hard": HARD | {"20": "HSSSSSSSS?"}, "soft": SOFT}
    return {
        "env": "atropos/Blackjack-v0",
        "policy": "tiny",
        "seed": 0,
        "updates": 20,
        "swaps": 21,
        "episodes_trained": 15360,
        "untrained": stage | {"mean": -1.0, "valid": 0.0},
        "before": stage,
        "after": stage | {"mean": -0.0512, "exact": -0.0508},
        "random": -0.3942,
        "optimal": -0.0431,
        "references": {
            "textbook": -0.0431,
            "stick on 17": -0.0759,
            "always stick": -0.1829,
            "random": -0.3942,
        },
        "seconds": {"format lesson": 40.0, "GRPO": 101.5},
        "cpu_seconds": 150.0,
        "curve": [
            {"update": 0, "exact": -0.5},
            {"update": 10, "exact": -0.18},
            {"update": 20, "exact": -0.05},
        ],
        "tables": {"learned": learned, "textbook": {"hard": HARD, "soft": SOFT}},
    } | changes


METRICS = [{"update": k, "rollout/ep_rew_mean": -0.4 + k / 60} for k in range(1, 21)]


class WellFormed(HTMLParser):
    """Collects tags and complains about any that is not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def parsed(page: str) -> WellFormed:
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    page = render_report(summary(), METRICS, samples="<p>an episode</p>", config="env: x")
    tags = parsed(page).seen
    assert not [tag for tag, _ in tags if tag in {"script", "link", "img", "iframe"}]
    assert "http" not in page
    assert "url(" not in page


def test_the_three_stages_stand_beside_the_reference_values() -> None:
    page = render_report(summary(), METRICS)
    body = page[page.index("<tbody>") : page.index("</tbody>")]
    rows = re.findall(r"<tr.*?</tr>", body)
    assert [re.sub("<.*?>", "|", row).split("|")[2] for row in rows] == [
        "untrained weights",
        "after the format lesson",
        "after GRPO",
        "textbook",
        "stick on 17",
        "always stick",
        "random",
    ]
    assert "−0.0508" in rows[2]
    assert "−0.0512 ± 0.0100" in rows[2]


def test_the_table_marks_exactly_the_answers_that_are_not_textbooks() -> None:
    page = render_report(summary(), METRICS)
    assert page.count(' differs">') == 2 + 1  # two cells and the legend's swatch
    assert '<td class="invalid differs">?</td>' in page
    assert "278 of 280 answers" in page


def test_both_colour_schemes_define_the_same_names() -> None:
    page = render_report(summary(), [])
    light, dark = re.findall(r":root \{(.*?)\}", page, re.S)
    names = [set(re.findall(r"--[a-z-]+(?=:)", part)) for part in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[a-z-]+)\)", page)) <= names[0]


def test_a_run_of_another_environment_shows_before_after_and_the_curve() -> None:
    stage = {"mean": 0.1, "stderr": 0.02, "episodes": 100, "valid": None}
    page = render_report(
        {"env": "atropos/Arithmetic-v0", "updates": 20, "before": stage, "after": stage}, METRICS
    )
    parsed(page)
    assert "learns Arithmetic" in page
    assert "Before and after" in page
    assert "exact" not in page.split("</style>")[1]
    assert page.count('<circle class="dot played"') == 2


def test_what_was_written_by_people_or_models_is_escaped() -> None:
    page = render_report(summary(env="x/<b>-v0", policy="<script>"), [], config="a: <i>")
    assert "<script>" not in page
    assert "&lt;i&gt;" in page


def test_the_page_is_made_of_the_runs_files(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "samples.html").write_text("<p>sample</p>")
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    path = write_report(tmp_path)
    page = path.read_text(encoding="utf-8")
    assert "<p>sample</p>" in page
    assert '<polyline class="line update"' in page
    assert '<polyline class="line rollout"' in page
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "report.html",
        "rollouts",
        "summary.json",
    ]


def test_a_last_line_cut_by_a_crash_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n{"upda')
    assert read_metrics(tmp_path) == [{"update": 1}]


def test_references_are_in_falling_order() -> None:
    assert list(references(summary())) == ["textbook", "stick on 17", "always stick", "random"]


def test_a_chart_without_anything_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        learning_curve([Line("a", [], "exact")], {}, x_label="x", y_label="y")


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30),
    reference=st.dictionaries(st.sampled_from("abc"), st.floats(-1e6, 1e6)),
)
def test_every_point_lies_inside_the_drawing(values: list[float], reference: dict[str, float]) -> None:
    chart = learning_curve([Line("a", list(enumerate(values)), "exact")], reference, x_label="x", y_label="y")
    points = re.search(r'<polyline class="line exact" points="([^"]*)"', chart)
    assert points is not None
    pairs = [tuple(map(float, pair.split(","))) for pair in points[1].split()]
    assert len(pairs) == len(values)
    for x, y in pairs:
        assert 62 <= x <= 742
        assert 15.9 <= y <= 356.1


def test_names_of_near_references_do_not_overlap() -> None:
    chart = learning_curve([], {"a": -0.0431, "b": -0.0432, "c": -0.5}, x_label="x", y_label="y")
    heights = [float(y) for y in re.findall(r'<text class="reference" x="[^"]*" y="([^"]*)"', chart)]
    assert heights[1] - heights[0] >= 15
    assert heights == sorted(heights)


def test_the_longest_bar_fills_its_cell() -> None:
    assert re.findall(r"width:([0-9.]+)%", bars({"a": 2.0, "b": 1.0})) == ["100.0", "50.0"]
