"""The policy that Stable-Baselines3 sees: a causal language model with adapter, optimizer and sampler."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor

from atropos_gym.trainers.adapters import AdapterState

__all__ = ["BaseState", "LMPolicy", "RandomState", "as_prompts"]

#: Samples one action per prompt; the flag asks for the most likely ids.
Sampler = Callable[[list[list[int]], bool], list[list[int]]]


class LMPolicy(BasePolicy):  # type: ignore[misc]
    """A causal language model whose observations and actions are token ids.

    Args:
        observation_space: of the environment.
        action_space: of the environment.
        model: with one adapter by PEFT.
        learning_rate: of the optimizer at the start.
        betas: of AdamW.
        weight_decay: of AdamW.

    Attributes:
        model: base and adapter.
        optimizer: AdamW over the adapter's weights alone.
        adapter: the adapter's state.
        base: the base's state.
        random_state: the process's random streams.
        sampler: samples actions; set by whoever owns an engine.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        model: Any,
        learning_rate: float = 2e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(observation_space, action_space, normalize_images=False)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=learning_rate,
            betas=betas,
            weight_decay=weight_decay,
        )
        self.adapter = AdapterState(model)
        self.base = BaseState(model)
        self.random_state = RandomState()
        self.sampler: Sampler | None = None

    def set_training_mode(self, mode: bool) -> None:
        """Does nothing: dropout stays off, or two scorings of one row would differ."""

    def predict(
        self,
        observation: Any,
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, tuple[np.ndarray, ...] | None]:
        """Returns the ids to say next, and ``state`` as it came: the prompt is all that a policy needs.

        Args:
            observation: prompt ids, or a batch of them (tuple, list or object array of arrays).
            state: passed through.
            episode_start: not used.
            deterministic: the most likely ids instead of sampled ones.
        """
        prompts, one = as_prompts(observation)
        actions = [np.asarray(ids, dtype=np.int32) for ids in self._sample(prompts, deterministic)]
        if one:
            return actions[0], state
        batch = np.empty(len(actions), dtype=object)
        batch[:] = actions
        return batch, state

    def _predict(self, observation: Any, deterministic: bool = False) -> Tensor:
        """Returns the ids for one prompt as a tensor."""
        (ids,) = self._sample([[int(i) for i in observation]], deterministic)
        return torch.tensor(ids)

    def _sample(self, prompts: list[list[int]], deterministic: bool) -> list[list[int]]:
        if self.sampler is None:
            raise RuntimeError("this policy has no engine to sample with: use the GRPO object it belongs to")
        return self.sampler(prompts, deterministic)


def as_prompts(observation: Any) -> tuple[list[list[int]], bool]:
    """Returns the prompts of an observation and whether it was a single one.

    Raises:
        TypeError: neither ids nor a batch of ids.

    Example:
        >>> as_prompts(np.array([1, 2], dtype=np.int32)), as_prompts([[1, 2]])
        (([[1, 2]], True), ([[1, 2]], False))
    """
    if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
        raise TypeError("predict() takes the observation alone: obs, info = env.reset(); predict(obs)")
    if isinstance(observation, np.ndarray) and observation.dtype != object and observation.ndim == 1:
        return [_ids(observation)], True
    if isinstance(observation, (str, bytes, Mapping)) or not isinstance(observation, (Sequence, np.ndarray)):
        raise TypeError(
            f"an observation is a prompt's ids, or a batch of them, got {type(observation).__name__} "
            f"{observation!r:.60}: env.reset() returns one"
        )
    if len(observation) and isinstance(observation[0], (int, np.integer)):
        return [_ids(observation)], True
    return [_ids(prompt) for prompt in observation], False


def _ids(prompt: Any) -> list[int]:
    """Returns one prompt's ids as Python's ints."""
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        what = f"{ids.ndim} dimensions of {ids.dtype}" if ids.ndim != 1 else f"dtype {ids.dtype}"
        raise TypeError(f"an observation is integer ids, got {what}")
    return [int(i) for i in ids]


class BaseState:
    """The base model's weights, without adapters, under their own names; shares the parameters' memory.

    Args:
        model: with adapters by PEFT.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Tensor]:
        """Returns name -> tensor as the model had them before it got adapters."""
        base = self._model.get_base_model()
        return {
            name.replace(".base_layer.", "."): tensor.detach()
            for name, tensor in base.state_dict().items()
            if ".lora_" not in name
        }

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Copies weights in, in place: whoever shares the tensors sees them."""
        own = self.state_dict()
        if strict and set(own) != set(state):
            raise ValueError(f"base weights differ in {sorted(set(own) ^ set(state))[:3]}")
        for name, tensor in state.items():
            own[name].copy_(tensor)


class RandomState:
    """The random streams of torch, numpy and Python, as tensors (a checkpoint loads no pickled objects)."""

    def state_dict(self) -> dict[str, Any]:
        """Returns where the streams stand."""
        _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        version, words, next_gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "numpy": torch.tensor(np.asarray(keys).astype(np.int64)),
            "numpy_position": [int(position), int(has_gauss), float(gauss)],
            "python": torch.tensor(words, dtype=torch.int64),
            "python_version": version,
            "python_gauss": next_gauss,
        }

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Puts the streams back to where they stood."""
        torch.set_rng_state(state["torch"].cpu())
        position, has_gauss, gauss = state["numpy_position"]
        keys = state["numpy"].cpu().numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
        words = tuple(int(word) for word in state["python"].tolist())
        random.setstate((state["python_version"], words, state["python_gauss"]))
