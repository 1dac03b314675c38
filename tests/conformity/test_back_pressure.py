"""Back-pressure with the original's own sender: it posts more than the server wants, and nothing is lost.

The environment posts all its groups at once. Its sender opens a connection a post, tries three times where
the answer is a 5xx, with pauses of a second or two, and then drops the group; so the server holds it instead.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable

import pytest

from tests.conformity.conftest import Environment, serving
from tests.conformity.test_atropos_envs import DIRECT, REGISTRATION, call, check_delivery, train

pytestmark = [pytest.mark.atropos, pytest.mark.timeout(900)]

GROUPS = 40
#: Longer than anything here takes: without it a sender would be let go, or try again.
HOLD = ("--hold-seconds", 240)


def inside(url: str) -> int:
    return int(call(f"{url}/status")["queue_size"])


def held(url: str) -> int:
    """Posts that wait at the server, whether their groups are in or not."""
    with DIRECT.open(urllib.request.Request(f"{url}/metrics"), timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("atropos_held_posts "))))


def start(url: str, launch: Callable[..., Environment], all_arrived: Callable[[], bool]) -> Environment:
    """Registers a trainer that takes nothing yet; returns an environment whose posts have all arrived."""
    call(f"{url}/register", REGISTRATION)
    call(f"{url}/batch")
    environment = launch("single", url, GROUPS, "--burst")
    deadline = time.monotonic() + 200
    while not all_arrived():
        assert environment.running() and time.monotonic() < deadline
        time.sleep(0.1)
    return environment


def test_beyond_the_soft_limit_groups_are_taken_and_replies_wait(launch: Callable[..., Environment]) -> None:
    with serving("--soft-groups", 10, *HOLD) as url:
        # All of them are in, whatever the senders do now.
        environment = start(url, launch, lambda: inside(url) == GROUPS)
        assert len(environment.lines("answered")) <= 10 + 1
        finish(environment, url)


def test_at_the_hard_limit_bodies_wait_outside(launch: Callable[..., Environment]) -> None:
    with serving("--hard-bytes", 8_000, *HOLD) as url:
        environment = start(url, launch, lambda: inside(url) + held(url) >= GROUPS)
        assert 0 < inside(url) < GROUPS
        finish(environment, url)


def finish(environment: Environment, url: str) -> None:
    """A trainer comes: every sender gets its answer, every group arrives once."""
    batches, rest = train(url, [environment])
    assert len(environment.lines("answered")) == GROUPS
    groups = [group for batch in [*batches, rest] for group in batch]
    assert len(groups) == GROUPS
    check_delivery(environment, groups)
