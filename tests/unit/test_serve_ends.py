"""A server whose writer has ended is of no use: it ends too, so that whoever watches it starts another."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from store_tools import NOW, add, registration, saved

from atropos_gym.batch_server import serve as module
from atropos_gym.batch_server.app import create_app
from atropos_gym.batch_server.serve import _lost, _Server
from atropos_gym.batch_server.state.journal import Journal
from atropos_gym.batch_server.store import MemoryStore, SqliteStore
from atropos_gym.cli import serve as verb
from atropos_gym.cli.command import parse
from atropos_gym.errors import ServerError


def test_nothing_is_lost_while_it_may_still_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _lost(MemoryStore()) == ""
    full = True

    def write(statements: Any, connection: sqlite3.Connection) -> None:
        if full:
            raise sqlite3.OperationalError("database or disk is full")

    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        store.register(registration(), NOW)
        assert _lost(store) == ""
        saved(store)
        assert _lost(store) == ""
        monkeypatch.setattr("atropos_gym.batch_server.state.journal._carry_out", write)
        add(store)
        waiting = store.save()
        assert waiting is not None
        while not store.failing:  # until the disk has refused it
            time.sleep(0.01)
        assert _lost(store) == "", "there may be room again"
        full = False
        waiting.result(20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_stops_within_a_second_once_its_writer_has_ended(tmp_path: Path) -> None:
    def broken(connection: sqlite3.Connection) -> None:
        raise IndexError("of ours")

    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        config = uvicorn.Config(create_app(store), log_level="error")
        server = _Server(config, lambda: None, lambda: None, lambda: _lost(store))
        ticks = range(20)
        assert not any(asyncio.run(server.on_tick(tick)) for tick in ticks)
        store._journal._add(broken)
        store._journal._thread.join(20)
        assert [tick for tick in ticks if asyncio.run(server.on_tick(tick))] == [0, 10]
        assert "IndexError" in _lost(store) and "nothing is saved until a restart" in _lost(store)


def test_its_exit_code_is_neither_success_nor_a_users_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*words: Any, **options: Any) -> None:
        raise ServerError("the batch server has stopped: no writer")

    command = parse(["serve"])
    assert command is not None
    monkeypatch.setattr(verb, "serve", ended)
    monkeypatch.setattr(module, "serve", ended)
    assert verb.run(command) == 1
    assert capsys.readouterr().err == "atropos-gym: the batch server has stopped: no writer\n"
    assert module.main([]) == 1
    assert capsys.readouterr().err == "the batch server has stopped: no writer\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_serving_raises_why_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a socket: the server is told to stop at its first look."""

    class Ended(Journal):
        def _work(self) -> None:
            raise IndexError("of ours")

    monkeypatch.setattr("atropos_gym.batch_server.state.sqlite.Journal", Ended)
    ticks: list[bool] = []

    def run(server: _Server, sockets: Any = None) -> None:
        ticks.append(asyncio.run(server.on_tick(0)))

    class Listener:
        def getsockname(self) -> tuple[str, int]:
            return "127.0.0.1", 1

        def close(self) -> None:
            pass

    store = SqliteStore(tmp_path / "store.sqlite", now=NOW)
    store._journal._thread.join(20)
    monkeypatch.setattr(module, "listen", lambda host, port: Listener())
    monkeypatch.setattr(module._Server, "run", run)
    with pytest.raises(ServerError, match="the batch server has stopped: cannot write .*IndexError"):
        module.serve(port=0, store=store)
    assert ticks == [True]
