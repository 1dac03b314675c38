"""Spool: a folder in which groups lie until the server has them, whatever is killed meanwhile.

A group is written before its first try, complete, under a name that says its turn and the key under which it
is posted; its file goes once the server has answered. Whoever opens the folder next posts what was left there
first, oldest first, each under its key: a server of ours takes a key only once, so nothing is lost and
nothing comes twice. The original API knows no keys: what it took without answering, it takes again.

A server remembers keys for a day, the newest 400,000. So the name also says since when a group may be at the
server without our knowing; one of which that is not known for longer is not posted again, but lies in
``unsure/``. Whoever finds that it is not there moves it back. What was never sent, or to nobody who listened,
is called ``new`` and goes however old it is. Older versions said neither: what they wrote may be at the
server since then.

What the server refuses lies in ``refused/``. In both folders the group is JSON, which ``atropos-gym view``
shows, and beside it a text says why it is there.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic_core import from_json

from atropos_gym.batch_server._group_bodies import JSON, MSGPACK, Body, body_of, group_of, unpack
from atropos_gym.errors import ConfigError
from atropos_gym.wire import ScoredDataGroup

try:
    import fcntl
except ImportError:  # Windows: two processes in one folder are not noticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["Kept", "Spool"]

log = logging.getLogger(__name__)

NAME = re.compile(r"(\d{10,})-([0-9a-f]{32})(?:-(\d+|new))?\.(msgpack|json)")
KINDS = {MSGPACK: "msgpack", JSON: "json"}
PART = ".part"
"""How the name of a file ends that is still being written."""


@dataclass(slots=True, eq=False)
class Kept:
    """A group in the folder.

    Attributes:
        key: under which it is posted.
        path: its file.
        size: of the file, in bytes.
        body: what is in it, while it is about to be posted; else None.
        sent_at: since when it may be at the server, in Unix seconds; None where it cannot be there.
    """

    key: str
    path: Path
    size: int
    body: Body | None = None
    sent_at: float | None = None


class Spool:
    """A folder for one client at a time.

    Args:
        folder: made where it is missing; another process that uses it is told.
        fsync: wait for the disk: then what is kept survives a power failure too.
        max_bytes: beyond it nothing new is kept until something was posted.

    Attributes:
        folder: where it is.
        on_kept: told of groups that are safe now, before any is posted; where it fails, they are not kept.

    Raises:
        ConfigError: the folder is used by another process, or cannot be used.
    """

    def __init__(self, folder: str | Path, *, fsync: bool = False, max_bytes: int = 4 * 2**30) -> None:
        self.folder = Path(folder).expanduser()
        self.on_kept: Callable[[Sequence[ScoredDataGroup]], None] | None = None
        self._fsync = fsync
        self._max_bytes = max_bytes
        self._change = threading.Lock()
        self._posted_late = 0
        try:
            for aside in ("refused", "unsure"):
                (self.folder / aside).mkdir(parents=True, exist_ok=True)
            self._unlock = _locked(self, self.folder)
            left = self._look()
            self._refused, self._unsure = (_aside(self.folder / aside) for aside in ("refused", "unsure"))
        except OSError as error:
            raise ConfigError(
                f"spool {self.folder} cannot be used: {error.strerror}; choose another folder"
            ) from None
        self._next = 1 + max(map(_turn, left), default=-1)
        self._left = deque(left)
        self._late = {kept.key for kept in left}
        self._sizes = {kept.key: kept.size for kept in left}

    @property
    def full(self) -> bool:
        """Whether nothing more is kept until something was posted."""
        return sum(self._waiting()) >= self._max_bytes

    @property
    def report(self) -> dict[str, Any]:
        """Groups that wait, and their bytes; how many were posted late; how many were set aside."""
        waiting = self._waiting()
        return {
            "folder": str(self.folder),
            "waiting": len(waiting),
            "bytes": sum(waiting),
            "posted_late": self._posted_late,
            "refused": self._refused,
            **({"unsure": self._unsure} if self._unsure else {}),
        }

    def keep(self, groups: Sequence[ScoredDataGroup]) -> list[Kept]:
        """Writes groups; all of them are safe when this returns, and none is there if it fails."""
        kept: list[Kept] = []
        try:
            for group in groups:
                kept.append(self._keep(body_of(group, packed=True)))
            if self._fsync and kept:
                _sync(self.folder)
            if self.on_kept is not None and kept:
                self.on_kept(groups)
        except BaseException:
            for one in kept:
                one.path.unlink(missing_ok=True)
                self._forget(one)
            raise
        return kept

    def _keep(self, body: Body) -> Kept:
        key = uuid4().hex
        with self._change:
            number, self._next = self._next, self._next + 1
        path = self.folder / _name(number, key, None, f".{KINDS[body.media_type]}")
        self._write(path, body.content)
        with self._change:
            self._sizes[key] = len(body.content)
        return Kept(key, path, len(body.content), body)

    def groups(self) -> Iterator[ScoredDataGroup]:
        """Reads what was left behind, oldest first, without what is not complete; nothing is taken."""
        with self._change:
            left = list(self._left)
        for kept in left:
            try:
                yield _group(kept, kept.path.read_bytes())
            except (FileNotFoundError, ValueError) as error:  # whoever posts it sets it aside
                log.debug("%s cannot be read: %s", kept.path, error)

    def claim(self) -> list[Kept]:
        """Takes what was left behind, oldest first."""
        with self._change:
            left = list(self._left)
            self._left.clear()
        return left

    def release(self, kept: Sequence[Kept]) -> None:
        """Leaves groups to whoever claims next."""
        with self._change:
            for one in kept:
                one.body = None
            self._left = deque(sorted([*self._left, *kept], key=_turn))
            self._late |= {one.key for one in kept}

    def body(self, kept: Kept, *, packed: bool) -> Body | None:
        """Reads a group's body, in JSON unless the server reads msgpack.

        A file that a power failure cut off is set aside; then there is none, as where somebody removed it.
        """
        if kept.body is not None and (packed or kept.body.media_type == JSON):
            return kept.body
        try:
            content = kept.path.read_bytes()
        except FileNotFoundError:
            log.warning("somebody removed %s: it is not posted", kept.path)
            self._forget(kept)
            return None
        try:
            group = _group(kept, content)
        except ValueError as error:
            self.refuse(kept, f"the file is not complete: {error}")
            return None
        if packed and kept.path.suffix == ".msgpack":
            return Body(content, MSGPACK)
        return Body(content, JSON) if kept.path.suffix == ".json" else body_of(group, packed=False)

    def mark(self, kept: Kept, sent_at: float | None) -> None:
        """Notes since when a group may be at the server, or that it cannot be there."""
        kept.sent_at = sent_at
        path = kept.path.with_name(_name(_turn(kept), kept.key, sent_at, kept.path.suffix))
        kept.path.replace(path)
        kept.path = path
        if self._fsync:
            _sync(self.folder)

    def posted(self, kept: Kept) -> None:
        """Removes a group that the server has."""
        kept.path.unlink(missing_ok=True)
        with self._change:
            self._posted_late += kept.key in self._late
        self._forget(kept)

    def refuse(self, kept: Kept, reason: str, *, unsure: bool = False) -> None:
        """Sets a group aside for people to look at; ``unsure``: it may be at the server."""
        content = kept.path.read_bytes()
        # As new: whoever moves it back wants it to be posted.
        name = _name(_turn(kept), kept.key, None, kept.path.suffix)
        target = self.folder / ("unsure" if unsure else "refused") / name
        if kept.path.suffix == ".msgpack":
            try:
                content = _group(kept, content).to_json()
                target = target.with_suffix(".json")
            except ValueError:  # it stays as it is
                pass
        self._write(target, content)
        self._write(target.with_suffix(".txt"), f"{reason}\n".encode())
        kept.path.unlink(missing_ok=True)
        with self._change:
            self._unsure += unsure
            self._refused += not unsure
        self._forget(kept)

    def close(self) -> None:
        """Lets others use the folder; what is in it stays."""
        self._unlock()

    def _waiting(self) -> list[int]:
        """Bytes of each group that waits."""
        with self._change:
            return list(self._sizes.values())

    def _forget(self, kept: Kept) -> None:
        with self._change:
            self._sizes.pop(kept.key, None)
            self._late.discard(kept.key)

    def _look(self) -> list[Kept]:
        """What lies in the folder, oldest first; what was never complete is removed."""
        found = []
        for path in self.folder.iterdir():
            if path.name.endswith(PART):
                path.unlink()
            elif (match := NAME.fullmatch(path.name)) is not None:
                about = path.stat()
                since = match[3] or about.st_mtime
                sent_at = None if since == "new" else float(since)
                found.append(Kept(match[2], path, about.st_size, sent_at=sent_at))
        return sorted(found, key=_turn)

    def _write(self, path: Path, content: bytes) -> None:
        part = path.with_name(path.name + PART)
        try:
            with part.open("wb") as file:
                file.write(content)
                if self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _turn(kept: Kept) -> int:
    return int(kept.path.name.partition("-")[0])


def _name(turn: int, key: str, sent_at: float | None, suffix: str) -> str:
    """What the file of a group is called."""
    since = "new" if sent_at is None else f"{int(sent_at)}"
    return f"{turn:010d}-{key}-{since}{suffix}"


def _aside(folder: Path) -> int:
    """How many groups lie in a folder for what was set aside; reasons without a group are removed."""
    paths = list(folder.iterdir())
    groups = {path.stem for path in paths if path.suffix not in (".txt", PART)}
    for path in paths:
        if path.suffix == ".txt" and path.stem not in groups and NAME.fullmatch(f"{path.stem}.json"):
            path.unlink()
    return len(groups)


def _group(kept: Kept, content: bytes) -> ScoredDataGroup:
    """The group in a file; raises ``ValueError`` where the file is not complete."""
    if kept.path.suffix == ".json":
        return ScoredDataGroup.model_construct(**from_json(content))
    return group_of(unpack(content))


def _locked(spool: Spool, folder: Path) -> Callable[[], object]:
    """Holds the folder until the spool is closed or gone; returns what lets go of it."""
    if fcntl is None:
        return lambda: None
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"spool {folder} is used by another process: stop that one, or choose another folder"
        ) from None
    return weakref.finalize(spool, os.close, lock)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
