"""atropos-gym with a record of what becomes of each group: ``python -m tests.tools.recorded FILE VERB ...``.

Each line of the file is one event, written in one piece, so that it is whole whenever the process is killed:
a collector says which groups it has ``kept`` and which of them the server has ``answered``; a learner which
batches were ``delivered`` (and then ``leased`` for an update), which updates are in a ``checkpoint`` on disk,
what was ``acked``, which versions are ``held`` and of which the folders are left when it has ``pruned``.
Adapters of all versions are copied to ``adapters/`` beside the file, where nobody deletes them.

A file beside it whose name ends in ``.hold`` names an event: the process waits right after the next such
event until it is killed, or that file is gone or says something else (a number follows the event's name).
So a kill comes between two chosen steps on any machine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Recorder", "hold_of", "main", "versions_in"]


class Recorder:
    """Writes events to a file.

    Args:
        file: where to.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._hold = hold_of(file)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, event: str, **values: Any) -> None:
        """Writes a line, and waits where it is to."""
        hold = self._held()
        held = hold.partition(" ")[0] == event
        line = json.dumps({"event": event, "at": time.time(), "held": held, **values})
        os.write(self._descriptor, line.encode() + b"\n")
        while held and self._held() == hold:
            time.sleep(0.02)

    def _held(self) -> str:
        try:
            return self._hold.read_text()
        except FileNotFoundError:
            return ""


def hold_of(file: Path) -> Path:
    """The file that says at which event the writer of a record waits."""
    return file.with_name(f"{file.name}.hold")


def record_collector(recorder: Recorder) -> None:
    """Notes groups as they are safe in the spool, and as the server has them."""
    from atropos_gym.batch_server import spool as module
    from atropos_gym.batch_server.client import AsyncBatchClient
    from atropos_gym.rollout import service

    class Spool(module.Spool):
        def keep(self, groups: Sequence[Any]) -> list[module.Kept]:
            kept = super().keep(groups)
            recorder.note("kept", versions={number_of(group): version_of(group) for group in groups})
            return kept

        def posted(self, kept: module.Kept) -> None:
            recorder.note("answered", number=number_of(module._group(kept, kept.path.read_bytes())))
            super().posted(kept)

    class Client(AsyncBatchClient):
        def __init__(self, *arguments: Any, spool: Any = None, **options: Any) -> None:
            super().__init__(*arguments, spool=None if spool is None else Spool(spool), **options)

    service.AsyncBatchClient = Client  # type: ignore[misc]


def record_learner(recorder: Recorder) -> None:
    """Notes batches as they come, updates as they are on disk, and batches as they are acknowledged."""
    from atropos_gym.batch_server.client import BatchClient
    from atropos_gym.trainers import _sources
    from atropos_gym.trainers._parts import RunFolder
    from atropos_gym.trainers.grpo import GRPO

    archive = recorder.file.parent / "adapters"
    checkpoint, save_version, lease = GRPO.checkpoint, GRPO.save_version, _sources.ServerSource.next
    prune, held = RunFolder.prune, _sources.ServerSource.held

    class Client(BatchClient):
        def batch(self, **options: Any) -> Any:
            batch = super().batch(**options)
            if batch is not None:
                groups = [of_group(group) for group in batch.groups]
                recorder.note("delivered", batch=batch.batch_id, delivery=batch.delivery, groups=groups)
            return batch

        def ack(self, batch_id: str, rank: int | None = None) -> dict[str, Any]:
            said = super().ack(batch_id, rank)
            recorder.note("acked", batch=batch_id)
            return said

    def recorded_lease(source: _sources.ServerSource, update: int) -> Any:
        groups = lease(source, update)
        recorder.note("leased", update=update)
        return groups

    def recorded_held(source: _sources.ServerSource) -> set[int]:
        versions = held(source)
        recorder.note("held", versions=sorted(versions))
        return versions

    def recorded_prune(folder: RunFolder, keep: set[int]) -> None:
        before = versions_in(folder.adapters)
        prune(folder, keep)
        recorder.note("pruned", before=before, left=versions_in(folder.adapters), newest=max(keep))

    def recorded_checkpoint(model: GRPO) -> Path:
        path = checkpoint(model)
        recorder.note("checkpoint", update=model._n_updates, version=model.version)
        return path

    def kept_version(model: GRPO) -> Path:
        folder = save_version(model)
        copy = archive / f"v{model.version}"
        if not copy.exists():
            partial = copy.with_name(f".{copy.name}")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial)
            partial.rename(copy)
        return folder

    _sources.BatchClient = Client  # type: ignore[misc]
    _sources.ServerSource.held = recorded_held  # type: ignore[method-assign]
    RunFolder.prune = recorded_prune  # type: ignore[method-assign]
    _sources.ServerSource.next = recorded_lease  # type: ignore[method-assign]
    GRPO.checkpoint = recorded_checkpoint  # type: ignore[method-assign]
    GRPO.save_version = kept_version  # type: ignore[method-assign]


def versions_in(adapters: Path) -> list[int]:
    """The versions whose folders are there."""
    return sorted({int(folder.name.rpartition("-v")[2]) for folder in adapters.glob("run-*-v*")})


def number_of(group: Any) -> int:
    """The number of a group in its service's run: it is never played twice."""
    return int(group.group_overrides["number"])


def version_of(group: Any) -> int:
    """The oldest version that sampled in a group."""
    return int(group.group_overrides["policy_version"])


def of_group(group: Any) -> dict[str, Any]:
    """What is looked at later."""
    return {
        "number": number_of(group),
        "version": version_of(group),
        "ids": group.tokens,
        "logprobs": group.inference_logprobs,
        "turns": [override["turns"] for override in group.overrides],
        "turn_versions": [override["turn_versions"] for override in group.overrides],
    }


def main(words: Sequence[str]) -> int:
    """Runs a verb and records it."""
    from atropos_gym.cli import main as run

    recorder = Recorder(Path(words[0]))
    recorder.note("start")
    {"collect": record_collector, "train": record_learner}[words[1]](recorder)
    return int(run(list(words[1:])) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
