"""How many groups a service that plays ahead may post now."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

__all__ = ["room_of"]


def room_of(status: Mapping[str, Any], *, group_size: int, most_batches: int, minimum: float) -> int:
    """Groups that may be posted until as many batches are queued as may be played ahead.

    Once a whole batch is queued, no more than this service's share: its minimum, and by its weight a part
    of what no minimum claims. So services at one server keep to their weights, and a slow one among them
    keeps no trainer waiting. A minimum may be filled in any case.

    Args:
        status: what ``/status-env`` says, with the trainer's ``batch_size`` in sequences.
        group_size: sequences of a group, where the trainer counts those.
        most_batches: that wait at the server; less where the trainer's lag is less.
        minimum: least share of a batch, 0 to 1.

    >>> status = {"batch_size": 8, "queue_size": 2}
    >>> room_of(status, group_size=4, most_batches=3, minimum=0.0)
    4
    """
    lag = status.get("max_policy_lag")
    most = most_batches if lag is None else min(most_batches, max(1, lag))
    if wanted := status.get("groups_per_update"):
        batch, queued = float(wanted), int(status["queue_groups"])
        own = int(status.get("self_queue_groups", 0))
    else:
        batch, queued = max(1, status["batch_size"]) / group_size, int(status["queue_size"])
        own = int(status.get("self_queue_size", 0))
    free = float(status.get("unallocated_fraction", 1.0)) * float(status.get("env_weight", 1.0))
    share, least = (int(most * batch * part + 1e-9) for part in (minimum + free, minimum))
    room = min(ceil(most * batch) - queued, max(max(1, share) - own, ceil(batch) - queued))
    return max(0, room, least - own)
