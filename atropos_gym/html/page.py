"""Groups of episodes as a fragment for reports, and as a page of their own that finds and filters.

A page is self-contained: one file, nothing loaded. It may hold thousands of episodes: what is drawn lies in
it as data, and ``page.js`` puts an episode's ids into the document when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from typing import Any

from atropos_gym.html.facts import episode_facts, group_facts, number, score_fact
from atropos_gym.html.pieces import visible
from atropos_gym.html.records import ShownEpisode, ShownGroup
from atropos_gym.html.rows import chips, render_episode

__all__ = ["IDS_SCRIPT", "LEGEND", "STYLE", "episode_head", "group_head", "render_group", "render_page"]

#: Scores of a group that are listed; more are counted.
_MOST_SCORES = 16


def _text(name: str) -> str:
    return resources.files("atropos_gym.html").joinpath(name).read_text(encoding="utf-8")


#: Style of the rows; a page that embeds them puts it into its own <style>.
STYLE = _text("style.css")

#: Script of a page that tells of the id under the mouse or the arrow keys: ``tellOfIds(list, about)``.
IDS_SCRIPT = _text("ids.js")


def render_group(group: ShownGroup, *, title: str | None = None, open: bool = False) -> str:
    """Returns one group as a ``<details>`` that needs no script: its episodes, each foldable.

    Args:
        group: what is shown.
        title: in place of the group's own.
        open: unfolded from the start, with its first episode.
    """
    episodes = "".join(
        f'<details class="episode"{" open" if open and index == 0 else ""}>'
        f"<summary>{episode_head(episode)}</summary>"
        f"{''.join(render_episode(episode, group.pieces))}</details>"
        for index, episode in enumerate(group.episodes)
    )
    name = escape(visible(group.title if title is None else title))
    return (
        f'<details class="group"{" open" if open else ""}><summary>{name} {_scores(group)}</summary>'
        f"<div>{episodes}</div></details>"
    )


def render_page(
    title: str, groups: Iterable[ShownGroup], *, facts: Mapping[str, object] | None = None
) -> str:
    """Returns a self-contained page of groups.

    Args:
        title: heading and title of the page.
        groups: taken one at a time.
        facts: more label and value pairs for the head of the page; escaped.

    Example:
        >>> page = render_page("Nothing yet", [], facts={"run": "r<1>"})
        >>> "<h1>Nothing yet</h1>" in page, "r&lt;1&gt;" in page
        (True, True)
    """
    # Members of a group share their prompt, and rows much else: each part is held once.
    places: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    tally = _Tally()
    for group in groups:
        episodes = [_episode(number, episode, group, places) for number, episode in group.shown]
        drawn.append({"head": group_head(group), "episodes": episodes})
        tally.add(group)
    data = {"groups": drawn, "parts": list(places)}
    shown = "".join(
        f"<div><dt>{escape(visible(str(label)))}</dt><dd>{escape(visible(str(value)))}</dd></div>"
        for label, value in {**tally.facts(), **(facts or {})}.items()
    )
    # "</" would end the script element; "<\\/" means the same to JSON.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\u0021--")
    return _text("page.html").format(
        title=escape(visible(title)),
        style=STYLE,
        facts=f'<dl class="facts">{shown}</dl>',
        legend=LEGEND,
        data=text,
        script=IDS_SCRIPT + _text("page.js"),
    )


def _episode(number: int, episode: ShownEpisode, group: ShownGroup, places: dict[str, int]) -> dict[str, Any]:
    """Returns an episode as ``page.js`` reads it: HTML, places of its parts, and what is filtered by."""
    return {
        "number": number,
        "head": f'<a class="link" href="#e{number}">#{number}</a>{episode_head(episode)}',
        "body": [places.setdefault(part, len(places)) for part in render_episode(episode, group.pieces)],
        "invalid": episode.invalid_turns,
        "solved": None if episode.success is None else int(episode.success),
    }


def group_head(group: ShownGroup) -> str:
    """Returns the heading of a group: its title, scores and facts."""
    name = escape(visible(group.title))
    return f'<h2>{name}</h2><p class="scores">{_scores(group)}{chips(group_facts(group))}</p>'


def episode_head(episode: ShownEpisode) -> str:
    """Returns what a folded episode shows: its number and facts."""
    return f'<span class="who">episode {episode.number}</span>{chips(episode_facts(episode))}'


def _scores(group: ShownGroup) -> str:
    facts = [score_fact(score) for score in group.scores]
    if len(facts) > _MOST_SCORES:
        facts[_MOST_SCORES:] = [(f"and {len(facts) - _MOST_SCORES} more", "")]
    return chips(facts)


class _Tally:
    """Counts what a page holds."""

    def __init__(self) -> None:
        self.groups = self.episodes = self.invalid = 0
        self.ids = self.trained = 0
        self.scores: list[float] = []
        self.tokenizers: dict[str, None] = {}

    def add(self, group: ShownGroup) -> None:
        self.groups += 1
        self.episodes += len(group.shown)
        self.invalid += sum(episode.invalid_turns for _, episode in group.shown)
        self.scores += group.scores
        if group.tokenizer is not None:
            self.tokenizers[group.tokenizer] = None
        for _, episode in group.shown:
            for row in episode.rows:
                self.ids += len(row.ids)
                self.trained += len(row.mask) - row.mask.count(-100)

    def facts(self) -> dict[str, str]:
        facts = {"groups": f"{self.groups:,}", "episodes": f"{self.episodes:,}"}
        if self.scores:
            facts["mean score"] = number(sum(self.scores) / len(self.scores))
        if self.ids:
            facts["ids"] = f"{self.ids:,}"
            facts["trained"] = f"{self.trained:,} ({100 * self.trained / self.ids:.0f} %)"
        if self.invalid:
            facts["invalid turns"] = f"{self.invalid:,}"
        if self.tokenizers:
            facts["tokenizer"] = ", ".join(self.tokenizers)
        return facts


#: How ids are coloured, as HTML.
LEGEND = (
    '<p class="legend"><b class="t">template</b><b class="m">message</b>'
    + "".join(
        f'<b class="s y p{index}">{label}</b>'
        for index, label in enumerate(("p &gt; 0.75", "0.35–0.75", "0.1–0.35", "0.02–0.1", "&lt; 0.02"))
    )
    + "<span>sampled, by probability; underlined: trained</span></p>"
)
