"""A service's groups on their way to the server: counted as taken, or as refused by which rule."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

from atropos_gym.batch_server.client import AsyncBatchClient
from atropos_gym.batch_server.spool import Spool
from atropos_gym.errors import GroupRefused
from atropos_gym.rollout._position import Position
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.wire import ScoredDataGroup

__all__ = ["Outbox"]

log = logging.getLogger(__name__)

#: Posts in a row in which every group may be refused before the service gives up.
REFUSALS = 3


class Outbox:
    """Posts groups, each number once.

    Args:
        name: of the service.
        position: told which numbers are on their way.
        on_post: told of groups that the server has taken.

    Attributes:
        posted: groups that the server has taken.
        refused: groups that it has refused, by reason.
    """

    def __init__(self, name: str, position: Position, on_post: Callable[[list[EpisodeGroup]], None]) -> None:
        self.posted = 0
        self.refused: Counter[str] = Counter()
        self._name = name
        self._position = position
        self._on_post = on_post
        self._refused_in_a_row = 0

    def follow_spool(self, spool: Spool) -> None:
        """The position is saved once groups lie in the spool: the last ones there may be beyond it."""
        if left := _numbers(spool.groups()):
            self._position.posted(left)
        spool.on_kept = lambda groups: self._position.posted(_numbers(groups))

    async def post(self, client: AsyncBatchClient, groups: list[EpisodeGroup], env_id: int | None) -> bool:
        """Posts groups; returns whether the server took any.

        Raises:
            GroupRefused: it refused every group of several posts in a row.
        """
        bodies = [group.to_wire().model_copy(update={"env_id": env_id}) for group in groups]
        if client.spool is None:  # which says it itself, once they are safe
            self._position.posted([group.number for group in groups])  # before: they are played only once
        refused: set[int] = set()
        try:
            await client.post_groups(bodies)
        except GroupRefused as error:
            entries = error.detail if isinstance(error.detail, list) else []
            named = {entry["loc"][1] for entry in entries if len(entry["loc"]) > 1}
            refused = named & set(range(len(groups))) or set(range(len(groups)))
            self.refused.update(str(entry["type"]) for entry in entries)
            log.warning("%s: %s", self._name, error)
            self._refused_in_a_row += len(refused) == len(groups)
            if self._refused_in_a_row == REFUSALS:
                raise
        if len(refused) == len(groups):
            return False
        self._refused_in_a_row = 0
        taken = [group for index, group in enumerate(groups) if index not in refused]
        self.posted += len(taken)
        self._on_post(taken)
        return True


def _numbers(groups: Iterable[ScoredDataGroup]) -> list[int]:
    """The groups' numbers in their run, as ``EpisodeGroup.to_wire`` says them."""
    numbers = ((group.group_overrides or {}).get("number") for group in groups)
    return [number for number in numbers if isinstance(number, int)]
