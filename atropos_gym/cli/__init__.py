"""The ``atropos-gym`` command: one file a verb, one configuration model for all of them.

A user's mistake is one line on stderr and exit code 2; ``--debug`` shows the traceback as well. An interrupt
is 130. Anything else that goes wrong is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from atropos_gym.cli.command import Command, parse
from atropos_gym.cli.mistakes import as_mistake

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: the words after the program's name; None: those of this process.

    Example:
        >>> main(["fly"])  # stderr: unknown verb 'fly'; ...
        2
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    try:
        command = parse(words)
        if command is None:
            return 0
        if command.dry_run:
            return _dry_run(command)
        return _run(command)
    except KeyboardInterrupt:
        print("atropos-gym: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe has gone (`atropos-gym envs | head`): nothing is wrong on our side.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        mistake = as_mistake(error)
        if mistake is None or debug:
            raise
        print(f"atropos-gym: {mistake}", file=sys.stderr)
        return 2


def _dry_run(command: Command) -> int:
    """Prints the configuration; an environment that is not there is said now, not when the file is used."""
    from atropos_gym.cli.environment import find_env

    if command.target or "env" in command.config.reads(command.verb):
        find_env(command.target or command.config.env)
    print(command.config.to_yaml(), end="")
    return 0


def _run(command: Command) -> int:
    """Imports the verb's module, which may be heavy, and runs it; SIGTERM ends it as Ctrl-C does."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # not in the main thread: whoever embeds us handles signals
        before = None
    # Every failed try to reach the hub would be a line. It reads this once, when a verb first imports it.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        verb = importlib.import_module(f"atropos_gym.cli.{command.verb.replace('-', '_')}")
        return int(verb.run(command))
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
