"""Writes groups of episodes: JSON lines for programs, one HTML page for people.

JSON lines hold all that was played (messages, ids, mask, logprobs, turns), one group a line; the page shows
every id with what is known of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO

from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.html import Pieces, render_group, render_page
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.tokenizers import BytesTokenizer, Tokenizer

__all__ = ["JSONLWriter", "pieces_of", "read_jsonl", "rollouts_html", "write_html"]


class JSONLWriter:
    """Appends groups to a file, one JSON object a line, each line whole once ``write`` returns.

    Args:
        path: file to append to; its folder is made.

    Example:
        >>> with JSONLWriter("rollouts.jsonl") as writer:  # doctest: +SKIP
        ...     for group in collector.collect(8):
        ...         writer.write(group)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def write(self, group: EpisodeGroup) -> None:
        """Appends one group.

        Raises:
            ValueError: a number in it is not finite.
        """
        # Only ASCII: a lone surrogate in a message is legal JSON, and no legal UTF-8.
        line = json.dumps(group.to_dict(), allow_nan=False, separators=(",", ":"))
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
                yield EpisodeGroup.from_dict(json.loads(line))
            except (json.JSONDecodeError, ConfigError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def write_html(
    path: str | Path,
    groups: Iterable[EpisodeGroup],
    tokenizer: Tokenizer,
    *,
    title: str = "Rollouts",
    facts: Mapping[str, object] | None = None,
) -> Path:
    """Writes one self-contained page of groups and returns its path; the file is replaced whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = rollouts_html(groups, tokenizer, title=title, facts=facts)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8", errors="replace")
    temporary.replace(target)
    return target


def rollouts_html(
    groups: Iterable[EpisodeGroup],
    tokenizer: Tokenizer,
    *,
    title: str = "Rollouts",
    facts: Mapping[str, object] | None = None,
) -> str:
    """Returns one self-contained page of groups.

    Args:
        groups: scored groups.
        tokenizer: the one their ids belong to.
        title: heading of the page.
        facts: more label and value pairs for its head.

    Raises:
        ConfigError: a group's ids are another tokenizer's.
    """
    pieces = pieces_of(tokenizer)
    sections: list[str] = []
    returns: list[float] = []
    for group in groups:
        if group.tokenizer_fingerprint != tokenizer.fingerprint:
            raise ConfigError(
                f"group {group.number} holds ids of tokenizer {group.tokenizer_fingerprint[:15]}, "
                f"{tokenizer.name} is {tokenizer.fingerprint[:15]}: give the tokenizer it was played with"
            )
        name = f"{group.env} · group {group.number} · version {group.policy_version}"
        sections.append(render_group(group.to_wire(), pieces, title=name, open=not sections))
        returns.extend(episode.episode_return for episode in group.episodes)
    shown: dict[str, object] = {
        "groups": len(sections),
        "episodes": len(returns),
        "tokenizer": tokenizer.name,
    }
    if returns:
        shown["mean return"] = f"{sum(returns) / len(returns):.3f}"
    return render_page(title, sections, facts={**shown, **(facts or {})})


def pieces_of(tokenizer: Tokenizer) -> Pieces:
    """Returns how a tokenizer's ids are shown: control ids by name, ids without text by number.

    Example:
        >>> from atropos_gym import load_tokenizer
        >>> pieces = pieces_of(load_tokenizer("bytes"))
        >>> pieces.control(258), pieces.control(104)
        ('<end>', None)
    """

    @cache
    def control(id_: int) -> str | None:
        if isinstance(tokenizer, BytesTokenizer):
            return _BYTES_NAMES.get(id_) or (None if id_ < 256 else f"<{id_}>")
        text = tokenizer.decode([id_])
        if not text:
            return f"<{id_}>"
        # encode() gives no control id whatever the text, so what it does not give back is one. Pieces that
        # look like words are not asked: SentencePiece encodes them differently alone.
        looks_like_markup = text[0] in "<[" or text[-1] in ">]"
        return text if looks_like_markup and id_ not in tokenizer.encode(text) else None

    return Pieces(decode=lambda ids: tokenizer.decode(list(ids)), control=control)


_BYTES_NAMES = {
    BytesTokenizer.PAD: "<pad>",
    BytesTokenizer.BOS: "<bos>",
    BytesTokenizer.END: "<end>",
    BytesTokenizer.SYSTEM: "<system>",
    BytesTokenizer.USER: "<user>",
    BytesTokenizer.ASSISTANT: "<assistant>",
    BytesTokenizer.TOOL: "<tool>",
}
