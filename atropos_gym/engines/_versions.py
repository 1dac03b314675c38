"""Which policy versions an engine serves: who holds them, what is newest, and when one may be unloaded.

Knows no weights: an engine hands in what to do when a version is loaded or unloaded. Safe to use from several
threads and event loops. Each waiter has a future of its own, so a cancelled one leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import get_args

from atropos_gym.engines.base import SwapMode
from atropos_gym.errors import ConfigError, EngineError, VersionExpired

__all__ = ["Hold", "ServesVersions", "VersionTable"]

BASE = 0


@dataclass(slots=True)
class _Entry:
    """One live version."""

    number: int
    folder: Path | None
    holders: int = 0
    requests: int = 0
    retiring: int = 0  # how many calls wait for it to become idle
    dropped: bool = False
    waiters: list[Future[None]] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        return self.holders == 0 and self.requests == 0


class Hold:
    """Keeps one version alive from entering to leaving; used once, with ``async with`` or ``with``.

    Attributes:
        version: the version held; set on entering.
    """

    __slots__ = ("_entry", "_table", "_wanted", "version")

    def __init__(self, table: VersionTable, version: int | None) -> None:
        self._table = table
        self._wanted = version
        self._entry: _Entry | None = None
        self.version = -1

    def __enter__(self) -> Hold:
        if self._entry is not None:
            raise EngineError(f"this hold of version {self.version} is already entered; call hold() again")
        self._entry = self._table._take_hold(self._wanted)
        self.version = self._entry.number
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._table._leave_hold(entry)

    async def __aenter__(self) -> Hold:
        while True:
            await self._table.admitted()
            try:
                return self.__enter__()
            except VersionExpired:
                if not self._table.passing(self._wanted):
                    raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class VersionTable:
    """The live versions of one engine. Version 0 is the base: always there, never counted, never retired.

    Args:
        max_live: most adapter versions loaded at a time; >= 1.
        publish_timeout: seconds that a publish waits for the oldest version's holders before it drops them.
        unload: called with a version's number once nobody uses it any more; awaited if it returns something
            to await.
        swap: how a published version comes into force; see ``SwapMode``.

    Attributes:
        newest: what ``version=None`` means.
        counters: ``published``, ``retired`` and ``version_expired`` (holders dropped); ``announced`` with
            ``swap="none"``.
    """

    def __init__(
        self,
        max_live: int,
        publish_timeout: float,
        unload: Callable[[int], Awaitable[None] | None],
        swap: SwapMode = "hot_swap",
    ) -> None:
        if max_live < 1:
            raise ConfigError(f"max_live_versions must be >= 1, got {max_live}")
        if not publish_timeout >= 0:
            raise ConfigError(f"publish_timeout must be >= 0 seconds, got {publish_timeout}")
        if swap not in get_args(SwapMode):
            raise ConfigError(f"swap must be one of {', '.join(get_args(SwapMode))}, got {swap!r}")
        self.swap = swap
        self.max_live = max_live
        self.publish_timeout = publish_timeout
        self.counters: Counter[str] = Counter(published=0, retired=0, version_expired=0)
        self.newest = BASE
        self._unload = unload
        self._lock = threading.Lock()
        self._live: dict[int, _Entry] = {BASE: _Entry(BASE, None)}
        self._folders: dict[int, Path] = {}  # of every version ever published or tried
        self._trials = 0
        self._publishing = False
        self._publish_queue: deque[Future[None]] = deque()
        self._gate: list[Future[None]] | None = None  # who waits for a restart to be over, while there is one
        self._closed = False

    @property
    def live(self) -> tuple[int, ...]:
        """Versions that are loaded, the base included, in order; trials are none."""
        with self._lock:
            return tuple(sorted(version for version in self._live if version >= BASE))

    def close(self) -> None:
        """Refuses everything from now on and wakes who waits."""
        with self._lock:
            self._closed = True
            waiters = [*self._publish_queue, *(self._gate or ())]
            self._publish_queue.clear()
            self._gate = None
            for entry in self._live.values():
                waiters += entry.waiters
                entry.waiters = []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(EngineError("the engine is closed"))

    # -- users of a version ----------------------------------------------------------------------------

    def hold(self, version: int | None) -> Hold:
        """Returns a hold of ``version`` (of the newest at the time of entering if None)."""
        return Hold(self, version)

    async def admitted(self) -> None:
        """Returns once no restart is under way; who holds a version need not ask."""
        while self._gate is not None:
            with self._lock:
                if self._gate is None:
                    return
                waiter: Future[None] = Future()
                self._gate.append(waiter)
            await asyncio.wrap_future(waiter)

    def passing(self, version: int | None) -> bool:
        """Whether a refusal a moment ago was a restart's, so that asking again helps."""
        with self._lock:
            return version is None and (self._gate is not None or self.newest in self._live)

    def enter_requests(self, version: int | None, count: int = 1) -> int:
        """Counts ``count`` requests in and returns the version they run under."""
        with self._lock:
            entry = self._find(version)
            entry.requests += count
            return entry.number

    def leave_requests(self, versions: Counter[int]) -> None:
        """Counts answered requests out."""
        with self._lock:
            for version, count in versions.items():
                entry = self._live[version if version in self._live else self.newest]  # moved on in place
                entry.requests -= count
                self._wake(entry)

    def _take_hold(self, version: int | None) -> _Entry:
        with self._lock:
            entry = self._find(version)
            if entry.retiring:
                raise VersionExpired(self._gone(entry.number))
            entry.holders += 1
            return entry

    def _leave_hold(self, entry: _Entry) -> None:
        with self._lock:
            if not entry.dropped:  # else the count went when the holders were dropped
                entry.holders -= 1
                self._wake(entry)

    def _find(self, version: int | None) -> _Entry:
        if self._closed:
            raise EngineError("the engine is closed")
        number = self.newest if version is None else version
        entry = self._live.get(number)
        if entry is None and self.swap == "in_place" and BASE <= number < self.newest:
            return self._live[self.newest]
        if entry is not None and not (entry.retiring and entry.holders == 0):
            return entry
        if entry is not None or number in self._folders:
            raise VersionExpired(self._gone(number))
        raise EngineError(f"version {number} was never published; the newest is {self.newest}")

    def _gone(self, number: int) -> str:
        live = ", ".join(str(v) for v in sorted(self._live) if not self._live[v].retiring)
        return f"version {number} is no longer served (served: {live}); start again under the newest"

    @staticmethod
    def _wake(entry: _Entry) -> None:
        if not entry.idle:
            return
        waiters, entry.waiters = entry.waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    # -- changes ---------------------------------------------------------------------------------------

    async def publish(self, version: int, folder: Path, load: Callable[[], Awaitable[None]]) -> None:
        """Makes ``version`` the newest once ``load`` has checked and loaded it.

        Raises:
            EngineError: the version does not grow, or version or folder was used before for something else.
            VersionExpired: the same version was published before and is retired.
        """
        if self.swap == "none":
            self.counters["announced"] += 1
            return
        folder = folder.resolve()
        await self._queue_publish()
        try:
            if self._is_published(version, folder):
                return
            if self.swap == "restart":
                await self._replace(version, folder, load)
            elif self.swap == "in_place":
                await self._move_on(version, folder, load)
            else:
                await self._add(version, folder, load)
        finally:
            self._next_publish()

    async def _add(self, version: int, folder: Path, load: Callable[[], Awaitable[None]]) -> None:
        """``hot_swap``: beside the older ones."""
        await load()
        try:
            if self.max_live > 1:
                await self._make_room(self.max_live - 1)
        except BaseException:
            await self._forget(version)
            raise
        with self._lock:
            self._admit(version, folder, _Entry(version, folder))
        if self.max_live == 1:  # the only other version was the newest: switch first, then let it drain
            await self._make_room(1)

    async def _replace(self, version: int, folder: Path, load: Callable[[], Awaitable[None]]) -> None:
        """``restart``: alone. A version that cannot be loaded leaves nothing but the base behind."""
        with self._lock:
            self._gate = []
        try:
            await self._drain(self.newest, timeout=self.publish_timeout)
            await load()
            with self._lock:
                self._admit(version, folder, _Entry(version, folder))
        finally:
            with self._lock:
                waiters, self._gate = self._gate or [], None
            for waiter in waiters:
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(None)

    async def _move_on(self, version: int, folder: Path, load: Callable[[], Awaitable[None]]) -> None:
        """``in_place``: whoever holds or runs anything goes on under the new version."""
        await load()
        with self._lock:
            old = self.newest
            entry = self._live[old]
            self._admit(version, folder, entry)
            del self._live[old]
            entry.number, entry.folder = version, folder
        if old != BASE:
            await self._forget(old)

    def _admit(self, version: int, folder: Path, entry: _Entry) -> None:
        """Makes a loaded version the newest; under the lock."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._live[version] = entry
        self._folders[version] = folder
        self.newest = version
        self.counters["published"] += 1

    async def retire(self, version: int) -> None:
        """Admits no new holders, waits for holders and requests, unloads. Retiring twice is no error."""
        with self._lock:
            if version == BASE:
                raise EngineError("version 0 is the base model and cannot be retired")
            if version == self.newest:
                raise EngineError(f"version {version} is the newest; publish a newer one before retiring it")
            if version not in self._folders:
                raise EngineError(f"version {version} was never published; the newest is {self.newest}")
        await self._drain(version, timeout=None)

    @asynccontextmanager
    async def trial(self, folder: Path, load: Callable[[int], Awaitable[None]]) -> AsyncIterator[Hold]:
        """Serves an adapter under a negative number, told to ``load``, until the context is left.

        It is never the newest, does not count, and its number and folder are never used again.
        """
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            self._trials += 1
            number = -self._trials
        await load(number)
        with self._lock:
            self._live[number] = _Entry(number, folder)
            self._folders[number] = folder.resolve()
        try:
            with self.hold(number) as held:
                yield held
        finally:
            await self._drain(number, timeout=None)

    def _is_published(self, version: int, folder: Path) -> bool:
        """Returns whether this very publish was done before; raises where it can never be."""
        if isinstance(version, bool) or version < 1:
            raise EngineError(f"a published version must be an integer >= 1 (0 is the base), got {version!r}")
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            known = self._folders.get(version)
            if known == folder:
                if version not in self._live:
                    raise VersionExpired(self._gone(version))
                return True
            if known is not None:
                raise EngineError(
                    f"version {version} was published from {known} already; give {folder} a new number"
                )
            for other, used in self._folders.items():
                if used == folder:
                    raise EngineError(
                        f"folder {folder} holds version {other} already; write {version} to a new folder"
                    )
            if version <= self.newest:
                raise EngineError(f"version {version} must be greater than the newest, {self.newest}")
        return False

    async def _queue_publish(self) -> None:
        """Waits until no other publish is under way (they run in order of asking)."""
        with self._lock:
            if not self._publishing:
                self._publishing = True
                return
            turn: Future[None] = Future()
            self._publish_queue.append(turn)
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next_publish()  # the turn came at the moment of the cancellation: hand it on
            raise

    def _next_publish(self) -> None:
        with self._lock:
            while self._publish_queue:
                turn = self._publish_queue.popleft()
                if turn.set_running_or_notify_cancel():
                    turn.set_result(None)
                    return
            self._publishing = False

    async def _make_room(self, keep: int) -> None:
        """Retires oldest versions until at most ``keep`` are loaded; the newest stays."""
        while True:
            with self._lock:
                adapters = sorted(version for version in self._live if version > BASE)
            if len(adapters) <= keep:
                return
            await self._drain(adapters[0], timeout=self.publish_timeout)

    async def _drain(self, version: int, timeout: float | None) -> None:
        """Retires one version; holders left after ``timeout`` seconds are dropped."""
        with self._lock:
            entry = self._live.get(version)
            if entry is None:
                return
            entry.retiring += 1
        try:
            try:
                await asyncio.wait_for(self._idle(entry), timeout)
            except TimeoutError:
                with self._lock:
                    self.counters["version_expired"] += entry.holders
                    entry.holders, entry.dropped = 0, True
                await self._idle(entry)  # what runs already is answered
        except BaseException:
            with self._lock:
                entry.retiring -= not entry.dropped  # dropped holders cannot come back: it stays retiring
            raise
        with self._lock:
            if version == BASE:
                self._live[BASE] = _Entry(BASE, None)  # the base stays; who was dropped keeps the old entry
                return
            if self._live.pop(version, None) is None:
                return  # another retire of the same version was faster
            self.counters["retired"] += version > BASE
        await self._forget(version)

    async def _forget(self, version: int) -> None:
        unloading = self._unload(version)
        if inspect.isawaitable(unloading):
            await unloading

    async def _idle(self, entry: _Entry) -> None:
        """Returns once nobody uses the version."""
        waiter: Future[None] = Future()
        with self._lock:
            if self._closed:
                raise EngineError("the engine is closed")
            entry.waiters.append(waiter)
            self._wake(entry)
        await asyncio.wrap_future(waiter)


class ServesVersions:
    """What every engine with a ``VersionTable`` offers of it."""

    _versions: VersionTable

    @property
    def swap(self) -> SwapMode:
        """How a published version comes into force."""
        return self._versions.swap

    @property
    def newest(self) -> int:
        """The version that ``version=None`` means."""
        return self._versions.newest

    @property
    def live_versions(self) -> tuple[int, ...]:
        """Versions that are served, the base (0) included."""
        return self._versions.live

    def hold(self, version: int | None = None) -> Hold:
        """Keeps a version alive (the newest if None) from entering to leaving; ``async with`` or ``with``."""
        return self._versions.hold(version)

    async def retire(self, version: int) -> None:
        """Admits no new holders, waits for holders and requests, unloads. The newest cannot be retired."""
        await self._versions.retire(version)
