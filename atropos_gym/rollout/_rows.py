"""Rows of an episode, built turn by turn from what the environment showed and what the engine sampled.

Sampled ids are never decoded and encoded again; every prompt is compared, position by position, with the ids
that are known already.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_gym.engines.base import Completion
from atropos_gym.messages import Message
from atropos_gym.rollout.episode import UNTRAINED_LOGPROB, UNTRAINED_MASK, Row, Turn

__all__ = ["BrokenIds", "RowBuilder", "checked_logprobs", "difference"]

#: A logprob this far above 0 is rounding; more is a wrong distribution.
ROUNDING = 1e-3


class BrokenIds(Exception):
    """What environment and engine said does not fit together position by position."""


class RowBuilder:
    """Grows the rows of one episode.

    Attributes:
        rows: the segments so far; the last one is open.
    """

    def __init__(self, observation: Sequence[int] | NDArray[np.int32], segment: int) -> None:
        self.rows: list[Row] = []
        self._segment = segment
        self._said = 0
        self._open(ids_of(observation))

    @property
    def prompt(self) -> list[int]:
        """All ids that the next turn is conditioned on."""
        return self.rows[-1].ids

    def sample(
        self, completion: Completion, stop_ids: frozenset[int], legal_actions: list[str] | None = None
    ) -> None:
        """Appends what the engine returned, as it is.

        Args:
            completion: the turn.
            stop_ids: ids that end a turn.
            legal_actions: what could be said in it, where the environment tells.

        Raises:
            BrokenIds: logprobs do not belong to the ids one by one, or are none.
        """
        row = self.rows[-1]
        start = len(row.ids)
        row.ids.extend(completion.ids)
        row.mask.extend(completion.ids)
        row.logprobs.extend(checked_logprobs(completion))
        cut = stop_ids.isdisjoint(completion.ids)
        row.turns.append(
            Turn(
                start,
                len(row.ids),
                0.0,
                completion.version,
                cut,
                legal_actions=legal_actions,
                last_version=completion.last_version,
            )
        )

    def observe(
        self,
        observation: Sequence[int] | NDArray[np.int32],
        segment: int,
        *,
        reward: float,
        ended: bool,
        cut_short: bool = False,
        info: dict[str, Any] | None = None,
    ) -> None:
        """Takes the environment's answer to the turn sampled last: a bridge, a new segment or the end.

        Args:
            observation: what the environment showed.
            segment: its number.
            reward: of the turn.
            ended: whether the episode is over.
            cut_short: a wrapper ended it, so the observation is the prompt of a turn that nobody plays.
            info: what else the environment said of the turn; kept, not copied.

        Raises:
            BrokenIds: ids changed within a segment, or the last observation is more than what was known.
        """
        row = self.rows[-1]
        row.turns[-1].reward = reward
        row.turns[-1].info = info or {}
        ids = ids_of(observation)
        if segment != self._segment:
            if (ended and not cut_short) or segment != self._segment + 1:
                raise BrokenIds(f"segment went from {self._segment} to {segment} (ended: {ended})")
            if not ended:
                self._segment = segment
                self._open(ids)
            return
        known = len(row.ids)
        if ids[:known] != row.ids:
            raise BrokenIds(f"prompt rewrote ids of its segment: {difference(row.ids, ids)}")
        if ended:
            if len(ids) != known and not cut_short:
                raise BrokenIds(f"the last observation has {len(ids)} ids, prompt and action have {known}")
            return
        row.ids.extend(ids[known:])
        row.mask.extend([UNTRAINED_MASK] * (len(ids) - known))
        row.logprobs.extend([UNTRAINED_LOGPROB] * (len(ids) - known))

    def end_here(self) -> None:
        """Ends with the last sampled id: the prompt of a turn that nobody plays is taken away."""
        row = self.rows[-1]
        if not row.turns:
            self.rows.pop()
            self.rows[-1].messages.extend(row.messages)
            return
        end = row.turns[-1].end
        del row.ids[end:], row.mask[end:], row.logprobs[end:]

    def hear(self, messages: Sequence[Message], upto: int | None = None) -> None:
        """Gives the open row the messages that no row has yet, up to an index."""
        heard = messages[self._said : upto]
        self.rows[-1].messages.extend(heard)
        self._said += len(heard)

    def _open(self, ids: list[int]) -> None:
        self.rows.append(Row(ids, [UNTRAINED_MASK] * len(ids), [UNTRAINED_LOGPROB] * len(ids)))


def ids_of(observation: Sequence[int] | NDArray[np.int32]) -> list[int]:
    """Returns an observation as a fresh list of Python ints."""
    ids: list[int] = np.asarray(observation).tolist()
    return ids


def difference(known: Sequence[int], ids: Sequence[int]) -> str:
    """Says where two sequences of ids first differ.

    Example:
        >>> difference([1, 2, 3], [1, 5, 3])
        'position 1 is 2 in one and 5 in the other'
    """
    for position, (one, other) in enumerate(zip(known, ids, strict=False)):
        if one != other:
            return f"position {position} is {one} in one and {other} in the other"
    position = min(len(known), len(ids))
    return f"position {position} is in one only (lengths {len(known)} and {len(ids)})"


def checked_logprobs(completion: Completion) -> Sequence[float]:
    """Returns one finite logprob <= 0 for each id, rounding above 0 taken away."""
    logprobs = completion.logprobs
    if logprobs is None and completion.trainable is not True:
        return [0.0] * len(completion.ids)  # greedy: what was said was certain
    if logprobs is None or len(logprobs) != len(completion.ids):
        count = "no" if logprobs is None else len(logprobs)
        raise BrokenIds(f"engine returned {len(completion.ids)} ids with {count} logprobs")
    if not logprobs:
        return logprobs
    if not isfinite(sum(logprobs)):
        raise BrokenIds(f"engine returned a logprob that is not finite: {list(logprobs)}")
    highest = max(logprobs)
    if highest <= 0:
        return logprobs
    if highest > ROUNDING:
        raise BrokenIds(f"engine returned a logprob above 0: {highest}")
    return [min(logprob, 0.0) for logprob in logprobs]
