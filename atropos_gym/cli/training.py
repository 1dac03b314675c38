"""A training run as stages: evaluated untrained, after the format lesson, and after GRPO.

Each stage that is finished stands in ``summary.json`` and is not repeated by ``--resume``; GRPO goes on from
its last checkpoint. With a server of the run's own, batches travel over HTTP: a service plays in a thread of
this process, a batch server runs in a process of its own, and adapters come back through ``/policy``.
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from stable_baselines3.common.callbacks import BaseCallback

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.batch_server.serve import ServerProcess
from atropos_gym.cli.blackjack import BlackjackScorer, letters
from atropos_gym.cli.environment import find_env, make_env
from atropos_gym.cli.folder import RunFolder
from atropos_gym.cli.learner import open_learner
from atropos_gym.cli.models import set_threads
from atropos_gym.cli.progress import Show, Update
from atropos_gym.cli.report import write_report
from atropos_gym.cli.samples import play_samples, write_samples
from atropos_gym.errors import AtroposError
from atropos_gym.rollout.evaluation import evaluate
from atropos_gym.rollout.service import EnvironmentService, ServiceThread
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.tiny import TINY

__all__ = ["LessonFailed", "Training"]

#: What the format lesson must reach (``check_lesson``).
LEAST_VALID = 0.985
MOST_BIAS = 0.05


class LessonFailed(AtroposError):
    """The format lesson did not make a random player of the model."""


class Training:
    """One run of ``atropos-gym train``.

    Args:
        folder: where it writes, and what it is.
        show: where progress is shown.
        started: when the command was started, by ``time.monotonic``: loading torch is part of setting up.
    """

    def __init__(self, folder: RunFolder, show: Show, *, started: float | None = None) -> None:
        self._started = time.monotonic() if started is None else started
        self.folder = folder
        self.config = folder.config
        self.show = show
        self._cpu_before = float(folder.summary.get("cpu_seconds", 0.0))

    def open(self) -> None:
        """Makes environment, learner and engine; what cannot work in the configuration is told here."""
        config = self.config
        with self._phase("set-up", since=self._started):
            if config.server is not None:
                _reach(config.server)
            set_threads(config.threads, tiny=config.policy == TINY)
            self.env = make_env(config.env, config.env_kwargs)
            self.model = open_learner(self.folder)
            if config.engine == "vllm":
                self.show.say(
                    f"starting vLLM, which takes minutes on a CPU; its log: {self.folder.path / 'vllm.log'}"
                )
            self.engine = self.model.engine
            self.model.require_fit_engine()
            self.scorer = BlackjackScorer(self.env) if BlackjackScorer.fits(self.env) else None
            self._save_references()

    def run(self) -> None:
        """Runs the stages that are not finished yet, and writes the report; ``open`` comes first."""
        summary = self.folder.summary
        try:
            if self.config.warm_up and not self.model.lessons:
                if "untrained" not in summary:
                    self._evaluate("untrained")
                self._lesson()
            if "before" not in summary:
                self._evaluate("before")
                if self.config.check_lesson:
                    self._check_lesson()
            self._learn()
            self._evaluate("after")
            self._save(status="finished")
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            self._save(status="interrupted" if stopped else f"failed: {error}")
            raise
        finally:
            self.engine.shutdown()
            self.model.close()
            self.env.close()
            write_report(self.folder.path)

    # -- stages ----------------------------------------------------------------------------------------

    def _lesson(self) -> None:
        config = self.config
        with self._phase("format lesson"), self.show.bar("format lesson", config.warm_up) as update:
            self.model.warm_up(
                config.warm_up,
                batch_size=config.warm_up_batch_size,
                learning_rate=config.warm_up_learning_rate,
                on_step=lambda step, loss: update(step, f"loss {loss:.3f} nats an id"),
            )
            self.model.checkpoint()

    def _learn(self) -> None:
        config, model = self.config, self.model
        missing = config.updates - model._n_updates
        if missing <= 0:
            return
        with self._phase("GRPO"), ExitStack() as parts:
            update = parts.enter_context(self.show.bar("GRPO", config.updates))
            if config.own_server:
                server = parts.enter_context(ServerProcess(tokenizer=model.tokenizer.name))
                model.server, model._parts.server_ended = server.url, server.ended
                parts.enter_context(self._service(server.url))
            elif config.server is not None:
                model.server = config.server
            curve = _Curve(self, update)
            again = model._n_updates > 0
            model.learn(updates=missing, callback=curve, log_interval=0, reset_num_timesteps=not again)
        self._save(
            updates=model._n_updates,
            episodes_trained=model._n_updates * config.groups_per_update * config.group_size,
        )
        if model.version > 0:
            target = self.folder.path / "adapter"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(model.save_version(), target)

    def _service(self, url: str) -> ServiceThread:
        """The environment service, in a thread of this process beside the learner's engine."""
        config = self.config
        service = EnvironmentService(
            find_env(config.env),
            self.engine,
            url,
            name=self.folder.path.name,
            first_number=self.model._n_updates * config.groups_per_update,
            group_size=config.group_size,
            concurrency=config.concurrency,
            seed=config.seed,
            common_random_numbers=config.common_random_numbers,
            env_kwargs=config.env_kwargs,
        )
        return service.in_thread()

    def _evaluate(self, stage: str) -> None:
        """Plays a stage's episodes, computes exact values where they are known, and keeps samples."""
        config = self.config
        last = stage == "after"
        episodes = config.final_episodes if last and config.final_episodes else config.episodes
        title = {"untrained": "untrained", "before": "before GRPO", "after": "after GRPO"}[stage]
        with self._phase("evaluation"), self.show.bar(f"evaluation, {title}", episodes) as update:
            result = evaluate(
                find_env(config.env),
                self.model,
                episodes,
                seed=config.seed,
                deterministic=last,
                env_kwargs=config.env_kwargs,
                concurrency=config.concurrency,
                progress=lambda done: None if done % 64 else update(done),
            )
            row: dict[str, Any] = {
                "mean": result.mean,
                "stderr": result.stderr,
                "episodes": result.episodes,
                "valid": result.valid,
                "success": result.success,
                "play": "greedy" if last else "sampled",
            }
            if self.scorer is not None:
                table = self.scorer.greedy(self.model)
                row["exact"] = self.scorer.value(table)
                row["exact_sampled"] = self.scorer.value(self.scorer.sampled(self.model))
                if last:
                    self.folder.summary["tables"] = {"learned": letters(table), "textbook": letters()}
            play_samples(self.folder, self.model, stage)
            self.folder.summary[stage] = row
            write_samples(self.folder, self.model, stage)
            update(episodes, f"return {result.mean:+.4f} ± {result.stderr:.4f}")
        self._save(swaps=self._swaps())

    def _check_lesson(self) -> None:
        """Raises LessonFailed unless the lesson's policy has the format and plays like a random player."""
        before = self.folder.summary["before"]
        if before["valid"] < LEAST_VALID:
            raise LessonFailed(
                f"after the format lesson {100 * before['valid']:.1f} % of replies are valid, "
                f"at least {100 * LEAST_VALID:.1f} % are needed; give it more steps with --warm-up "
                f"(now {self.config.warm_up}), or go on all the same with --no-check-lesson"
            )
        if self.scorer is not None:
            random = self.scorer.references()["random"]
            if abs(before["exact_sampled"] - random) > MOST_BIAS:
                raise LessonFailed(
                    f"after the format lesson the policy is worth {before['exact_sampled']:.4f}, more than "
                    f"{MOST_BIAS} from a random player's {random:.4f}; give it more steps with --warm-up "
                    f"(now {self.config.warm_up}), or go on all the same with --no-check-lesson"
                )

    # -- what is kept ----------------------------------------------------------------------------------

    def _save_references(self) -> None:
        scores = dict(self.env.scores)
        changes: dict[str, Any] = {name: scores[name] for name in ("random", "optimal") if name in scores}
        if self.scorer is not None:
            changes["references"] = self.scorer.references()
        self._save(status="running", **changes)

    def _swaps(self) -> int:
        return int(self.engine.counters["published"])

    @contextmanager
    def _phase(self, name: str, *, since: float | None = None) -> Iterator[None]:
        started = time.monotonic() if since is None else since
        try:
            yield
        finally:
            self.folder.spend(name, time.monotonic() - started)
            self._save()

    def _save(self, **changes: Any) -> None:
        self.folder.save(**changes, cpu_seconds=round(self._cpu_before + _cpu_seconds(), 1))


class _Curve(BaseCallback):  # type: ignore[misc]
    """Shows each update and, every so often, adds the exact value of greedy play to the curve."""

    def __init__(self, training: Training, update: Update) -> None:
        super().__init__()
        self._training = training
        self._update = update

    def _on_rollout_start(self) -> None:
        self._at(self.model._n_updates)

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self._at(self.model._n_updates)

    def _at(self, update: int) -> None:
        training = self._training
        curve: list[dict[str, Any]] = training.folder.summary.setdefault("curve", [])
        due = update % training.config.eval_every == 0 or update == training.config.updates
        if training.scorer is not None and due and not any(point["update"] == update for point in curve):
            assert isinstance(self.model, GRPO)
            exact = training.scorer.value(training.scorer.greedy(self.model))
            curve.append({"update": update, "exact": exact})
            training._save(updates=update)
        # The logger keeps what the last update recorded.
        mean = self.logger.name_to_value.get("rollout/ep_rew_mean")
        notes = [f"return {mean:+.3f}"] if mean is not None else []
        notes += [f"exact {curve[-1]['exact']:+.4f}"] if curve else []
        self._update(update, "  ".join(notes))


def _reach(url: str) -> None:
    """Raises ServerError where no server answers: a run should not find out after its first evaluation."""
    with BatchClient(url, retry_seconds=3.0) as client:
        client.info()


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
