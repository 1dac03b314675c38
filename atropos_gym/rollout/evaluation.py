"""How well a policy plays: mean return with its standard error, on starts that training never sees.

Seeds come from a stream of their own (``seeds.py``). Nothing is dropped: an episode that fails raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from numbers import Integral
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np

from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.errors import ConfigError, EngineError
from atropos_gym.rollout._anywhere import close_anywhere, run_anywhere
from atropos_gym.rollout._legal import LegalReplies
from atropos_gym.rollout._play import EpisodeFailed, Plan, Start, play, sampling_for
from atropos_gym.rollout._pool import EnvPool, EnvSource, Ids, Seat
from atropos_gym.rollout.episode import Episode
from atropos_gym.rollout.seeds import sampling_seed, start_seed
from atropos_gym.tokenizers import Tokenizer

__all__ = ["EvalResult", "Policy", "Predictor", "aevaluate", "evaluate"]


@runtime_checkable
class Predictor(Protocol):
    """A policy as Stable-Baselines3 has it, such as ``GRPO``; it may have a ``tokenizer``."""

    def predict(self, observation: Any, *, deterministic: bool) -> tuple[Any, Any]:
        """Returns one action for each prompt of an object array, and a state that is not used."""
        ...


Policy = Predictor | Engine | Literal["random"] | Callable[[Ids, dict[str, Any]], Sequence[int] | Ids]
"""A learner, an engine, ``"random"`` (the environment's ``sample_reply``), or ``f(obs, info) -> ids``."""

# What a batch is asked: the seats that play, with the prompt and info that each now faces.
_Act = Callable[[list["_Game"]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        mean: mean undiscounted return of an episode.
        stderr: standard error of the mean; nan for a single episode.
        episodes: how many were played.
        valid: share of turns with a usable action.
        success: share of episodes that were solved, of those that know; None if none does.
        exact: the policy's exact value, where somebody computed it.

    Example:
        >>> print(EvalResult(mean=-0.043, stderr=0.0095, episodes=10000, valid=0.999, success=None))
        -0.0430 ± 0.0095 (10000 episodes, 99.9 % valid)
    """

    mean: float
    stderr: float
    episodes: int
    valid: float
    success: float | None
    exact: float | None = None

    def __str__(self) -> str:
        """Returns one line for people."""
        solved = "" if self.success is None else f", {self.success:.1%} solved".replace("%", " %")
        valid = f"{self.valid:.1%}".replace("%", " %")
        return f"{self.mean:.4f} ± {self.stderr:.4f} ({self.episodes} episodes, {valid} valid{solved})"


def evaluate(
    env: EnvSource,
    policy: Policy,
    episodes: int,
    *,
    seed: int,
    deterministic: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 512,
    progress: Callable[[int], None] | None = None,
    legal_only: bool = False,
) -> EvalResult:
    """Plays ``episodes`` episodes and returns how well they went.

    Args:
        env: an id, a ``TextEnv`` class or a factory; an id or class is made with the policy's tokenizer.
        policy: a learner (anything with ``predict``), an engine, ``"random"``, or ``f(obs, info) -> ids``.
        episodes: how many, each from a start of its own.
        seed: of the evaluation; equal seeds give equal starts, and none that a collector plays.
        deterministic: the most likely ids instead of sampled ones, for a learner or an engine.
        env_kwargs: keywords for the environments.
        concurrency: episodes that are played side by side.
        progress: told how many episodes are finished, from time to time.
        legal_only: an engine is asked for nothing but legal replies, whole: it never plays illegally, and
            never thinks on its own. ``deterministic`` then takes the likeliest id that a legal reply goes
            on with.

    Raises:
        ConfigError: no such policy, a random player in an environment without ``sample_reply``, or
            ``legal_only`` where the environment does not say what is legal or the policy is no engine.
        TokenizerMismatch: environment and policy have different tokenizers.
        EngineError: the engine failed; what the environment raises is raised as it is.

    Example:
        >>> result = evaluate("atropos/Blackjack-v0", "random", 200, seed=1)
        >>> -1 < result.mean < 0, result.valid
        (True, 1.0)
    """
    _check(episodes, concurrency)
    if isinstance(policy, Engine):
        playing = aevaluate(
            env,
            policy,
            episodes,
            seed=seed,
            deterministic=deterministic,
            env_kwargs=env_kwargs,
            concurrency=concurrency,
            progress=progress,
            legal_only=legal_only,
        )
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        try:
            return run_anywhere(runner, playing)
        finally:
            close_anywhere(runner)
    if legal_only:
        raise ConfigError(f"legal_only masks what an engine samples: give an engine, got {policy!r:.60}")
    pool = EnvPool(
        env,
        tokenizer=_tokenizer_of(policy),
        player=type(policy).__name__,
        env_kwargs=env_kwargs,
        blocking=False,
    )
    tally = _Tally(progress)
    try:
        _play_in_step(pool, _actor(policy, deterministic, pool.name), episodes, seed, concurrency, tally)
    finally:
        pool.close()
    return tally.result()


async def aevaluate(
    env: EnvSource,
    engine: Engine,
    episodes: int,
    *,
    seed: int,
    deterministic: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
    concurrency: int = 512,
    progress: Callable[[int], None] | None = None,
    legal_only: bool = False,
) -> EvalResult:
    """Does what ``evaluate`` does for an engine, in the running event loop.

    All episodes are played by the version that is the newest at the beginning.
    """
    _check(episodes, concurrency)
    pool = EnvPool(
        env,
        tokenizer=_tokenizer_of(engine),
        player=str(getattr(engine, "model", type(engine).__name__)),
        env_kwargs=env_kwargs,
    )
    tally = _Tally(progress)
    try:
        temperature = 0.0 if deterministic else 1.0
        sampling = SamplingParams(max_tokens=pool.env.max_turn_tokens, temperature=temperature)
        sampling = sampling_for(pool.env, sampling)
        legal = LegalReplies(pool.name) if legal_only else None
        async with engine.hold() as held:

            def plan_of(number: int) -> Plan:
                return Plan(
                    start=Start(pool.name, start_seed(seed, number, evaluation=True)),
                    member=0,
                    chance=None,
                    sampling=sampling,
                    seed_of=_seeds_of(seed, number),
                    trainable=False,
                    legal=legal,
                    version=held.version,
                    lane="eval",
                    affinity=(pool.name, "eval", number),
                )

            await _play_with_engine(pool, engine, plan_of, episodes, concurrency, tally)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    finally:
        pool.close()
    return tally.result()


def _check(episodes: int, concurrency: int) -> None:
    for name, value in (("episodes", episodes), ("concurrency", concurrency)):
        if not isinstance(value, Integral) or value < 1:
            raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")


@dataclass(slots=True)
class _Tally:
    """Sums up episodes."""

    progress: Callable[[int], None] | None = None
    returns: list[float] = field(default_factory=list)
    turns: int = 0
    invalid: int = 0
    successes: list[bool] = field(default_factory=list)

    def add(self, episode_return: float, turns: int, invalid: int, success: bool | None) -> None:
        self.returns.append(episode_return)
        self.turns += turns
        self.invalid += invalid
        if success is not None:
            self.successes.append(bool(success))
        if self.progress is not None:
            self.progress(len(self.returns))

    def result(self) -> EvalResult:
        returns = np.asarray(self.returns)
        several = returns.size > 1
        return EvalResult(
            mean=float(returns.mean()),
            stderr=float(returns.std(ddof=1)) / sqrt(returns.size) if several else float("nan"),
            episodes=returns.size,
            valid=1 - self.invalid / self.turns,
            success=float(np.mean(self.successes)) if self.successes else None,
        )


@dataclass(slots=True)
class _Game:
    """An episode under way."""

    seat: Seat
    observation: Ids
    info: dict[str, Any]
    episode_return: float = 0.0
    turns: int = 0
    invalid: int = 0


def _play_in_step(
    pool: EnvPool, act: _Act, episodes: int, seed: int, concurrency: int, tally: _Tally
) -> None:
    """Plays many games a turn at a time, so that a learner answers all of them in one batch."""
    numbers = iter(range(episodes))
    seats: list[Seat] = []
    try:
        for _ in range(min(concurrency, episodes)):
            seats.append(pool.take())
        _play_on(seats, act, numbers, seed, tally)
    finally:  # also of an error: all that was made is closed with the pool
        for seat in seats:
            pool.give_back(seat)


def _play_on(seats: list[Seat], act: _Act, numbers: Iterator[int], seed: int, tally: _Tally) -> None:
    games = [_deal(seat, seed, number) for seat, number in zip(seats, numbers, strict=False)]
    while games:
        going = []
        for game, action in zip(games, act(games), strict=True):
            step = game.seat.env.step(action)  # as it came: the environment says what is wrong with it
            game.observation, reward, terminated, truncated, game.info = step
            game.episode_return += float(reward)
            game.turns += 1
            game.invalid += bool(game.info.get("invalid"))
            if not (terminated or truncated):
                going.append(game)
                continue
            tally.add(game.episode_return, game.turns, game.invalid, game.info.get("success"))
            number = next(numbers, None)
            if number is not None:
                going.append(_deal(game.seat, seed, number))
        games = going


def _deal(seat: Seat, seed: int, number: int) -> _Game:
    observation, info = seat.env.reset(seed=start_seed(seed, number, evaluation=True))
    return _Game(seat, observation, info)


def _actor(policy: Policy, deterministic: bool, name: str) -> _Act:
    """Returns what chooses the actions of a batch of games."""
    if policy == "random":
        return lambda games: [_random_ids(game, name) for game in games]
    if isinstance(policy, Predictor):
        predictor = policy

        def predict(games: list[_Game]) -> Sequence[Any]:
            prompts = np.empty(len(games), dtype=object)
            prompts[:] = [game.observation for game in games]
            actions, _ = predictor.predict(prompts, deterministic=deterministic)
            return cast(Sequence[Any], actions)

        return predict
    if callable(policy):
        choose = policy
        return lambda games: [choose(game.observation, game.info) for game in games]
    raise ConfigError(
        f"policy must be a learner with predict(), an engine, 'random' or a function (obs, info) -> ids, "
        f"got {policy!r}"
    )


def _random_ids(game: _Game, name: str) -> list[int]:
    env = game.seat.text_env
    reply = env.sample_reply()
    if reply is None:
        raise ConfigError(f"{name} knows no random player: define sample_reply() to play 'random' in it")
    return env.say(reply)


async def _play_with_engine(
    pool: EnvPool,
    engine: Engine,
    plan_of: Callable[[int], Plan],
    episodes: int,
    concurrency: int,
    tally: _Tally,
) -> None:
    """Plays episodes concurrently, each at its own pace."""

    async def player(numbers: Iterator[int]) -> None:
        for number in numbers:
            seat = await pool.seat()
            try:
                episode = await play(seat, engine, plan_of(number))
            except BaseException:
                seat.close()
                raise
            pool.give_back(seat)
            _count(tally, episode)

    numbers = iter(range(episodes))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, episodes)):
            tasks.create_task(player(numbers))


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns what went wrong first, as environment or engine raised it."""
    failure = failures.exceptions[0]
    if not isinstance(failure, EpisodeFailed):
        return failure
    return failure.__cause__ if isinstance(failure.__cause__, Exception) else EngineError(str(failure))


def _seeds_of(seed: int, number: int) -> Callable[[int, int], int]:
    return lambda turn, attempt: sampling_seed(seed, number, 0, turn, attempt, evaluation=True)


def _count(tally: _Tally, episode: Episode) -> None:
    tally.add(episode.episode_return, len(episode.rewards), episode.invalid_turns, episode.success)


def _tokenizer_of(policy: Policy) -> Tokenizer | None:
    tokenizer = getattr(policy, "tokenizer", None)
    return tokenizer if isinstance(tokenizer, Tokenizer) else None
