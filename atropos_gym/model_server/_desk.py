"""What all routes share: the engine, the groups that are being played, and where finished ones go."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atropos_gym.engines.base import Engine
from atropos_gym.html import Pieces
from atropos_gym.model_server.answers import Answer
from atropos_gym.model_server.outlet import Outlet
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
        clock: seconds since 1970.
        unposted: finished groups that the batch server did not take yet, by session.
    """

    engine: Engine
    sessions: Sessions
    wishes: Wishes = "session"
    token: str | None = None
    outlet: Outlet | None = None
    clock: Callable[[], float] = time.time
    unposted: dict[str, Finished] = field(default_factory=dict)
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = pieces_of(self.engine.tokenizer)

    def answer(self, kind: str, said: Sequence[Said], *, logprobs: bool, ids: bool) -> Answer:
        """Returns replies as they are told."""
        key = f"{kind}-{secrets.token_hex(12)}"
        pieces = self.pieces if logprobs else None
        return Answer(key, int(self.clock()), self.engine.model, said, pieces, ids)
