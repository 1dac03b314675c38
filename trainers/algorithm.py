"""A language model as an algorithm of Stable-Baselines3: everything around learning itself.

Model, adapter, engine, folders, acting, scoring, saving and loading. What is learned, and how, is GRPO's.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.utils import configure_logger, get_device
from stable_baselines3.common.vec_env import VecEnv

from atropos_gym._secrets import without_secrets
from atropos_gym.engines.base import SERVERS, Engine, SamplingParams
from atropos_gym.engines.checks import agreement
from atropos_gym.errors import ConfigError, EngineUnfit, MissingData
from atropos_gym.findings import Finding, faults
from atropos_gym.tokenizers import Tokenizer
from atropos_gym.trainers._model import base_model, max_context_of, tokenizer_of
from atropos_gym.trainers._parts import Parts, RunFolder, save_whole, torch_threads
from atropos_gym.trainers._tasks import is_url, make_tasks, vec_env_of
from atropos_gym.trainers.adapters import Lora, add_lora, save_adapter
from atropos_gym.trainers.policy import LMPolicy
from atropos_gym.trainers.reference import LearnerReference
from atropos_gym.trainers.schedules import Schedule
from atropos_gym.trainers.scoring import Scorer, rows_of, score_rows
from atropos_gym.trainers.tiny import TINY

__all__ = ["LMAlgorithm"]


class LMAlgorithm(BaseAlgorithm):  # type: ignore[misc]
    """A causal language model with a LoRA adapter, an environment and an engine.

    Arguments and attributes are those of ``GRPO``.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"LMPolicy": LMPolicy}
    policy: LMPolicy
    env: VecEnv | None
    num_timesteps: int
    ep_info_buffer: deque[Any] | None
    ep_success_buffer: deque[Any] | None
    _n_updates: int
    _episode_num: int

    def __init__(
        self,
        policy: str | Path | type[BasePolicy],
        env: Any,
        *,
        server: str | None,
        env_kwargs: Mapping[str, Any] | None,
        tokenizer: Any,
        learning_rate: float | Schedule,
        temperature: float,
        engine: str | Mapping[str, Any] | Engine,
        engine_kwargs: Mapping[str, Any] | None,
        betas: tuple[float, float],
        weight_decay: float,
        lora: Lora | None,
        dtype: str,
        folder: str | Path | None,
        policy_kwargs: dict[str, Any] | None,
        stats_window_size: int,
        tensorboard_log: str | None,
        verbose: int,
        device: torch.device | str,
        seed: int | None,
        open_env: bool,
    ) -> None:
        is_class = isinstance(policy, type)
        self.model_name = TINY if is_class or policy in self.policy_aliases else str(policy)
        self.tokenizer_name = tokenizer
        self._parts = Parts()
        if is_url(env):
            server, env = server or env, None
        self.server = server
        self.env_kwargs = None if env_kwargs is None else dict(env_kwargs)
        super().__init__(
            policy=policy if is_class else LMPolicy,
            env=self._open_env(env) if open_env else None,
            learning_rate=learning_rate,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
        )
        self.temperature = temperature
        if isinstance(engine, Mapping):
            engine, more = _split(engine)
            engine_kwargs = {**more, **(engine_kwargs or {})}
        self.engine_spec = engine if isinstance(engine, str) else "given"
        self.engine_kwargs = dict(engine_kwargs or {})
        if not isinstance(engine, str):
            self._parts.engine = engine
        self.betas = betas
        self.weight_decay = weight_decay
        self.lora = lora or Lora()
        self.dtype = dtype
        self.folder = folder
        self.version = 0
        self.run = ""
        self.group_numbers: list[int] = []  # of the next group to collect, one an environment
        self._settled_timesteps = 0  # timesteps of whole updates: what a save amid a batch goes back to

    # -- set-up ----------------------------------------------------------------------------------------

    def _open_env(self, env: Any) -> VecEnv | None:
        """Makes the tasks and the VecEnv that SB3 holds."""
        if env is None and self.server is None:
            return None
        self._parts.tasks = [] if env is None else make_tasks(env, self.tokenizer, self.env_kwargs)
        self._parts.trie = None
        return vec_env_of(self._parts.tasks, self.tokenizer, max_context=8192)

    def _setup_model(self) -> None:
        """Builds model, adapter and optimizer from attributes alone: SB3's ``load`` has nothing else."""
        self._setup_lr_schedule()
        if self.seed is not None and self.env is not None:
            self.set_random_seed(self.seed)
        self._new_run()
        self._parts.folder = RunFolder(self.folder)
        seed = self.seed or 0
        base = base_model(
            self.model_name, self.tokenizer, dtype=self.dtype, device=get_device(self.device), seed=seed
        )
        base_name = str(self._parts.folder.base) if self.model_name == TINY else self.model_name
        model = add_lora(base, self.lora, seed=seed, base_name=base_name)
        if not hasattr(self, "observation_space"):  # neither env nor server: scoring and predicting only
            spaces = vec_env_of([], self.tokenizer, max_context_of(base))
            self.observation_space, self.action_space = spaces.observation_space, spaces.action_space
        self.policy = LMPolicy(
            self.observation_space,
            self.action_space,
            model=model,
            learning_rate=self.lr_schedule(1.0),
            betas=self.betas,
            weight_decay=self.weight_decay,
        )
        self.policy.sampler = self._sample
        self._parts.scorer = Scorer(model)

    def _new_run(self) -> None:
        """Names this incarnation: adapters of two of them are never mistaken for each other."""
        self.run = f"run-{uuid.uuid4().hex[:8]}"
        self._run_over = False

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Sets what is learned: whatever the constructor takes as ``env``, a server's URL included."""
        if env is self.env and env is not None:
            return
        if is_url(env):
            self.server, env = env, None
        vec = self._open_env(env)
        assert vec is not None, "an environment or a URL was given"
        self.env, self.n_envs = vec, 1
        self.observation_space, self.action_space = vec.observation_space, vec.action_space
        self.policy.observation_space, self.policy.action_space = vec.observation_space, vec.action_space
        self.group_numbers = []

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        if self._parts.tokenizer is None:
            self._parts.tokenizer = tokenizer_of(self.model_name, self.tokenizer_name)
        return self._parts.tokenizer

    @property
    def run_folder(self) -> Path:
        """Where adapters, metrics and checkpoints are."""
        assert self._parts.folder is not None
        return self._parts.folder.path

    @property
    def adapter_dir(self) -> Path:
        """Where adapters are, one folder a version: ``<run>-v<N>``."""
        assert self._parts.folder is not None
        return self._parts.folder.adapters

    @property
    def engine(self) -> Any:
        """The engine that samples, at the learner's current version; made on first use.

        ``hf`` shares the learner's base tensors, but none of its modules.
        """
        parts = self._parts
        if parts.engine is None:
            parts.engine = self._make_engine()
            parts.owns_engine = True
        if self.version > 0:  # again for the same version and folder is no work
            parts.sync(parts.engine.publish(self.version, self.save_version()))
        return parts.engine

    @property
    def player(self) -> Any:
        """The engine that plays the learner's own policy: not ``engine`` where that one never changes."""
        parts, engine = self._parts, self.engine
        if getattr(engine, "swap", "hot_swap") != "none":
            return engine
        if parts.player is None:
            parts.player = self._make_own_engine()
        if self.version > 0:
            parts.sync(parts.player.publish(self.version, self.save_version()))
        return parts.player

    def _make_engine(self) -> Any:
        if self.engine_spec == "hf":
            return self._make_own_engine(**self.engine_kwargs)
        from atropos_gym.engines import make_engine

        if self.engine_spec == "given":
            raise ConfigError(
                "this learner was made with an engine object, which is not saved: pass engine= again"
            )
        options = dict(self.engine_kwargs)
        kind = self.engine_spec.partition(":")[0]
        if kind in SERVERS:
            options = self._server_options(kind) | options
        return make_engine(self.engine_spec, model=self.model_name, tokenizer=self.tokenizer, **options)

    def _make_own_engine(self, **options: Any) -> Any:
        """The engine in this process, on the learner's own base tensors."""
        from atropos_gym.engines.hf import HFEngine

        base = self.policy.model.get_base_model()
        return HFEngine(
            base=self.policy.base.state_dict(),
            config=base.config,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            device=str(self.device),
            seed=self.seed,
            **options,
        )

    def _server_options(self, kind: str) -> dict[str, Any]:
        """What a server must know of this learner."""
        options: dict[str, Any] = {"run": self.run}
        if self.engine_spec != "vllm":  # a server that runs; its key is nothing for a checkpoint
            return options | {"api_key": os.environ.get(SERVERS[kind])}
        rank = max(8, 1 << (self.lora.rank - 1).bit_length())  # vLLM takes powers of two
        return options | {"dtype": self.dtype, "max_lora_rank": rank, "log": self.run_folder / "vllm.log"}

    def reference(self) -> LearnerReference:
        """Returns what an engine is compared with: this learner's base, and adapters of its shape."""
        return LearnerReference(
            self.policy.model,
            self.tokenizer,
            adapter_dir=self.adapter_dir,
            stop_ids=self.stop_ids,
            dtype=self.dtype,
            temperature=self.temperature,
            device=self.device,
        )

    def check_engine(self) -> list[Finding]:
        """Tries the engine against the learner and returns what was found; ``learn`` does it once.

        Raises:
            EngineUnfit: a finding is wrong; the message has them all.
        """
        engine, parts, reference = self.engine, self._parts, self.reference()
        with torch_threads(self._threads):
            findings: list[Finding] = parts.sync(engine.check(reference))
            if said := faults(findings):
                raise EngineUnfit(f"engine {engine.model} is not fit to train with: {said}")
            parts.noise = parts.sync(agreement(engine, reference)).rms
        parts.checked = True
        return findings

    @property
    def _threads(self) -> int | None:
        return None

    # -- acting and scoring ----------------------------------------------------------------------------

    def _sample(self, prompts: list[list[int]], deterministic: bool) -> list[list[int]]:
        """Samples one action per prompt with the current version, all as one batch of the engine."""
        engine = self.player
        params = SamplingParams(
            max_tokens=self.action_space.max_length,
            temperature=0.0 if deterministic else self.temperature,
            stop_ids=self.stop_ids,
        )

        async def ask() -> list[list[int]]:
            asked = [engine.generate(p, params, version=self.version, lane="eval") for p in prompts]
            return [list(answer[0].ids) for answer in await asyncio.gather(*asked)]

        return self._parts.sync(ask())

    def score(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Returns the learner's logprobs of given completions under the current adapter.

        Args:
            prompts: ids, one list a completion.
            completions: ids to score.
            temperature: that logits are divided by.

        Returns:
            float64 ``[len(completion)]`` each.
        """
        rows = rows_of(prompts, completions, temperature)
        return score_rows(self._parts.scorer, rows, max_ids=self.max_ids, device=self.device)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an action."""
        if self._parts.tasks:
            return tuple(self._parts.tasks[0].text_env.stop_ids)
        from atropos_gym.rendering import chat_renderer

        return tuple(chat_renderer(self.tokenizer).stop_ids)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: Any = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """Sets counters, logger and callbacks; no environment is reset: groups have starts of their own."""
        self.start_time = time.time_ns()
        if self.ep_info_buffer is None or reset_num_timesteps:
            self.ep_info_buffer = deque(maxlen=self._stats_window_size)
            self.ep_success_buffer = deque(maxlen=self._stats_window_size)
        if reset_num_timesteps:
            self.num_timesteps = self._settled_timesteps = self._episode_num = self._n_updates = 0
        total_timesteps += self.num_timesteps
        self._total_timesteps = total_timesteps
        self._num_timesteps_at_start = self.num_timesteps
        if not self._custom_logger:
            self._logger = configure_logger(
                self.verbose, self.tensorboard_log, tb_log_name, reset_num_timesteps
            )
        return total_timesteps, self._init_callback(callback, progress_bar)

    @property
    def max_ids(self) -> int:
        """Most ids of a micro-batch: its logits may take half a gigabyte."""
        return max(512, min(8192, 2**27 // self.tokenizer.rows))

    def dump_logs(self) -> None:
        """Writes what was recorded to the logger's outputs."""
        self.logger.dump(step=self.num_timesteps)

    # -- keeping ---------------------------------------------------------------------------------------

    def save_version(self) -> Path:
        """Returns the folder of the current version's adapter in PEFT's form, written if it is not there."""
        folder = self.adapter_dir / f"{self.run}-v{self.version}"
        return folder if folder.exists() else save_adapter(self.policy.model, folder)

    def checkpoint(self) -> Path:
        """Writes ``checkpoints/<update>.zip``, complete or not at all; ``load`` goes on from it exactly."""
        assert self._parts.folder is not None
        path = self._parts.folder.checkpoints / f"{self._n_updates:06d}.zip"
        return save_whole(self.save, path)

    def _excluded_save_params(self) -> list[str]:
        # Where things are is the next process's business, as with SB3's env.
        here = ["run", "server", "folder", "metrics_path", "tokenizer_name"]
        return [*super()._excluded_save_params(), "_parts", *here]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        states = ["policy.adapter", "policy.optimizer", "policy.random_state"]
        return (["policy.base", *states] if self.model_name == TINY else states), []

    def save(self, path: Any, exclude: Any = None, include: Any = None) -> None:
        """Saves settings, adapter, optimizer, random states and position; a tiny policy's base too.

        A save amid a batch (a callback's) is that of the batch's beginning: it is collected again. Keys and
        passwords of engine and environments are left out: whoever loads it has them in variables, or says
        them again with ``engine_spec=``, ``engine_kwargs=`` and ``env_kwargs=``.
        """
        secretive = ("engine_spec", "engine_kwargs", "env_kwargs")
        kept = {name: getattr(self, name) for name in ("num_timesteps", *secretive)}
        self.num_timesteps = self._settled_timesteps
        for name in secretive:
            setattr(self, name, without_secrets(kept[name]))
        try:
            super().save(path, exclude, include)
        finally:
            for name, value in kept.items():
                setattr(self, name, value)

    @classmethod
    def load(
        cls,
        path: Any,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Loads a saved learner as a new run of the same policy.

        Only files that you trust: SB3's settings are pickled.

        Args:
            path: what ``save`` wrote.
            env: whatever the constructor takes, a URL included; needed to learn on.
            device: where to put it.
            custom_objects: see SB3.
            print_system_info: see SB3.
            force_reset: see SB3.
            **kwargs: settings to change, such as ``folder=`` or ``server=``.

        Raises:
            MissingData: there is no such file.
        """
        if isinstance(path, (str, Path)) and not any(map(os.path.exists, (path, f"{path}.zip"))):
            raise MissingData(f"no saved learner in {str(path)!r}; save() writes one")
        kwargs = {"server": None, "folder": None, "metrics_path": None, "tokenizer_name": None, **kwargs}
        model: Self = super().load(
            path, None, device, custom_objects, print_system_info, force_reset, **kwargs
        )
        numbers = model.group_numbers
        if env is not None or model.server is not None:
            model.set_env(env if env is not None else model.server)
            model.group_numbers = numbers
        return model

    def close(self) -> None:
        """Closes the engine if it was made here, and removes a temporary folder; idempotent."""
        parts = self._parts
        if parts.engine is not None and parts.owns_engine:
            parts.sync(parts.engine.close())
            parts.engine = None
        if parts.player is not None:
            parts.sync(parts.player.close())
            parts.player = None
        for task in parts.tasks:
            task.env.close()
        parts.sync.close()
        if parts.folder is not None:
            parts.folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _split(spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns an engine's mapping as a string and further arguments.

    Example:
        >>> _split({"kind": "vllm", "url": "http://127.0.0.1:8000", "retries": 2})
        ('vllm:http://127.0.0.1:8000', {'retries': 2})
    """
    more = dict(spec)
    kind, where = more.pop("kind", None), more.pop("url", None) or more.pop("path", None)
    if not isinstance(kind, str):
        raise ConfigError(
            f"engine has no kind, such as 'vllm', only {', '.join(map(str, spec)) or 'nothing'}"
        )
    where = where if where is None or isinstance(where, str) else ",".join(map(str, where))
    return kind if where is None else f"{kind}:{where}", more
