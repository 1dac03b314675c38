"""What one episode leaves behind, and how a group of them becomes a body of the wire.

Turns hold what the engine returned; rows are training sequences, one a segment. Nothing here plays, samples
or decodes: ``_play.py`` fills these records, the writers and the learner read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from atropos_gym.errors import ConfigError
from atropos_gym.messages import Message
from atropos_gym.wire import ScoredDataGroup

__all__ = ["UNTRAINED_LOGPROB", "UNTRAINED_MASK", "Episode", "EpisodeGroup", "Row", "Turn"]

#: What a mask says at a position that is not trained; elsewhere it repeats the id.
UNTRAINED_MASK = -100
#: What stands in ``logprobs`` at a position that was not sampled: no logprob can be 1.
UNTRAINED_LOGPROB = 1.0


@dataclass(slots=True)
class Turn:
    """One action of the policy.

    Attributes:
        start: position of the first sampled id in its row.
        end: position after the last sampled id.
        reward: what the environment paid for it.
        version: policy version that sampled it.
        cut: no end id was sampled.
        info: what the environment said of it: ``invalid`` and why, ``reward_terms``, a task's own words.
        legal_actions: what could be said in it; None where the environment does not tell.
        last_version: of its last id, where weights changed in mid-flight and ``version`` is the first. None:
            the same.
    """

    start: int
    end: int
    reward: float
    version: int
    cut: bool
    info: dict[str, Any] = field(default_factory=dict)
    legal_actions: list[str] | None = None
    last_version: int | None = None


@dataclass(slots=True)
class Row:
    """One training sequence: a segment of an episode.

    Attributes:
        ids: prompt, sampled ids, bridge, sampled ids, ... of one segment; ends at its last sampled id.
        mask: the id where sampled, -100 elsewhere.
        logprobs: the engine's where sampled, 1.0 elsewhere.
        turns: the turns that lie in this row.
        messages: what was said in this segment and in no earlier one; an episode's rows together hold its
            whole conversation.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


@dataclass(slots=True)
class Episode:
    """One played episode.

    Attributes:
        rows: its segments in order.
        rewards: reward of every turn, in order; their sum is the return.
        messages: the conversation as text, final feedback included.
        end_reason: ``terminated``, ``max_turns``, ``max_tokens`` or the environment's own word.
        success: whether solved; None where unknown.
        truncated: cut off by a limit.
        invalid_turns: replies without a usable action.
        seed: seed of the start.
        member: number within its group.
        score: what the group's scoring gave; None leaves the group.
        info: the last step's ``info``.
        trainable: True, or the reason why what it sampled cannot be trained on.
    """

    rows: list[Row]
    rewards: list[float]
    messages: list[Message]
    end_reason: str
    success: bool | None
    truncated: bool
    invalid_turns: int
    seed: int
    member: int
    score: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    trainable: Literal[True] | str = True

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(sum(self.rewards))

    @property
    def turns(self) -> list[Turn]:
        """All turns in order."""
        return [turn for row in self.rows for turn in row.turns]

    @property
    def versions(self) -> list[int]:
        """Policy version of every turn."""
        return [turn.version for turn in self.turns]


@dataclass(slots=True)
class EpisodeGroup:
    """``group_size`` episodes from one start, with scores.

    Attributes:
        env: id or class name of the environment.
        number: the group's number in its run; its seeds follow from it.
        episodes: the members, in order.
        policy_version: lowest version that sampled any of its ids.
        temperature: of sampling, the same for all.
        tokenizer_fingerprint: of the tokenizer that gives the ids their meaning.
    """

    env: str
    number: int
    episodes: list[Episode]
    policy_version: int
    temperature: float
    tokenizer_fingerprint: str

    @property
    def scores(self) -> list[float]:
        """The members' scores.

        Raises:
            ConfigError: a member has none.
        """
        scores = []
        for episode in self.episodes:
            if episode.score is None:
                raise ConfigError(
                    f"episode {episode.member} of group {self.number} has no score: score it, or remove it"
                )
            scores.append(float(episode.score))
        return scores

    @property
    def trainable(self) -> Literal[True] | str:
        """True, or the reason why a member's samples cannot be trained on."""
        return next((one.trainable for one in self.episodes if one.trainable is not True), True)

    def to_wire(self) -> ScoredDataGroup:
        """Returns the group as a body of the wire: one sequence a row, the episode's score on each.

        Where episodes have several rows, ``advantages`` are filled (score minus the mean over *episodes*, at
        sampled positions), so that a trainer which reads them counts an episode once in the baseline.

        Raises:
            ConfigError: a member has no score, or samples that cannot be trained on.
        """
        if self.trainable is not True:
            raise ConfigError(
                f"group {self.number} cannot be trained on ({self.trainable}): the wire has no field for how "
                "it was sampled; keep it in a file, or collect without legal_only"
            )
        scores = self.scores
        rows = [(index, row) for index, episode in enumerate(self.episodes) for row in episode.rows]
        segments = len(rows) > len(self.episodes)
        group_overrides: dict[str, Any] = {
            "policy_version": self.policy_version,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "group_size": len(rows),
            "number": self.number,
        }
        if segments:
            group_overrides["segments"] = True
        return ScoredDataGroup(
            tokens=[row.ids for _, row in rows],
            masks=[row.mask for _, row in rows],
            scores=[scores[index] for index, _ in rows],
            advantages=_advantages(rows, scores) if segments else None,
            messages=[[dict(message) for message in row.messages] for _, row in rows],
            generation_params={"temperature": self.temperature},
            inference_logprobs=[row.logprobs for _, row in rows],
            overrides=[_overrides(index, self.episodes[index], row) for index, row in rows],
            group_overrides=group_overrides,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data (sharing its lists) from which ``from_dict`` makes the same group."""
        return {
            **_fields(self),
            "episodes": [
                {
                    **_fields(episode),
                    "rows": [
                        {**_fields(row), "turns": [_fields(turn) for turn in row.turns]}
                        for row in episode.rows
                    ],
                }
                for episode in self.episodes
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeGroup:
        """Returns the group that ``to_dict`` wrote.

        Raises:
            ConfigError: a field is missing or unknown.
        """
        try:
            return cls(**{**data, "episodes": [_episode(episode) for episode in data["episodes"]]})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"this is no group of episodes as `atropos-gym collect` writes it: {error}"
            ) from error


def _overrides(index: int, episode: Episode, row: Row) -> dict[str, Any]:
    """Returns what the wire says of one sequence beside its ids."""
    overrides = {
        "episode": index,
        "turns": [[turn.start, turn.end] for turn in row.turns],
        "turn_rewards": [turn.reward for turn in row.turns],
        "turn_versions": [turn.version for turn in row.turns],
        "cut": any(turn.cut for turn in row.turns),
        "truncated": episode.truncated,
        "success": episode.success,
        "end_reason": episode.end_reason,
    }
    if any(turn.last_version is not None for turn in row.turns):  # weights changed in mid-flight
        overrides["turn_last_versions"] = [
            turn.version if turn.last_version is None else turn.last_version for turn in row.turns
        ]
    return overrides


def _advantages(rows: list[tuple[int, Row]], scores: list[float]) -> list[list[float]]:
    """Returns each row's episode advantage at its sampled positions, 0.0 elsewhere."""
    mean = sum(scores) / len(scores)
    advantages = []
    for index, row in rows:
        advantage = scores[index] - mean
        advantages.append([0.0 if mark == UNTRAINED_MASK else advantage for mark in row.mask])
    return advantages


def _fields(record: Turn | Row | Episode | EpisodeGroup) -> dict[str, Any]:
    """Returns a record's fields without copying what they hold: ``asdict`` would visit every single id."""
    return {entry.name: getattr(record, entry.name) for entry in fields(record)}


def _episode(data: Mapping[str, Any]) -> Episode:
    """Returns the episode that was written as ``data``."""
    rows = [Row(**{**row, "turns": [Turn(**turn) for turn in row["turns"]]}) for row in data["rows"]]
    return Episode(**{**data, "rows": rows})
