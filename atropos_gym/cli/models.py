"""Models by name: a folder that is not there is told at once, and the libraries that load them keep quiet."""

from __future__ import annotations

import os
from pathlib import Path

from atropos_gym.errors import MissingData

__all__ = ["find_model", "set_threads"]


def find_model(name: str) -> str:
    """Returns what loads the model: a folder, or a hub's name; ``hf:`` before it means the same.

    Call it before transformers is imported: progress bars of loading a folder are switched off.

    Raises:
        MissingData: ``name`` can only be a folder, and is none.

    Example:
        >>> find_model("hf:HuggingFaceTB/SmolLM2-135M-Instruct")
        'HuggingFaceTB/SmolLM2-135M-Instruct'
    """
    name = name.removeprefix("hf:")
    path = Path(name).expanduser()
    if path.is_dir():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return str(path)
    inside = path.parent.is_dir() and path.parent != Path(".")  # such as runs/x where runs is here
    if path.is_absolute() or name.startswith((".", "~")) or inside or name.count("/") > 1:
        there = sorted(p.name for p in path.parent.glob("*/") if p.is_dir()) if path.parent.is_dir() else []
        found = f"; in {path.parent} there are: {', '.join(there[:8])}" if there else ""
        raise MissingData(f"no model and no run in {name!r}: there is no such folder{found}")
    return name


def set_threads(threads: int | None, *, tiny: bool = False) -> None:
    """Sets the number of threads; None leaves it to torch, but for a tiny model, which gets one.

    Its matrices are too small to share: on a machine with other work, threads that wait for each other made a
    run ten times slower.
    """
    wanted = 1 if threads is None and tiny else threads
    if wanted is not None:
        import torch

        torch.set_num_threads(wanted)
