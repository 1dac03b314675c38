"""One SQLite file and the thread that writes it.

Everything that is handed over while a transaction is being committed goes into the next one: with many
senders, one commit serves them all.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from atropos_gym.errors import ConfigError, ServerError

__all__ = ["Journal", "Statement"]

Statement = tuple[str, Sequence[Sequence[Any]]]
"""SQL, and the rows that it is carried out for."""

APPLICATION_ID = 0x41475142  # "AGQB"
VERSION = 2
SCHEMA = """
CREATE TABLE groups (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE data (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE units (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE leases (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE envs (env_id INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE aside (number INTEGER PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE replies (number INTEGER PRIMARY KEY, name TEXT, digest BLOB NOT NULL, body BLOB NOT NULL,
    at REAL NOT NULL);
CREATE TABLE state (name TEXT PRIMARY KEY, body TEXT NOT NULL);
"""
PAGE_BYTES = 4096  # a row above half a page gets one for itself: with larger ones, groups of 1,000 ids would
LOG_BYTES = 64 * 2**20
IDLE_SECONDS = 1.0
SPARE_PAGES = 4 * 2**20 // PAGE_BYTES
"""So many free pages stay in the file for what comes next; more are given back in quiet moments."""
TIDY_PAGES = 8 * 2**20 // PAGE_BYTES
"""So many are given back at once: whoever writes meanwhile waits for it."""
TIDY_PAUSE = 0.05

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    """What is done with the file at its turn; once it is done for good, the future has what came of it."""

    work: Callable[[sqlite3.Connection], Any]
    future: Future[Any]
    size: int = 0


class Journal:
    """A file that is written to and read from in the order in which that is asked for.

    So what is read is there, whatever is handed over afterwards, and also what is handed over but not yet
    committed is found.

    Args:
        path: the file; its folder is made.
        fresh: forget what is in it.
        fsync: wait for the disk at each commit: then it survives a power failure too, not only the end of
            this process.

    Attributes:
        failing: why nothing can be written; "" where all is well.
        dead: what to wait for once nothing will be written ever again: it has failed already. Else None.
        waiting_bytes: of what was handed over and is not yet committed.

    Raises:
        ConfigError: the file is used by another server, is something else, or cannot be opened.
    """

    def __init__(self, path: Path, *, fresh: bool = False, fsync: bool = False) -> None:
        self.path = path
        self.failing = ""
        self.dead: Future[None] | None = None
        self.waiting_bytes = 0
        self._connection = _opened(path, fresh=fresh, fsync=fsync)
        self._change = threading.Condition()
        self._waiting: list[_Job] = []
        self._taken: list[_Job] = []
        self._last: Future[None] | None = None
        self._closed = False
        self._tidied = True
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def read(self, sql: str) -> list[tuple[Any, ...]]:
        """Reads rows; only while nothing is being written."""
        return self._connection.execute(sql).fetchall()

    def write(self, statements: Sequence[Statement], size: int = 0) -> Future[None]:
        """Hands rows over; the result is there once they are committed.

        Args:
            statements: carried out in order, all or none.
            size: bytes that wait in memory until then.
        """
        self._last = self._add(partial(_carry_out, statements), size)
        return self._last

    def ask(self, look: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """Looks something up at its turn; it must change nothing."""
        return self._add(partial(_looked_up, look))

    def _add(self, work: Callable[[sqlite3.Connection], Any], size: int = 0) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # whoever stops waiting must not stop the writing
        with self._change:
            if self.dead is not None:
                future.set_exception(ServerError(self.failing))
                return future
            if self._closed:
                raise ServerError(f"{self.path} is closed")
            self._waiting.append(_Job(work, future, size))
            self.waiting_bytes += size
            self._change.notify()
        return future

    @property
    def unwritten(self) -> Future[None] | None:
        """What to wait for until everything so far is committed; None where it is."""
        last = self._last
        return None if last is None or last.done() else last

    def close(self) -> None:
        """Writes what is left and closes the file."""
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            with self._change:
                self.failing = f"cannot write {self.path}: {error!r}; nothing is saved until a restart"
                self._closed = True
                self.dead = Future()
                self.dead.set_exception(ServerError(self.failing))
                for job in (*self._taken, *self._waiting):
                    if not job.future.done():
                        job.future.set_exception(ServerError(self.failing))
            raise

    def _work(self) -> None:
        pause = IDLE_SECONDS
        while True:
            with self._change:
                if not self._waiting and not self._closed:
                    self._change.wait(pause)
                self._taken, self._waiting = self._waiting, []
                closed = self._closed
            if self._taken:
                self._commit(self._taken)
                pause = IDLE_SECONDS
            elif closed:
                return
            else:
                pause = TIDY_PAUSE if self._tidy() else IDLE_SECONDS

    def _commit(self, work: list[_Job]) -> None:
        """Writes until it succeeds: memory has it, so the file must have it before anything else."""
        while True:
            try:
                with self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    found = [job.work(self._connection) for job in work]
                break
            except (sqlite3.Error, MemoryError) as error:
                why = str(error) or "memory is short"
                self.failing = f"cannot write {self.path}: {why}; what is posted now is not safe"
            with self._change:
                if self._closed:
                    for job in work:
                        job.future.set_exception(ServerError(self.failing))
                    return
                self._change.wait(IDLE_SECONDS)
        self.failing, self._tidied = "", False
        with self._change:
            self.waiting_bytes -= sum(job.size for job in work)
        for job, result in zip(work, found, strict=True):
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)

    def _tidy(self) -> bool:
        """Empties the log and gives free pages back to the system, some at a time; says if there are more."""
        try:
            ((free,),) = self._connection.execute("PRAGMA freelist_count").fetchall()
            if free > SPARE_PAGES:
                # Each step gives back one page, and has no row: `execute` would stop after the first.
                self._connection.executescript(f"PRAGMA incremental_vacuum({TIDY_PAGES})")
            if free > SPARE_PAGES or not self._tidied:
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._tidied = True
        except sqlite3.Error as error:
            self.failing = f"cannot write {self.path}: {error}; what is posted now is not safe"
            return False
        return bool(free - TIDY_PAGES > SPARE_PAGES)


def _carry_out(statements: Sequence[Statement], connection: sqlite3.Connection) -> None:
    for sql, rows in statements:
        connection.executemany(sql, rows)


def _looked_up(look: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T | Exception:
    """What was found; an error is for who asked, and no reason to write nothing."""
    try:
        return look(connection)
    except (sqlite3.Error, LookupError, MemoryError) as error:
        return ServerError(f"cannot read what was stored: {error!r}")


def _opened(path: Path, *, fresh: bool, fsync: bool) -> sqlite3.Connection:
    """Opens the file for this process alone, and makes its tables where it is new."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            _prepare(connection, path, fresh=fresh, fsync=fsync)
        except BaseException:
            connection.close()
            raise
        return connection
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise ConfigError(
                f"store {path} is used by another server: stop that one, or choose another --store"
            ) from None
        raise ConfigError(f"cannot open store {path}: {error}; choose another --store") from None
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"cannot open store {path}: {error}; choose another --store") from None


def _prepare(connection: sqlite3.Connection, path: Path, *, fresh: bool, fsync: bool) -> None:
    settings = (
        f"page_size={PAGE_BYTES}",
        "auto_vacuum=INCREMENTAL",
        "locking_mode=EXCLUSIVE",
        "journal_mode=WAL",
        f"synchronous={'FULL' if fsync else 'NORMAL'}",
        f"journal_size_limit={LOG_BYTES}",
        f"wal_autocheckpoint={LOG_BYTES // PAGE_BYTES}",  # what is used by then is never copied to the file
        "temp_store=MEMORY",
    )
    for setting in settings:
        connection.execute(f"PRAGMA {setting}").fetchall()
    connection.execute("BEGIN EXCLUSIVE")  # from here on the file is ours until this process ends
    ((ours,),) = connection.execute("PRAGMA application_id").fetchall()
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    if tables and ours != APPLICATION_ID:
        raise ConfigError(f"{path} is a database, but not of a batch server: choose another --store")
    if fresh:
        _drop(connection, tables)
        tables = []
    if tables and version != VERSION:
        raise ConfigError(
            f"store {path} is of version {version}, this server reads {VERSION}: start anew with --fresh"
        )
    if not tables:
        for statement in SCHEMA.split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={VERSION}")
    connection.execute("COMMIT")


def _drop(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    for table in tables:
        connection.execute(f"DROP TABLE {table}")
