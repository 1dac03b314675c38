"""What all routes share: the engine, the groups that are being played, and where finished ones go."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_gym.engines.base import Engine
from atropos_gym.html import Pieces
from atropos_gym.model_server.answers import Answer
from atropos_gym.model_server.outlet import Outlet
from atropos_gym.model_server.refusals import Refusal
from atropos_gym.model_server.requests import Wishes
from atropos_gym.model_server.sessions import Finished, Sessions
from atropos_gym.rollout.conversation import Said
from atropos_gym.tokenizers.pieces import pieces_of

__all__ = ["Desk"]


@dataclass(slots=True)
class Desk:
    """Shared by all routes of one server.

    Attributes:
        engine: who speaks.
        sessions: the groups that are being played.
        wishes: whose sampling counts.
        token: opens the routes of ``/sessions``; None for whoever reaches them.
        outlet: where finished groups are posted; None returns them.
        max_body_bytes: of a request.
        keep_alive: seconds from one sign of life to the next while a streamed reply is being sampled.
        clock: seconds since 1970.
        unposted: finished groups that the batch server did not take yet, by session.
    """

    engine: Engine
    sessions: Sessions
    wishes: Wishes = "session"
    token: str | None = None
    outlet: Outlet | None = None
    max_body_bytes: int = 256 * 2**20
    keep_alive: float = 10.0
    clock: Callable[[], float] = time.time
    unposted: dict[str, Finished] = field(default_factory=dict)
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.engine.tokenizer)

    def answer(self, kind: str, said: Sequence[Said], *, logprobs: bool, ids: bool) -> Answer:
        """Returns replies as they are told."""
        key = f"{kind}-{secrets.token_hex(12)}"
        return Answer(key, int(self.clock()), self.engine.model, said, self.pieces, logprobs, ids)

    def check_open(self) -> None:
        """Looks whether a new group would come to anything.

        Raises:
            Refusal: the trainer has finished, or its versions cannot be followed.
        """
        if self.outlet is not None and self.outlet.problem is not None:
            raise Refusal(self.outlet.problem, 503, kind="server_error", code="versions_lost")
        if self.outlet is not None and self.outlet.finished:
            raise Refusal("the trainer has finished: no more groups are wanted", 410, code="finished")

    def health(self) -> dict[str, Any]:
        """Returns whether all is well, for anyone."""
        problem = None if self.outlet is None else self.outlet.problem
        return {
            "status": "ok" if problem is None else "failing",
            "problem": problem,
            "model": self.engine.model,
            "open_sessions": len(self.sessions),
        }

    def report(self) -> dict[str, Any]:
        """Returns what is being played, what became of the rest, and what was posted."""
        posted = (
            {}
            if self.outlet is None
            else {
                "posted": self.outlet.posted,
                "refused": self.outlet.refused,
                "not posted yet": len(self.unposted),
                "version": self.outlet.version,
            }
        )
        return {**self.sessions.report(), **posted}
