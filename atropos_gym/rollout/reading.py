"""Reads files of groups for people: whatever of them is there, and what is wrong with the rest.

``JSONLWriter``'s lines, those of older versions, and groups of the wire (one a line, a list, or a batch, as
JSON in any layout). Programs that need every group whole take ``read_jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from atropos_gym.errors import ConfigError, MissingData, TokenizerMismatch
from atropos_gym.html import Pieces, ShownGroup, numbered, wire_episodes
from atropos_gym.rollout._extras import show_group, split_extras, tokenizer_name
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.tokenizers import Tokenizer, load_tokenizer
from atropos_gym.tokenizers.pieces import pieces_of
from atropos_gym.wire import ScoredDataGroup

__all__ = ["FileOfGroups"]


class FileOfGroups:
    """The groups of a file, read one at a time.

    Args:
        path: of the file.
        tokenizer: gives the pieces where the file has none; None takes what the file says.

    Attributes:
        problems: after reading, one line for each part of the file that was left out.
        unknown_pieces: after reading, whether some ids could be shown by number only.

    Raises:
        MissingData: there is no such file.
        ConfigError: on reading: it is no text, or nothing in it is a group.
        TokenizerMismatch: on reading: a group's ids are another tokenizer's.
    """

    def __init__(self, path: str | Path, tokenizer: Tokenizer | None = None) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        self.unknown_pieces = False
        self._tokenizer = tokenizer
        if self.path.is_dir():
            files = (found for found in self.path.rglob("*.jsonl") if found.name != "metrics.jsonl")
            inside = sorted(map(str, files))[:3]
            hint = f"; found there: {', '.join(inside)}" if inside else ""
            raise ConfigError(f"{path} is a folder: name a file of groups (.jsonl){hint}")
        if not self.path.exists():
            raise MissingData(f"no file {str(path)!r}; `atropos-gym collect --out rollouts.jsonl` writes one")

    def __iter__(self) -> Iterator[ShownGroup]:
        return numbered(self._groups())

    def _groups(self) -> Iterator[ShownGroup]:
        self.problems = []
        found = False
        for where, value in self._values():
            try:
                yield self._group(value)
                found = True
            except TokenizerMismatch:
                raise
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(map(str, first["loc"]))
                self.problems.append(f"{where} is no group of the wire: {place}: {first['msg']}")
            except (ConfigError, TypeError, ValueError, KeyError, AttributeError) as error:
                self.problems.append(f"{where} is left out: {error}")
        if not found:
            raise ConfigError(
                f"{self.path}: {self.problems[0]}"
                if self.problems
                else f"{self.path} is empty; `atropos-gym collect --out rollouts.jsonl` fills one"
            )

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Yields JSON values that should be groups, with the place that each stands in."""
        try:
            with self.path.open(encoding="utf-8") as file:
                whole = _whole(file)
                if whole is not None:
                    yield from _flat("the file", whole)
                    return
                file.seek(0)
                for number, line in enumerate(file, start=1):
                    yield from self._line(number, line)
        except UnicodeDecodeError:
            raise ConfigError(f"{self.path} is no text file: groups are lines of JSON") from None

    def _line(self, number: int, line: str) -> Iterator[tuple[str, Any]]:
        if not line.strip():
            return
        try:
            value = json.loads(line)
        except ValueError as error:
            cut = "" if line.endswith("\n") else " (the file ends in it: its writer was cut off)"
            self.problems.append(f"line {number} is not JSON{cut}: {error}")
            return
        except RecursionError:
            self.problems.append(f"line {number} is nested too deeply for a group")
            return
        yield from _flat(f"line {number}", value)

    def _group(self, value: Any) -> ShownGroup:
        if not isinstance(value, dict):
            raise ConfigError(f"a group is a JSON object, this is a {type(value).__name__}")
        if "episodes" in value:
            return self._played(value)
        if "tokens" in value:
            return self._wire(ScoredDataGroup.model_validate(value))
        keys = ", ".join(f"`{key}`" for key in list(value)[:6]) or "nothing"
        raise ConfigError(f"it has neither `episodes` (by collect) nor `tokens` (the wire); it has {keys}")

    def _played(self, value: dict[str, Any]) -> ShownGroup:
        extras = split_extras(value)
        group = EpisodeGroup.from_dict(value)
        texts, control = _table(extras.get("pieces")), _table(extras.get("control"))
        pieces = Pieces.of_table(texts, control)
        name = extras.get("tokenizer")
        if not pieces.known:
            pieces, name = self._pieces(group.tokenizer_fingerprint)
        return show_group(group, pieces, tokenizer=name, sources=extras["sources"])

    def _wire(self, group: ScoredDataGroup) -> ShownGroup:
        about = group.group_overrides or {}
        fingerprint = about.get("tokenizer_fingerprint")
        pieces, name = self._pieces(fingerprint if isinstance(fingerprint, str) else None)
        number, temperature = about.get("number"), (group.generation_params or {}).get("temperature")
        return ShownGroup(
            wire_episodes(group),
            pieces,
            env=None if group.env_id is None else f"environment {group.env_id}",
            number=number if isinstance(number, int) else None,
            version=group.policy_version,
            temperature=temperature if isinstance(temperature, int | float) else None,
            tokenizer=name,
        )

    def _pieces(self, fingerprint: str | None) -> tuple[Pieces, str | None]:
        """Returns the pieces of a group whose line lists none, and the tokenizer's name."""
        tokenizer = self._tokenizer
        if tokenizer is None and fingerprint == load_tokenizer("bytes").fingerprint:
            tokenizer = load_tokenizer("bytes")
        if tokenizer is None:
            self.unknown_pieces = True
            return Pieces.unknown(), None
        if fingerprint not in (None, tokenizer.fingerprint):
            raise TokenizerMismatch(
                f"{self.path} holds ids of tokenizer {str(fingerprint)[:15]}, {tokenizer.name} is "
                f"{tokenizer.fingerprint[:15]}: give the tokenizer they were played with"
            )
        return pieces_of(tokenizer), tokenizer_name(tokenizer)


def _whole(file: Iterable[str]) -> Any:
    """Returns the one JSON value of a file that is laid out over lines, or None for a file of lines."""
    lines = iter(file)
    first = next((line for line in lines if line.strip()), "")
    try:
        json.loads(first)
        return None
    except (ValueError, RecursionError):
        rest = "".join(lines)
    try:
        return json.loads(first + rest) if rest.strip() else None
    except (ValueError, RecursionError):
        return None


def _flat(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the groups of a list, or of a batch as a server gives it."""
    if isinstance(value, Mapping) and isinstance(value.get("batch"), list):
        value = value["batch"]
    if not isinstance(value, list):
        yield where, value
        return
    for index, entry in enumerate(value):
        yield f"{where}, group {index}", entry


def _table(table: Any) -> dict[int, str]:
    """Returns a table of a file; JSON has its keys as strings."""
    return {int(id_): str(text) for id_, text in (table or {}).items()}
