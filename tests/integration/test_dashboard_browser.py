"""The page at /dashboard in a real browser, over a real server: it polls, draws, finds, pages and tells.

1. It shows how things stand and goes on doing so without a reload; nothing goes wrong in it.
2. Sampled ids are coloured apart from prompt ids; the mouse and the arrow keys tell of one id.
3. Text is found and marked; pages stand still while groups come.
4. It is light or dark as its reader is, never scrolls sideways on a phone, and can be used by keys alone.
5. It says when the server is gone, and goes on when it is back.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.tools.chromium import CHROMIUM, Chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]

TRAINER = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": 8, "max_token_len": 512, "checkpoint_dir": "c",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 40,
}  # fmt: skip
ENV = {"max_token_length": 512, "desired_name": "counting", "weight": 1.0, "group_size": 2}
SHOWN = "document.querySelectorAll('#list pre b').length > 5"


class Server:
    """``atropos-gym serve``, and what a trainer and an environment do with it."""

    def __init__(self, port: int = 0, token: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "atropos_gym", "serve", "--store", "memory", "--port", str(port)]
            + ["--tokenizer", "bytes"],
            stdout=subprocess.PIPE,
            env={**os.environ, "ATROPOS_GYM_TOKEN": token},
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]
        self._http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    def call(self, method: str, path: str, **options: Any) -> Any:
        response = self._http.request(method, path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    def start(self) -> int:
        """A trainer has registered, published a version and asked; an environment follows."""
        self.call("POST", "/register", json=TRAINER)
        self.call("POST", "/policy", json={"version": 3, "model_name": "m-3"})
        self.call("GET", "/batch")
        return int(self.call("POST", "/register-env", json=ENV)["env_id"])

    def send(self, said: str, env_id: int) -> None:
        prompt = [257, 260, *b"Count to three.", 258, 261]
        ids = [*prompt, *said.encode(), 258]
        turn = [len(prompt), len(ids)]
        mask = [-100] * turn[0] + ids[turn[0] :]
        logprobs = [1.0] * turn[0] + [-0.05] * (turn[1] - turn[0] - 1) + [-4.5]
        self.call("POST", "/scored_data", json={
            "tokens": [ids, ids], "masks": [mask, mask], "scores": [1.0, -1.0],
            "inference_logprobs": [logprobs, logprobs], "env_id": env_id,
            "overrides": [{"turns": [turn]}, {"turns": [turn]}], "group_overrides": {"policy_version": 3},
        })  # fmt: skip

    def stop(self) -> None:
        self._http.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def serving(port: int = 0, token: str = "") -> Iterator[Server]:
    server = Server(port, token)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Fourteen groups; the second one says something else."""
    with serving() as server:
        env_id = server.start()
        for number in range(14):
            server.send("one, two, drei €!" if number == 1 else f"one, two, {number}", env_id)
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def nothing_goes_wrong(browser: Chromium) -> Iterator[None]:
    yield
    # Chromium itself notes that nobody answers; a page outlives the server of its test.
    wrong, browser.wrong[:] = [one for one in browser.wrong if "net::ERR_" not in one], []
    assert wrong == []


def look(browser: Chromium, server: Server, **window: Any) -> None:
    browser.open(f"{server.url}/dashboard", **window)
    browser.until(SHOWN)


def text(browser: Chromium, css: str) -> str:
    return str(browser.ask(f"return document.querySelector({css!r}).textContent;"))


def test_it_shows_how_things_stand(browser: Chromium, server: Server) -> None:
    look(browser, server)
    assert text(browser, "#live").startswith("live · up ")
    assert "Groups come in" in text(browser, "#why") or "The trainer" in text(browser, "#why")
    tiles = browser.ask("return [...document.querySelectorAll('#tiles dd')].map((one) => one.innerText);")
    assert tiles[1].split() == ["3", "version"]
    assert tiles[2].split() == ["14", "groups,", "28", "sequences"]
    row = browser.ask("return [...document.querySelectorAll('#envs td')].map((one) => one.textContent);")
    assert row[:5] == ["counting_0", "14", "14", "0", "0.000"]
    assert "8 sequences" in text(browser, "#trainer")
    assert "m-3" in text(browser, "#policy")
    browser.until("document.querySelector('#queue path')?.getAttribute('d').includes('L')")
    assert text(browser, "#queue .keys-of").startswith("queued14")
    assert text(browser, "#reward .keys-of") == "counting0"
    assert "no delivered group says its version" in text(browser, "#staleness .plot")


def test_it_goes_on_without_a_reload(browser: Chromium, tmp_path: Path) -> None:
    with serving() as server:
        browser.open(f"{server.url}/dashboard")
        browser.until("document.querySelector('#why').textContent === 'No trainer has registered yet.'")
        env_id = server.start()
        browser.until("document.querySelector('#why').textContent.includes('0 of 8 sequences queued')")
        server.send("one", env_id)
        browser.until(SHOWN)
        for _ in range(3):
            server.send("two", env_id)
        browser.until("document.querySelector('#newer').textContent === '3 newer groups'")
        assert len(browser.ask("return [...document.querySelectorAll('article')].map(String);")) == 1
        browser.ask("document.querySelector('#newer').click();")
        browser.until("document.querySelectorAll('article').length === 4")
        server.call("GET", "/batch", params={"lease_seconds": 300})
        browser.until("document.querySelector('#why').textContent.includes('works on a batch of 4 groups')")
        browser.until("document.querySelectorAll('#leases td').length === 5")
        browser.until("document.querySelector('#staleness .keys-of').textContent === 'counting0'")
        browser.ask("document.querySelector('#follow').click();")
        server.send("three", env_id)
        browser.until("document.querySelectorAll('article').length === 5")


def test_sampled_ids_are_coloured_apart_and_told_of(browser: Chromium, server: Server) -> None:
    look(browser, server)
    colours = browser.ask("""
        const colour = (css) => getComputedStyle(document.querySelector(css)).backgroundColor;
        return [colour("#list b.u"), colour("#list b.p0"), colour("#list b.p4")];""")
    assert len(set(colours)) == 3
    told = browser.ask("""
        const id = document.querySelector("#list b.p0");
        id.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        return document.querySelector("#about").innerText.replace(/\\n/g, " | ");""")
    assert re.fullmatch(
        r"o \| id 111 \| position 19 \| in turn 0 \| from sampled \| trained \| logprob −0\.0500 \| p 0\.951",
        re.sub(r"\s+\|", " |", told).replace("  ", " ").strip(),
    )


def test_text_is_found_and_marked(browser: Chromium, server: Server) -> None:
    look(browser, server)
    browser.press("/")
    assert browser.ask("return document.activeElement.id;") == "find"
    for character in "Drei €":
        browser.press(character)
    browser.until("document.querySelectorAll('article').length === 1")
    browser.until("CSS.highlights.get('found')?.size > 0")
    assert "group 2 " in text(browser, "article h2")
    marked = "return [...CSS.highlights.get('found')].map((range) => range.toString());"
    assert browser.ask(marked) == ["drei €"]
    browser.ask("""
        const box = document.getElementById("find");
        box.value = "nobody says this"; box.dispatchEvent(new Event("input"));""")
    browser.until("document.querySelector('#list').textContent === 'Nothing that is kept says this.'")


def test_pages_stand_still_while_groups_come(browser: Chromium, server: Server) -> None:
    look(browser, server)
    heads = "return [...document.querySelectorAll('article')].map((one) => +one.dataset.number);"
    first = browser.ask(heads)
    assert first == list(range(first[0], first[0] - 10, -1))
    browser.ask("document.querySelector('#on').click();")
    browser.until("document.querySelector('#where').textContent === 'page 2'")
    assert browser.ask(heads) == list(range(first[-1] - 1, 0, -1))
    assert browser.ask("return document.querySelector('#on').disabled;")
    browser.ask("document.querySelector('#back').click();")
    browser.until("document.querySelector('#where').textContent === 'page 1'")
    assert browser.ask(heads) == first


def test_keys_alone_open_episodes_and_read_charts(browser: Chromium, server: Server) -> None:
    look(browser, server)
    browser.press("j")
    browser.press("j")
    browser.ask("document.activeElement.click();")
    browser.until("document.activeElement.closest('details').querySelectorAll('pre b').length > 5")
    browser.ask("document.activeElement.closest('details').querySelector('.turn pre').focus();")
    browser.press("ArrowRight")
    assert "position 20" in text(browser, "#about")
    browser.press("Escape")
    assert browser.ask("return document.querySelector('#about').hidden;")
    browser.ask("document.querySelector('#queue .plot').focus();")
    browser.press("ArrowLeft")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", text(browser, "#queue output"))
    browser.press("Escape")
    assert text(browser, "#queue output") == ""


def test_spans_are_buttons_and_say_which_is_pressed(browser: Chromium, server: Server) -> None:
    look(browser, server)
    browser.ask("document.querySelector('[data-span=\"10800\"]').click();")
    pressed = (
        "return [...document.querySelectorAll('#span [aria-pressed=true]')].map((one) => one.innerText);"
    )
    assert browser.ask(pressed) == ["3 h"]
    browser.until("document.querySelector('#queue svg')")


def test_light_and_dark_follow_the_reader(browser: Chromium, server: Server) -> None:
    def brightness(css: str) -> int:
        script = f"return getComputedStyle(document.body).{css};"
        return sum(map(int, re.findall(r"\d+", browser.ask(script))[:3]))

    look(browser, server)
    assert brightness("backgroundColor") > 600 > 200 > brightness("color")
    look(browser, server, dark=True)
    assert brightness("backgroundColor") < 200 < 600 < brightness("color")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_never_scrolls_sideways(browser: Chromium, server: Server, width: int) -> None:
    look(browser, server, width=width, height=800)
    browser.ask("document.getElementById('ids').click();")
    browser.ask("for (const one of [...document.querySelectorAll('details')].slice(0, 6)) one.open = true;")
    browser.until("document.querySelectorAll('#list pre').length > 6")
    wide = browser.ask("""
        const wide = (one) => one.getClientRects().length && !one.parentElement.closest(".wide")
          && one.getBoundingClientRect().right > innerWidth + 1;
        return [...document.querySelectorAll("main *")].filter(wide).map((one) => one.outerHTML);""")
    assert wide == []
    assert browser.ask("return document.documentElement.scrollWidth;") == width


def test_it_says_when_the_server_is_gone_and_goes_on_when_it_is_back(browser: Chromium) -> None:
    with socket.socket() as keeper:  # bound, not listened on: nobody else gets the port meanwhile
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        port = keeper.getsockname()[1]
        with serving(port) as server:
            browser.open(f"{server.url}/dashboard")
            browser.until("document.querySelector('#live').className === 'on'")
        browser.until("document.querySelector('#live-text').textContent.startsWith('no answer since ')")
        with serving(port):
            browser.until("document.querySelector('#live').className === 'on'")


def test_a_token_in_the_address_is_enough(browser: Chromium) -> None:
    with serving(token="secret") as server:
        assert httpx.get(f"{server.url}/dashboard", trust_env=False).status_code == 401
        browser.open(f"{server.url.replace('http://', 'http://x:secret@')}/dashboard")
        browser.until("document.querySelector('#why').textContent === 'No trainer has registered yet.'")
