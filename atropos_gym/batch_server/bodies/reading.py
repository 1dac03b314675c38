"""Groups out of a body: straight into arrays where they are plainly right, else by the exact validator."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from fastapi import HTTPException

from atropos_gym.batch_server.bodies.exact import is_json, parse_body, parse_groups
from atropos_gym.batch_server.bodies.fast_json import read_json_groups
from atropos_gym.batch_server.bodies.msgpack import MSGPACK, read_msgpack_groups, unpack_plain
from atropos_gym.batch_server.state.intake import Incoming

__all__ = ["GroupsRefused", "answer", "exact_groups", "plain_groups"]

log = logging.getLogger(__name__)

MOST_SENDERS = 1000
"""So many environments are told apart among the groups of one refused list."""


class GroupsRefused(HTTPException):
    """Posted groups that cannot be used.

    Attributes:
        senders: how many groups of which environments, None where unknown.
    """

    def __init__(self, status: int, detail: Any, senders: Iterable[tuple[int | None, int]]) -> None:
        super().__init__(status, detail)
        self.senders = dict(senders)

    @property
    def reason(self) -> str:
        """A word for the first thing that is wrong."""
        return str(self.detail[0]["type"]) if isinstance(self.detail, list) else f"status_{self.status_code}"


def plain_groups(body: bytes, media_type: str, many: bool) -> list[Incoming] | None:
    """The groups of a body that is plainly right; None where the exact validator must look."""
    if media_type != MSGPACK:
        return read_json_groups(body, many=many) if is_json(media_type) else None
    try:
        return read_msgpack_groups(unpack_plain(body), many=many)
    except ValueError:
        return None


def exact_groups(body: bytes, media_type: str, many: bool, foreign_masks: str) -> list[Incoming]:
    """The groups of any body.

    Raises:
        GroupsRefused: 400, 413, 415 or 422; then no group of the list may be kept.
    """
    try:
        value = parse_body(body, media_type)
    except HTTPException as refusal:
        raise GroupsRefused(refusal.status_code, refusal.detail, [(None, 1)]) from None
    try:
        return parse_groups(value, many=many, packed=media_type == MSGPACK, foreign_masks=foreign_masks)
    except HTTPException as refusal:
        senders = Counter(map(_sender, value if many and isinstance(value, list) else [value]))
        named = senders.most_common(MOST_SENDERS)
        if others := senders.total() - sum(count for _, count in named):
            named.append((-1, others))
        raise GroupsRefused(refusal.status_code, refusal.detail, named) from None


def _sender(item: Any) -> int | None:
    env_id = item.get("env_id") if isinstance(item, dict) else None
    return env_id if isinstance(env_id, int) else None


def answer(body: bytes, question: dict[str, Any]) -> list[Incoming] | dict[str, Any]:
    """What a reading process says of a body: its groups, or what ``GroupsRefused`` is made of."""
    try:
        media_type, many = question["media_type"], question["many"]
        groups = plain_groups(body, media_type, many)
        return exact_groups(body, media_type, many, question["foreign_masks"]) if groups is None else groups
    except GroupsRefused as refusal:
        return {
            "status": refusal.status_code,
            "detail": refusal.detail,
            "senders": list(refusal.senders.items()),
        }
    except MemoryError:
        raise  # this process ends, and with it what it has taken
    except Exception:  # ours, and of this body: the next one may be read
        log.exception("a large body could not be read")
        return {"status": 500, "detail": "internal error: see the server's log", "senders": [(None, 1)]}
