"""Posts that may have arrived without an answer: they go again only while their server knows their key.

That is a day, as long as the server gets no more than 400,000 posts with keys in it (4.6 a second). Beyond
that it forgets the oldest and logs a warning; a client cannot see it.
"""

from __future__ import annotations

import time

import httpx

from atropos_gym.batch_server.limits import KEPT_SECONDS, QUEUE_FULL
from atropos_gym.errors import PostUnsure

__all__ = ["Doubt", "may_have_arrived"]

SURE_SECONDS = KEPT_SECONDS - 3600.0
"""So long after it was sent first may a post go again; the hour is for clocks that differ."""


class Doubt:
    """Since when it is unknown whether a post has arrived.

    Attributes:
        since: Unix seconds of the first try that may have brought it there; None where there was none.

    >>> doubt = Doubt()
    >>> doubt.begin(1000.0)
    >>> doubt.failed(maybe=False)  # the connection was refused
    >>> doubt.begin(2000.0)
    >>> doubt.failed(maybe=True)  # no answer came
    >>> doubt.begin(3000.0), doubt.since
    (None, 2000.0)
    """

    def __init__(self, since: float | None = None) -> None:
        self.since = since
        self._first = False

    def begin(self, now: float) -> None:
        """The post is about to be sent, perhaps once more.

        Raises:
            PostUnsure: it may be there since so long ago that it could come twice.
        """
        if self.since is not None and now - self.since > SURE_SECONDS:
            at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(self.since))
            message = (
                f"posted at {at} and never answered; servers know their posts for "
                f"{KEPT_SECONDS / 3600:.0f} h at most: posted again, it could come twice"
            )
            raise PostUnsure(message, detail=[{"type": "unsure", "loc": ["body"], "msg": message}])
        self._first = self.since is None
        if self._first:
            self.note(now)

    def failed(self, *, maybe: bool) -> None:
        """The try was not answered, or refused.

        Args:
            maybe: whether the post may be there nevertheless.
        """
        if self._first and not maybe:
            self.note(None)

    def note(self, since: float | None) -> None:
        """Sets ``since``."""
        self.since = since


def may_have_arrived(failure: httpx.TransportError | httpx.Response) -> bool:
    """Whether what was posted may be kept although the try has failed."""
    if not isinstance(failure, httpx.Response):
        return not isinstance(failure, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    if failure.status_code == 503 and QUEUE_FULL in failure.text[:200]:
        return False
    return failure.status_code >= 500 or failure.is_success
