"""What one episode leaves behind, and how a group of them becomes a body of the wire.

Turns hold what the engine returned; rows are training sequences, one a segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from atropos_gym.messages import Message
from atropos_gym.wire import ScoredDataGroup

__all__ = ["Episode", "EpisodeGroup", "Row", "Turn"]


@dataclass(slots=True)
class Turn:
    """One action of the policy.

    Attributes:
        start: position of the first sampled id in its row.
        end: position after the last sampled id.
        reward: what the environment paid for it.
        version: policy version that sampled it.
        cut: no end id was sampled.
    """

    start: int
    end: int
    reward: float
    version: int
    cut: bool


@dataclass(slots=True)
class Row:
    """One training sequence: a segment of an episode.

    Attributes:
        ids: prompt, sampled ids, bridge, sampled ids, ... of one segment; ends at its last sampled id.
        mask: the id where sampled, -100 elsewhere.
        logprobs: the engine's where sampled, 1.0 elsewhere.
        turns: the turns that lie in this row.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[Turn] = field(default_factory=list)


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
        versions: policy version of every turn.
        score: what the group's scoring gave; None leaves the group.
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

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the rewards."""
        return float(sum(self.rewards))


@dataclass(slots=True)
class EpisodeGroup:
    """``group_size`` episodes from one start, with scores."""

    env: str
    number: int
    episodes: list[Episode]
    policy_version: int
    temperature: float
    tokenizer_fingerprint: str

    def to_wire(self) -> ScoredDataGroup:
        """Returns the group as a body of the wire (DESIGN section 8)."""
        raise NotImplementedError
