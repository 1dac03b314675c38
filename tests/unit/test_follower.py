"""A service says which versions it uses also while the next one is being loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.engines.scripted import ScriptedEngine
from atropos_gym.errors import EngineError
from atropos_gym.rollout import _follower
from atropos_gym.rollout._follower import Follower
from atropos_gym.wire import Policy


class Server:
    """Its policy is always version 2; it notes what is said to be held."""

    def __init__(self) -> None:
        self.held: list[tuple[int, ...]] = []
        self.heard = asyncio.Event()

    async def policy(self, *_: Any, holding: Iterable[int] = (), **__: Any) -> Policy:
        self.held.append(tuple(holding))
        if len(self.held) == 4:
            self.heard.set()
        return Policy(version=2, adapter_path="/adapters/2", run="r")


class Engine(ScriptedEngine):
    """Loads for as long as it is told to."""

    def __init__(self) -> None:
        super().__init__(script=lambda prompt, params, call: [258])
        self.may_load = asyncio.Event()
        self.cancelled = False

    async def publish(self, version: int, folder: Path, *args: Any, **kwargs: Any) -> None:
        try:
            await self.may_load.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if version == 2:
            raise EngineError("no such folder")


async def followed(server: Server, engine: Engine) -> None:
    await Follower(engine, "http://here").follow(server, 0)  # type: ignore[arg-type]


def test_versions_are_held_while_the_next_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follower, "FOLLOW", 0.001)

    async def run() -> None:
        server, engine = Server(), Engine()
        following = asyncio.create_task(followed(server, engine))
        await asyncio.wait_for(server.heard.wait(), 60)
        assert all(2 in held for held in server.held[1:])
        engine.may_load.set()
        with pytest.raises(EngineError, match="no such folder"):
            await following

    asyncio.run(run())


def test_who_stops_following_stops_loading() -> None:
    async def run() -> None:
        server, engine = Server(), Engine()
        following = asyncio.create_task(followed(server, engine))
        while not server.held:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        assert engine.cancelled

    asyncio.run(run())
