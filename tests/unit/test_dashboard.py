"""The page at /dashboard: what it counts, keeps, finds and says, and that reading it changes nothing.

1. History is bounded in every resolution, and its columns are as long as its times.
2. The sentence names who is behind it when nothing moves.
3. The gallery keeps the newest groups within its limits, finds them, and draws as the collector's files do.
4. The page is one file that its own policy lets run, and that loads nothing.
5. No route of it changes what the store would save.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_tools import REGISTER, LocalServer, group

from atropos_gym import ScoredDataGroup, load_tokenizer
from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.clock import ManualClock
from atropos_gym.batch_server.dashboard import watch
from atropos_gym.batch_server.dashboard.gallery import MOST_IDS, Exhibit, Gallery
from atropos_gym.batch_server.dashboard.history import LEVELS, MOST_ENVS, OTHERS, History
from atropos_gym.batch_server.dashboard.reason import Situation, duration, why
from atropos_gym.batch_server.state.packed import pack_group
from atropos_gym.batch_server.store import SqliteStore
from atropos_gym.errors import ConfigError
from atropos_gym.html import Pieces, render_episode, wire_episodes
from atropos_gym.tokenizers.pieces import pieces_of

BYTES = pieces_of(load_tokenizer("bytes"))


def with_tokenizer(tokenizer: str | None = "bytes", store: Any = None) -> LocalServer:
    server = LocalServer()
    server.app = create_app(store, clock=server.clock, tokenizer=tokenizer)
    return server


# History.


def test_columns_are_as_long_as_their_times_in_every_resolution() -> None:
    history = History()
    for second in range(0, 40_000, 7):
        history.received("a", sequences=4, ids=100, scores=2.0, now=second)
        history.look({"queue_groups": second}, second)
    for span, (seconds, _) in zip((600, 10_800, 259_200), LEVELS, strict=True):
        series = history.series(span, now=39_999)
        assert series["seconds"] == seconds
        assert series["at"] == sorted(set(series["at"]))
        assert series["at"][0] > 39_999 - span - 2 * seconds
        columns = [series[name] for name in ("queue_groups", "groups_in", "version")]
        columns += series["envs"]["a"].values()
        assert {len(column) for column in columns} == {len(series["at"])}
    assert sum(history.series(259_200, now=39_999)["envs"]["a"]["groups"]) == len(range(0, 40_000, 7))


def test_history_is_bounded_in_time_and_in_environments() -> None:
    history = History()
    for second in range(0, 4_000_000, 600):
        history.received(f"env {second}", sequences=1, ids=1, scores=0.0, now=second)
    assert [len(bins) for _, bins in history._levels] == [count for _, count in LEVELS]
    for number in range(MOST_ENVS + 50):
        history.received(f"other {number}", sequences=1, ids=1, scores=0.0, now=4_000_000)
    newest = history.series(60, now=4_000_001)["envs"]
    assert len(newest) <= MOST_ENVS + 1
    assert sum(newest[OTHERS]["groups"]) == 50


def test_a_clock_that_goes_back_stays_in_the_newest_bin() -> None:
    history = History()
    history.received("a", sequences=1, ids=1, scores=1.0, now=1000.0)
    history.received("a", sequences=1, ids=1, scores=1.0, now=900.0)
    series = history.series(600, now=1001.0)
    assert series["at"] == [1000.0]
    assert series["envs"]["a"]["groups"] == [2]


def test_age_is_counted_where_it_is_known() -> None:
    history = History()
    history.delivered([("a", 10, 0), ("a", 10, 3), ("a", 10, None), ("b", 10, None)], now=50.0)
    series = history.series(600, now=52.0)
    assert series["groups_out"] == [2.0], "four in two seconds"
    assert series["envs"]["a"]["ages"] == [3]
    assert series["envs"]["a"]["aged"] == [2]
    assert "b" not in series["envs"]


def test_rates_are_of_the_last_half_minute() -> None:
    history = History()
    for second in range(100):
        history.received("a", sequences=1, ids=50, scores=0.0, now=second)
    assert history.rate("groups_in", now=100) == pytest.approx(1.0, rel=0.1)
    assert history.rate("ids_in", now=100) == pytest.approx(50.0, rel=0.1)
    assert history.rate("groups_in", now=1000) == 0.0


# The sentence.

RUNNING = Situation(registered=True, started=True, connected=2, known=2, received=3.0, trainer=1.0)

SENTENCES = [
    (Situation(), "wait", "No trainer has registered yet."),
    (Situation(queue_groups=1), "wait", "No trainer has registered yet; 1 group waits for one."),
    (Situation(registered=True), "wait", "A trainer has registered but not asked for a batch yet"),
    (replace(RUNNING, failing="disk is full"), "bad", "so nothing is accepted: disk is full."),
    (replace(RUNNING, finished=True), "good", "The run has finished"),
    (replace(RUNNING, reason="3 of 8"), "good", "3 of 8; the last group came 3 s ago."),
    (
        replace(RUNNING, reason="0 of 8", connected=0),
        "bad",
        "no environment is connected (2 registered before).",
    ),
    (replace(RUNNING, reason="0 of 8", received=700.0), "bad", "none for 12 min, though 2 environments are"),
    (
        replace(RUNNING, reason="0 of 8", received=None),
        "wait",
        "no group has come yet, though 2 environments",
    ),
    (replace(RUNNING, trainer=90.0, queue_groups=9), "bad", "last heard of 2 min ago; 9 groups wait"),
    (
        replace(RUNNING, trainer=90.0, queue_groups=9, reason="old"),
        "bad",
        "last heard of 2 min ago; 9 groups",
    ),
    (replace(RUNNING, trainer=90.0, leased_groups=8), "wait", "2 min ago and holds 8 groups under a lease;"),
    (replace(RUNNING, held_posts=4), "wait", "so 4 posts are held until it has taken a batch"),
    (replace(RUNNING, connected=0), "bad", "No environment is connected (2 registered before): nothing"),
    (replace(RUNNING, received=61.0), "bad", "No group has come for 61 s, though 2 environments are"),
    (replace(RUNNING, leased_groups=8), "good", "The trainer works on a batch of 8 groups."),
    (RUNNING, "good", "Groups come in and batches go out."),
]


@pytest.mark.parametrize(("situation", "tone", "says"), SENTENCES, ids=[says for *_, says in SENTENCES])
def test_the_sentence_says_who_is_behind_it(situation: Situation, tone: str, says: str) -> None:
    found = why(situation)
    assert says in found[1]
    assert found[0] == tone
    assert found[1].endswith(".")


def test_durations_never_say_nothing() -> None:
    assert [duration(seconds) for seconds in (None, 0, 89, 90, 5400, 129_600)] == [
        *("1 s", "1 s", "89 s", "2 min", "2 h", "2 d")
    ]


# The gallery.


def exhibit(number: int, text: str = "Hit me.", **fields: Any) -> Exhibit:
    ids = [257, *text.encode(), 258]
    mask = [-100, *ids[1:]]
    made = ScoredDataGroup(
        tokens=[ids, ids], masks=[mask, mask], scores=[1.0, -1.0],
        inference_logprobs=[[1.0] + [-0.5] * (len(ids) - 1)] * 2, **fields,
    )  # fmt: skip
    return Exhibit(number, pack_group(made), "blackjack", 3, 1000.0)


def numbers(gallery: Gallery, **asked: Any) -> list[int]:
    return [one["number"] for one in gallery.page(gallery.all(), **asked)["groups"]]


def test_the_gallery_keeps_the_newest_within_its_limits() -> None:
    gallery = Gallery(most_groups=3)
    for number in range(1, 6):
        gallery.add(exhibit(number))
    assert numbers(gallery) == [5, 4, 3]
    size = len(exhibit(1).packed.data)
    small = Gallery(most_bytes=2 * size + 1)
    for number in range(1, 6):
        small.add(exhibit(number))
    assert numbers(small) == [5, 4]
    small.add(exhibit(6, "long " * 1000))
    assert numbers(small) == [6], "the newest is kept though it alone is too large"


def test_a_group_found_again_after_its_text_was_read_leaves_no_text_behind() -> None:
    gallery = Gallery(BYTES, most_groups=2)
    for number in range(1, 10):
        gallery.add(exhibit(number))
        numbers(gallery, find="nothing says this")
    assert set(gallery._texts) == {8, 9}


def test_pages_stand_still_while_groups_come() -> None:
    gallery = Gallery()
    for number in range(1, 26):
        gallery.add(exhibit(number))
    first = gallery.page(gallery.all(), count=10)
    assert first["more"]
    gallery.add(exhibit(26))
    assert numbers(gallery, before=first["groups"][-1]["number"]) == list(range(15, 5, -1))
    assert not gallery.page(gallery.all(), before=6, count=10)["more"]


def test_text_is_found_over_ids_in_messages_and_by_name() -> None:
    gallery = Gallery(BYTES)
    gallery.add(exhibit(7, "Ich zähle bis drei."))
    gallery.add(exhibit(8, "no", messages=[[{"role": "user", "content": "What is IT?"}]] * 2))
    assert numbers(gallery, find="ZÄHLE BIS") == [7]
    assert numbers(gallery, find="what is it?") == [8]
    assert numbers(gallery, find="g-7") == [7]
    assert numbers(gallery, find=" blackjack ") == [8, 7]
    assert numbers(gallery, find="nowhere") == []


def test_it_is_said_which_episodes_say_it() -> None:
    def found(gallery: Gallery, find: str) -> list[list[bool]]:
        page = gallery.page(gallery.all(), find=find)
        return [[episode["found"] for episode in one["episodes"]] for one in page["groups"]]

    said = [list(b"one two"), list(b"two three")]
    made = pack_group(ScoredDataGroup(tokens=said, masks=said, scores=[0.0, 1.0]))
    for pieces, three in ((BYTES, "Three"), (Pieces.unknown(), "116 104 114")):
        gallery = Gallery(pieces)
        gallery.add(Exhibit(1, made, "counting", None, 0.0))
        assert found(gallery, three) == [[False, True]]
        assert found(gallery, "counting") == [[False, False]]
        assert found(gallery, "") == [[False, False]]


def test_without_pieces_ids_in_a_row_are_found() -> None:
    gallery = Gallery()
    gallery.add(exhibit(1, "abc"))
    gallery.add(exhibit(2, "acb"))
    assert numbers(gallery, find="97 98 99") == [1]
    assert numbers(gallery, find="99, 98") == [2]
    assert numbers(gallery, find="98 97") == []
    assert numbers(gallery, find="97 x") == []
    assert numbers(gallery, find="1" * 40) == []


def test_an_episode_is_drawn_as_files_of_the_collector_are() -> None:
    fields: dict[str, Any] = {
        "advantages": [[0.0] + [0.25] * 8, [0.0] + [-0.25] * 8],
        "overrides": [{"turns": [[1, 9]], "turn_rewards": [1.0], "success": True}, {}],
    }
    one = exhibit(1, **fields)
    posted = ScoredDataGroup.model_validate_json(one.packed.to_json())
    gallery = Gallery(BYTES)
    for index, episode in enumerate(wire_episodes(posted)):
        assert gallery.draw(one, index) == "".join(render_episode(episode, BYTES))
    drawn = gallery.draw(one, 0) or ""
    assert '<b class="s y p1" data-i="72" data-l="-0.5000" data-a="0.25">H</b>' in drawn
    assert gallery.draw(one, 2) is None
    assert gallery.draw(one, -1) is None


def test_ids_that_are_too_many_are_counted_and_not_drawn() -> None:
    text = "x" * (MOST_IDS + 5)
    drawn = Gallery(BYTES).draw(exhibit(1, text, overrides=[{"turns": [[1, len(text) + 2]]}] * 2), 0) or ""
    assert drawn.count("<b ") == MOST_IDS
    assert "7 more ids are not drawn here" in drawn


def test_what_was_said_cannot_become_markup() -> None:
    one = exhibit(1, "<script>alert(1)</script>", messages=[[{"role": "<b>", "content": "<img>"}]] * 2)
    for pieces in (BYTES, Pieces.unknown()):
        drawn = Gallery(pieces).draw(one, 0) or ""
        assert "<script" not in drawn
        assert "<img" not in drawn


# The page and its routes.


def test_the_page_is_one_file_that_its_policy_lets_run() -> None:
    response = LocalServer().call("GET", "/dashboard")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"""(src|href)=(?!["']?data:,)""", response.text.split("<script>")[0])
    assert re.findall(r"https?://[^\s\"']+", response.text) == ["http://www.w3.org/2000/svg"]


def test_its_data_say_how_things_stand() -> None:
    server = with_tokenizer()
    assert server.get("/dashboard/data")["why"]["text"] == "No trainer has registered yet."
    server.start(max_policy_lag=5)
    env = server.add_env(desired_name="gsm8k")
    for version in (0, 1, 2):
        server.post("/policy", {"version": version, "model_name": f"m{version}"})
    for tag in (1.0, 0.5):
        server.send(env_id=env, tag=tag, group_overrides={"policy_version": 1})
    server.clock.advance(1)
    batch = server.get("/batch", lease_seconds=60)
    data = server.get("/dashboard/data")
    assert data["why"] == {"tone": "good", "text": "The trainer works on a batch of 2 groups."}
    assert data["status"]["current_step"] == 1
    assert data["trainer"]["settings"]["batch_size"] == REGISTER["batch_size"]
    assert data["policy"]["version"] == 2
    assert [one["batch_id"] for one in data["leases"]] == [batch["batch_id"]]
    assert data["leases"][0] == {
        "batch_id": "b-1", "step": 1, "groups": 2, "sequences": 8, "delivery": 1,
        "expires_at": server.clock.time() + 60,
    }  # fmt: skip
    (row,) = data["envs"]
    assert (row["name"], row["groups_received"], row["score_mean"]) == ("gsm8k", 2, 0.5625)
    sent = data["series"]["envs"]["gsm8k"]
    assert (sum(sent["groups"]), sum(sent["sequences"]), sum(sent["scores"])) == (2, 8, 4.5)
    assert (sum(sent["aged"]), sum(sent["ages"])) == (2, 2), "each was a version behind when it went out"
    assert data["gallery"] == {"kept": 2, "newest": 2, "tokenizer": "bytes"}


def test_an_environment_keeps_its_name_when_it_registers_again() -> None:
    server = with_tokenizer()
    server.start()
    for _ in range(2):
        server.send(env_id=server.add_env(desired_name="taxi"))
    server.send(env_id=77)
    server.send()
    envs = server.get("/dashboard/data")["series"]["envs"]
    assert {name: sum(one["groups"]) for name, one in envs.items()} == {
        "taxi": 2,
        "env 77": 1,
        "unknown sender": 1,
    }


def test_scores_whose_sum_is_infinite_leave_everything_readable() -> None:
    server = with_tokenizer()
    server.start()
    env_id = server.add_env(desired_name="large", group_size=2)
    for scores in ([1.7e308, 1.7e308], [-1.7e308, -1.7e308], [0.5, 0.5]):
        server.send(2, env_id=env_id, scores=scores)
    server.send(2, env_id=server.add_env(desired_name="plain"), scores=[0.5, 1.0])
    for path in ("/envs", "/dashboard/data"):
        body = server.call("GET", path).text
        assert "Infinity" not in body and "NaN" not in body
    large, plain = server.get("/envs")["envs"]
    assert (large["score_mean"], plain["score_mean"]) == (None, 0.75)
    envs = server.get("/dashboard/data")["series"]["envs"]
    assert (envs["large"]["scores"], envs["plain"]["scores"]) == ([None], [1.5])


def test_nobody_is_listed_to_name_a_sender_that_never_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    server = with_tokenizer()
    server.start()
    for number in range(5):
        server.add_env(desired_name=f"e{number}")
    store = server.app.state.desk.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "envs", lambda: pytest.fail("all environments were listed"))
        server.send(env_id=77), server.send(env_id=77), server.send(env_id=3)
    server.send(env_id=server.add_env(desired_name="late"))
    envs = server.get("/dashboard/data")["series"]["envs"]
    assert {name: sum(one["groups"]) for name, one in envs.items()} == {"env 77": 2, "e3": 1, "late": 1}


def test_trajectories_are_shown_by_pieces_or_by_number() -> None:
    for tokenizer, shown in (("bytes", "␁"), (None, "⟨1⟩")):
        server = with_tokenizer(tokenizer)
        server.send(tokens=[[1, 72, 105]] * 2, masks=[[-100, 72, 105]] * 2, scores=[0.0, 1.0])
        (found,) = server.get("/dashboard/trajectories")["groups"]
        assert found["number"] == 1
        assert [one["ids"] for one in found["episodes"]] == [3, 3]
        html = server.get("/dashboard/trajectories/1/0")["html"]
        assert shown in html
        assert (">H</b>" in html) == (tokenizer is not None)


def test_what_is_not_kept_is_told() -> None:
    server = with_tokenizer()
    assert server.get("/dashboard/trajectories") == {"groups": [], "more": False, "kept": 0}
    for path in ("/dashboard/trajectories/1/0", "/dashboard/trajectories/1/-1"):
        response = server.call("GET", path)
        assert response.status_code == 404
        assert "is not kept" in response.json()["detail"]
    for query in ({"count": 0}, {"count": 51}, {"before": "x"}, {"find": "x" * 201}):
        assert server.call("GET", "/dashboard/trajectories", params=query).status_code == 422
    for span in (1, "x", 10**9):
        assert server.call("GET", "/dashboard/data", params={"span": span}).status_code == 422


def test_reading_changes_nothing_that_would_be_saved(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "state.sqlite") as store:
        server = with_tokenizer(store=store)
        server.start()
        env = server.add_env()
        server.post("/policy", {"version": 1, "model_name": "m"})
        server.get("/policy", env_id=env, holding="1")
        for _ in range(3):
            server.send(env_id=env)
        server.get("/batch", lease_seconds=5)
        store.save()
        server.clock.advance(2)
        before = (store.health(), store.envs(), store.status(), store.leases())
        for path in ("", "/data", "/data?span=259200", "/trajectories?find=x", "/trajectories/1/0"):
            assert server.call("GET", f"/dashboard{path}").status_code == 200
            assert list(store._changes(*store._moves())) == []
        assert before == (store.health(), store.envs(), store.status(), store.leases())


def test_an_unknown_tokenizer_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match="tokenizer must be a name or a folder"):
        create_app(tokenizer="")


def test_the_pulse_goes_on_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.001)
    looks = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def one() -> int:
        pulse = watch.Pulse(app, lambda: looks.append(1))
        before = len(looks)
        await pulse({}, None, None)  # type: ignore[arg-type]
        await pulse({}, None, None)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            while len(looks) < before + 4:
                await asyncio.sleep(0.001)
        return len(looks)

    assert asyncio.run(one()) >= 4


def test_gauges_follow_the_queue_while_nobody_looks() -> None:
    clock = ManualClock()
    server = LocalServer()
    server.clock, server.app = clock, create_app(clock=clock)
    for count in (1, 2, 3):
        server.send()
        clock.advance(2)
        server.get("/status")
        assert server.get("/dashboard/data")["series"]["queue_groups"][-1] == count


def test_the_server_needs_no_transformers_to_show_a_page() -> None:
    script = (
        "import sys; from atropos_gym.batch_server import create_app; create_app(tokenizer='bytes'); "
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_small_group_is_what_the_tools_say() -> None:
    assert group(2)["scores"] == [0.0, 0.5], "the sums above rest on this"
