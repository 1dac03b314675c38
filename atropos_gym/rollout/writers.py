"""Writes groups of episodes: JSON lines for programs, one HTML page for people.

JSON lines hold all that was played (messages, ids, mask, logprobs, turns), one group a line, and, where the
writer knows the tokenizer, the piece of every id; the page shows every id with what is known of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.html import numbered, render_page
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout._extras import show_group, sources_of, split_extras, tokenizer_name, with_extras
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.tokenizers import Tokenizer
from atropos_gym.tokenizers.pieces import pieces_of

__all__ = ["JSONLWriter", "read_jsonl", "rollouts_html", "write_html", "write_page"]


class JSONLWriter:
    """Appends groups to a file, one JSON object a line, each line whole once ``write`` returns.

    Args:
        path: file to append to; its folder is made.
        speaker: the environment's renderer: lines then also say the piece of every id and whether template,
            message or policy put it there. A tokenizer gives the pieces only.

    Example:
        >>> with JSONLWriter("rollouts.jsonl", collector.env.renderer) as writer:  # doctest: +SKIP
        ...     for group in collector.collect(8):
        ...         writer.write(group)
    """

    def __init__(self, path: str | Path, speaker: Tokenizer | ChatRenderer | None = None) -> None:
        self.path = Path(path)
        self._speaker = speaker
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, group: EpisodeGroup) -> None:
        """Appends one group.

        Raises:
            ValueError: a number in it is not finite.
        """
        # Only ASCII: a lone surrogate in a message is legal JSON, and no legal UTF-8.
        data = group.to_dict() if self._speaker is None else with_extras(group, self._speaker)
        line = json.dumps(data, allow_nan=False, separators=(",", ":"), default=_plain)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()

    def __enter__(self) -> JSONLWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: str | Path) -> Iterator[EpisodeGroup]:
    """Yields the groups of a file that ``JSONLWriter`` wrote.

    Raises:
        MissingData: there is no such file.
        ConfigError: a line is no group; the message names file and line.
    """
    try:
        file = Path(path).open(encoding="utf-8")
    except FileNotFoundError as error:
        raise MissingData(f"no rollouts at {path}: write some with `atropos-gym collect`") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                if isinstance(data, dict) and "episodes" in data:
                    split_extras(data)
                yield EpisodeGroup.from_dict(data)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def write_html(
    path: str | Path,
    groups: Iterable[EpisodeGroup],
    speaker: Tokenizer | ChatRenderer,
    *,
    title: str = "Rollouts",
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Writes the page of ``rollouts_html`` and returns its path; the file is replaced whole."""
    return write_page(path, rollouts_html(groups, speaker, title=title, facts=facts))


def write_page(path: str | Path, page: str) -> Path:
    """Writes a page so that a reader sees the old one or the new one, never a part; returns its path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    temporary.replace(target)
    return target


def rollouts_html(
    groups: Iterable[EpisodeGroup],
    speaker: Tokenizer | ChatRenderer,
    *,
    title: str = "Rollouts",
    facts: Mapping[str, object] | None = None,
) -> str:
    """Returns one self-contained page of groups.

    Args:
        groups: scored groups.
        speaker: the environment's renderer, or the tokenizer that the ids belong to.
        title: heading of the page.
        facts: more label and value pairs for its head.

    Raises:
        ConfigError: a group's ids are another tokenizer's.
    """
    tokenizer = speaker.tokenizer if isinstance(speaker, ChatRenderer) else speaker
    pieces = pieces_of(tokenizer)
    shown = []
    for group in groups:
        if group.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"group {group.number} holds ids of tokenizer {group.tokenizer_fingerprint[:15]}, "
                f"{tokenizer.name} is {tokenizer.fingerprint[:15]}: give the tokenizer it was played with"
            )
        sources = sources_of(group, speaker)
        shown.append(show_group(group, pieces, tokenizer=tokenizer_name(tokenizer), sources=sources))
    return render_page(title, numbered(shown), facts=facts)


def _plain(value: Any) -> Any:
    """Returns what a wrapper put into ``info`` as JSON has it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r} cannot be written as JSON")
