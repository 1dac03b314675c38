"""Batches that a learner has leased and not yet acknowledged, so that whoever goes on after it knows them.

A learner that is killed leaves its leases open. What its last checkpoint contains must not be learned again,
and the rest should come again at once, not only when the leases have run out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atropos_gym.errors import ServerError
from atropos_gym.trainers._parts import save_whole

__all__ = ["OVER", "Leases", "server_of", "settle"]

log = logging.getLogger(__name__)

#: What a server answers where a lease is over.
OVER = (404, 409)


class Leases:
    """The open leases of one run, oldest first.

    Args:
        file: where they are written down until the run is finished; None keeps them in memory alone.
        run: whose they are.
        server: who has leased them, without a token.

    Example:
        >>> leases = Leases(None, "run-1")
        >>> leases.add("b-7", update=3)
        >>> list(leases)
        ['b-7']
    """

    def __init__(self, file: Path | None, run: str, server: str = "") -> None:
        self._file = file
        self._run = run
        self._server = server
        self._updates: dict[str, int] = {}
        self._save()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._updates))

    def add(self, batch_id: str, update: int) -> None:
        """A batch was leased; this is the update that learns from it."""
        self._updates[batch_id] = update
        self._save()

    def remove(self, batch_id: str) -> None:
        """A batch was acknowledged, or given back."""
        del self._updates[batch_id]
        self._save()

    def finish(self) -> None:
        """The run is finished: nobody goes on with it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _save(self) -> None:
        if self._file is None:
            return
        text = json.dumps({"run": self._run, "server": self._server, "updates": self._updates}) + "\n"
        save_whole(lambda path: path.write_text(text, encoding="utf-8"), self._file)


def server_of(file: Path) -> str | None:
    """The server of the run that has left this file; None where there is no file."""
    if not file.is_file():
        return None
    return str(json.loads(file.read_text(encoding="utf-8")).get("server", ""))


def settle(client: Any, file: Path, learned: int) -> None:
    """Ends what a killed learner has left: acknowledged where its checkpoint has it, else given back.

    Leases of a run that is no longer the server's newest are left alone: it may be another server, and their
    names another learner's.

    Args:
        client: a ``BatchClient`` that has registered.
        file: that learner's ``Leases``; it need not be there.
        learned: updates that the checkpoint contains.
    """
    if not file.is_file():
        return
    left = json.loads(file.read_text(encoding="utf-8"))
    if left["updates"] and client.policy().run == left["run"]:
        for batch_id, update in left["updates"].items():
            try:
                if update <= learned:
                    client.ack(batch_id)
                else:
                    client.nack(batch_id, reason="the learner was killed before this update")
            except ServerError as error:
                if error.status not in OVER:
                    raise
                log.info("batch %s of %s was over: %s", batch_id, left["run"], error)
