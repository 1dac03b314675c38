"""The groups that programs are playing: opened, asked through, and finished with scores or given up.

Every group that was opened ends as exactly one of finished, withheld, dropped and expired, and is counted so.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.model_server.refusals import Refusal
from atropos_gym.model_server.requests import OpenSession
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.conversation import Conversation, GroupSession
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["Finished", "Session", "Sessions"]

T = TypeVar("T")

REMEMBERED = 10_000
"""Of so many sessions that have ended it is still known how."""


@dataclass(slots=True, eq=False)
class Session:
    """One group that is being played.

    Attributes:
        key: its name in URLs; who knows it may speak through it.
        group: what its members say.
        idle_seconds: after so long without a request it is given up.
        version: of the policy that plays it.
        ignored: wishes of its programs that were not followed, by name.
    """

    key: str
    group: GroupSession
    idle_seconds: float
    version: int | None = None
    ignored: Counter[str] = field(default_factory=Counter)
    held: AsyncExitStack = field(default_factory=AsyncExitStack)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    touched: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def members(self) -> list[Conversation]:
        """Its conversations."""
        return self.group.conversations

    def report(self) -> dict[str, Any]:
        """Returns what can be said of it so far."""
        counts = {name: count for name, count in self.group.counts.items() if count}
        return {
            "name": self.group.name,
            "number": self.group.number,
            "version": self.version,
            "members": [
                {
                    "member": one.member,
                    "replies": len(one.sampled_ids),
                    "ids": sum(map(len, one.sampled_ids)),
                    "segments": dict(one.segments),
                }
                for one in self.members
            ],
            "counts": counts,
            "ignored": dict(self.ignored),
        }


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a group.

    Attributes:
        group: the scored one; None where it is withheld.
        withheld: why there is none.
        left_out: members that have no part in it, with the reason.
        report: what was said and counted.
    """

    group: EpisodeGroup | None
    withheld: str | None
    left_out: dict[int, str]
    report: dict[str, Any]


class Sessions:
    """All groups of one engine.

    Args:
        engine: who speaks.
        renderer: writes messages as ids; the engine's tokenizer's by default.
        sampling: of every reply, where a session does not say otherwise.
        seed: of the run.
        name: of groups that have none of their own.
        idle_seconds: after so long without a request a group is given up.
        alternatives: what becomes of replies that nothing went on from; see ``GroupSession``.

    Attributes:
        counts: groups by what became of them, and requests that found none.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer | None = None,
        *,
        sampling: SamplingParams,
        seed: int = 0,
        name: str = "agent",
        idle_seconds: float = 3600.0,
        alternatives: Any = "train",
    ) -> None:
        self.engine = engine
        self.sampling = sampling
        self.counts: Counter[str] = Counter()
        self._renderer = renderer
        self._seed = seed
        self._name = name
        self._idle_seconds = idle_seconds
        self._alternatives = alternatives
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._number = 0
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many groups are being played."""
        return len(self._open)

    async def open(self, wanted: OpenSession) -> Session:
        """Begins a group; the version that is newest now plays it."""
        number, self._number = self._number, self._number + 1
        group = GroupSession(
            self.engine,
            self._renderer,
            sampling=self.sampling.with_(**wanted.changes()),
            seed=self._seed,
            number=number,
            name=wanted.name or self._name,
            same_start=False,
            alternatives=self._alternatives,
        )
        session = Session(secrets.token_urlsafe(16), group, wanted.idle_seconds or self._idle_seconds)
        await session.held.enter_async_context(group)
        session.version = group.version
        for _ in range(wanted.group_size):
            group.conversation()
        self._open[session.key] = session
        self.counts["opened"] += 1
        self._touch(session)
        return session

    def find(self, key: str) -> Session:
        """Returns a group that is being played.

        Raises:
            Refusal: there is none of that name, or no longer.
        """
        session = self._open.get(key)
        if session is not None:
            return session
        self.counts["requests without a session"] += 1
        if (ended := self._ended.get(key)) is not None:
            raise Refusal(f"this session was {ended}: open another one", 410, code="session_ended")
        raise Refusal(
            "no such session: POST /sessions opens one, and says where its members' programs speak",
            404,
            code="session_not_found",
        )

    def member(self, key: str, member: str) -> tuple[Session, Conversation]:
        """Returns a group and the conversation of one member.

        Raises:
            Refusal: as ``find``, or it has no such member.
        """
        session = self.find(key)
        if not member.isascii() or not member.isdigit() or int(member) >= len(session.members):
            raise Refusal(
                f"member must be a number below {len(session.members)}, got {member[:20]!r}",
                404,
                code="member_not_found",
            )
        return session, session.members[int(member)]

    async def run(self, session: Session, work: Coroutine[Any, Any, T]) -> T:
        """Runs a request of a group; the group's end cancels it.

        Raises:
            Refusal: the group ended meanwhile.
        """
        task = asyncio.create_task(work)
        session.tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if session.key in self._open or (me is not None and me.cancelling()):
                task.cancel()
                await asyncio.wait([task])
                raise
            raise Refusal(
                f"this session was {self._ended[session.key]}: open another one", 410, code="session_ended"
            ) from None
        finally:
            session.tasks.discard(task)
            self._touch(session)

    async def finish(self, key: str, scores: Sequence[float | None]) -> Finished:
        """Ends a group with its members' scores.

        Raises:
            Refusal: there is no such group, or another number of members.
        """
        session = self.find(key)
        if len(scores) != len(session.members):
            raise Refusal(
                f"{len(session.members)} members need as many scores, got {len(scores)}", param="scores"
            )
        self._remove(session, "finished")
        await self._release(session)
        left_out: dict[int, str] = {}
        given: list[float | None] = []
        for chat, score in zip(session.members, scores, strict=True):
            if score is None:
                left_out[chat.member] = "no score"
            elif not chat.trainable:
                left_out[chat.member] = "no reply that can be trained on"
            given.append(None if chat.member in left_out else score)
        scored = len(given) - len(left_out)
        wanted = min(2, len(given))
        if scored < wanted:
            self.counts["withheld"] += 1
            why = f"{scored} of {len(given)} members have a score and a reply, {wanted} are needed"
            return Finished(None, why, left_out, session.report())
        self.counts["finished"] += 1
        group = session.group.group(given)
        return Finished(group, None, left_out, session.report())

    async def drop(self, key: str) -> dict[str, Any]:
        """Gives a group up; returns what was said and counted."""
        session = self.find(key)
        self._remove(session, "dropped")
        self.counts["dropped"] += 1
        await self._release(session)
        return session.report()

    async def close(self) -> None:
        """Gives all groups up."""
        for key in list(self._open):
            await self.drop(key)
        if self._ending:
            await asyncio.wait(self._ending)

    def report(self) -> dict[str, Any]:
        """Returns what is being played and what became of the rest."""
        return {
            "open": {session.key: session.report() for session in self._open.values()},
            "counts": dict(self.counts),
        }

    def _remove(self, session: Session, how: str) -> None:
        """Takes a group out: nothing more is asked."""
        del self._open[session.key]
        self._ended[session.key] = how
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        if session.timer is not None:
            session.timer.cancel()

    async def _release(self, session: Session) -> None:
        """Cancels what is being asked and lets the version go."""
        for task in session.tasks:
            task.cancel()
        if session.tasks:
            await asyncio.wait(session.tasks)
        await session.held.aclose()

    def _touch(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        session.touched = loop.time()
        if session.timer is None and session.key in self._open:
            session.timer = loop.call_later(session.idle_seconds, self._look, session)

    def _look(self, session: Session) -> None:
        """Gives a group up that was silent for too long; else looks again when it could be."""
        loop = asyncio.get_running_loop()
        left = session.touched + session.idle_seconds - loop.time()
        if session.tasks or left > 0:
            wait = left if left > 0 else session.idle_seconds
            session.timer = loop.call_later(wait, self._look, session)
            return
        self._remove(session, "expired")
        self.counts["expired"] += 1
        ending = loop.create_task(self._release(session))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
