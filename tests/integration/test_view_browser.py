"""The page of ``atropos-gym view`` in a real browser: it opens without an error, finds, filters and tells.

Each test gives the page a script to run in it and reads back what the script found. Chromium needs no driver:
``--dump-dom`` prints the page once its timers are done.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import main
from atropos_gym.engines import Completion
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.writers import JSONLWriter
from tests.unit.rollout_cases import END, Countdown, exactly

pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
GROUPS = 60
#: One reply with an end, one without: the latter is invalid in this task.
SAID = [
    Completion((106, 97, END), (-0.25, -0.5, -4.75), "stop"),
    Completion((0xF0, 0x9F, 0x8E, 0xB2), (-0.1, -0.2, -0.3, -0.4), "length"),
]

#: Before anything else in the page: whatever goes wrong is kept.
WATCH = """<script>const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
const said = console.error; console.error = (...words) => wrong.push(words.join(" "));</script>"""
#: Behind everything else: helpers, what a test wants to know, and the answer in place of the page.
REPORT = """<script>
const $$ = (css) => [...document.querySelectorAll(css)];
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const set = (id, value) => {
  const box = document.getElementById(id);
  if (box.type === "checkbox") return box.click();
  box.value = value;
  for (const name of ["input", "change"]) box.dispatchEvent(new Event(name));
};
const press = (key) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
};
(async () => {
  let found;
  try { found = await (async () => { SCRIPT })(); } catch (error) { wrong.push(String(error)); }
  const pre = document.createElement("pre");
  pre.id = "result";
  pre.textContent = JSON.stringify({ found, wrong });
  document.body.replaceChildren(pre);
})();
</script>"""

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("view")
    collector = GroupCollector(Countdown, exactly(SAID), group_size=4, seed=3)
    with JSONLWriter(folder / "games.jsonl", ChatRenderer("bytes")) as writer:
        for group in collector.collect(GROUPS):
            writer.write(solved_by_member(group))
    collector.close()
    assert main(["view", str(folder / "games.jsonl")]) == 0
    return (folder / "games.html").read_text()


def solved_by_member(group: EpisodeGroup) -> EpisodeGroup:
    for episode in group.episodes:
        episode.success = episode.member == 0
    return group


@pytest.fixture
def ask(page: str, tmp_path: Path) -> Ask:
    """Runs a script in the page and returns what it returns; nothing may have gone wrong."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")

    def call(script: str, *flags: str, at: str = "", width: int = 1000) -> Any:
        file = tmp_path / "page.html"
        watched = page.replace("<head>", "<head>" + WATCH, 1)
        file.write_text(watched.replace("</body>", REPORT.replace("SCRIPT", script) + "</body>"))
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--no-first-run",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={width},800",
                "--virtual-time-budget=20000",
                "--dump-dom",
                *flags,
                file.as_uri() + at,
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        result = re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)
        assert result is not None, f"no result: {done.stderr[-2000:]}"
        answer = json.loads(unescape(result[1]))
        assert answer["wrong"] == []
        return answer["found"]

    return call


def test_it_opens_without_an_error_and_draws_one_episode(ask: Ask) -> None:
    found = ask("""
        return { episodes: $$("details.episode").length, open: $$("details[open]").map((one) => one.id),
                 drawn: $$("pre b").length, count: $$("#count")[0].textContent,
                 undrawn: $$("details:not([open]) pre").length };""")
    assert found["episodes"] == 100, "25 groups of 4"
    assert found["open"] == ["e0"]
    assert found["drawn"] > 20
    assert found["undrawn"] == 0, "an episode's ids are drawn when it is opened"
    assert found["count"] == "240 episodes"


def test_an_episode_is_drawn_when_it_is_opened(ask: Ask) -> None:
    assert ask("""
        $$("#e5 summary")[0].click(); await wait(50);
        return [$$("#e5 pre b").length > 20, $$("#e5 .turn").length > 0];""") == [True, True]


def test_filters_narrow_and_widen_again(ask: Ask) -> None:
    found = ask("""
        const counts = [];
        const count = async () => { await wait(400); counts.push(parseInt($$("#count")[0].textContent)); };
        set("invalid"); await count(); set("invalid"); await count();
        set("outcome", "1"); await count(); set("outcome", "0"); await count(); set("outcome", "");
        set("find", "NOCH 3 €"); await count(); set("find", "there is no such text"); await count();
        set("find", ""); await count();
        return counts;""")
    every, invalid = 240, found[0]
    assert 0 < invalid < every
    assert found[1:4] == [every, 60, 180]
    assert 0 < found[4] < every
    assert found[5:] == [0, every]


def test_what_was_searched_for_is_marked_across_ids(ask: Ask) -> None:
    found = ask("""
        set("find", "fertig"); await wait(400);
        $$("details.episode")[0].open = true;
        set("find", "zähle."); await wait(400);
        return [...CSS.highlights.get("found")].map((range) => range.toString());""")
    assert found
    assert set(found) == {"Zähle."}


def test_only_trained_hides_the_rest_and_ids_shows_numbers(ask: Ask) -> None:
    assert ask("""
        const hidden = () => $$("pre b").filter((id) => !id.getClientRects().length).length;
        const before = hidden(); set("trained");
        const left = $$("pre b").filter((id) => id.getClientRects().length);
        const trained = left.length > 0 && left.every((id) => id.classList.contains("y"));
        set("ids");
        return [before, trained, getComputedStyle(left[0], "::after").content, left[0].dataset.i];
        """) == [0, True, '"106"', "106"]


def test_keys_go_through_ids_and_tell_of_them(ask: Ask) -> None:
    found = ask("""
        $$(".turn pre")[0].focus();
        const first = $$("#about")[0].textContent; press("ArrowRight"); press("ArrowRight");
        const third = $$("#about")[0].textContent; press("ArrowLeft");
        const second = $$("pre b.at")[0].textContent; press("Escape");
        return [first, third, second, $$("#about")[0].hidden];""")
    assert re.fullmatch(r"jid 106position \d+in turn 0from sampled trainedlogprob −0\.2500p 0\.779", found[0])
    assert found[1].startswith("<end>id 258")
    assert found[2:] == ["a", True]


def test_a_character_of_several_ids_tells_of_each(ask: Ask) -> None:
    found = ask("""
        set("invalid"); await wait(100);
        const dice = $$("pre b.s").find((id) => id.dataset.i.includes(" ")); dice.click();
        return $$("#about > div").map((line) => line.textContent);""")
    assert [re.search(r"id (\d+)", line)[1] for line in found] == ["240", "159", "142", "178"]
    assert found[1].startswith("🎲 (2 of 4)")


def test_a_space_can_be_seen_where_its_id_is_told(ask: Ask) -> None:
    assert (
        ask("""
        $$("pre b").find((id) => id.textContent === " ").click();
        return $$("#about code")[0].textContent;""")
        == "␣"
    )


def test_keys_find_and_go_through_episodes(ask: Ask) -> None:
    assert ask("""
        press("j"); const first = document.activeElement.closest("details").id;
        press("j"); const second = document.activeElement.closest("details").id;
        press("k"); const back = document.activeElement.closest("details").id;
        press("/"); return [first, second, back, document.activeElement.id];""") == ["e0", "e1", "e0", "find"]


def test_long_files_have_pages(ask: Ask) -> None:
    assert ask("""
        const heads = () => $$("details.episode");
        const where = () => [$$("#where")[0].textContent, heads()[0].id, heads().length];
        const seen = [where()];
        for (const _ of [1, 2]) { $$("#on")[0].click(); seen.push(where()); }
        return [...seen, $$("#on")[0].disabled, $$("#back")[0].disabled];
        """) == [
        ["page 1 of 3", "e0", 100],
        ["page 2 of 3", "e100", 100],
        ["page 3 of 3", "e200", 40],
        True,
        False,
    ]


def test_a_link_leads_to_its_episode(ask: Ask) -> None:
    assert ask("""return [$$("#e130")[0].open, $$("#where")[0].textContent];""", at="#e130") == [
        True,
        "page 2 of 3",
    ]


def test_paper_shows_what_the_page_could_open(ask: Ask) -> None:
    closed, open_, undrawn = ask("""
        const closed = $$("details:not([open])").length;
        dispatchEvent(new Event("beforeprint"));
        const undrawn = $$("details").filter((one) => !one.querySelector("pre")).length;
        return [closed, $$("details[open]").length, undrawn];""")
    assert (closed, open_, undrawn) == (99, 100, 0)


def test_light_and_dark_follow_the_reader(ask: Ask) -> None:
    script = "const style = getComputedStyle(document.body); return [style.backgroundColor, style.color];"
    light, dark = ask(script), ask(script, "--blink-settings=preferredColorScheme=0")

    def brightness(colour: str) -> int:
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    assert brightness(light[0]) > 600 > 200 > brightness(light[1])
    assert brightness(dark[0]) < 200 < 600 < brightness(dark[1])


def test_a_phone_never_scrolls_sideways(ask: Ask) -> None:
    """Chromium's window is 500 pixels wide at least; the body is held to a phone's 360."""
    assert (
        ask(
            """
        document.documentElement.style.width = "360px";
        set("ids");
        for (const one of $$("details").slice(0, 8)) one.open = true;
        await wait(100);
        const wide = (one) => one.getClientRects().length && one.getBoundingClientRect().right > 361;
        return $$("main *").filter(wide).map((one) => one.outerHTML.slice(0, 80));""",
            width=500,
        )
        == []
    )
