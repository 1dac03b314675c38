"""Rows of ids as HTML: one renderer for files, reports and the dashboard.

Data runs one way: ``pieces`` say how an id is shown, ``records`` what was played, ``facts`` says it in words,
``rows`` draws the ids of an episode, ``page`` puts groups into a page. Ids are known only through ``Pieces``;
reading files and loading tokenizers is done above.
"""

from atropos_gym.html.facts import Fact, episode_facts, group_facts, number, score_fact, turn_facts
from atropos_gym.html.page import (
    IDS_SCRIPT,
    LEGEND,
    STYLE,
    episode_head,
    group_head,
    render_group,
    render_page,
)
from atropos_gym.html.pieces import Pieces, visible
from atropos_gym.html.records import (
    ShownEpisode,
    ShownGroup,
    ShownRow,
    ShownTurn,
    Source,
    Stretch,
    numbered,
    stretches,
    wire_episodes,
)
from atropos_gym.html.rows import render_episode, render_row

__all__ = [
    "IDS_SCRIPT",
    "LEGEND",
    "STYLE",
    "Fact",
    "Pieces",
    "ShownEpisode",
    "ShownGroup",
    "ShownRow",
    "ShownTurn",
    "Source",
    "Stretch",
    "episode_facts",
    "episode_head",
    "group_facts",
    "group_head",
    "number",
    "numbered",
    "render_episode",
    "render_group",
    "render_page",
    "render_row",
    "score_fact",
    "stretches",
    "turn_facts",
    "visible",
    "wire_episodes",
]
