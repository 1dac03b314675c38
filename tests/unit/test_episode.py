"""A group on the wire: one sequence a row, the episode's score on each, everything else beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Message
from atropos_gym.rollout.episode import Episode, EpisodeGroup, Row, Turn

QUESTION = Message(role="user", content="2+2?")
ANSWER = Message(role="assistant", content="4")


def make_row(prompt: list[int], sampled: list[int], *, reward: float = 0.0, version: int = 3) -> Row:
    start, end = len(prompt), len(prompt) + len(sampled)
    return Row(
        ids=prompt + sampled,
        mask=[-100] * start + sampled,
        logprobs=[1.0] * start + [-0.5 * (i + 1) for i in range(len(sampled))],
        turns=[Turn(start, end, reward, version, cut=False)],
        messages=[QUESTION, ANSWER],
    )


def make_episode(rows: list[Row], *, member: int = 0, score: float | None = 1.0) -> Episode:
    return Episode(
        rows=rows,
        rewards=[turn.reward for row in rows for turn in row.turns],
        messages=[message for row in rows for message in row.messages],
        end_reason="terminated",
        success=True,
        truncated=False,
        invalid_turns=0,
        seed=11,
        member=member,
        score=score,
    )


def make_group(*episodes: Episode) -> EpisodeGroup:
    return EpisodeGroup(
        env="atropos/Test-v0",
        number=5,
        episodes=list(episodes),
        policy_version=3,
        temperature=0.7,
        tokenizer_fingerprint="sha256:abc",
    )


@pytest.fixture
def flat() -> EpisodeGroup:
    """Two episodes of one row each."""
    return make_group(
        make_episode([make_row([1, 2], [7, 8], reward=1.0)], score=1.0),
        make_episode([make_row([1, 2], [9], reward=0.0)], member=1, score=0.0),
    )


@pytest.fixture
def segmented() -> EpisodeGroup:
    """One episode of two rows beside one of a single row."""
    return make_group(
        make_episode([make_row([1, 2], [7]), make_row([1, 3], [8, 8], reward=1.0)], score=1.0),
        make_episode([make_row([1, 2], [9])], member=1, score=-2.0),
    )


def test_one_row_an_episode(flat: EpisodeGroup) -> None:
    wire = flat.to_wire()
    assert wire.tokens == [[1, 2, 7, 8], [1, 2, 9]]
    assert wire.masks == [[-100, -100, 7, 8], [-100, -100, 9]]
    assert wire.inference_logprobs == [[1.0, 1.0, -0.5, -1.0], [1.0, 1.0, -0.5]]
    assert wire.scores == [1.0, 0.0]
    assert wire.advantages is None, "a trainer's own baseline is used where rows are episodes"
    assert wire.generation_params == {"temperature": 0.7}
    assert wire.messages == [[dict(QUESTION), dict(ANSWER)]] * 2
    assert wire.group_overrides == {
        "policy_version": 3,
        "tokenizer_fingerprint": "sha256:abc",
        "group_size": 2,
        "number": 5,
    }


def test_what_is_said_of_each_row(segmented: EpisodeGroup) -> None:
    overrides = segmented.to_wire().overrides
    assert overrides is not None
    assert [entry["episode"] for entry in overrides] == [0, 0, 1]
    assert overrides[1] == {
        "episode": 0,
        "turns": [[2, 4]],
        "turn_rewards": [1.0],
        "turn_versions": [3],
        "cut": False,
        "truncated": False,
        "success": True,
        "end_reason": "terminated",
    }


def test_an_episode_counts_once_in_the_baseline_whatever_its_rows(segmented: EpisodeGroup) -> None:
    wire = segmented.to_wire()
    assert wire.group_overrides is not None
    assert wire.group_overrides["segments"] is True
    assert wire.group_overrides["group_size"] == len(wire.tokens) == 3
    assert wire.scores == [1.0, 1.0, -2.0]
    # The mean over episodes is -0.5; over rows it would be 0.
    assert wire.advantages == [[0.0, 0.0, 1.5], [0.0, 0.0, 1.5, 1.5], [0.0, 0.0, -1.5]]


def test_a_cut_turn_marks_its_row(flat: EpisodeGroup) -> None:
    flat.episodes[1].rows[0].turns[0].cut = True
    overrides = flat.to_wire().overrides
    assert overrides is not None
    assert [entry["cut"] for entry in overrides] == [False, True]


def test_a_member_without_a_score_is_named(flat: EpisodeGroup) -> None:
    flat.episodes[1].score = None
    with pytest.raises(ConfigError, match="episode 1 of group 5 has no score"):
        flat.to_wire()


def test_the_wire_body_shares_no_list_with_the_group(flat: EpisodeGroup) -> None:
    wire = flat.to_wire()
    wire.tokens[0].append(99)
    assert flat.episodes[0].rows[0].ids == [1, 2, 7, 8]


@pytest.mark.parametrize("name", ["flat", "segmented"])
def test_json_round_trip(name: str, request: pytest.FixtureRequest) -> None:
    group: EpisodeGroup = request.getfixturevalue(name)
    assert EpisodeGroup.from_dict(json.loads(json.dumps(group.to_dict()))) == group


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data.pop("episodes"), id="missing"),
        pytest.param(lambda data: data.update(colour="red"), id="unknown"),
        pytest.param(lambda data: data["episodes"][0]["rows"][0].pop("ids"), id="inner"),
    ],
)
def test_json_of_something_else_is_refused(flat: EpisodeGroup, change: Any) -> None:
    data = json.loads(json.dumps(flat.to_dict()))
    change(data)
    with pytest.raises(ConfigError, match="no group of episodes"):
        EpisodeGroup.from_dict(data)


def test_derived_views(segmented: EpisodeGroup) -> None:
    episode = segmented.episodes[0]
    assert episode.episode_return == 1.0
    assert len(episode.turns) == 2
    assert episode.versions == [3, 3]
