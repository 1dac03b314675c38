"""Units, leases, environments and groups as they stand in a store's file: each a JSON object, ids apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic_core import from_json, to_json

from atropos_gym.batch_server.state.env_book import EnvRecord
from atropos_gym.batch_server.state.group_queue import Place, StoredGroup, Unit
from atropos_gym.batch_server.state.leases import Lease, LeaseState
from atropos_gym.wire import EnvRegistration

__all__ = [
    "env_body",
    "group_body",
    "lease_body",
    "read_env",
    "read_group",
    "read_lease",
    "read_unit",
    "unit_body",
]


def group_body(group: StoredGroup) -> bytes:
    """What is known of a group; its data is kept apart."""
    return _body(group, without=("number", "data"))


def read_group(number: int, body: str | bytes) -> StoredGroup:
    """A group whose data lies in the file."""
    return StoredGroup(number, **from_json(body))


def unit_body(unit: Unit) -> bytes:
    """A unit, with the numbers of its groups."""
    saved = {"deliveries": unit.deliveries, "step": unit.step, "came_under": unit.came_under}
    return to_json({"groups": [group.number for group in unit.groups], **saved})


def read_unit(body: str | bytes, groups: dict[int, StoredGroup]) -> Unit:
    """A unit as it was; its groups are taken out of ``groups``."""
    saved = from_json(body)
    parts = tuple(groups.pop(number) for number in saved.pop("groups"))
    return Unit(parts, **saved)


def lease_body(lease: Lease) -> bytes:
    """A lease, with the numbers of its units."""
    expires_at = None if math.isinf(lease.expires_at) else lease.expires_at
    return _body(lease, without=("units",), expires_at=expires_at)


def read_lease(body: str | bytes, units: Mapping[int, Unit]) -> Lease:
    """A lease as it was; the units of an open one are marked as handed out."""
    saved = from_json(body)
    state = LeaseState(saved["state"])
    held = [units[number] for number in saved["numbers"]] if state is LeaseState.OPEN else []
    for unit in held:
        unit.place = Place.LEASED
    expires_at = math.inf if saved["expires_at"] is None else saved["expires_at"]
    changed: dict[str, Any] = {"state": state, "expires_at": expires_at}
    for name in ("numbers", "given_ranks", "acked_ranks"):
        changed[name] = tuple(saved.get(name, ()))
    return Lease(**{**saved, **changed}, units=tuple(held))


def env_body(env: EnvRecord) -> bytes:
    """An environment, without what it has in its buffer and without clocks."""
    without = ("buffer", "last_seen", "had_data_at")
    return _body(env, without=without, settings=env.settings.model_dump())


def read_env(body: str | bytes, now: float) -> EnvRecord:
    """An environment as it was; it counts as heard of now."""
    saved = from_json(body)
    settings = EnvRegistration.model_validate(saved.pop("settings"))
    return EnvRecord(**saved, settings=settings, last_seen=now, had_data_at=now)


def _body(thing: object, without: tuple[str, ...], **other: Any) -> bytes:
    """A dataclass as JSON: without some fields, and with others in another form."""
    names = _names(type(thing), (*without, *other))  # type: ignore[arg-type]  # classes are hashable
    return to_json({name: getattr(thing, name) for name in names} | other)


@cache
def _names(kind: type, without: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind) if one.name not in without)
