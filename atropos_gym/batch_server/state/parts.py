"""One batch for several ranks: who gets which groups, and which batch a rank means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Self

from atropos_gym.batch_server.state.leases import Lease

__all__ = ["Part", "RankCalls", "Share", "cuts"]

COUNTED = "#"
"""How the name of a batch begins that ranks ask for by the number of their calls, not by a step."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a batch a trainer asks for.

    Attributes:
        rank: who asks, from 0.
        world_size: how many ranks there are.
        step: which batch, as the ranks count; None for each rank's next one.
    """

    rank: int
    world_size: int
    step: int | None = None


def cuts(tokens: Sequence[int], count: int) -> list[int]:
    """Cuts a row of units into ``count`` stretches of about equal tokens.

    Each cut lies where the tokens before it come nearest to their fair share. No stretch is empty while there
    are as many units as stretches.

    Args:
        tokens: of each unit, in order.
        count: how many stretches.

    Returns:
        Where each stretch begins and, at last, where the last one ends.

    >>> cuts([5, 5, 5, 5], 2)
    [0, 2, 4]
    >>> cuts([9, 1, 1, 1], 2)
    [0, 1, 4]
    >>> cuts([3], 2)
    [0, 0, 1]
    """
    sums = [0, *accumulate(tokens)]
    found = [0]
    for place in range(1, count):
        fair = sums[-1] * place / count
        first, last = found[-1], len(tokens)
        if len(tokens) >= count:
            first, last = first + 1, last - (count - place)
        found.append(min(range(first, last + 1), key=lambda at: abs(sums[at] - fair)))
    return [*found, len(tokens)]


@dataclass(slots=True)
class Part(Lease):
    """A lease as one of its ranks sees it: with its own units only.

    Attributes:
        rank: whose part it is.
        whole: the lease that it is a part of.
    """

    rank: int = 0
    whole: Lease | None = None

    @classmethod
    def of(cls, lease: Lease, rank: int) -> Self:
        """Cuts a rank's part out of a lease: the same at every call."""
        assert lease.world_size is not None
        at = cuts([unit.tokens for unit in lease.units], lease.world_size)
        units = lease.units[at[rank] : at[rank + 1]]
        values = {one.name: getattr(lease, one.name) for one in fields(Lease)}
        own = {"units": units, "group_count": sum(len(unit.groups) for unit in units)}
        return cls(**{**values, **own}, rank=rank, whole=lease)


class RankCalls:
    """How many parts each rank was given, where ranks do not count their steps themselves."""

    def __init__(self, calls: Mapping[str, int] | None = None) -> None:
        self._calls = dict(calls or {})

    def state(self) -> dict[str, int]:
        """What is to be saved."""
        return dict(self._calls)

    def name(self, share: Share, open_leases: Mapping[str, Lease]) -> str:
        """Names the batch that a rank means: its step's, or its next one that it has not acked."""
        if share.step is not None:
            return str(share.step)
        count = self._calls.get(_rank(share.rank, share.world_size), 0)
        while (lease := open_leases.get(f"{COUNTED}{count}")) is not None and share.rank in lease.acked_ranks:
            count += 1
        return f"{COUNTED}{count}"

    def given(self, part: Part) -> None:
        """Notes that a rank has its part: its next call means the next batch."""
        if (count := _count(part)) is not None:
            self._calls[_rank(part.rank, part.world_size)] = count + 1

    def undone(self, lease: Lease) -> None:
        """Notes that a batch went back: every rank will ask for it again."""
        if (count := _count(lease)) is None:
            return
        for rank in range(lease.world_size or 0):
            name = _rank(rank, lease.world_size)
            self._calls[name] = min(self._calls.get(name, 0), count)


def _count(lease: Lease) -> int | None:
    """The number of calls by which a batch is named; None where it is named by a step."""
    name = lease.asked_as or ""
    return int(name.removeprefix(COUNTED)) if name.startswith(COUNTED) else None


def _rank(rank: int, world_size: int | None) -> str:
    return f"{rank}/{world_size}"
