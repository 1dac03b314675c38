"""Watches a desk: hears what comes and goes, looks once in a while, and answers what the page asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_gym.batch_server.dashboard.gallery import Exhibit, Gallery
from atropos_gym.batch_server.dashboard.history import History
from atropos_gym.batch_server.dashboard.reason import Situation, why
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.state.intake import Incoming, Receipt
from atropos_gym.batch_server.state.leases import Lease
from atropos_gym.html import Pieces

__all__ = ["Dashboard", "Pulse"]

LOOK_SECONDS = 1.0
"""How often the gauges are read."""

FORMER_ENV_SECONDS = 24 * 3600.0
"""How long a disconnected environment stays in the table."""

MOST_ENVS = 200
"""Environments in the table; those that were heard of last come first."""

Found = TypeVar("Found")


class Dashboard:
    """What the page knows. The store is only read; drawing runs in one thread of its own.

    Args:
        desk: what is watched.
        tokenizer: name or folder of the tokenizer that ids are shown with; None shows them by number.

    Raises:
        ConfigError: there is no such tokenizer.
    """

    def __init__(self, desk: Desk, tokenizer: str | None = None) -> None:
        self.history = History()
        self.gallery = Gallery(None if tokenizer is None else _pieces(tokenizer), tokenizer)
        self.started_at = desk.clock.time()
        self._desk = desk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dashboard")

    # What the routes tell it.

    def received(self, incoming: Sequence[Incoming], receipts: Sequence[Receipt], now: float) -> None:
        """Notes groups that were accepted."""
        for one, receipt in zip(incoming, receipts, strict=True):
            packed, env = one.packed, self._name(one.env_id)
            scores, ids = packed.score_sum, int(packed.lengths.sum())
            self.history.received(env, sequences=packed.size, ids=ids, scores=scores, now=now)
            number = int(receipt.group_id.removeprefix("g-"))
            self.gallery.add(Exhibit(number, packed, env, one.policy_version, now))

    def delivered(self, lease: Lease) -> None:
        """Notes a batch that goes out."""
        newest = self._desk.store.gauges()["policy_version"]

        def age(version: int | None) -> int | None:
            return None if version is None or newest is None else max(0, newest - version)

        self.history.delivered(
            [(self._name(group.env_id), group.tokens, age(group.policy_version)) for group in lease.groups],
            self._desk.clock.time(),
        )

    def look(self) -> None:
        """Reads the gauges."""
        status = self._desk.store.gauges()
        gauges = {
            "queue_groups": status["queue_size"],
            "queue_sequences": status["queue_sequences"],
            "leased_groups": status["leased_groups"],
            "step": status["current_step"],
            "version": status["policy_version"],
        }
        self.history.look(gauges, self._desk.clock.time())

    # What the page asks.

    def data(self, span: float) -> dict[str, Any]:
        """All but the trajectories."""
        store, now = self._desk.store, self._desk.clock.time()
        self.look()
        envs, health, trainer, leases = store.envs(), store.health(), store.trainer(), store.leases()
        policy = store.policy(now)
        status = store.status()
        tone, sentence = why(self._situation(status, envs, health, trainer, now))
        return {
            "now": now,
            "started_at": self.started_at,
            "why": {"tone": tone, "text": sentence},
            "warnings": [text for text in health["warnings"] if not text.startswith("no batch: ")],
            "status": status,
            "rates": {name: self.history.rate(name, now) for name in ("groups_in", "groups_out", "ids_in")},
            "trainer": trainer,
            "policy": policy.model_dump(),
            "envs": self._table(envs, now),
            "leases": leases,
            "series": self.history.series(span, now),
            "gallery": {
                "kept": len(self.gallery),
                "newest": self.gallery.newest,
                "tokenizer": self.gallery.tokenizer,
            },
        }

    async def page(self, *, find: str, before: int | None, count: int) -> dict[str, Any]:
        """Some of the latest groups, without their ids."""
        exhibits = self.gallery.all()
        return await self._apart(lambda: self.gallery.page(exhibits, find=find, before=before, count=count))

    async def draw(self, number: int, episode: int) -> str | None:
        """An episode as HTML; None where it is not, or no longer, kept."""
        found = next((one for one in self.gallery.all() if one.number == number), None)
        return None if found is None else await self._apart(lambda: self.gallery.draw(found, episode))

    async def _apart(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _situation(
        self,
        status: dict[str, Any],
        envs: list[dict[str, Any]],
        health: dict[str, Any],
        trainer: dict[str, Any],
        now: float,
    ) -> Situation:
        store, history = self._desk.store, self.history

        def ago(moment: float | None) -> float | None:
            return None if moment is None else now - moment

        return Situation(
            failing=store.failing,
            registered=store.registered,
            started=health["started"],
            finished=status["finished"],
            connected=sum(env["connected"] for env in envs),
            known=len(envs),
            queue_groups=status["queue_size"],
            leased_groups=status["leased_groups"],
            held_posts=self._desk.held_posts,
            # Of the last request; what holds it up may be another thing by now, or nothing any more.
            reason=status["reason"] if store.reason else "",
            received=ago(history.received_at),
            delivered=ago(history.delivered_at),
            trainer=ago(trainer["last_seen"]),
        )

    def _table(self, envs: list[dict[str, Any]], now: float) -> list[dict[str, Any]]:
        """Environments that are there or were lately."""
        shown = [env for env in envs if env["connected"] or now - env["last_seen"] < FORMER_ENV_SECONDS]
        shown.sort(key=lambda env: (not env["connected"], -env["last_seen"]))
        return shown[:MOST_ENVS]

    def _name(self, env_id: int | None) -> str:
        """An environment's name: the same one after it has registered again."""
        if env_id is None:
            return "unknown sender"
        name = self._desk.store.env_name(env_id)
        return f"env {env_id}" if name is None else name


class Pulse:
    """Looks once a second from the first request on, whoever asks; a loop that ends takes its timer along.

    Args:
        app: what answers.
        look: what is called.
    """

    def __init__(self, app: ASGIApp, look: Callable[[], None]) -> None:
        self.app = app
        self.look = look
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._beat(loop)
        await self.app(scope, receive, send)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.look()
        loop.call_later(LOOK_SECONDS, self._beat, loop)


def _pieces(tokenizer: str) -> Pieces:
    # Only here: a Hugging Face tokenizer brings transformers along.
    from atropos_gym.tokenizers import load_tokenizer
    from atropos_gym.tokenizers.pieces import pieces_of

    return pieces_of(load_tokenizer(tokenizer))
