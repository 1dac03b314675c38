"""What has changed in a store since it was last saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atropos_gym.batch_server.state.env_book import EnvRecord
    from atropos_gym.batch_server.state.group_queue import StoredGroup, Unit
    from atropos_gym.batch_server.state.leases import Lease
    from atropos_gym.batch_server.state.replies import KeptReply

__all__ = ["Marks"]


@dataclass(slots=True)
class Marks:
    """Marks on what has changed.

    The things themselves are marked, not copies: how they are at the next save is what counts, however often
    they changed until then.

    Attributes:
        cleared: everything from before was forgotten.
        groups: groups that came.
        units: by number; they were queued, handed out, used or set aside.
        leases: by name; they were opened, changed, ended or forgotten.
        envs: by number.
        replies: by number; they were given, arrived, or were forgotten.
        aside: units that were set aside, with the reason; None where that was forgotten.
    """

    cleared: bool = False
    groups: list[StoredGroup] = field(default_factory=list)
    units: dict[int, Unit] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    envs: dict[int, EnvRecord] = field(default_factory=dict)
    replies: dict[int, KeptReply] = field(default_factory=dict)
    aside: dict[int, str | None] = field(default_factory=dict)

    def unit(self, unit: Unit) -> None:
        """Marks a unit."""
        self.units[unit.number] = unit

    def lease(self, lease: Lease) -> None:
        """Marks a lease."""
        self.leases[lease.batch_id] = lease

    def env(self, env: EnvRecord) -> None:
        """Marks an environment."""
        self.envs[env.env_id] = env

    def clear(self, *, cleared: bool = False) -> None:
        """Removes all marks: everything was saved, or, with ``cleared``, forgotten."""
        self.cleared = cleared
        for marked in (self.units, self.leases, self.envs, self.replies, self.aside, self.groups):
            marked.clear()
