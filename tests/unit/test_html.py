"""The HTML of ids: who put each there, how likely it was, and nothing that a browser takes for markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import log
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.html import (
    Pieces,
    ShownEpisode,
    ShownGroup,
    ShownRow,
    ShownTurn,
    episode_facts,
    group_facts,
    numbered,
    render_group,
    render_page,
    render_row,
    stretches,
    turn_facts,
    visible,
    wire_episodes,
)
from atropos_gym.wire import ScoredDataGroup

END = 258
PIECES = Pieces(
    lambda id_: bytes([id_]).decode("utf-8", "surrogateescape") if id_ < 256 else "",
    lambda id_: "<end>" if id_ == END else None,
)


class Ids(HTMLParser):
    """The ids of a piece of HTML, its text, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = "", set()
        self.ids: list[dict[str, str]] = []
        self._in_id = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self._in_id = "data-i" in values
        if self._in_id:
            self.ids.append({**{name: value or "" for name, value in attrs}, "text": ""})

    def handle_endtag(self, tag: str) -> None:
        self._in_id = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_id:
            self.ids[-1]["text"] += data


def row(prompt: str, sampled: str, logprob: float = -0.1, **more: Any) -> ShownRow:
    before, after = list(prompt.encode()), list(sampled.encode())
    return ShownRow(
        before + after,
        [-100] * len(before) + after,
        [1.0] * len(before) + [logprob] * len(after),
        **more,
    )


def shown(one: ShownRow, pieces: Pieces = PIECES) -> Ids:
    return Ids("".join(render_row(one, pieces)))


def data_of(page: str) -> list[dict[str, Any]]:
    """What the page's script reads."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    for entry in data["groups"]:
        for episode in entry["episodes"]:
            episode["body"] = "".join(data["parts"][place] for place in episode["body"])
    return data["groups"]


# --- ids


def test_every_id_says_its_number_and_sampled_ones_their_logprob() -> None:
    ids = shown(row("ab", "c", log(0.5))).ids
    assert [one["data-i"] for one in ids] == ["97", "98", "99"]
    assert [one.get("data-l") for one in ids] == [None, None, "-0.6931"]


@pytest.mark.parametrize(
    ("probability", "colour"), [(0.99, "p0"), (0.5, "p1"), (0.2, "p2"), (0.05, "p3"), (1e-9, "p4")]
)
def test_the_less_likely_the_warmer(probability: float, colour: str) -> None:
    assert shown(row("", "x", log(probability))).ids[0]["class"] == f"s y {colour}"


def test_sources_are_told_apart_and_trained_is_what_the_mask_says() -> None:
    one = ShownRow(
        [1, 2, 3, 4],
        [-100, -100, -100, 4],
        [1.0, 1.0, -0.1, -0.1],
        sources=["template", "message", "sampled", "sampled"],
    )
    assert [i["class"].split()[:2] for i in shown(one).ids] == [["t"], ["m"], ["s", "p0"], ["s", "y"]]


def test_without_sources_a_prompt_is_a_prompt() -> None:
    assert [i["class"].split()[0] for i in shown(row("a", "b")).ids] == ["u", "s"]


def test_a_character_of_several_ids_is_one_element_with_all_of_them() -> None:
    page = shown(row("é", "😀"))
    assert [i["text"] for i in page.ids] == ["é", "😀"]
    assert page.ids[1]["data-i"] == "240 159 152 128"
    assert page.ids[1]["data-l"] == "-0.1000 -0.1000 -0.1000 -0.1000"


def test_a_broken_character_does_not_swallow_its_neighbours() -> None:
    one = ShownRow([0xF0, 0x9F, 65], [0xF0, 0x9F, 65], [-0.1, -0.2, -0.3])
    assert [i["text"] for i in shown(one).ids] == ["\ufffd", "\ufffd", "A"]


def test_a_character_never_runs_over_the_border_of_a_turn() -> None:
    smile = list("😀".encode())
    one = ShownRow(smile, [-100, -100, *smile[2:]], [1.0, 1.0, -0.1, -0.1])
    assert [i["data-i"] for i in shown(one).ids] == ["240", "159", "152", "128"]


def test_control_ids_are_visible_in_prompt_and_reply() -> None:
    page = shown(ShownRow([END, 65, END], [-100, 65, END], [1.0, -0.1, -0.2]))
    assert [i["text"] for i in page.ids] == ["<end>", "A", "<end>"]
    assert ["c" in i["class"].split() for i in page.ids] == [True, False, True]


def test_an_id_without_text_is_shown_by_number() -> None:
    assert shown(ShownRow([9], [9], [-0.1]), Pieces.unknown()).ids[0]["text"] == "⟨9⟩"


def test_line_ends_and_control_characters_are_visible_and_text_cannot_turn_the_page_around() -> None:
    text = "".join(i["text"] for i in shown(row("a\nb\x00\x7f\u202e", "")).ids)
    assert text == "a⏎\nb␀␡⟨U+202E⟩"


@pytest.mark.parametrize("text", ["\x1b[2J", "\u2028", "\u200f", "\x85", "\ud800"])
def test_nothing_in_a_text_moves_a_cursor(text: str) -> None:
    assert visible(text).isprintable()


def test_without_logprobs_only_the_id_is_known() -> None:
    ids = shown(replace(row("a", "b"), logprobs=None)).ids
    assert ids[1] == {"class": "s y", "data-i": "98", "text": "b"}


def test_advantages_of_single_ids_are_said_where_they_are_trained() -> None:
    ids = shown(row("a", "bc", advantages=[0.0, 0.5, -0.25])).ids
    assert [i.get("data-a") for i in ids] == [None, "0.5", "-0.25"]


@pytest.mark.parametrize("field", ["mask", "logprobs", "sources", "advantages"])
def test_lists_of_different_lengths_are_refused(field: str) -> None:
    lists: dict[str, Any] = {"mask": [-100, -100], field: [1]}
    with pytest.raises(ValueError, match=f"2 ids, 1 {field}"):
        ShownRow([1, 2], **lists)


@pytest.mark.parametrize("turns", [[(1, 3)], [(-1, 1)], [(1, 0)], [(0, 2), (1, 2)]])
def test_turns_that_do_not_lie_in_the_row_are_refused(turns: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not fit into 2 ids"):
        ShownRow([1, 2], [1, 2], turns=[ShownTurn(start, end) for start, end in turns])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, END), max_size=30), st.data())
def test_any_ids_give_well_formed_html_that_shows_every_id_once_in_order(
    ids: list[int], data: st.DataObject
) -> None:
    sampled = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    mask = [id_ if s else -100 for id_, s in zip(ids, sampled, strict=True)]
    page = shown(ShownRow(ids, mask, [-0.5 if s else 1.0 for s in sampled]))
    assert page.tags <= {"div", "h5", "pre", "span", "b"}
    said = [(int(i), "y" in one["class"].split()) for one in page.ids for i in one["data-i"].split()]
    assert said == list(zip(ids, sampled, strict=True))


# --- pieces


def test_a_table_gives_the_pieces_that_it_lists() -> None:
    pieces = Pieces.of_table({104: "h", 240: "\udcf0", 7: "\ud800"}, {258: "<end>"})
    assert [pieces.name(i) for i in (104, 240, 258, 5)] == ["h", "<0xF0>", "<end>", "⟨5⟩"]
    assert pieces.decode([104, 240, 7]) == "h\ufffd\ufffd"
    assert pieces.known
    assert not Pieces.of_table({}, {}).known


# --- turns, episodes, groups


def test_stretches_follow_the_turns_or_the_mask() -> None:
    mask = [-100, 2, -100, 4, -100]
    kinds = [(s.kind, s.start, s.end) for s in stretches(ShownRow([1, 2, 3, 4, 5], mask))]
    assert kinds == [("prompt", 0, 1), ("turn", 1, 2), ("bridge", 2, 3), ("turn", 3, 4), ("rest", 4, 5)]
    given_turns = ShownRow([1, 2, 3], [-100, 2, 3], turns=[ShownTurn(1, 2), ShownTurn(2, 2), ShownTurn(2, 3)])
    assert [(s.kind, s.start, s.end) for s in stretches(given_turns)][1:] == [
        ("turn", 1, 2),
        ("turn", 2, 2),
        ("turn", 2, 3),
    ]


def test_an_empty_turn_is_said() -> None:
    page = "".join(render_row(ShownRow([1], [-100], turns=[ShownTurn(1, 1, -1.0)]), PIECES))
    assert "nothing was sampled" in page


def test_a_turn_says_why_its_reward_is_what_it_is() -> None:
    turn = ShownTurn(
        0,
        1,
        -1.5,
        version=3,
        cut=True,
        info={
            "invalid": True,
            "invalid_reason": "no_container",
            "reward_terms": {"game": -1.0, "format": -0.5},
            "verdict": "wrong",
            "turn": 1,
        },
        legal_actions=["hit", "stick"],
    )
    assert [text for text, _ in turn_facts(turn)] == [
        "reward −1.5",
        "game −1",
        "format −0.5",
        "invalid: no_container",
        "cut: no end id",
        "verdict: wrong",
        "legal: hit, stick",
        "version 3",
    ]
    (page,) = render_row(ShownRow([65], [65], turns=[turn]), PIECES)
    assert 'class="turn bad"' in page
    assert "invalid: no_container" in page


def group(text: str = "hi", **changes: Any) -> ShownGroup:
    turn = ShownTurn(len(text), len(text) + 2, 1.5, 4, info={"invalid": True, "invalid_reason": text})
    one = row(text, "yo", turns=[turn])
    episode = ShownEpisode(
        [one],
        number=0,
        score=1.5,
        advantage=1.25,
        end_reason=text,
        success=False,
        messages=[{"role": "assistant", "content": "yo"}, {"role": "user", "content": f"bye {text}"}],
    )
    other = replace(episode, number=1, score=-1.0, advantage=-1.25, success=True, truncated=True)
    return replace(ShownGroup([episode, other], PIECES, env="Game", number=7, version=4, seed=11), **changes)


def test_an_episode_says_what_became_of_it() -> None:
    facts = [text for text, _ in episode_facts(group().episodes[1])]
    assert facts == [
        "score −1",
        "advantage −1.25",
        "1 turn",
        "solved",
        "ended: hi",
        "truncated",
        "1 invalid turn",
    ]


def test_a_group_without_spread_says_that_nothing_is_learnt() -> None:
    same = group()
    same = replace(same, episodes=[same.episodes[0]] * 2)
    assert "all scores equal: nothing to learn from" in [text for text, _ in group_facts(same)]
    assert "all scores equal" not in str(group_facts(group()))


def test_a_group_for_reports_needs_no_script() -> None:
    page = Ids(render_group(group(), title="Start 1", open=True))
    assert page.tags <= {"details", "summary", "div", "h5", "span", "pre", "b", "p"}
    assert "Start 1 +1.5−1" in page.text
    assert "bye hi" in page.text


def test_segments_have_borders() -> None:
    episode = ShownEpisode([row("a", "b"), row("c", "d")], number=0)
    page = Ids(render_group(ShownGroup([episode], PIECES)))
    assert "segment 0" in page.text
    assert "segment 12 ids, 1 trained" in page.text


def test_without_pieces_the_messages_tell_what_was_said() -> None:
    text = Ids(render_group(group(pieces=Pieces.unknown()))).text
    assert "⟨104⟩" in text
    assert "assistantsaid" in text


# --- pages


def test_a_page_holds_every_episode_as_data() -> None:
    page = render_page("Rollouts", numbered([group(), group()]))
    data = data_of(page)
    assert [[one["number"] for one in entry["episodes"]] for entry in data] == [[0, 1], [2, 3]]
    first, second = data[0]["episodes"]
    assert (first["solved"], second["solved"], first["invalid"]) == (0, 1, 1)
    assert "Game · group 7 · version 4" in data[0]["head"]
    assert [i["data-i"] for i in Ids(first["body"]).ids] == ["104", "105", "121", "111"]
    head = Ids(page[: page.index("<script")]).text
    for fact in ("groups2", "episodes4", "mean score+0.25", "ids16", "trained8 (50 %)", "invalid turns4"):
        assert fact in head


def test_a_prompt_that_a_group_shares_is_held_once() -> None:
    same = group()
    page = render_page("Rollouts", [replace(same, episodes=[same.episodes[0]] * 8)])
    assert page.count('data-i=\\"104\\"') == 1
    assert len(data_of(page)[0]["episodes"]) == 8


def test_a_page_of_one_episode() -> None:
    data = data_of(render_page("One", [replace(group(), first=4, only=5)]))
    assert [one["number"] for one in data[0]["episodes"]] == [5]


def test_a_page_of_nothing_is_a_page() -> None:
    assert data_of(render_page("Nothing", [])) == []


@pytest.mark.parametrize(
    "evil",
    ["</pre><script>alert('x')</script>", "<!--<script>", "</SCRIPT >", '"><img src=x onerror=alert(1)>'],
)
def test_nothing_that_was_said_becomes_markup(evil: str) -> None:
    page = render_page(evil, [group(evil, env=evil)], facts={evil: evil})
    assert Ids(page).tags == Ids(render_page("", [], facts={"a": "b"})).tags
    assert page.count("<script") == 2
    episode = data_of(page)[0]["episodes"][0]
    assert Ids(episode["head"] + episode["body"]).tags <= {"a", "span", "div", "h5", "pre", "b", "p"}
    assert evil in Ids(episode["body"]).text


def test_a_page_loads_nothing() -> None:
    page = render_page("Rollouts", [group()])
    assert page.startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#|\\\"#)|url\(|@import|https?:|fetch\(|import\(", page)
    assert "prefers-color-scheme:dark" in page


# --- the wire


def wire(**changes: Any) -> ScoredDataGroup:
    parts: dict[str, Any] = {
        "tokens": [[65, 66], [65, 67]],
        "masks": [[-100, 66], [-100, 67]],
        "scores": [1.0, 0.0],
    }
    return ScoredDataGroup(**(parts | changes))


def test_a_bare_group_of_the_wire_is_shown() -> None:
    first, second = wire_episodes(wire())
    assert (first.score, first.advantage, second.advantage) == (1.0, 0.5, -0.5)
    assert first.rows[0].logprobs is None
    assert first.success is None
    assert [s.kind for s in stretches(first.rows[0])] == ["prompt", "turn"]


def test_sequences_of_one_episode_are_its_rows() -> None:
    about = [
        {"episode": 0, "turns": [[1, 2]], "turn_rewards": [0.25], "turn_versions": [3], "cut": True},
        {"episode": 0, "turns": [[1, 2]], "turn_rewards": [0.75], "turn_versions": [4], "success": True},
    ]
    (episode,) = wire_episodes(wire(overrides=about, scores=[1.0, 1.0]))
    assert [turn.version for turn in episode.turns] == [3, 4]
    assert (episode.episode_return, episode.success, episode.cut) == (1.0, True, True)


def test_advantages_that_were_sent_are_the_ones_shown() -> None:
    sent = wire(advantages=[[0.0, 2.0], [0.0, -2.0]])
    assert [episode.advantage for episode in wire_episodes(sent)] == [2.0, -2.0]


@pytest.mark.parametrize("turns", ["x", [[0, 9]], [1], [[2, 1]], {"a": 1}])
def test_overrides_that_mean_something_else_are_not_taken_for_turns(turns: Any) -> None:
    about = [{"turns": turns}, {}]
    first = wire_episodes(wire(overrides=about))[0]
    assert first.turns == []
