"""The API's requests and how their answers are read, without sending anything.

Both clients, the blocking one and the asynchronous one, send these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import ValidationError
from pydantic_core import from_json, to_json

from atropos_gym.batch_server._doubt import Doubt
from atropos_gym.batch_server._group_bodies import JSON, MSGPACK, group_of, unpack
from atropos_gym.errors import GroupRefused, ServerError
from atropos_gym.wire import EnvRegistration, Policy, PolicyUpdate, Registration, ScoredDataGroup

__all__ = [
    "Batch",
    "Call",
    "ack",
    "batch",
    "describe",
    "get",
    "name_of",
    "names_of",
    "policy",
    "post",
    "publish",
    "register",
    "register_env",
]

T = TypeVar("T")


@dataclass(slots=True)
class Batch:
    """What GET ``/batch`` gave.

    Attributes:
        groups: oldest first.
        batch_id: names the lease; None after a plain read.
        expires_at: when the lease runs out, Unix seconds.
        step: number of the batch.
        delivery: 1 at its first delivery.
        group_ids: names of the groups.
        rank: whose part of the batch it is; None where it is the whole one.
        world_size: how many parts there are.
    """

    groups: list[ScoredDataGroup]
    batch_id: str | None = None
    expires_at: float | None = None
    step: int | None = None
    delivery: int | None = None
    group_ids: list[str] = field(default_factory=list)
    rank: int | None = None
    world_size: int | None = None

    @property
    def sequences(self) -> int:
        """Sequences of all groups."""
        return sum(group.size for group in self.groups)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    Attributes:
        method: ``GET`` or ``POST``.
        path: from the server's root.
        read: makes the result of the answer.
        params: query parameters; None is left out.
        content: body.
        media_type: what the body is.
        headers: besides the usual ones.
        wait_seconds: how long the server may hold the request.
        doubt: whether the groups that it posts may be there already; a 422 refuses them. None where it
            posts none.
        final: statuses that are answers, although others of their kind are worth another try.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None
    media_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_seconds: float = 0.0
    doubt: Doubt | None = None
    final: tuple[int, ...] = ()

    def query(self) -> dict[str, str | int | float]:
        """Query parameters as they are sent."""
        return {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in self.params.items()
            if value is not None
        }

    def result(self, response: httpx.Response) -> T:
        """Reads an answer below 500; raises ``ServerError`` or ``GroupRefused`` where it is a refusal."""
        if response.is_success:
            return self.read(response)
        detail = _detail(response)
        kind = GroupRefused if self.doubt is not None and response.status_code == 422 else ServerError
        message = f"{self.method} {self.path} was refused ({response.status_code}): {describe(detail)}"
        if response.status_code == 401:
            message += "; give token=, or ATROPOS_GYM_TOKEN, or http://x:TOKEN@host as the server's URL"
        raise kind(message, status=response.status_code, detail=detail)


def get(path: str, *, env_id: int | None = None) -> Call[dict[str, Any]]:
    """A plain GET whose answer is an object; ``env_id`` goes as the original wants it and as a query."""
    if env_id is None:
        return Call("GET", path, _object)
    # The original fails with 500 where it does not know the number, and would do so for ever.
    content = to_json({"env_id": env_id})
    return Call("GET", path, _registered, params={"env_id": env_id}, content=content, final=(500,))


def post(path: str, body: Mapping[str, Any], **params: Any) -> Call[dict[str, Any]]:
    """A plain POST whose answer is an object."""
    return Call("POST", path, _object, params=params, content=to_json(body))


def register(takeover: bool, trainer: str | None, fields: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """POST ``/register``; what is not given has a value that asks for nothing."""
    defaults = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": 1,
        "max_token_len": 0,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": -1,
    }
    body = _checked(Registration, {**defaults, **fields})
    return post("/register", body, takeover=True if takeover else None, trainer=trainer)


def register_env(fields: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """POST ``/register-env``."""
    body = _checked(EnvRegistration, {"weight": 1.0, **fields})
    return Call("POST", "/register-env", _registered, content=to_json(body))


def publish(force: bool, trainer: str | None, fields: Mapping[str, Any]) -> Call[dict[str, Any]]:
    """POST ``/policy``."""
    return post("/policy", _checked(PolicyUpdate, fields), force=True if force else None, trainer=trainer)


def policy(
    after: int | None,
    wait_seconds: float,
    env_id: int | None,
    holding: Iterable[int] | None,
    registration: str | None,
) -> Call[Policy]:
    """GET ``/policy``."""
    return Call(
        "GET",
        "/policy",
        lambda response: Policy.model_validate(_object(response)),
        params={
            "after": after,
            "wait_seconds": wait_seconds or None,
            "env_id": env_id,
            "holding": None if holding is None else ",".join(map(str, holding)),
            "registration": registration,
        },
        wait_seconds=wait_seconds,
    )


def batch(
    groups: int | None,
    wait_seconds: float,
    lease_seconds: float | None,
    trainer: str | None,
    partial: bool,
    share: Mapping[str, int | None],
) -> Call[Batch | None]:
    """GET ``/batch``."""
    return Call(
        "GET",
        "/batch",
        _read_batch,
        params={
            "groups": groups,
            "wait_seconds": wait_seconds or None,
            "lease_seconds": lease_seconds,
            "trainer": trainer,
            "partial": True if partial else None,
            **share,
        },
        headers={"Accept": f"{MSGPACK}, {JSON};q=0.9"},
        wait_seconds=wait_seconds,
    )


def ack(batch_id: str, rank: int | None) -> Call[dict[str, Any]]:
    """POST ``/ack``."""
    return post("/ack", {"batch_id": batch_id} if rank is None else {"batch_id": batch_id, "rank": rank})


def name_of(response: httpx.Response) -> list[str]:
    """The name of a posted group; none from a server that gives none."""
    name = _object(response).get("group_id")
    return [] if name is None else [name]


def names_of(response: httpx.Response) -> list[str]:
    """The names of posted groups."""
    return list(_object(response).get("group_ids", []))


def describe(detail: object) -> str:
    """Says in one line what a server's ``detail`` says.

    >>> describe([{"loc": ["body", "masks", 0], "msg": "too short"}])
    'masks[0]: too short'
    """
    if not isinstance(detail, list):
        return str(detail)[:500]
    lines = []
    for entry in detail[:3]:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in entry["loc"][1:])
        lines.append(f"{path.lstrip('.') or entry['loc'][0]}: {entry['msg']}")
    more = f" (and {len(detail) - 3} more)" if len(detail) > 3 else ""
    return "; ".join(lines) + more


def _detail(response: httpx.Response) -> object:
    try:
        return _object(response)["detail"]
    except (ServerError, KeyError):
        return f"{response.text[:80]!r}; is {response.request.url} a batch server?"


def _object(response: httpx.Response) -> dict[str, Any]:
    packed = response.headers.get("content-type", "").startswith(MSGPACK)
    try:
        value = unpack(response.content) if packed else from_json(response.content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        message = f"{response.request.url} answered {response.content[:100]!r}: is this a batch server?"
        raise ServerError(message, status=response.status_code)
    return value


def _registered(response: httpx.Response) -> dict[str, Any]:
    """What is said to an environment; with ``registration``, where the server names those."""
    named = response.headers.get("x-registration")
    return _object(response) | ({"registration": named} if named else {})


def _checked(
    model: type[Registration] | type[EnvRegistration] | type[PolicyUpdate], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Checks a body before it is sent; a mistyped name would be ignored by the server."""
    if unknown := fields.keys() - model.model_fields.keys():
        raise TypeError(f"{model.__name__} has no field {', '.join(sorted(unknown))}")
    return model.model_validate(fields).model_dump(exclude_none=True)


def _read_batch(response: httpx.Response) -> Batch | None:
    packed = response.headers.get("content-type", "").startswith(MSGPACK)
    value = _object(response)
    if value.get("status") == "error":
        raise ServerError(f"no batch: {value.get('message')}", status=response.status_code, detail=value)
    items = value["batch"]
    if items is None:
        return None
    # Our server says how much it sends and has checked all of it; what comes from another is checked here.
    ours = "x-batch-groups" in response.headers
    batch = Batch(
        [_group(item, packed=packed, trusted=ours) for item in items],
        value.get("batch_id"),
        value.get("expires_at"),
        value.get("step"),
        value.get("delivery"),
        value.get("group_ids", []),
        value.get("rank"),
        value.get("world_size"),
    )
    if ours and batch.sequences != int(response.headers["x-batch-sequences"]):
        raise ServerError(
            f"batch has {batch.sequences} sequences, the server says otherwise: is a proxy between?"
        )
    return batch


def _group(item: Any, *, packed: bool, trusted: bool) -> ScoredDataGroup:
    try:
        if packed:
            return group_of(item, trusted=trusted)
        return ScoredDataGroup.model_construct(**item) if trusted else ScoredDataGroup.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = f"{first['loc']}: {first['msg']}"
    except ValueError as error:
        reason = str(error)
    raise ServerError(f"the server gave a group that cannot be used: {reason}")
