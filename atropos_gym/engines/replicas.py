"""Several servers behind one engine: who gets the next request.

A request goes to the least loaded replica; requests of one affinity (an episode's turns) stay with the
replica that has their earlier turns in its prefix cache, for as long as it can be reached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from atropos_gym.errors import ConfigError

__all__ = ["Replica", "Router"]

#: Most affinities that are remembered; the one unused for longest is forgotten first.
_REMEMBERED = 65_536


class Replica(Protocol):
    """What the router looks at."""

    @property
    def running(self) -> int:
        """Requests on their way."""
        ...

    @property
    def down(self) -> bool:
        """Whether it could not be reached when it was last tried."""
        ...


R = TypeVar("R", bound=Replica)


class Router(Generic[R]):
    """Chooses a replica for each request. Not thread-safe: it lives on one event loop.

    Args:
        replicas: all of them; at least one.

    Example:
        >>> from types import SimpleNamespace
        >>> a, b = (SimpleNamespace(running=n, down=False) for n in (2, 1))
        >>> router = Router([a, b])
        >>> router.choose("episode 1") is b
        True
        >>> b.running = 9
        >>> router.choose("episode 1") is b, router.choose("episode 2") is a
        (True, True)
    """

    def __init__(self, replicas: Sequence[R]) -> None:
        if not replicas:
            raise ConfigError("an engine needs at least one URL")
        self.replicas = tuple(replicas)
        self._given: Counter[int] = Counter()  # of equally loaded ones the one that got fewest
        self._home: OrderedDict[Hashable, R] = OrderedDict()

    def choose(self, affinity: Hashable = None) -> R:
        """Returns the replica that a request goes to."""
        if len(self.replicas) == 1:
            return self.replicas[0]
        home = self._home.get(affinity) if affinity is not None else None
        up = [replica for replica in self.replicas if not replica.down]
        if home is None or (home.down and up):
            home = min(up or self.replicas, key=lambda replica: (replica.running, self._given[id(replica)]))
            self._given[id(home)] += 1
        if affinity is not None:
            self._home[affinity] = home
            self._home.move_to_end(affinity)
            if len(self._home) > _REMEMBERED:
                self._home.popitem(last=False)
        return home
