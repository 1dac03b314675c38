"""``atropos-gym view``: a file of groups as a page for the browser, or as text in the terminal."""

from __future__ import annotations

import sys
import webbrowser
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_gym.cli._transcript import Transcript, wants_colour
from atropos_gym.cli.command import Command
from atropos_gym.errors import ConfigError
from atropos_gym.html import ShownGroup, render_page
from atropos_gym.rollout.reading import FileOfGroups
from atropos_gym.rollout.writers import write_page
from atropos_gym.tokenizers import load_tokenizer

__all__ = ["run"]


def run(command: Command) -> int:
    """Shows the file."""
    options = command.options
    path, only = Path(command.target), options["episode"]
    if path.suffix == ".html" and path.is_file():
        raise ConfigError(f"{path} is a page already: open it in a browser, or name the .jsonl of its groups")
    name = options["tokenizer"]
    file = FileOfGroups(path, None if name is None else load_tokenizer(name))
    groups = iter(file) if only is None else _chosen(file, only)
    if options["terminal"] or options["ids"]:
        _print(groups, Transcript(colour=wants_colour(sys.stdout), ids=options["ids"]))
    else:
        _write(path, groups, options)
    for problem in file.problems:
        print(f"atropos-gym: {path}: {problem}", file=sys.stderr)
    if file.unknown_pieces:
        print(
            f"atropos-gym: {path} does not say what its ids spell; --tokenizer NAME shows their text",
            file=sys.stderr,
        )
    return 0


def _print(groups: Iterable[ShownGroup], transcript: Transcript) -> None:
    for group in groups:
        for line in transcript.group(group):
            print(line.encode("utf-8", "replace").decode("utf-8"))


def _write(path: Path, groups: Iterable[ShownGroup], options: Mapping[str, Any]) -> None:
    target = options["out"] or path.with_suffix(".html")
    if target.exists() and target.samefile(path):
        raise ConfigError(f"-o {target} is the file that is shown; name another one")
    try:
        write_page(target, render_page(path.name, groups))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}; choose another with -o") from None
    print(target)
    if options["open"] and not webbrowser.open(target.resolve().as_uri()):
        print(f"atropos-gym: no browser is known here; open {target} yourself", file=sys.stderr)


def _chosen(file: FileOfGroups, only: int) -> Iterator[ShownGroup]:
    """Yields the group of the one episode that is asked for."""
    count = 0
    for group in file:
        count += len(group.episodes)
        if group.first <= only < count:
            yield replace(group, only=only)
            return
    raise ConfigError(f"--episode {only}: {file.path} holds {count} episodes, numbered from 0")
