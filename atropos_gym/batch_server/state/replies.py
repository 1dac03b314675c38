"""What posts were answered, so that the same post again does not count twice.

A sender that names its post (``Idempotency-Key``) gets the same answer again for a day, unless 400,000 newer
posts had a name too, as many as in a day of 4.6 posts a second. Of a sender that does not, only the answers
that did not reach it are kept, for the time in which it would try again: two equal groups whose answers both
arrived are two samples.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from atropos_gym.batch_server.limits import KEPT_SECONDS
from atropos_gym.batch_server.state.marks import Marks
from atropos_gym.batch_server.state.refusals import Problem, Refused

__all__ = ["KeptReply", "ReplyBook"]

log = logging.getLogger(__name__)

KEPT_KEYS = 400_000
"""At about 475 bytes each, those of single groups take 190 MB."""

RETRY_SECONDS = 20 * 60.0
"""How long an answer is kept that did not arrive: longer than any sender goes on trying."""


@dataclass(frozen=True, slots=True)
class KeptReply:
    """One answer.

    Attributes:
        number: its place in the order of answers.
        key: what the sender called its post; None where it did not.
        digest: of what was posted: BLAKE3 after a byte for its kind. Older servers kept 32 bytes of SHA-256.
        body: what was answered.
        at: Unix seconds.
    """

    number: int
    key: str | None
    digest: bytes
    body: bytes
    at: float


class ReplyBook:
    """The answers that are kept.

    Attributes:
        number: of the newest answer.
    """

    def __init__(self, marks: Marks) -> None:
        self.number = 0
        self._marks = marks
        self._early = False
        self._named: OrderedDict[str, KeptReply] = OrderedDict()
        self._unnamed: OrderedDict[int, KeptReply] = OrderedDict()  # on their way, or lost
        self._lost: dict[bytes, KeptReply] = {}

    def __contains__(self, reply: KeptReply) -> bool:
        if reply.key is not None:
            return self._named.get(reply.key) is reply
        return reply.number in self._unnamed

    def find(self, key: str | None, digest: bytes, now: float) -> KeptReply | None:
        """Returns the answer to the same post.

        Where an older server has kept another kind of digest, the key alone says which post it is.

        Raises:
            Refused: another post had this key.
        """
        self._forget_older(now)
        if key is None:
            return self._lost.get(digest)
        known = self._named.get(key)
        if known is not None and len(known.digest) == len(digest) and known.digest != digest:
            message = f"key {key!r} was used for a post with other content"
            raise Refused([Problem("key_reused", ("header", "idempotency-key"), message)])
        return known

    def keep(self, key: str | None, digest: bytes, body: bytes, now: float) -> KeptReply:
        """Keeps an answer that is about to be given."""
        self.number += 1
        reply = KeptReply(self.number, key, digest, body, now)
        self.restore(reply)
        self._marks.replies[reply.number] = reply
        return reply

    def restore(self, reply: KeptReply, *, lost: bool = False) -> None:
        """Puts a kept answer into the book; of one that was saved nobody knows whether it arrived."""
        if reply.key is not None:
            self._named[reply.key] = reply
            return
        self._unnamed[reply.number] = reply
        if lost:
            self._lost[reply.digest] = reply

    def arrived(self, reply: KeptReply, *, arrived: bool) -> None:
        """Notes whether an answer reached its sender."""
        if reply.key is not None or reply not in self:
            return
        if arrived:
            self._forget(reply)
        else:
            self._lost[reply.digest] = reply

    def _forget_older(self, now: float) -> None:
        for book, seconds in ((self._named, KEPT_SECONDS), (self._unnamed, RETRY_SECONDS)):
            while book and (oldest := next(iter(book.values()))).at < now - seconds:
                self._forget(oldest)
        while len(self._named) > KEPT_KEYS:
            oldest = next(iter(self._named.values()))
            self._forget(oldest)
            if not self._early:
                self._early = True
                log.warning(
                    "%d posts in %.1f h: older ones are forgotten, and would count again",
                    KEPT_KEYS,
                    (now - oldest.at) / 3600,
                )

    def _forget(self, reply: KeptReply) -> None:
        if reply.key is not None:
            del self._named[reply.key]
        else:
            del self._unnamed[reply.number]
            if self._lost.get(reply.digest) is reply:
                del self._lost[reply.digest]
        self._marks.replies[reply.number] = reply
