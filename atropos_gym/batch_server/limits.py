"""The server's limits and times, all in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

__all__ = ["BATCHES_PER_ENV", "KEPT_SECONDS", "MOST_GROUPS", "QUEUE_FULL", "Limits", "memory_allows"]

BATCHES_PER_ENV = 4
"""So many batches each connected environment may be ahead, unless ``soft_groups`` says otherwise."""

MOST_GROUPS = 4096
"""Groups in one post. A list is stored whole or not at all, and nobody else is answered meanwhile: so many
take 0.15 s, however small they are. Clients of ours post longer lists in parts."""

KEPT_SECONDS = 24 * 3600.0
"""So long does a server remember posts by their keys, the newest 400,000: the same post again counts once."""

QUEUE_FULL = "queue full"
"""The ``detail`` where there was no room for a body: nothing of it is kept."""


def memory_allows() -> int:
    """Half of this machine's memory, in bytes; where it does not tell, 16 GiB."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return 16 * 2**30


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server allows, and how long it waits. Durations are in seconds.

    Attributes:
        max_body_bytes: largest request body, counted after inflation.
        receive_seconds: within which a whole request body must have arrived, and within which a client must
            have taken each piece of a batch.
        allowed_hosts: names besides loopback's that a ``Host`` header may carry; ``"*"`` is any.
        soft_groups: so many groups may be queued before the replies to posts are held; None is four batches
            for each connected environment. Nothing is held while no batch can be formed.
        soft_bytes: so many bytes of groups may be queued before that; None is no such limit.
        hard_bytes: most bytes of groups that are kept, bodies on their way in included; beyond it no body is
            read. A store in memory keeps no more than half of the machine's memory, whatever this says.
        memory_bytes: so many bytes of groups does a store on disk hold in memory as well; what comes beyond
            lies on disk only until it goes out. Of each group some hundred bytes stay in memory anyway.
        hold_seconds: how long a post is held by either limit, 0 to 240: its sender gives up after 300.
        foreign_masks: what becomes of groups whose masks are neither -100 nor the id: refused, or kept as
            they are for a trainer that knows what they mean.
        short_batch_seconds: how long the oldest group may be passed over before a smaller batch goes out.
        buffer_seconds: how long parts of a group wait for the missing ones.
        min_wait_seconds: how long a batch waits for an environment with a minimum that sends nothing.
        env_timeout: an environment that was silent for so long counts as disconnected.
        trainer_timeout: a trainer that was silent for so long may be replaced by one with other settings.
        holding_seconds: how long a service's word on the versions it uses is good.
        save_seconds: how long an answer waits for what it says to be saved; then it is a 503.
        max_deliveries: after so many deliveries without an ack a group is set aside.
    """

    max_body_bytes: int = 256 * 2**20
    receive_seconds: float = 300.0
    allowed_hosts: tuple[str, ...] = ()
    soft_groups: int | None = None
    soft_bytes: int | None = None
    hard_bytes: int = 16 * 2**30
    memory_bytes: int = 2**30
    hold_seconds: float = 60.0
    foreign_masks: Literal["refuse", "keep"] = "refuse"
    short_batch_seconds: float = 30.0
    buffer_seconds: float = 60.0
    min_wait_seconds: float = 30.0
    env_timeout: float = 120.0
    trainer_timeout: float = 60.0
    holding_seconds: float = 120.0
    save_seconds: float = 30.0
    max_deliveries: int = 5
