"""What a learner says and does while its batch server is away."""

from __future__ import annotations

import logging
from collections.abc import Callable

from atropos_gym.errors import ServerError

__all__ = ["SERVER_SECONDS", "Waiting"]

log = logging.getLogger(__name__)

#: Seconds that a learner waits for a server that is away, such as one whose machine is started anew.
SERVER_SECONDS = 600.0

#: Seconds between two lines about it.
SAY_EVERY = 60.0


class Waiting:
    """Called before each further try at a server that did not answer (``again`` of ``BatchClient``).

    Args:
        url: the server, as it may be shown.
        ended: says whether it is a process that has ended for good; None where nobody here would know.

    Attributes:
        first: what is done before each further try.
    """

    def __init__(self, url: str, ended: Callable[[], bool] | None = None) -> None:
        self._url = url
        self._ended = ended
        self._next = 0.0  # seconds after which it is said again
        self.first: Callable[[], object] = lambda: None

    def __call__(self, error: ServerError, failed: int, seconds: float) -> None:
        """Says that the server is away, at first and then once a minute.

        Raises:
            ServerError: the server has ended, so that no try will help.
        """
        if self._ended is not None and self._ended():
            raise ServerError(
                f"the batch server at {self._url}, a part of this run, has ended: {error}"
            ) from error
        if failed == 1 or seconds >= self._next:
            log.warning("%s; trying again, %.0f s so far", error, seconds)
            self._next = seconds + SAY_EVERY
        self.first()
