"""What the learner is asked to learn: environments made with its tokenizer, and the VecEnv that SB3 wants."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from atropos_gym.errors import ConfigError, TokenizerMismatch
from atropos_gym.rollout._registered import check_id
from atropos_gym.spaces import TokenSequence
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import Tokenizer
from atropos_gym.trainers.entropy import AnswerTrie

__all__ = ["Task", "answers_of", "is_url", "make_tasks", "vec_env_of"]


@dataclass(slots=True)
class Task:
    """One environment of a run.

    Attributes:
        source: what a collector makes its environments from.
        env: one of them, for lesson, answers, spaces and evaluation.
        weight: share of the groups.
        env_kwargs: keywords for an id or a class.
    """

    source: str | type[TextEnv] | Callable[..., gymnasium.Env[Any, Any]]
    env: gymnasium.Env[Any, Any]
    weight: float = 1.0
    env_kwargs: Mapping[str, Any] | None = None

    @property
    def text_env(self) -> TextEnv:
        """The TextEnv inside the wrappers."""
        inner = self.env.unwrapped
        assert isinstance(inner, TextEnv)
        return inner


def is_url(value: object) -> bool:
    """Whether an ``env`` names a server.

    Example:
        >>> is_url("http://127.0.0.1:8000"), is_url("atropos/Taxi-v0")
        (True, False)
    """
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def make_tasks(env: Any, tokenizer: Tokenizer, env_kwargs: Mapping[str, Any] | None) -> list[Task]:
    """Returns the tasks that ``env`` names.

    Args:
        env: an id, a TextEnv or its class, a factory, or a mapping of ids to weights.
        tokenizer: the learner's; ids and classes are made with it.
        env_kwargs: keywords for ids and classes.

    Raises:
        ConfigError: not an environment in token ids, or a weight that is not positive.
        TokenizerMismatch: an environment with another tokenizer; both are named.
    """
    if isinstance(env, Mapping):
        tasks = []
        for name, weight in env.items():
            if not weight > 0:
                raise ConfigError(f"weight of {name} must be > 0, got {weight}: leave the environment out")
            tasks.append(_make_task(name, tokenizer, env_kwargs, float(weight)))
        if not tasks:
            raise ConfigError("env is an empty mapping: name at least one environment")
        return tasks
    return [_make_task(env, tokenizer, env_kwargs, 1.0)]


def _make_task(env: Any, tokenizer: Tokenizer, env_kwargs: Mapping[str, Any] | None, weight: float) -> Task:
    kwargs = dict(env_kwargs or {})
    if isinstance(env, VecEnv):
        raise ConfigError(
            "env is a VecEnv, but groups need starts of their own: give an id, a TextEnv, its class or a "
            "factory"
        )
    if isinstance(env, str) or isinstance(env, type):
        if "renderer" not in kwargs:
            kwargs.setdefault("tokenizer", tokenizer)
        if isinstance(env, str):
            check_id(env)
        made = _made(env, kwargs)
        task = Task(env, made, weight, kwargs)
    elif isinstance(env, gymnasium.Env):
        if kwargs:
            raise ConfigError(
                f"env_kwargs {sorted(kwargs)} have no effect on an environment that exists already"
            )
        task = Task(lambda: copy.deepcopy(env), env, weight)
    elif callable(env):
        task = Task(env, env(**kwargs), weight, kwargs or None)
    else:
        raise ConfigError(
            f"env must be an id, a TextEnv, its class, a factory or a URL, got {type(env).__name__}"
        )
    inner = task.env.unwrapped
    if not isinstance(inner, TextEnv):
        raise ConfigError(
            f"{env!r} is a {type(inner).__name__}, whose observations are no ids: wrap it with GymTextEnv"
        )
    if inner.tokenizer.fingerprint != tokenizer.fingerprint:
        raise TokenizerMismatch(
            f"the environment uses tokenizer {inner.tokenizer.name!r}, the policy {tokenizer.name!r}: "
            "make the environment with the policy's"
        )
    return task


def _made(env: str | type[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return gymnasium.make(env, **kwargs) if isinstance(env, str) else env(**kwargs)
    except TypeError as error:
        if "unexpected keyword argument 'tokenizer'" not in str(error):
            raise
        raise ConfigError(
            f"{env!r} takes no tokenizer=: wrap a simulator in GymTextEnv; a TextEnv's __init__ hands "
            "**keywords on to super().__init__(**keywords)"
        ) from error


def vec_env_of(tasks: list[Task], tokenizer: Tokenizer, max_context: int) -> VecEnv:
    """Returns the one-environment VecEnv that SB3 holds; its spaces come from the learner's tokenizer.

    With several tasks it plays the first; without one (a server's URL) it has spaces and refuses to play.
    """
    if tasks:
        longest = max(task.text_env.observation_space.max_length for task in tasks)
        turn = max(task.text_env.action_space.max_length for task in tasks)
        env = tasks[0].env
    else:
        longest = turn = max_context
        env = _Elsewhere()
    observation_space = TokenSequence(tokenizer.rows, longest)
    action_space = TokenSequence(tokenizer.rows, turn)
    if not tasks:
        env.observation_space, env.action_space = observation_space, action_space
    # allow_early_resets: SB3 resets the environment it evaluates on whenever it likes.
    vec = DummyVecEnv([lambda: env if isinstance(env, Monitor) else Monitor(env, allow_early_resets=True)])
    vec.observation_space, vec.action_space = observation_space, action_space
    return vec


class _Elsewhere(gymnasium.Env[Any, Any]):
    """Stands for environments that only a server knows."""

    render_mode = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        raise ConfigError(
            "this learner reads batches from a server and has no environment: give env= as well"
        )

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ConfigError(
            "this learner reads batches from a server and has no environment: give env= as well"
        )


def answers_of(tasks: Sequence[Task]) -> AnswerTrie:
    """Returns the answers that can be legal, as ids.

    Raises:
        ConfigError: no environment, one without answers, or several with different ones.
    """
    if not tasks:
        raise ConfigError('entropy over "answers" needs an environment: give env= besides the server')
    first = tasks[0].text_env
    for task in tasks:
        if not task.text_env.answers:
            raise ConfigError(
                f'{type(task.text_env).__name__} has no list of answers: use entropy=(coefficient, "ids")'
            )
        if task.text_env.answers != first.answers:
            raise ConfigError(
                'environments with different answers cannot share entropy over "answers": use '
                'entropy=(coefficient, "ids")'
            )
    return AnswerTrie([first.say(answer) for answer in first.answers or ()])
