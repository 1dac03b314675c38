"""Adapter folders as the server sees them: where they are, or copied to a folder that both sides share."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["SharedFolder"]


class SharedFolder:
    """Makes adapter folders visible to a server in another place.

    Args:
        shared: a folder that both see under one path; None: every folder is visible.
    """

    def __init__(self, shared: str | Path | None) -> None:
        self._shared = None if shared is None else Path(shared).expanduser().absolute()
        self._copies: dict[str, Path] = {}

    def place(self, name: str, folder: Path) -> Path:
        """Returns where the server finds ``folder``; a copy is complete before it has its name."""
        if self._shared is None or folder.is_relative_to(self._shared):
            return folder
        self._shared.mkdir(parents=True, exist_ok=True)
        copy = self._shared / name
        unfinished = self._shared / f".{name}.unfinished"
        for old in (unfinished, copy):
            shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(folder, unfinished)
        unfinished.rename(copy)
        self._copies[name] = copy
        return copy

    def remove(self, name: str) -> None:
        """Deletes the copy that was made for ``name``; the folder that it was made of is not ours."""
        copy = self._copies.pop(name, None)
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)

    def clear(self) -> None:
        """Deletes all copies."""
        for name in list(self._copies):
            self.remove(name)
