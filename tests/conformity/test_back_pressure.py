"""Back-pressure with the original's own sender: it posts more than the server wants, and nothing is lost.

The environment posts all its groups at once. Its sender opens a connection a post, tries three times where
the answer is a 5xx, with pauses of a second or two, and then drops the group; so the server holds it instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.conformity.conftest import Environment, serving
from tests.conformity.test_atropos_envs import REGISTRATION, call, check_delivery, train

pytestmark = [pytest.mark.atropos, pytest.mark.timeout(300)]

GROUPS = 40


def start(url: str, launch: Callable[..., Environment]) -> Environment:
    """Registers a trainer that takes nothing yet; returns an environment whose posts are all under way."""
    call(f"{url}/register", REGISTRATION)
    call(f"{url}/batch")
    environment = launch("single", url, GROUPS, "--burst")
    deadline = time.monotonic() + 60
    while len(environment.lines("begun")) < GROUPS:
        assert environment.running() and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)  # whatever can be answered is answered by now
    return environment


def test_beyond_the_soft_limit_groups_are_taken_and_replies_wait(launch: Callable[..., Environment]) -> None:
    with serving("--soft-groups", 10) as url:
        environment = start(url, launch)
        status = call(f"{url}/status")
        assert status["queue_size"] == GROUPS, "all of them are in, whatever the senders do now"
        assert len(environment.lines("answered")) <= 10 + 1
        finish(environment, url)


def test_at_the_hard_limit_bodies_wait_outside(launch: Callable[..., Environment]) -> None:
    with serving("--hard-bytes", 8_000) as url:
        environment = start(url, launch)
        inside = call(f"{url}/status")["queue_size"]
        assert 0 < inside < GROUPS
        finish(environment, url)


def finish(environment: Environment, url: str) -> None:
    """A trainer comes: every sender gets its answer, every group arrives once."""
    batches, rest = train(url, [environment])
    assert len(environment.lines("answered")) == GROUPS
    groups = [group for batch in [*batches, rest] for group in batch]
    assert len(groups) == GROUPS
    check_delivery(environment, groups)
