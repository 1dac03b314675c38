"""Adapter folders as the server sees them: where they are, or copied to a folder that both sides share."""

from __future__ import annotations

import secrets
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
        """Returns where the server finds ``folder``; a copy is complete before it has its name.

        No copy's path was ever used before: a server takes what it cached of a path for what is there now.
        """
        if self._shared is None:
            return folder
        if folder.is_relative_to(here := self._shared.resolve()):
            return self._shared / folder.relative_to(here)  # the server may have it under that path alone
        self._shared.mkdir(parents=True, exist_ok=True)
        copy = self._shared / f"{name}-{secrets.token_hex(4)}"
        unfinished = copy.with_name(f".{copy.name}.unfinished")
        try:
            shutil.copytree(folder, unfinished)
            unfinished.rename(copy)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
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
