"""Groups on their way to the server: which requests bring them there, and what becomes of refused ones.

Both clients, the blocking one and the asynchronous one, send what a parcel gives them::

    with parcel:
        while (call := parcel.next(packed=...)) is not None:
            ...  # send it, then parcel.accepted(names) or parcel.refused(error)
    names = parcel.close()
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self
from uuid import uuid4

from atropos_gym.batch_server._calls import Call, describe, name_of, names_of
from atropos_gym.batch_server._doubt import Doubt
from atropos_gym.batch_server._group_bodies import Body, body_of, body_of_list
from atropos_gym.batch_server.limits import MOST_GROUPS
from atropos_gym.batch_server.spool import Kept, Spool
from atropos_gym.errors import GroupRefused, PostUnsure, ServerError
from atropos_gym.wire import ScoredDataGroup

__all__ = ["ListParcel", "OneParcel", "Parcel", "SpooledParcel"]

log = logging.getLogger(__name__)

MAX_HOLD_SECONDS = 240.0
"""So long may a server hold a post while too much is queued."""

MAX_LIST_BYTES = 32 * 2**20
"""Groups are sent in lists of about this size at most, and of no more groups than a server takes."""

REFUSALS = (400, 413, 422)
"""Statuses that are about what was posted: the same post would be refused again."""


class Parcel(Protocol):
    """Groups that are to be posted."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def empty(self) -> bool:
        """Whether nothing is left to send."""
        ...

    def next(self, *, packed: bool) -> Call[list[str]] | None:
        """The next request, None where nothing is left; ``packed``: the server reads msgpack."""
        ...

    def accepted(self, names: list[str]) -> None:
        """Notes that the last request went through."""
        ...

    def refused(self, error: ServerError) -> None:
        """Notes that the last request failed; raises ``error`` where nothing can go on."""
        ...

    def close(self) -> list[str]:
        """Returns the names of the accepted groups; raises ``GroupRefused`` if there were others."""
        ...


class ListParcel:
    """Groups in lists that shrink where the server refuses one of their groups.

    A list is taken whole or not at all, so after a refusal the others are sent again without the bad ones.
    """

    def __init__(self, groups: Sequence[ScoredDataGroup]) -> None:
        self._waiting = deque(enumerate(groups))
        self._sent: list[tuple[int, ScoredDataGroup]] = []
        self._names: dict[int, str] = {}
        self._refusals: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves nothing behind."""

    @property
    def empty(self) -> bool:
        """Whether nothing is left to send."""
        return not self._waiting

    def next(self, *, packed: bool) -> Call[list[str]] | None:
        """The next list."""
        bodies: list[Body] = []
        size = 0
        while self._waiting and size < MAX_LIST_BYTES and len(bodies) < MOST_GROUPS:
            self._sent.append(self._waiting.popleft())
            bodies.append(body_of(self._sent[-1][1], packed=packed))
            size += len(bodies[-1].content)
        if not bodies:
            return None
        if len({body.media_type for body in bodies}) > 1:  # one of them can only be said in JSON
            bodies = [body_of(group, packed=False) for _, group in self._sent]
        return _call("/scored_data_list", body_of_list(bodies), uuid4().hex, Doubt())

    def accepted(self, names: list[str]) -> None:
        """Notes that the last list went through."""
        self._names.update((index, name) for (index, _), name in zip(self._sent, names, strict=False))
        self._sent = []

    def refused(self, error: ServerError) -> None:
        """Takes the groups that the server names out of the list; they are reported by :meth:`close`."""
        if not isinstance(error, GroupRefused):
            raise error
        if isinstance(error, PostUnsure):  # the whole list
            self._refusals += [
                {**one, "loc": ["body", at]} for at, _ in self._sent for one in _entries(error)
            ]
            self._sent = []
            return
        bad: set[int] = set()
        for entry in error.detail if isinstance(error.detail, list) else []:
            loc = entry.get("loc", [])
            if len(loc) > 1 and isinstance(loc[1], int) and loc[1] < len(self._sent):
                bad.add(loc[1])
                self._refusals.append({**entry, "loc": ["body", self._sent[loc[1]][0], *loc[2:]]})
        if not bad:
            raise error
        self._waiting.extendleft(reversed([one for at, one in enumerate(self._sent) if at not in bad]))
        self._sent = []

    def close(self) -> list[str]:
        """Returns the names of the accepted groups; raises ``GroupRefused`` if there were others."""
        if self._refusals:
            raise _some_refused(self._refusals)
        return [self._names[index] for index in sorted(self._names)]


class OneParcel(ListParcel):
    """One group, posted as one."""

    def next(self, *, packed: bool) -> Call[list[str]] | None:
        """The only request."""
        if not self._waiting:
            return None
        self._sent.append(self._waiting.popleft())
        return _call("/scored_data", body_of(self._sent[0][1], packed=packed), uuid4().hex, Doubt())

    def refused(self, error: ServerError) -> None:
        """Raises it."""
        raise error


class SpooledParcel:
    """Groups that lie in a folder until the server has them, behind those that were left there before.

    Each is a request of its own with a key of its own: whoever goes on after the end of this process sends
    just the same.

    Args:
        spool: the folder.
        groups: what is posted now.
        alone: errors speak of one group, not of a list.
    """

    def __init__(self, spool: Spool, groups: Sequence[ScoredDataGroup], *, alone: bool = False) -> None:
        self._spool = spool
        self._alone = alone
        self._own = spool.keep(groups)
        self._waiting = deque([*spool.claim(), *self._own])
        self._sent: Kept | None = None
        self._names: dict[str, str] = {}
        self._refusals: dict[int, ServerError] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves what was not answered to the next parcel."""
        self._spool.release(([self._sent] if self._sent is not None else []) + list(self._waiting))

    @property
    def empty(self) -> bool:
        """Whether nothing is left to send."""
        return not self._waiting

    def next(self, *, packed: bool) -> Call[list[str]] | None:
        """The next group."""
        while self._waiting:
            self._sent = self._waiting.popleft()
            body = self._spool.body(self._sent, packed=packed)
            if body is not None:
                return _call("/scored_data", body, self._sent.key, _Marked(self._spool, self._sent))
            self._sent = None
        return None

    def accepted(self, names: list[str]) -> None:
        """Takes the last group out of the folder."""
        assert self._sent is not None
        self._spool.posted(self._sent)
        self._names[self._sent.key] = names[0] if names else ""
        self._sent = None

    def refused(self, error: ServerError) -> None:
        """Sets the last group aside where it is at fault, or could come twice."""
        assert self._sent is not None
        unsure = isinstance(error, PostUnsure)
        if error.status not in REFUSALS and not unsure:
            message = f"{error}; {len(self._waiting) + 1} groups are kept in {self._spool.folder} until then"
            raise type(error)(message, status=error.status, detail=error.detail) from error
        if self._sent in self._own:
            self._refusals[self._own.index(self._sent)] = error
        else:
            log.warning("a group of an earlier post was %s: %s", "set aside" if unsure else "refused", error)
        self._spool.refuse(self._sent, str(error), unsure=unsure)
        self._sent = None

    def close(self) -> list[str]:
        """Returns the names of the groups posted now; raises ``GroupRefused`` where some were refused."""
        if self._alone and self._refusals:
            raise self._refusals[0]
        if self._refusals:
            raise _some_refused(
                [
                    {**entry, "loc": ["body", index, *entry["loc"][1:]]}
                    for index, error in self._refusals.items()
                    for entry in _entries(error)
                ]
            )
        return [name for kept in self._own if (name := self._names.get(kept.key))]


class _Marked(Doubt):
    """A doubt that outlives this process."""

    def __init__(self, spool: Spool, kept: Kept) -> None:
        super().__init__(kept.sent_at)
        self._spool = spool
        self._kept = kept

    def note(self, since: float | None) -> None:
        """Sets ``since``, in the folder too."""
        super().note(since)
        self._spool.mark(self._kept, since)


def _call(path: str, body: Body, key: str, doubt: Doubt) -> Call[list[str]]:
    return Call(
        "POST",
        path,
        name_of if path == "/scored_data" else names_of,
        content=body.content,
        media_type=body.media_type,
        headers={"Idempotency-Key": key},
        wait_seconds=MAX_HOLD_SECONDS,
        doubt=doubt,
    )


def _some_refused(entries: list[dict[str, Any]]) -> GroupRefused:
    message = f"groups were refused, all others are stored: {describe(entries)}"
    return GroupRefused(message, status=422, detail=entries)


def _entries(error: ServerError) -> list[dict[str, Any]]:
    if isinstance(error.detail, list):
        return list(error.detail)
    return [{"type": f"status_{error.status}", "loc": ["body"], "msg": str(error.detail)}]
