"""What a learner holds while it runs and never saves: tokenizer, tasks, engine, folders, the metrics file."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atropos_gym.tokenizers import Tokenizer
from atropos_gym.trainers._swap_watch import SwapWatch
from atropos_gym.trainers._sync import Sync
from atropos_gym.trainers._tasks import Task
from atropos_gym.trainers.entropy import AnswerTrie

__all__ = ["MetricsFile", "Parts", "Phases", "RunFolder", "torch_threads"]


@dataclass(slots=True)
class Parts:
    """Runtime objects of a learner.

    Attributes:
        tokenizer: the policy's.
        tasks: what it learns.
        engine: who samples; None until it is asked for.
        owns_engine: it was made here, so it is closed here.
        player: who plays the learner's policy where ``engine`` never changes.
        folder: where adapters, metrics and checkpoints go.
        scorer: scores rows under the current adapter.
        trie: answers of the tasks, once looked up.
        checked: the engine was tried.
        noise: root mean square of engine minus learner, once measured.
        watch: over the engine's swaps.
        registered_at: the server whose trainer this learner is.
        server_ended: says whether the server, a child of this process, has ended; None where it is no child.
        sync: runs the engine's coroutines.
    """

    tokenizer: Tokenizer | None = None
    tasks: list[Task] = field(default_factory=list)
    engine: Any = None
    owns_engine: bool = False
    player: Any = None
    folder: RunFolder | None = None
    scorer: Any = None
    trie: AnswerTrie | None = None
    checked: bool = False
    noise: float | None = None
    watch: SwapWatch | None = None
    registered_at: str | None = None
    server_ended: Callable[[], bool] | None = None
    sync: Sync = field(default_factory=Sync)


class RunFolder:
    """A learner's folder: given, or a temporary one that goes when the learner is closed.

    Attributes:
        path: the folder.
        adapters: below it, one folder a version.
        checkpoints: below it.
        base: below it, the base model that a format lesson made.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="atropos-gym-") if path is None else path).resolve()
        # Also without close(), when the learner is collected or the process ends.
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, True) if path is None else None
        self.adapters = self.path / "adapters"
        self.checkpoints = self.path / "checkpoints"
        self.base = self.path / "base"
        self.path.mkdir(parents=True, exist_ok=True)

    def prune(self, keep: set[int]) -> None:
        """Deletes the adapters of all versions but those in ``keep``, earlier runs' of this folder too."""
        for folder in self.adapters.glob("run-*-v*"):
            if int(folder.name.rsplit("-v", 1)[1]) not in keep:
                shutil.rmtree(folder)

    def close(self) -> None:
        """Removes it if it is temporary; idempotent."""
        if self._remove is not None:
            self._remove()


class MetricsFile:
    """``metrics.jsonl``: one object an update, whole lines only, readable while it grows.

    Args:
        path: where it stands; lines are added.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def add(self, values: Mapping[str, float | int | None]) -> None:
        """Adds a line; what is not a number (no id had an entropy, say) becomes null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain, allow_nan=False) + "\n")


class Phases:
    """Seconds of an update by phase: ``time/collect``, ``time/read``, ``time/train``, ``time/publish``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what runs within it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - start


@contextmanager
def torch_threads(wanted: int | None) -> Iterator[None]:
    """Within it torch computes on so many threads; None leaves it as it is."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def save_whole(save: Any, path: Path) -> Path:
    """Calls ``save(temporary path)`` and renames: whoever sees ``path`` sees all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}")
    try:
        save(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
