"""What the server tells of itself: numbers for Prometheus, and in a sentence why nothing goes out."""

from __future__ import annotations

import re

import pytest
from server_tools import LocalServer, group

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.metrics import counter, exposition

LINE = re.compile(r'atropos_[a-z_]+(\{[a-z]+="(?:[^"\\\n]|\\.)*"\})? -?[0-9.e+]+')


def scrape(server: LocalServer) -> dict[str, float]:
    """All samples; each line must be one that Prometheus reads."""
    reply = server.call("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in reply.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            assert LINE.fullmatch(line), line
            name, value = line.rsplit(" ", 1)
            found[name.removeprefix("atropos_")] = float(value)
            bare = re.sub(r"(_bucket|_sum|_count)$", "", name.partition("{")[0])
            assert bare in kinds or name.partition("{")[0] in kinds, f"{name} has no TYPE"
    return found


def test_all_names_are_there_before_anything_happens() -> None:
    found = scrape(LocalServer())
    zero = (
        "queue_groups",
        "queue_sequences",
        "queue_tokens",
        "queue_bytes",
        "leased_groups",
        "buffered_groups",
    )
    zero += (
        "buffered_groups",
        "current_step",
        "batches_delivered_total",
        "batches_redelivered_total",
        "short_batches_total",
    )
    zero += ("held_posts", "hold_seconds_total", "policy_lag_count", "policy_lag_sum")
    assert [found[name] for name in zero] == [0.0] * len(zero)
    assert "policy_version" not in found


def test_numbers_follow_what_happens() -> None:
    server = LocalServer()
    server.start()
    env_id = server.add_env()
    server.post("/policy", {"version": 5, "model_name": "m"})
    for version in (5, 4, 2):
        server.send(env_id=env_id, group_overrides={"policy_version": version})
    server.send(), server.send(env_id=77), server.send(1, env_id=env_id)
    found = scrape(server)
    assert (found["queue_groups"], found["queue_sequences"], found["queue_tokens"]) == (5, 20, 60)
    assert found["queue_bytes"] > 5 * 12 * 4
    assert (found["buffered_groups"], found["policy_version"], found["connected_envs"]) == (1, 5, 1)
    received = [found[f'groups_received_total{{env="{env}"}}'] for env in ("e_0", "unknown", "none")]
    assert received == [4, 1, 1]
    leased = server.get("/batch", lease_seconds=10)
    found = scrape(server)
    assert (found["leased_groups"], found["batches_delivered_total"], found["current_step"]) == (2, 1, 1)
    assert (found['policy_lag_bucket{le="0"}'], found['policy_lag_bucket{le="+Inf"}']) == (1, 2)
    server.clock.advance(11)
    again = server.get("/batch", lease_seconds=10)
    assert again["delivery"] == 2 and again["batch_id"] != leased["batch_id"]
    found = scrape(server)
    assert (found["batches_delivered_total"], found["batches_redelivered_total"]) == (2, 1)
    assert found["policy_lag_count"] == 2  # a group that is handed over again is no second one
    server.get("/batch")
    found = scrape(server)
    assert (found["policy_lag_sum"], found["policy_lag_count"]) == (0 + 1 + 3, 3)
    assert found["policy_lag_unknown_total"] == 1


def test_refusals_are_counted_by_reason() -> None:
    server = LocalServer(Limits(max_body_bytes=1000))
    server.start()
    json = {"Content-Type": "application/json"}
    server.post("/scored_data", {"tokens": [[1]], "masks": [[1]]}, status=422)
    server.post("/scored_data", group(9), status=422)
    server.call("POST", "/scored_data", content=b"{", headers=json)
    server.call("POST", "/scored_data", content=b'"\xff"', headers=json)
    server.call("POST", "/scored_data", content=b" " * 1001, headers=json)
    found = scrape(server)
    reasons = ("missing", "too_long", "json_invalid", "status_400", "status_413")
    assert [found[f'groups_refused_total{{reason="{reason}"}}'] for reason in reasons] == [1] * 5
    assert "5 groups refused: their senders were told why" in server.get("/health")["warnings"]


def test_a_label_cannot_break_out_of_its_line() -> None:
    text = exposition([counter("x_total", "A test.", {'a"b\\c\nd': 1}, label="l")])
    assert text.splitlines()[-1] == 'atropos_x_total{l="a\\"b\\\\c\\nd"} 1'


# Why nothing goes out.


def why(server: LocalServer) -> str:
    """The sentence; /status and /health say the same."""
    sentence = server.get("/status")["reason"]
    warnings = [one for one in server.get("/health")["warnings"] if one.startswith("no batch: ")]
    assert warnings == ([f"no batch: {sentence}"] if sentence else [])
    return str(sentence)


def test_the_sentence_is_of_now() -> None:
    server = LocalServer()
    assert why(server) == "no trainer has registered"
    server.register()
    assert why(server) == "the trainer has not asked for one yet, and environments wait for that"
    server.get("/batch")
    assert why(server) == "0 of 8 sequences queued"
    env_id = server.add_env()
    server.send(1, env_id=env_id)
    assert why(server) == "0 of 8 sequences queued; 1 sequences wait for the rest of their groups"
    server.send(), server.send()
    assert why(server) == ""
    server.clock.advance(61)
    assert why(server) == "one is ready, but the trainer has not asked for 61 s"
    assert server.sizes() == [4, 4]
    server.clock.advance(121)
    assert why(server) == "1 of 8 sequences queued; no environment is connected"


def test_what_is_handed_out_is_named() -> None:
    server = LocalServer()
    server.start()
    server.send(), server.send()
    server.get("/batch", lease_seconds=60)
    assert why(server) == "0 of 8 sequences queued; 2 groups are handed out and not acknowledged"


@pytest.mark.parametrize("exact", [False, True])
def test_groups_that_do_not_sum_up_are_named_until_a_short_batch_is_due(exact: bool) -> None:
    server = LocalServer()
    server.start(batch_size=10, exact_batches=exact)
    for _ in range(3):
        server.send(4)
    assert server.get("/batch")["batch"] is None
    assert why(server) == "no groups sum to 10"
    server.clock.advance(31)
    assert why(server) == ("no groups sum to 10" if exact else "")


def test_an_environment_that_is_waited_for_is_named() -> None:
    server = LocalServer()
    server.start()
    server.add_env(min_batch_allocation=0.5)
    server.send(), server.send(), server.send()
    assert why(server) == "e_0 has a minimum but nothing queued, for 30 s more"


def test_reading_changes_nothing() -> None:
    """Asked however often why there is none, the next batch is the one it would have been."""
    stories = []
    for asked in (0, 50):
        server = LocalServer()
        server.start(batch_size=10)
        for size in (4, 4, 4, 6):
            server.send(size)
        for _ in range(asked):
            why(server), scrape(server)
            server.clock.advance(0.5)
        server.clock.advance(25 - asked / 2)
        stories.append([server.sizes(), server.get("/status")["current_step"], why(server)])
    assert stories[0] == stories[1]
