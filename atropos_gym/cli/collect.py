"""``atropos-gym collect``: episodes into a file, or, as an environment service, to a batch server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from atropos_gym.batch_server.client import BatchClient
from atropos_gym.cli.command import Command
from atropos_gym.cli.config import Config
from atropos_gym.cli.engines import require_fit
from atropos_gym.cli.environment import find_env, find_function, make_env
from atropos_gym.cli.player import open_engine, with_saved_run
from atropos_gym.cli.progress import Show
from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.curriculum import Options, in_turn
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.service import EnvironmentService, Evaluation
from atropos_gym.rollout.writers import JSONLWriter, write_html

__all__ = ["run"]


def run(command: Command) -> int:
    """Collects."""
    config = command.config
    if (config.out is None) == (config.to is None):
        raise ConfigError("collect needs one of --out FILE (.jsonl or .html) and --to URL (a batch server)")
    if config.to is not None and config.legal_only:
        raise ConfigError("--legal-only: such groups cannot be trained on; leave it out, or --out FILE")
    if config.out is not None:
        _check_file(config.out)
    config = with_saved_run(command)
    env = make_env(config.env, config.env_kwargs)
    limit, items = env.max_turn_tokens, getattr(env, "items", None)
    env.close()
    if config.each_item and not items:
        raise ConfigError(f"--each-item: {config.env} has no items to go through; leave it out")
    options = in_turn(items, seed=config.seed) if config.each_item and items else None
    show = Show()
    sampling = SamplingParams(max_tokens=limit, temperature=config.temperature)
    with open_engine(config) as engine:
        if config.to is not None:
            require_fit(engine)
            _serve(config, config.to, engine, sampling, show, options)
        else:
            assert config.out is not None
            _write(config, config.out, engine, sampling, show, options)
    return 0


def _serve(
    config: Config,
    url: str,
    engine: Engine,
    sampling: SamplingParams,
    show: Show,
    options: Options = None,
) -> None:
    """Serves a trainer behind a batch server until its run is finished, or SIGTERM comes."""
    service = EnvironmentService(
        find_env(config.env),
        engine,
        url,
        name=config.name,
        max_batches_ahead=config.max_batches_ahead,
        weight=config.weight,
        min_batch_allocation=config.min_batch_allocation,
        state=config.state,
        spool=config.spool,
        curriculum=None if config.curriculum is None else find_function(config.curriculum),
        options=options,
        evaluation=_evaluation(config, show),
        on_post=lambda groups: show.say(_posted(groups)),
        **_settings(config, sampling),
    )
    with BatchClient(url, retry_seconds=0) as client:
        try:
            client.info()
        except ServerError as error:
            show.say(f"{error}; waiting for it")
        show.say(f"{service.name}: serving the trainer at {client.url}; Ctrl-C ends it")
    why = "the trainer has finished" if asyncio.run(_to_its_end(service)) else "stopped"
    print(f"{why}: {_summary(service.report)}")


async def _to_its_end(service: EnvironmentService) -> bool:
    """Serves until the trainer has finished; SIGTERM ends it sooner and in order. Returns which it was."""
    running = asyncio.create_task(service.run())
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        running.cancel()

    with contextlib.suppress(NotImplementedError):  # Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    try:
        await running
    except asyncio.CancelledError:
        if not told.is_set():  # Ctrl-C
            raise
    return not told.is_set()


def _summary(report: dict[str, Any]) -> str:
    said = f"{report['posted']} groups posted"
    if refused := sum(report["refused"].values()):
        said += f", {refused} refused"
    if (spool := report["spool"]) is not None and spool["waiting"]:
        said += f", {spool['waiting']} wait in {spool['folder']}"
    if spool is not None and (unsure := spool.get("unsure")):
        said += f", {unsure} may have arrived and lie in {spool['folder']}/unsure"
    return said


def _evaluation(config: Config, show: Show) -> Evaluation | None:
    if config.evaluate_every is None:
        return None
    return Evaluation(
        every=config.evaluate_every,
        episodes=config.episodes,
        seed=config.seed,
        env_kwargs={} if config.evaluate_split is None else {"split": config.evaluate_split},
        on_result=lambda step, result: show.say(f"evaluation at step {step}: {result}"),
    )


def _settings(config: Config, sampling: SamplingParams) -> dict[str, Any]:
    """Returns what a collector is told, whether it plays into a file or for a server."""
    return {
        "group_size": config.group_size,
        "concurrency": config.concurrency,
        "sampling": sampling,
        "seed": config.seed,
        "common_random_numbers": config.common_random_numbers,
        "env_kwargs": config.env_kwargs,
    }


def _posted(groups: list[EpisodeGroup]) -> str:
    returns = [episode.episode_return for group in groups for episode in group.episodes]
    version = groups[-1].policy_version
    return f"posted {len(groups)} groups of version {version}, mean return {sum(returns) / len(returns):.4f}"


def _check_file(path: Path) -> None:
    if path.suffix not in (".jsonl", ".html"):
        raise ConfigError(f"--out {path}: the file must end in .jsonl or .html")
    if path.exists():
        raise ConfigError(f"--out {path}: the file exists already; choose another name or remove it")
    try:  # now, not after a model was loaded and played
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}; choose another place") from None


def _write(
    config: Config, path: Path, engine: Engine, sampling: SamplingParams, show: Show, options: Options = None
) -> None:
    """Plays the groups into a file, a round of them at a time; what was played is in it after each round."""
    collector = GroupCollector(
        find_env(config.env),
        engine,
        options=options,
        legal_only=config.legal_only,
        **_settings(config, sampling),
    )
    a_round = max(1, config.concurrency // config.group_size)
    groups: list[EpisodeGroup] = []
    with ExitStack() as parts:
        parts.callback(collector.close)
        update = parts.enter_context(show.bar(config.env, config.groups))
        writer = None
        if path.suffix == ".jsonl":
            writer = parts.enter_context(JSONLWriter(path, collector.env.renderer))
        while len(groups) < config.groups:
            played = collector.collect(min(a_round, config.groups - len(groups)))
            if writer is not None:
                for group in played:
                    writer.write(group)
            groups += played
            update(len(groups))
    if writer is None:
        write_html(path, groups, collector.env.renderer, title=config.env)
    returns = [episode.episode_return for group in groups for episode in group.episodes]
    mean = sum(returns) / len(returns)
    count = f"{len(groups)} group{'s' if len(groups) > 1 else ''}"
    print(f"{path}: {count}, {len(returns)} episodes, mean return {mean:.4f}")
