"""What a learner knows of its open leases after a kill: acknowledged, given back, or left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.errors import ServerError
from atropos_gym.trainers._leases import Leases, settle
from atropos_gym.wire import Policy


class Client:
    """A batch server's client that says what it was told; ``over`` leases are not there any more."""

    def __init__(self, run: str = "r", over: dict[str, int] | None = None) -> None:
        self.run = run
        self.over = over or {}
        self.told: list[tuple[str, str]] = []

    def policy(self) -> Policy:
        return Policy(run=self.run, version=3)

    def ack(self, batch_id: str) -> None:
        self._end("ack", batch_id)

    def nack(self, batch_id: str, reason: str) -> None:
        assert "killed" in reason
        self._end("nack", batch_id)

    def _end(self, how: str, batch_id: str) -> None:
        self.told.append((how, batch_id))
        if batch_id in self.over:
            raise ServerError("it is over", status=self.over[batch_id])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a learner that was killed with two batches that it had learned from, and one that it had not."""
    leases = Leases(tmp_path / "leases.json", "r")
    for number in (1, 2, 3, 4):
        leases.add(f"b-{number}", update=number)
    leases.remove("b-1")
    return tmp_path / "leases.json"


def test_what_the_checkpoint_has_is_acknowledged_and_the_rest_comes_again(file: Path) -> None:
    settle(client := Client(), file, learned=3)
    assert client.told == [("ack", "b-2"), ("ack", "b-3"), ("nack", "b-4")]


def test_the_same_again_after_another_kill(file: Path) -> None:
    for _ in range(2):
        settle(client := Client(), file, learned=2)
        assert client.told == [("ack", "b-2"), ("nack", "b-3"), ("nack", "b-4")]


@pytest.mark.parametrize("status", [404, 409])
def test_a_lease_that_is_over_is_no_fault(file: Path, status: int) -> None:
    settle(client := Client(over={"b-2": status}), file, learned=4)
    assert client.told == [("ack", "b-2"), ("ack", "b-3"), ("ack", "b-4")]


def test_a_server_that_fails_is_one(file: Path) -> None:
    with pytest.raises(ServerError):
        settle(Client(over={"b-2": 503}), file, learned=4)


def test_names_of_another_learners_leases_are_left_alone(file: Path) -> None:
    settle(client := Client(run="another"), file, learned=4)
    assert client.told == []


def test_nothing_was_left(tmp_path: Path) -> None:
    file = tmp_path / "leases.json"
    settle(client := Client(), file, learned=4)
    leases = Leases(file, "r", "s")
    assert json.loads(file.read_text()) == {"run": "r", "server": "s", "updates": {}}, (
        "whoever goes on takes over"
    )
    settle(client, file, learned=4)
    assert client.told == []
    leases.finish()
    leases.finish()
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leases: Any = Leases(None, "r")
    leases.add("b-1", update=1)
    assert list(leases) == ["b-1"]
    leases.finish()
    assert list(tmp_path.iterdir()) == []
