"""Back-pressure with the original's own sender: it posts more than the server wants, and nothing is lost.

The environment posts all its groups at once. Its sender opens a connection a post, tries three times where
the answer is a 5xx, with pauses of a second or two, and then drops the group; so the server holds it instead.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.conformity.conftest import Environment
from tests.conformity.test_atropos_envs import REGISTRATION, call, check_delivery, train

pytestmark = [pytest.mark.atropos, pytest.mark.timeout(300)]

GROUPS = 40
PROGRAM = """
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.serve import serve
serve(port=0, limits=Limits({limits}))
"""


@contextmanager
def serving(limits: str) -> Iterator[str]:
    command = [sys.executable, "-c", PROGRAM.format(limits=limits)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        call(f"{url}/register", REGISTRATION)
        call(f"{url}/batch")
        yield url
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until_begun(environment: Environment) -> None:
    deadline = time.monotonic() + 60
    while len(environment.lines("begun")) < GROUPS:
        assert environment.running() and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)  # whatever can be answered is answered by now


def test_beyond_the_soft_limit_groups_are_taken_and_replies_wait(launch: Callable[..., Environment]) -> None:
    with serving("soft_groups=10, hold_seconds=60") as url:
        environment = launch("single", url, GROUPS, "--burst")
        until_begun(environment)
        status = call(f"{url}/status")
        assert status["queue_size"] == GROUPS, "all of them are in, whatever the senders do now"
        assert len(environment.lines("answered")) <= 10 + 1
        finish(environment, url)


def test_at_the_hard_limit_bodies_wait_outside(launch: Callable[..., Environment]) -> None:
    with serving("hard_bytes=8_000, hold_seconds=10") as url:
        environment = launch("single", url, GROUPS, "--burst")
        until_begun(environment)
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
