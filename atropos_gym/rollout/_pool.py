"""Environments for many episodes at a time: made once, bound to the engine's tokenizer, used again.

A *seat* is one environment object and the way its methods are called: in the event loop, or in a thread where
they block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from atropos_gym.errors import ConfigError, TokenizerMismatch
from atropos_gym.rollout._pace import Pace
from atropos_gym.rollout._registered import check_id
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import Tokenizer

__all__ = ["EnvPool", "EnvSource", "Ids", "Seat"]

Ids = NDArray[np.int32]
EnvSource = str | type[TextEnv] | Callable[..., "gymnasium.Env[Any, Any]"]
"""An id, a TextEnv class, or a factory that returns an environment."""

_Answer = TypeVar("_Answer")


class Seat:
    """One environment object in use by one episode at a time.

    Args:
        env: the environment, wrappers included.
        blocking: call it in a thread of its own, always the same one: some connections live in one thread.
        pace: of calls in the event loop.

    Attributes:
        env: the environment.
        text_env: the ``TextEnv`` inside it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], *, blocking: bool, pace: Pace) -> None:
        self.text_env = cast(TextEnv, env.unwrapped)
        self.env = env
        self._pace = pace
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="env") if blocking else None

    async def reset(
        self, seed: int, options: Mapping[str, Any] | None, chance: int | None
    ) -> tuple[Ids, dict[str, Any]]:
        """Starts an episode; ``chance`` seeds what comes after the start, None leaves it."""
        return await self._call(self._reset, seed, options, chance)

    async def step(self, action: Ids) -> tuple[Ids, float, bool, bool, dict[str, Any]]:
        """Plays one turn."""
        observation, reward, terminated, truncated, info = await self._call(self.env.step, action)
        return observation, float(reward), bool(terminated), bool(truncated), info

    async def legal_replies(self) -> tuple[str, ...] | None:
        """Returns what ``TextEnv.legal_replies`` does."""
        return await self._call(self.text_env.legal_replies)

    def close(self) -> None:
        """Closes the environment; a blocking one behind the call that may still run in its thread."""
        if self._thread is None:
            self.env.close()
        else:
            self._thread.submit(self.env.close)
            self._thread.shutdown(wait=False)

    def _reset(
        self, seed: int, options: Mapping[str, Any] | None, chance: int | None
    ) -> tuple[Ids, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        if chance is not None:
            self.text_env.reseed(chance)
        return observation, info

    async def _call(self, function: Callable[..., _Answer], *arguments: Any) -> _Answer:
        if self._thread is None:
            await self._pace.step()
            return function(*arguments)
        return await asyncio.wrap_future(self._thread.submit(function, *arguments))


class EnvPool:
    """Makes environments when they are needed and keeps them for the next episode.

    Args:
        env: an id, a ``TextEnv`` class, or a factory.
        tokenizer: of who plays: ids and classes are made with it. None: the environment's own.
        player: name of who plays, for errors.
        env_kwargs: keywords for each environment.
        blocking: call environments in threads. None: as the environment's attribute ``blocking`` says.

    Attributes:
        name: id, or name of the class.
        env: the first environment's ``TextEnv``: its limits, scores and tokenizer.

    Raises:
        TokenizerMismatch: environment and player have different tokenizers; both are named.
        ConfigError: ``env`` is none of the three, or makes no ``TextEnv``.
    """

    def __init__(
        self,
        env: EnvSource,
        *,
        tokenizer: Tokenizer | None,
        player: str,
        env_kwargs: Mapping[str, Any] | None = None,
        blocking: bool | None = None,
    ) -> None:
        if not isinstance(env, str) and not callable(env):
            raise ConfigError(
                f"env must be an id, a TextEnv class or a factory, got {type(env).__name__}: many are "
                "played at a time, so give what makes environments, such as lambda: MyEnv()"
            )
        self._source = env
        self._kwargs = dict(env_kwargs or {})
        makes_with_keywords = isinstance(env, (str, type))
        if tokenizer is not None and makes_with_keywords and "renderer" not in self._kwargs:
            self._kwargs.setdefault("tokenizer", tokenizer)
        self._free: list[Seat] = []
        self._pace = Pace()
        self._closed = False
        first = self._make()
        self.env = cast(TextEnv, first.unwrapped)
        self.name = self._name(first)
        self._first: gymnasium.Env[Any, Any] | None = first
        self._blocking = bool(getattr(self.env, "blocking", False) if blocking is None else blocking)
        if tokenizer is not None:
            self._bind(tokenizer, player)

    def take(self) -> Seat:
        """Returns a free seat, or a new one.

        Raises:
            Exception: whatever the environment's constructor raises.
        """
        if self._free:
            return self._free.pop()
        if self._first is not None:
            env, self._first = self._first, None
        else:
            env = self._make()
        return Seat(env, blocking=self._blocking, pace=self._pace)

    async def seat(self) -> Seat:
        """Does what ``take`` does; where many are to be made, the event loop does other things in between."""
        if not self._free:
            await self._pace.step()
        return self.take()

    @property
    def busy(self) -> bool:
        """Whether environments are called one after another in this turn of the running event loop."""
        return self._pace.busy

    def give_back(self, seat: Seat) -> None:
        """Keeps a seat whose episode ended well for the next one."""
        if self._closed:
            seat.close()
        else:
            self._free.append(seat)

    def close(self) -> None:
        """Closes every free environment; those in use are closed when they come back."""
        self._closed = True
        while self._free:
            self._free.pop().close()
        if self._first is not None:
            self._first.close()
            self._first = None

    def _make(self) -> gymnasium.Env[Any, Any]:
        try:
            if isinstance(self._source, str):
                check_id(self._source)
                # The passive checker looks at the first steps of each object: it is for tests, not for many.
                made: Any = gymnasium.make(self._source, disable_env_checker=True, **self._kwargs)
            else:
                made = self._source(**self._kwargs)
        except TypeError as error:
            if "unexpected keyword argument 'tokenizer'" not in str(error):
                raise
            raise ConfigError(
                f"{self._source!r} takes no tokenizer=: wrap a simulator in GymTextEnv; a TextEnv's __init__ "
                "hands **keywords on to super().__init__(**keywords)"
            ) from error
        if not isinstance(made, gymnasium.Env) or not isinstance(made.unwrapped, TextEnv):
            what = type(getattr(made, "unwrapped", made)).__name__
            raise ConfigError(f"{self._source!r} makes {what}, which is no TextEnv: wrap it in GymTextEnv")
        return made

    def _name(self, env: gymnasium.Env[Any, Any]) -> str:
        if isinstance(self._source, str):
            return self._source
        return env.spec.id if env.spec is not None else type(env.unwrapped).__name__

    def _bind(self, tokenizer: Tokenizer, player: str) -> None:
        own = self.env.tokenizer
        if own is tokenizer or own.fingerprint == tokenizer.fingerprint:
            return
        self.close()
        raise TokenizerMismatch(
            f"{self.name} speaks the ids of tokenizer {own.name} ({own.fingerprint[:15]}), {player} those of "
            f"{tokenizer.name} ({tokenizer.fingerprint[:15]}): make the environment with the latter"
        )
