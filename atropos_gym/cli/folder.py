"""A run's folder: its configuration and its summary, whole at any moment.

``summary.json`` is written after every stage and every point of the curve, by a temporary name and a rename,
so that a run which was killed can be read and gone on with.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from atropos_gym.cli.config import Config, load_yaml
from atropos_gym.cli.environment import short_name
from atropos_gym.errors import ConfigError, MissingData

__all__ = ["RunFolder", "write_whole"]


class RunFolder:
    """The folder of one run.

    Attributes:
        path: the folder.
        config: its configuration.
        summary: what ``summary.json`` holds; ``save`` writes it.
    """

    def __init__(self, path: Path, config: Config, summary: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.summary = summary

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Makes a new folder below ``config.runs`` with ``config.yaml`` in it.

        Raises:
            ConfigError: the name is taken, or no folder name.
        """
        task = short_name(config.env)
        name = config.name if config.name is not None else _free_name(config.runs, task)
        if not name or name in (".", "..") or Path(name).name != name:
            raise ConfigError(f"name {name!r} cannot be a folder's name; take letters, digits and dashes")
        path = config.runs / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise ConfigError(
                f"{path} exists already; choose another --name, "
                f"or go on with `atropos-gym train --resume {path}`"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {path}: {error.strerror}; choose another --runs"
            ) from None
        config = config.model_copy(update={"name": name})
        write_whole(path / "config.yaml", config.to_yaml())
        summary = {"env": config.env, "policy": config.policy, "seed": config.seed, "status": "running"}
        if config.secrets:
            summary["secrets"] = config.secrets
        folder = cls(path, config, summary)
        folder.save()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Opens a folder that a run has left.

        Raises:
            MissingData: no run is there.
        """
        if not (path / "config.yaml").is_file():
            found = sorted(p.parent.name for p in path.parent.glob("*/config.yaml"))
            hint = f"; found there: {', '.join(found[-5:])}" if found else ""
            raise MissingData(f"no run in {str(path)!r} (it has no config.yaml){hint}")
        config = Config.model_validate(load_yaml(path / "config.yaml"))
        summary: dict[str, Any] = {"env": config.env, "policy": config.policy, "seed": config.seed}
        if (path / "summary.json").is_file():
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        return cls(path, config, summary)

    def save(self, **changes: Any) -> None:
        """Puts ``changes`` into the summary and writes it."""
        self.summary.update(changes)
        write_whole(self.path / "summary.json", json.dumps(self.summary, indent=2) + "\n")

    def spend(self, phase: str, seconds: float) -> None:
        """Adds to the seconds of a phase."""
        spent = dict(self.summary.get("seconds") or {})
        spent[phase] = round(spent.get(phase, 0.0) + seconds, 3)
        self.summary["seconds"] = spent


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _free_name(runs: Path, task: str) -> str:
    """``task-1``, or the next number that is free."""
    taken = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    number = 1
    while f"{task}-{number}" in taken:
        number += 1
    return f"{task}-{number}"
