"""GRPO for language models, on Stable-Baselines3's ``BaseAlgorithm``.

Groups of episodes come from a collector in this process or from a batch server; each update is one clipped
policy-gradient step on a LoRA adapter, and the adapter goes back into the engine while it serves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self

import torch
from stable_baselines3.common.policies import BasePolicy

from atropos_gym._urls import without_token
from atropos_gym.engines.base import Engine
from atropos_gym.errors import ConfigError
from atropos_gym.trainers import _learning
from atropos_gym.trainers._parts import torch_threads
from atropos_gym.trainers._settings import check_count, check_settings
from atropos_gym.trainers._tasks import answers_of
from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.advantages import Baseline, Scale
from atropos_gym.trainers.algorithm import LMAlgorithm
from atropos_gym.trainers.batches import RowRules
from atropos_gym.trainers.entropy import AnswerTrie
from atropos_gym.trainers.lesson import interleave, lesson_bar, lesson_steps, trainable, transcripts
from atropos_gym.trainers.losses import Reduction
from atropos_gym.trainers.schedules import Schedule, as_schedule
from atropos_gym.trainers.tiny import TINY, save_base
from atropos_gym.trainers.update import LossSettings

__all__ = ["GRPO"]

EntropyKind = Literal["ids", "answers"]


class GRPO(LMAlgorithm):
    """Group relative policy optimisation of a causal language model.

    Args:
        policy: a model's name or path, or ``"tiny"`` (0.1 M weights over bytes, untrained).
        env: an id, a TextEnv, its class, a factory, a mapping ``{id: weight}``, or a batch server's URL.
        server: URL of a batch server that the groups come from; ``env`` then serves lesson, answers,
            evaluation and spaces.
        env_kwargs: keywords for environments that are ids or classes.
        tokenizer: in place of the model's own.
        learning_rate: of AdamW, or a schedule of the remaining progress.
        warm_up_updates: updates over which the learning rate rises.
        group_size: episodes from one start.
        groups_per_update: groups of an update.
        concurrency: episodes in flight when collecting locally.
        temperature: of sampling.
        common_random_numbers: members of a group share all chance.
        collector_kwargs: further keywords of ``GroupCollector``.
        engine: ``"hf"`` (in process, sharing the base weights), another spec (a string or a mapping), or an
            engine.
        engine_kwargs: further keywords of the engine.
        max_staleness: oldest version that is learned from, counted back from the newest.
        baseline: see ``advantages.group_advantages``.
        scale: see there.
        drop_equal: leave out groups of equal scores.
        reduction: see ``losses.token_weights``.
        clip_range: of the ratio, or ``(low, high)``.
        dual_clip: cap of the ratio where the advantage is negative.
        entropy: coefficient of the bonus, or ``(coefficient or schedule, "ids" | "answers")``.
        kl_coef: weight of the KL to the base.
        n_epochs: optimizer steps on each batch.
        sub_batches: micro-batches that a step is cut into at least.
        max_grad_norm: gradient norm is clipped to it.
        betas: of AdamW.
        weight_decay: of AdamW.
        mask_truncated: leave truncated episodes out of the loss.
        alignment_limit: mean difference of engine and learner, in nats, up to which the engine's logprobs
            stand for the learner's; above, the learner scores and corrects the difference.
        lora: shape of the adapter.
        dtype: of base weights, in learner and engine.
        engine_check: try the engine before learning; None: unless it is in this process.
        slope_test: after each publish, test that the engine samples with the new weights (it costs a forward
            of the learner); None: unless the engine is in this process, or unknown behind a server.
        deterministic: one thread, fixed order: the same bits every time.
        threads: that torch learns with; None is one for a tiny model, else torch's own choice.
        folder: for adapters, metrics and checkpoints; None: a temporary one until ``close``.
        metrics_path: of ``metrics.jsonl``; in ``folder`` if None.
        checkpoint_every: updates between checkpoints in ``folder``; None makes none.
        lease_seconds: of a batch from a server; extended while it is worked on.
        policy_kwargs: not used; here because SB3's ``load`` knows it.
        stats_window_size: episodes that SB3's buffers hold.
        tensorboard_log: folder for TensorBoard.
        verbose: 1 prints SB3's tables.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        seed: of weights, starts and sampling; None is 0 for starts and draws nothing else.

    Attributes:
        version: of the policy: 0 is the base, each update makes the next.
        run: name of this incarnation of the learner; a loaded one is a new run.

    Raises:
        ConfigError: a setting that cannot work, named.
        TokenizerMismatch: the environment has another tokenizer.
        MissingData: no such model.

    Example:
        ``GRPO("tiny", "atropos/Identity-v0").warm_up(50).learn(updates=20).save("identity.zip")``
    """

    def __init__(
        self,
        policy: str | Path | type[BasePolicy] = TINY,
        env: Any = None,
        *,
        server: str | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        learning_rate: float | Schedule = 2e-4,
        warm_up_updates: int = 0,
        group_size: int = 8,
        groups_per_update: int = 8,
        concurrency: int = 64,
        temperature: float = 1.0,
        common_random_numbers: bool = False,
        collector_kwargs: Mapping[str, Any] | None = None,
        engine: str | Mapping[str, Any] | Engine = "hf",
        engine_kwargs: Mapping[str, Any] | None = None,
        max_staleness: int = 0,
        baseline: Baseline = "mean",
        scale: Scale = "none",
        drop_equal: bool = True,
        reduction: Reduction = "token_mean",
        clip_range: float | tuple[float, float] = 0.2,
        dual_clip: float | None = None,
        entropy: float | tuple[float | Schedule, EntropyKind] = 0.0,
        kl_coef: float = 0.0,
        n_epochs: int = 1,
        sub_batches: int = 1,
        max_grad_norm: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        mask_truncated: bool = False,
        alignment_limit: float = 1e-2,
        lora: Lora | None = None,
        dtype: str = "float32",
        engine_check: bool | None = None,
        slope_test: bool | None = None,
        deterministic: bool = False,
        threads: int | None = None,
        folder: str | Path | None = None,
        metrics_path: str | Path | None = None,
        checkpoint_every: int | None = None,
        lease_seconds: float = 60.0,
        policy_kwargs: dict[str, Any] | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        device: torch.device | str = "auto",
        seed: int | None = None,
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            server=server,
            env_kwargs=env_kwargs,
            tokenizer=tokenizer,
            learning_rate=learning_rate,
            temperature=temperature,
            engine=engine,
            engine_kwargs=engine_kwargs,
            betas=betas,
            weight_decay=weight_decay,
            lora=lora,
            dtype=dtype,
            folder=folder,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
            open_env=_init_setup_model,
        )
        self.warm_up_updates = warm_up_updates
        self.group_size = group_size
        self.groups_per_update = groups_per_update
        self.concurrency = concurrency
        self.common_random_numbers = common_random_numbers
        self.collector_kwargs = dict(collector_kwargs or {})
        self.max_staleness = max_staleness
        self.baseline = baseline
        self.scale = scale
        self.drop_equal = drop_equal
        self.reduction = reduction
        self.clip_range = clip_range
        self.dual_clip = dual_clip
        self.entropy = entropy
        self.kl_coef = kl_coef
        self.n_epochs = n_epochs
        self.sub_batches = sub_batches
        self.max_grad_norm = max_grad_norm
        self.mask_truncated = mask_truncated
        self.alignment_limit = alignment_limit
        self.engine_check = engine_check
        self.slope_test = slope_test
        self.deterministic = deterministic
        self.threads = threads
        self.metrics_path = metrics_path
        self.checkpoint_every = checkpoint_every
        self.lease_seconds = lease_seconds
        self.lessons = 0  # steps of format lessons so far
        check_settings(self)
        if _init_setup_model:
            self._setup_model()

    @property
    def _threads(self) -> int | None:
        if self.deterministic:
            return 1  # sums in one order, the same bits every time
        if self.threads is None and self.model_name == TINY:
            # Its matrices are too small to share: a second thread mostly waits, and on a busy machine makes
            # everything ten times slower.
            return 1
        return self.threads

    @property
    def tests_slope(self) -> bool:
        """Whether swaps are tested."""
        engine = self._parts.engine
        if getattr(engine, "swap", "hot_swap") == "none":
            return False
        return self._elsewhere(engine) if self.slope_test is None else self.slope_test

    def require_fit_engine(self) -> None:
        """Checks the engine once, where that is wanted; notes become warnings.

        Raises:
            EngineUnfit: a finding is wrong.
        """
        wanted = self._elsewhere(self.engine) if self.engine_check is None else self.engine_check
        if wanted and not self._parts.checked:
            for found in self.check_engine():
                if found.status == "note":
                    remedy = f"; {found.remedy}" if found.remedy else ""
                    warnings.warn(f"engine, {found.name}: {found.detail}{remedy}", stacklevel=3)

    def _elsewhere(self, engine: Any) -> bool:
        """Whether an engine is known and is not part of this process."""
        return engine is not None and not getattr(engine, "in_process", False)

    # -- learning --------------------------------------------------------------------------------------

    def warm_up(
        self,
        steps: int = 250,
        *,
        batch_size: int = 64,
        learning_rate: float = 3e-3,
        progress_bar: bool = False,
        on_step: Callable[[int, float], None] | None = None,
    ) -> Self:
        """Gives the format lesson: whole transcripts of a random legal player, loss on every id.

        All weights of a ``"tiny"`` policy are trained, before its first version, and the result is its base;
        of any other policy the adapter is, and it becomes the next version.

        Args:
            steps: optimizer steps.
            batch_size: transcripts a step.
            learning_rate: at its peak; 20 steps up, then linearly to 0.
            progress_bar: show one.
            on_step: told step and loss.

        Raises:
            ConfigError: no environment, or a tiny policy that has versions already or an engine elsewhere.
        """
        tasks = self._parts.tasks
        if not tasks:
            raise ConfigError("warm_up needs transcripts of an environment: give env= besides the server")
        check_count("steps of a lesson", steps, least=1)
        tiny = self.model_name == TINY
        if tiny and (self.version > 0 or self.engine_spec != "hf"):
            raise ConfigError(
                "a tiny policy's lesson changes its base: give it before the first update and with "
                f"engine='hf', not at version {self.version} with "
                f"engine={without_token(self.engine_spec)!r}"
            )
        stream = interleave(
            [transcripts(task.env, seed=(self.seed or 0) + k) for k, task in enumerate(tasks)]
        )
        with torch_threads(self._threads), trainable(self.policy.model, base=tiny) as parameters:
            with lesson_bar(steps, progress_bar, on_step) as tell:
                lesson_steps(
                    self._parts.scorer,
                    parameters,
                    stream,
                    steps=steps,
                    batch_size=batch_size,
                    learning_rate=learning_rate,
                    max_ids=self.max_ids,
                    device=self.device,
                    on_step=tell,
                )
        self.lessons += steps
        assert self._parts.folder is not None
        if tiny:
            base = self.policy.model.get_base_model()
            save_base(base, self._parts.folder.base, self.policy.base.state_dict())
        else:
            self.version += 1
        return self

    def learn(
        self,
        total_timesteps: int | None = None,
        callback: Any = None,
        log_interval: int = 1,
        tb_log_name: str = "GRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        *,
        updates: int | None = None,
    ) -> Self:
        """Learns; one of ``total_timesteps`` and ``updates`` is given.

        A timestep is one turn of a delivered group; callbacks are called once a turn.

        Args:
            total_timesteps: a lower bound, as in SB3: whole updates are made.
            callback: SB3's callbacks.
            log_interval: updates between the logger's dumps.
            tb_log_name: name for TensorBoard.
            reset_num_timesteps: start counting anew; False goes on, ``updates`` are then further ones.
            progress_bar: SB3's, in timesteps.
            updates: optimizer steps.

        Raises:
            ConfigError: neither or both of the two, or nothing to learn.
        """
        if (total_timesteps is None) == (updates is None):
            raise ConfigError("give learn() one of total_timesteps and updates=")
        if updates is not None:
            check_count("updates", updates)
        elif not (isinstance(total_timesteps, Real) and total_timesteps >= 0):
            raise ConfigError(f"total_timesteps must be a number >= 0, got {total_timesteps!r}")
        if self.env is None:
            raise ConfigError("there is nothing to learn: give env= or server=, or call set_env()")
        if self.model_name == TINY and self.lessons == 0:
            warnings.warn(
                "this tiny model is untrained: its replies are noise and earn nothing; call warm_up() first",
                stacklevel=2,
            )
        with torch_threads(self._threads):
            _learning.learn(
                self,
                total_timesteps=total_timesteps,
                updates=updates,
                callback=callback,
                log_interval=log_interval,
                tb_log_name=tb_log_name,
                reset_num_timesteps=reset_num_timesteps,
                progress_bar=progress_bar,
            )
        return self

    def entropy_trie(self) -> AnswerTrie | None:
        """Returns the answers whose entropy is kept, or None where entropy is over all ids."""
        if self._entropy[1] != "answers":
            return None
        if self._parts.trie is None:
            self._parts.trie = answers_of(self._parts.tasks)
        return self._parts.trie

    @property
    def entropy_schedule(self) -> Schedule:
        """Coefficient of the entropy bonus by remaining progress."""
        return as_schedule(self._entropy[0])

    @property
    def _entropy(self) -> tuple[float | Schedule, EntropyKind]:
        """Coefficient and kind; SB3 saves a tuple as a list."""
        coefficient, kind = self.entropy if isinstance(self.entropy, (tuple, list)) else (self.entropy, "ids")
        return coefficient, kind

    def loss_settings(self) -> LossSettings:
        """Returns what the loss is made of."""
        both = self.clip_range
        low, high = both if isinstance(both, (tuple, list)) else (both, both)
        return LossSettings(
            reduction=self.reduction,
            eps_low=low,
            eps_high=high,
            dual_clip=self.dual_clip,
            kl_coef=self.kl_coef,
            entropy_kind="ids" if self.entropy_trie() is None else "answers",
            trie=self.entropy_trie(),
            sub_batches=self.sub_batches,
            max_ids=self.max_ids,
        )

    def row_rules(self) -> RowRules:
        """Returns what rows must satisfy now."""
        return RowRules(
            vocab_size=self.policy.model.get_base_model().get_input_embeddings().num_embeddings,
            fingerprint=self.tokenizer.fingerprint,
            version=self.version,
            max_staleness=self.max_staleness,
            drop_equal=self.drop_equal,
            baseline=self.baseline,
            scale=self.scale,
            eps=0.0 if self.scale == "none" else 1e-6,
            mask_truncated=self.mask_truncated,
        )
