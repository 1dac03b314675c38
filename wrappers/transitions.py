"""RecordTransitions: what really happened in each step of a vector environment, and what did not.

A vector environment may take an action and play nothing with it. With Gymnasium's default autoreset mode
(``"NextStep"``) the step after an episode's end ignores its action and returns the next start with reward 0;
an ``AsyncVectorEnv`` without shared memory does so even after an explicit ``reset``, because its worker still
remembers the end. Such a ghost step looks like a turn, and must not be trained on.

Text environments tell the two apart: ``info["turn"]`` is 0 after a reset, whoever asked for it, and at least
1 after a turn that was played. ``"SameStep"`` has no ghost steps and wastes no generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from atropos_gym.errors import ConfigError

__all__ = ["RecordTransitions", "Transition"]

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Transition:
    """One turn that was played in one of the environments.

    Attributes:
        index: the environment's place in the vector.
        observation: the prompt that the action answers, shape ``(length,)``.
        action: the sampled ids, shape ``(length,)``.
        reward: of this turn.
        terminated: the episode is over.
        truncated: the episode is cut off.
        next_observation: what the turn led to, at an episode's end its last observation in every mode.
        info: of this turn and this environment alone, as plain Python values.
    """

    index: int
    observation: Ids
    action: Ids
    reward: float
    terminated: bool
    truncated: bool
    next_observation: Ids
    info: dict[str, Any]


class RecordTransitions(VectorWrapper[Any, Any, Any, Any, Any]):
    """A vector environment of text environments that keeps each step's transitions.

    ``reset`` and ``step`` are those of the wrapped one. Every action ends up either in one transition or
    among the ignored; for all steps together ``played_count + ignored_count == num_envs * steps``.

    Works in every autoreset mode, sync and async, and around or inside Gymnasium's vector wrappers that leave
    observations, actions and ``info["turn"]`` alone.

    Attributes:
        transitions: the turns that the last step played, in order of the environments.
        ignored: places of the environments that played nothing with their action in the last step.
        played_count: turns since this wrapper was made.
        ignored_count: actions since then that were not played.

    Args:
        env: a vector environment whose environments are text environments.

    Example:
        >>> import gymnasium, atropos_gym
        >>> envs = RecordTransitions(gymnasium.make_vec("atropos/Identity-v0", num_envs=2))
        >>> observations, _ = envs.reset(seed=0)
        >>> red = np.array([*b"red", 258], np.int32)
        >>> _ = envs.step((red, red))  # each episode has one turn
        >>> [(t.index, t.terminated, len(t.action)) for t in envs.transitions], envs.ignored
        ([(0, True, 4), (1, True, 4)], ())
        >>> _ = envs.step((red, red))  # NextStep: the environments start anew instead
        >>> envs.transitions, envs.ignored
        ((), (0, 1))
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self.transitions: tuple[Transition, ...] = ()
        self.ignored: tuple[int, ...] = ()
        self.played_count = 0
        self.ignored_count = 0
        self._observations: tuple[Ids, ...] = ()

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environments, or those of ``options["reset_mask"]``.

        Args:
            seed: an int, one for each environment, or None.
            options: of the environments, and ``reset_mask``, a bool array of shape ``(num_envs,)``.

        Returns:
            The prompts, a tuple of ``num_envs`` id arrays, and the merged ``info``.
        """
        # Gymnasium takes the mask out of the dict it is given.
        observations, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        self._observations = tuple(observations)
        self.transitions = self.ignored = ()
        return observations, info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all environments and sorts their actions into played and ignored.

        Args:
            actions: ids for each environment, ``num_envs`` sequences.

        Raises:
            ConfigError: the environments are no text environments: their ``info`` has no ``turn``.
        """
        answered = self._observations
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        played: list[Transition] = []
        ignored: list[int] = []
        for index in range(self.num_envs):
            told = _info_of(info, index)
            ends = told.get("final_info")
            if ends is not None:  # SameStep: what stands beside it is the next episode's start
                if "episode" in told:
                    ends["episode"] = told["episode"]  # Gymnasium's statistics stay outside
                told, result = ends, info["final_obs"][index]
            else:
                result = observations[index]
            if "turn" not in told:
                raise ConfigError(
                    f"RecordTransitions needs text environments: info of environment {index} has no 'turn'"
                )
            if told["turn"] == 0:
                ignored.append(index)
                continue
            played.append(
                Transition(
                    index=index,
                    observation=answered[index],
                    action=np.asarray(actions[index], dtype=np.int32),
                    reward=float(rewards[index]),
                    terminated=bool(terminated[index]),
                    truncated=bool(truncated[index]),
                    next_observation=result,
                    info=told,
                )
            )
        self._observations = tuple(observations)
        self.transitions, self.ignored = tuple(played), tuple(ignored)
        self.played_count += len(played)
        self.ignored_count += len(ignored)
        return observations, rewards, terminated, truncated, info


def _info_of(merged: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns one environment's part of a merged ``info``; entries that it did not report are left out."""
    own: dict[str, Any] = {}
    for key, column in merged.items():
        if f"_{key}" in merged:
            if not merged[f"_{key}"][index]:
                continue
        elif key.startswith("_") and key[1:] in merged:  # the mask of another entry
            continue
        if isinstance(column, Mapping):
            own[key] = _info_of(column, index)
        else:
            value = column[index]
            own[key] = value.item() if isinstance(value, np.generic) else value
    return own
