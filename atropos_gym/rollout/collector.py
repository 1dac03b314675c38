"""GroupCollector: plays an environment in groups with a language model.

A group is ``group_size`` episodes from one start. Episodes run concurrently; every started group ends as
exactly one of delivered, filtered or failed, and the counts add up. Nothing here trains or posts.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from numbers import Integral
from typing import Any

from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.engines.checks import sampling_findings
from atropos_gym.errors import ConfigError
from atropos_gym.rollout._anywhere import close_anywhere, run_anywhere
from atropos_gym.rollout._group import Filter, GroupPlayer, OnPartial, Score, Version
from atropos_gym.rollout._legal import LegalReplies
from atropos_gym.rollout._play import sampling_for
from atropos_gym.rollout._pool import EnvPool, EnvSource
from atropos_gym.rollout._schedule import Run
from atropos_gym.rollout.accounting import Accounting
from atropos_gym.rollout.curriculum import Options
from atropos_gym.rollout.episode import EpisodeGroup

__all__ = ["GroupCollector"]


class GroupCollector:
    """Plays groups of episodes and keeps, id for id, what the engine sampled.

    Args:
        env: an id, a ``TextEnv`` class, or a factory. An id or class is made with the engine's tokenizer
            unless ``env_kwargs`` names one.
        engine: who speaks.
        group_size: episodes of a group.
        concurrency: most episodes in flight.
        sampling: how turns are sampled; its ``max_tokens`` is lowered to what the environment allows. None
            samples at temperature 1.
        seed: of the run: all starts, chances and samples follow from it.
        score: ``"return"``, or a callable (plain or async) from the group's episodes to one score each; None
            takes an episode out. A group with fewer than two scored members is withheld.
        filters: callables on the scored group, or a mapping of names to them; True keeps it. They are counted
            by name.
        on_partial: what to do when an episode fails: ``"drop"`` the group, ``"keep"`` the other members, or
            ``"retry"`` the episode, three times at most.
        deadline: seconds that an episode may take, by the event loop's clock; None for no limit. A step that
            blocks the loop cannot be cut off: see ``blocking``.
        version: ``"episode"``: an episode keeps the version it began with; ``"turn"``: each turn takes the
            newest. Every turn records its version.
        common_random_numbers: members also share all chance after the start.
        env_kwargs: keywords for the environments.
        options: handed to every ``reset``, or a function from a group's number to them.
        blocking: play each environment in a thread of its own. None: as its attribute ``blocking`` says.
        legal_only: sample nothing but replies that the environment says are legal, each whole (a thought that
            it wants is ``say``'s, not the policy's). For files, lessons and a look: such groups cannot be
            trained on (``trainable`` says so, ``to_wire`` refuses), since no learner knows the masks.

    Attributes:
        env: a ``TextEnv`` of the kind that is played: its limits, scores and tokenizer.
        next_number: of the group that ``collect`` and ``stream`` begin with unless told.

    Raises:
        ConfigError: an argument that cannot work, named.
        TokenizerMismatch: environment and engine have different tokenizers; both are named.

    Example:
        >>> from atropos_gym import make_engine
        >>> engine = make_engine("scripted", script=lambda prompt, params, number: [*b"stick", 258])
        >>> collector = GroupCollector("atropos/Blackjack-v0", engine, group_size=4, seed=1)
        >>> groups = collector.collect(2)
        >>> [len(group.episodes) for group in groups], collector.report["delivered"]
        ([4, 4], 2)
        >>> collector.close()
    """

    def __init__(
        self,
        env: EnvSource,
        engine: Engine,
        *,
        group_size: int = 8,
        concurrency: int = 64,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        score: Score = "return",
        filters: Sequence[Filter] | Mapping[str, Filter] = (),
        on_partial: OnPartial = "drop",
        deadline: float | None = 600.0,
        version: Version = "episode",
        common_random_numbers: bool = False,
        env_kwargs: Mapping[str, Any] | None = None,
        options: Options = None,
        blocking: bool | None = None,
        legal_only: bool = False,
    ) -> None:
        _check(group_size, concurrency, score, on_partial, deadline, version)
        if not hasattr(engine, "generate"):
            raise ConfigError(f"engine must be an engine, such as make_engine() returns, got {engine!r:.60}")
        self.engine = engine
        self.group_size = group_size
        self.concurrency = concurrency
        self._pool = EnvPool(
            env,
            tokenizer=engine.tokenizer,
            player=engine.model,
            env_kwargs=env_kwargs,
            blocking=blocking,
        )
        self.env = self._pool.env
        self.sampling = sampling_for(
            self.env, sampling or SamplingParams(max_tokens=self.env.max_turn_tokens)
        )
        if faults := sampling_findings(self.sampling):
            raise ConfigError(
                f"sampling cannot be trained on: {'; '.join(f'{f.detail} -> {f.remedy}' for f in faults)} "
                "(evaluate() may play otherwise)"
            )
        self._accounting = Accounting()
        self._player = GroupPlayer(
            pool=self._pool,
            engine=engine,
            accounting=self._accounting,
            group_size=group_size,
            sampling=self.sampling,
            seed=seed,
            score=score,
            filters=_named(filters),
            on_partial=on_partial,
            deadline=deadline,
            common_random_numbers=common_random_numbers,
            options=options,
            fingerprint=engine.tokenizer.fingerprint,
            version=version,
            legal=LegalReplies(self._pool.name) if legal_only else None,
        )
        self.next_number = 0
        self._runs: set[Run] = set()
        self._closed = False
        self._one_collect = threading.Lock()
        # One loop for all calls of collect(): an engine's connections belong to the loop that made them.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._finalizer = weakref.finalize(self, close_anywhere, self._runner)

    @property
    def name(self) -> str:
        """Id or class name of the environment."""
        return self._pool.name

    @property
    def report(self) -> dict[str, Any]:
        """What became of every group so far: started = delivered + filtered + failed + in flight."""
        return self._accounting.report()

    def collect(self, n: int, *, first_number: int | None = None) -> list[EpisodeGroup]:
        """Plays until ``n`` groups are delivered and returns them by number. Blocks.

        Also works inside a running event loop (a notebook): then it plays in a thread of its own.

        Args:
            n: groups wanted; a group that is filtered or fails is replaced by the next number.
            first_number: number of the first group; None goes on where the last call ended.

        Raises:
            CollectionFailed: too many groups in a row were lost; the message says to what.
            UnequalStarts: a group's members began differently.
        """
        self._check_open()
        with self._one_collect:
            return run_anywhere(self._runner, self.acollect(n, first_number=first_number))

    async def acollect(self, n: int, *, first_number: int | None = None) -> list[EpisodeGroup]:
        """Does what ``collect`` does, in the running event loop."""
        if not isinstance(n, Integral) or n < 0:
            raise ConfigError(f"collect(n) needs a whole number n >= 0, got {n!r}")
        run = self._open(first_number, limit=n)
        groups = []
        try:
            while (group := await run.next()) is not None:
                groups.append(group)
        finally:
            await self._close(run)
        return sorted(groups, key=lambda group: group.number)

    async def stream(self, *, first_number: int | None = None) -> AsyncGenerator[EpisodeGroup, None]:
        """Yields groups as they are finished, until ``stop``; plays on while the caller is busy.

        At most ``concurrency // group_size`` finished groups wait for the caller.
        """
        run = self._open(first_number, limit=None)
        try:
            while (group := await run.next()) is not None:
                yield group
        finally:
            await self._close(run)

    async def bursts(self, *, first_number: int | None = None) -> AsyncGenerator[list[EpisodeGroup], None]:
        """Does what ``stream`` does, and yields all at once what is finished."""
        run = self._open(first_number, limit=None)
        try:
            while groups := await run.burst():
                yield groups
        finally:
            await self._close(run)

    async def stop(self) -> None:
        """Ends every ``stream`` and ``collect``: cancels what is in flight, delivers what is finished."""
        here = asyncio.get_running_loop()
        for run in list(self._runs):
            if run.loop is here:
                await run.stop()
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run.stop(), run.loop))

    def close(self) -> None:
        """Closes the environments; idempotent. Call it when nothing is being played."""
        self._closed = True
        self._pool.close()
        self._finalizer()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this collector is closed: make a new one")

    def _open(self, first_number: int | None, limit: int | None) -> Run:
        self._check_open()
        run = Run(
            self._player,
            concurrency=self.concurrency,
            first_number=self.next_number if first_number is None else first_number,
            limit=limit,
        )
        self._runs.add(run)
        return run

    async def _close(self, run: Run) -> None:
        try:
            await run.close()
        finally:
            self._runs.discard(run)
            self.next_number = run.next_number


def _check(
    group_size: int,
    concurrency: int,
    score: Score,
    on_partial: OnPartial,
    deadline: float | None,
    version: Version,
) -> None:
    """Refuses arguments that cannot work."""
    for name, value in (("group_size", group_size), ("concurrency", concurrency)):
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}")
    if score != "return" and not callable(score):
        raise ConfigError(f"score must be 'return' or a callable on the group's episodes, got {score!r}")
    if on_partial not in ("drop", "keep", "retry"):
        raise ConfigError(f"on_partial must be 'drop', 'keep' or 'retry', got {on_partial!r}")
    if deadline is not None and not deadline > 0:
        raise ConfigError(f"deadline must be > 0 seconds or None, got {deadline}")
    if version not in ("episode", "turn"):
        raise ConfigError(f"version must be 'episode' or 'turn', got {version!r}")


def _named(filters: Sequence[Filter] | Mapping[str, Filter]) -> dict[str, Filter]:
    """Returns filters by the name that they are counted under."""
    if isinstance(filters, Mapping):
        return dict(filters)
    named: dict[str, Filter] = {}
    for keeps in filters:
        name = getattr(keeps, "__name__", type(keeps).__name__)
        if name in named:
            raise ConfigError(f"two filters are called {name!r}: pass a mapping of names to filters")
        named[name] = keeps
    return named
