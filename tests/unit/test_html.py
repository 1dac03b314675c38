"""The HTML of ids: what was sampled, how likely it was, and nothing that a browser would take for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from math import log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.html import Pieces, render_group, render_page, render_row
from atropos_gym.wire import ScoredDataGroup

END = 258


def decode(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


PIECES = Pieces(lambda ids: decode(list(ids)), lambda id_: "<end>" if id_ == END else None)


class Text(HTMLParser):
    """The visible text of a page, the tips, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tips, self.tags = "", [], set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.tips.extend(value for name, value in attrs if name == "data-tip" and value)

    def handle_data(self, data: str) -> None:
        self.text += data


def row(prompt: str, sampled: str, logprob: float = -0.1) -> tuple[list[int], list[int], list[float]]:
    before, after = list(prompt.encode()), list(sampled.encode())
    return before + after, [-100] * len(before) + after, [1.0] * len(before) + [logprob] * len(after)


def test_only_sampled_ids_have_a_tip_with_id_logprob_and_probability() -> None:
    shown = Text(render_row(*row("ab", "c", log(0.5)), PIECES))
    assert shown.text == "abc"
    assert shown.tips == ["id 99 · logprob −0.6931 · p 0.500"]


@pytest.mark.parametrize(
    ("probability", "colour"), [(0.99, "p0"), (0.5, "p1"), (0.2, "p2"), (0.05, "p3"), (1e-9, "p4")]
)
def test_the_less_likely_the_warmer(probability: float, colour: str) -> None:
    assert f'class="s {colour}"' in render_row(*row("", "x", log(probability)), PIECES)


def test_a_character_of_several_ids_is_shown_once_with_a_line_for_each_id() -> None:
    shown = Text(render_row(*row("é", "😀"), PIECES))
    assert shown.text == "é😀"
    assert shown.tips == ["\n".join(f"id {b} · logprob −0.1000 · p 0.905" for b in "😀".encode())]


def test_a_broken_character_does_not_swallow_its_neighbours() -> None:
    shown = Text(render_row([0xF0, 0x9F, 65], [0xF0, 0x9F, 65], [-0.1, -0.2, -0.3], PIECES))
    assert shown.text == "\ufffd\ufffdA"
    assert len(shown.tips) == 3


def test_control_ids_are_visible_in_prompt_and_reply() -> None:
    page = render_row([END, 65, END], [-100, 65, END], [1.0, -0.1, -0.2], PIECES)
    assert Text(page).text == "<end>A<end>"
    assert page.count('<span class="c">&lt;end&gt;</span>') == 2


def test_an_id_without_text_is_shown_by_number() -> None:
    pieces = Pieces(lambda ids: "", lambda id_: None)
    assert Text(render_row([9], [9], [-0.1], pieces)).text == "id 9"


def test_line_ends_and_control_characters_are_visible_and_text_cannot_turn_the_page_around() -> None:
    assert Text(render_row(*row("a\nb\x00\x7f\u202e", ""), PIECES)).text == "a⏎\nb␀␡⟨U+202E⟩"


def test_without_logprobs_only_the_id_is_known() -> None:
    ids, mask, _ = row("a", "b")
    assert Text(render_row(ids, mask, None, PIECES)).tips == ["id 98"]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 mask"):
        render_row([1, 2], [-100], [1.0, 1.0], PIECES)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, END), max_size=30), st.data())
def test_any_ids_give_well_formed_html_that_shows_every_sampled_id(
    ids: list[int], data: st.DataObject
) -> None:
    sampled = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    mask = [id_ if s else -100 for id_, s in zip(ids, sampled, strict=True)]
    logprobs = [-0.5 if s else 1.0 for s in sampled]
    shown = Text(render_row(ids, mask, logprobs, PIECES))
    assert shown.tags <= {"pre", "span"}
    lines = [line for tip in shown.tips for line in tip.split("\n")]
    assert [int(line.split()[1]) for line in lines] == [id_ for id_ in mask if id_ != -100]


def group(*, script: str = "") -> ScoredDataGroup:
    ids, mask, logprobs = row(f"hi {script}", "yo")
    about = {
        "episode": 0,
        "turns": [[3, 4], [4, 5]],
        "cut": True,
        "success": False,
        "end_reason": script or "end",
    }
    return ScoredDataGroup(
        tokens=[ids, ids],
        masks=[mask, mask],
        scores=[1.5, -1.0],
        inference_logprobs=[logprobs, logprobs],
        overrides=[about, {"episode": 1, "success": True}],
    )


def test_a_group_says_what_became_of_each_row() -> None:
    text = Text(render_group(group(), PIECES, title="Game")).text
    assert "Game +1.5−1" in text
    assert "episode 0 +1.5 2 turns not solved end cut" in text
    assert "episode 1 −1 solved" in text


def test_a_foreign_group_without_the_optional_fields_is_shown_too() -> None:
    bare = ScoredDataGroup(tokens=[[65, 66]], masks=[[-100, 66]], scores=[0.0])
    assert "episode 0" in render_group(bare, PIECES, title="foreign")


def test_nothing_that_was_said_becomes_markup() -> None:
    script = "</pre><script>alert('x')</script>"
    page = render_page(
        script, [render_group(group(script=script), PIECES, title=script)], facts={script: script}
    )
    assert "script" not in Text(page).tags
    assert page.count("alert(") >= 4


def test_a_page_loads_nothing() -> None:
    page = render_page("Rollouts", [render_group(group(), PIECES, title="g", open=True)])
    assert page.startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", page)
    assert "prefers-color-scheme:dark" in page
    assert '<details class="group" open>' in page
