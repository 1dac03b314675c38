"""What groups begin with: items in turn by the group's number, and a curriculum by the trainer's step."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_gym.errors import ConfigError
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.curriculum import Lessons, Progress, in_turn
from tests.unit.rollout_cases import Countdown, saying


def groups_of(options: Any, n: int, seed: int = 0) -> list[Any]:
    collector = GroupCollector(Countdown, saying("ja"), group_size=2, options=options, seed=seed)
    try:
        return collector.collect(n)
    finally:
        collector.close()


@pytest.mark.parametrize("items", [1, 2, 7])
def test_each_item_comes_once_a_pass(items: int) -> None:
    options = in_turn(items, seed=3)
    passes = [[options(number)["item"] for number in range(p * items, (p + 1) * items)] for p in range(5)]
    assert all(sorted(one) == list(range(items)) for one in passes)
    if items == 7:
        assert len({tuple(one) for one in passes}) > 1, "another order each time"


def test_the_item_follows_from_the_number_alone() -> None:
    """So whoever goes on at a number goes on with the same items, in any process."""
    one, two = in_turn(50, seed=1), in_turn(50, seed=1)
    assert [one(number) for number in range(200)] == [two(number) for number in reversed(range(200))][::-1]
    assert [in_turn(50, seed=2)(number) for number in range(50)] != [one(number) for number in range(50)]


def test_without_items_there_is_nothing_to_go_through() -> None:
    with pytest.raises(ConfigError, match="items must be >= 1, got 0"):
        in_turn(0)


def test_a_collector_takes_options_by_number() -> None:
    groups = groups_of(lambda number: {"turns": 1 + number % 3}, 6)
    turns = [{sum(len(row.turns) for row in episode.rows) for episode in group.episodes} for group in groups]
    assert turns == [{1}, {2}, {3}, {1}, {2}, {3}]
    assert groups_of(lambda number: None, 1)[0].episodes == groups_of(None, 1)[0].episodes


def test_a_curriculum_is_asked_once_a_step_and_told_how_it_went() -> None:
    asked: list[tuple[int, Progress]] = []

    def harder(step: int, progress: Progress) -> dict[str, int]:
        asked.append((step, progress))
        return {"turns": 1 + step}

    lessons = Lessons(harder, {"turns": 9, "other": True})
    assert lessons.options(0) == {"turns": 9, "other": True}
    assert lessons.reached(0) and not lessons.reached(0)
    assert lessons.options(0) == {"turns": 1, "other": True}
    groups = groups_of({"turns": 1}, 3)
    lessons.posted(groups[:2])
    lessons.posted(groups[2:])
    assert lessons.reached(2)
    episodes = [episode for group in groups for episode in group.episodes]
    mean = sum(episode.episode_return for episode in episodes) / 6
    assert asked == [(0, Progress()), (2, Progress(3, 6, pytest.approx(mean), 1.0))]
    assert lessons.reached(3) and asked[-1] == (3, Progress()), "counted anew"


def test_its_answer_holds_again_in_the_next_process() -> None:
    lessons = Lessons(lambda step, progress: {"turns": step})
    lessons.reached(4)
    assert lessons.state == {"step": 4, "options": {"turns": 4}}
    again = Lessons(lambda step, progress: {"turns": 100}, state=lessons.state)
    assert not again.reached(4) and again.options(7) == {"turns": 4}
    assert again.reached(5) and again.options(7) == {"turns": 100}


class Ladder:
    """A rung up for each good step."""

    def __init__(self) -> None:
        self.rung = 0

    def __call__(self, step: int, progress: Progress) -> dict[str, int]:
        self.rung += (progress.success or 0) > 0.5
        return {"turns": 1 + self.rung}

    def state_dict(self) -> dict[str, int]:
        return {"rung": self.rung}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rung = state["rung"]


def test_a_curriculum_with_a_state_of_its_own_gets_it_back() -> None:
    lessons = Lessons(Ladder())
    lessons.reached(0)
    lessons.posted(groups_of({"turns": 1}, 1))
    lessons.reached(1)
    assert lessons.state == {"step": 1, "options": {"turns": 2}, "state": {"rung": 1}}
    again = Lessons(Ladder(), state=lessons.state)
    again.posted(groups_of({"turns": 1}, 1))
    again.reached(2)
    assert again.options(0) == {"turns": 3}
    with pytest.raises(
        ConfigError, match=r"service\.json holds the state of a curriculum, but .* has no load"
    ):
        Lessons(lambda step, progress: None, state=lessons.state, what="service.json")


def test_without_a_curriculum_there_is_nothing_to_remember() -> None:
    lessons = Lessons(None, None, state={"step": 1, "options": {"turns": 2}})
    assert lessons.state is None and lessons.options(3) is None and not lessons.reached(3)
    lessons.posted(groups_of({"turns": 1}, 1))
