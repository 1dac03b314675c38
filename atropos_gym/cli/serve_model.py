"""``atropos-gym serve-model``: an OpenAI-shaped server for agent programs, until Ctrl-C."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

from atropos_gym.batch_server.access import Access
from atropos_gym.batch_server.client import AsyncBatchClient, without_token
from atropos_gym.batch_server.hosts import TOKEN_VARIABLE, is_loopback, listen
from atropos_gym.cli.command import Command
from atropos_gym.cli.config import Config
from atropos_gym.cli.player import open_engine, with_saved_run
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import ConfigError
from atropos_gym.model_server.app import create_app
from atropos_gym.model_server.outlet import Outlet
from atropos_gym.model_server.serve import serve

__all__ = ["run"]


def run(command: Command) -> int:
    """Serves; the line that it prints says where, the last one what became of the groups."""
    config = with_saved_run(command)
    token = Access.find(config.token).token
    if not is_loopback(config.host) and token is None and not config.insecure:
        raise ConfigError(
            f"host {config.host!r} can be reached from other machines and there is no token: set "
            f"{TOKEN_VARIABLE} or --token, use 127.0.0.1, or --insecure where the network is trusted"
        )
    name = config.name or "agent"
    sampling = SamplingParams(max_tokens=config.reply_tokens, temperature=config.temperature)
    with closing(listen(config.host, config.port)) as listener, open_engine(config) as engine:
        outlet = None
        if config.to is not None:
            client = AsyncBatchClient(config.to)
            outlet = Outlet(engine, client, name=name, group_size=config.group_size)
        app = create_app(
            engine,
            sampling=sampling,
            seed=config.seed,
            name=name,
            wishes=config.wishes,
            idle_seconds=config.idle_seconds,
            alternatives=config.alternatives,
            outlet=outlet,
            token=token,
            hosts=("*",) if config.insecure else (),
            max_body_bytes=config.max_body_bytes,
        )
        serve(app, listener, lambda url: _say_ready(url, config))
        counts = app.state.desk.sessions.counts + Counter({"not posted": len(app.state.desk.unposted)})
    ended = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()) if how != "opened")
    print(f"{counts['opened']} groups opened{': ' if ended else ''}{ended}")
    return 0


def _say_ready(url: str, config: Config) -> None:
    where = "" if config.to is None else f"; finished groups go to {without_token(config.to)}"
    print(f"Model server ready on {url} (POST /sessions opens a group){where}", flush=True)
