"""Counts of everything that did not go the usual way, and the sentences that tell people about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["Tallies"]

MOST_NAMES = 100
"""How many different unknown field names are kept apart; the rest counts as ``...``. As many reasons to set
groups aside are, too; of the rest only what stands before a colon is told."""

MOST_LAG = 1000
"""Groups that are further behind count as this far."""


@dataclass(slots=True)
class Tallies:
    """Counters since the server started or was reset.

    Attributes:
        set_aside: groups that no trainer will get, by reason.
        refused: groups that were refused, by reason.
        unknown_fields: groups by the name of a field that the API does not have.
        unknown_env: groups with the number of an environment that never registered.
        no_env: groups whose sender did not say who it is.
        foreign_masks: groups with masks that are neither -100 nor the id, kept as they came.
        batches: batches that were handed over.
        redelivered: those of them that had been handed over before.
        policy_lag: delivered groups by how many versions they were behind the newest one.
        lag_unknown: delivered groups of which that is not known.
        short_batches: batches with fewer sequences than asked for.
        hurried: batches that an older group may have been left out of, because the search was too much work.
        waived: batches formed without an environment whose minimum was not met, by ``wandb_name``.
    """

    set_aside: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unknown_fields: Counter[str] = field(default_factory=Counter)
    unknown_env: int = 0
    no_env: int = 0
    foreign_masks: int = 0
    batches: int = 0
    redelivered: int = 0
    policy_lag: Counter[str] = field(default_factory=Counter)
    lag_unknown: int = 0
    short_batches: int = 0
    hurried: int = 0
    waived: Counter[str] = field(default_factory=Counter)

    def state(self) -> dict[str, Any]:
        """What is to be saved."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Self:
        """Goes on from what :meth:`state` said.

        >>> tallies = Tallies(refused=Counter(missing=2), set_aside=Counter(old=3))
        >>> Tallies.restore(tallies.state()) == tallies
        True
        """
        values: dict[str, Any] = {
            name: Counter(value) if isinstance(value, dict) else value for name, value in state.items()
        }
        return cls(**values)

    def count_set_aside(self, reason: str, groups: int) -> None:
        """Counts groups that no trainer will get.

        >>> tallies = Tallies(set_aside=Counter(map(str, range(MOST_NAMES))))
        >>> tallies.count_set_aside("dropped by the trainer: loss 0.731", 2)
        >>> tallies.set_aside.most_common(1)
        [('dropped by the trainer', 2)]
        """
        known = reason in self.set_aside or len(self.set_aside) < MOST_NAMES
        self.set_aside[reason if known else reason.partition(": ")[0]] += groups

    def count_lag(self, lag: int | None) -> None:
        """Counts a group that was handed over, with how many versions it was behind."""
        if lag is None:
            self.lag_unknown += 1
        else:
            self.policy_lag[str(min(max(lag, 0), MOST_LAG))] += 1

    def count_unknown_fields(self, names: Iterable[str]) -> None:
        """Counts field names that are not stored."""
        for name in names:
            known = name in self.unknown_fields or len(self.unknown_fields) < MOST_NAMES
            self.unknown_fields[name[:100] if known else "..."] += 1

    def warnings(self) -> list[str]:
        """One sentence for each kind of trouble."""
        found = [f"{count} groups set aside: {reason}" for reason, count in self.set_aside.items()]
        if refused := self.refused.total():
            found.append(f"{refused} groups refused: their senders were told why")
        if self.unknown_env:
            found.append(f"{self.unknown_env} groups came from environments that never registered")
        if self.foreign_masks:
            found.append(f"{self.foreign_masks} groups have masks that are neither -100 nor the id: kept")
        if self.short_batches:
            found.append(f"{self.short_batches} batches were short: no groups summed to batch_size")
        if self.hurried:
            found.append(
                f"{self.hurried} batches may have left older groups behind: to try all was too much work"
            )
        for name, count in self.waived.items():
            found.append(f"{count} batches were formed without {name}: it has a minimum but sent nothing")
        for name, count in self.unknown_fields.items():
            found.append(f"field {name!r} is not part of a group: ignored in {count} groups")
        return found
