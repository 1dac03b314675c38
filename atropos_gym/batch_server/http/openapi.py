"""What the OpenAPI page says beside what FastAPI finds out by itself: bodies, refusals, and msgpack.

Routes read and write bodies on their own, so what they declare here is held against what they do by a test.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

from atropos_gym.batch_server.bodies.details import MAX_ENTRIES
from atropos_gym.batch_server.bodies.msgpack import MSGPACK

__all__ = ["BINARY", "MAY_FAIL", "NOT_SERVED", "REFUSALS", "schema_of"]

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
PLACES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_ENTRIES,
    "items": {
        "type": "object",
        "required": ["type", "loc", "msg"],
        "properties": {
            "type": TEXT,
            "loc": {"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1},
            "msg": TEXT,
            "input": {"type": ["string", "number", "boolean"]},
        },
        "additionalProperties": False,
    },
}


def _says(description: str, **properties: Schema) -> dict[str, Any]:
    """An answer in JSON with these members and no others."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"description": description, "content": {"application/json": {"schema": schema}}}


#: What may become of any request before it reaches its route.
NOT_SERVED: Responses = {
    400: _says("The body cannot be decoded, or Host is not served here.", detail=TEXT),
    401: _says("Missing or wrong token.", detail=TEXT),
    403: _says("A page of another site asks, or the token is not good for this.", detail=TEXT),
    408: _says("The body did not arrive in time.", detail=TEXT),
    413: _says("The body is too large.", detail=TEXT),
    415: _says("Content-Encoding or Content-Type is not spoken here.", detail=TEXT),
    503: _says("Not now: it cannot be saved, or there is no room.", detail=TEXT, retry_after=NUMBER),
}

#: What a route may say of a request.
REFUSALS: Responses = {
    404: _says("Nothing of this name or number was ever issued.", detail=TEXT),
    409: _says("It contradicts the server's state.", detail=TEXT),
    422: _says("The content cannot be used; the bad places are named.", detail=PLACES),
}

#: An answer that may be msgpack.
BINARY: Responses = {200: {"content": {MSGPACK: {}}}}

#: An answer that is the same where the server fails.
MAY_FAIL: Responses = {503: {"description": "The server fails.", "content": {"application/json": {}}}}


@cache
def schema_of(model: type[BaseModel], *, many: bool = False) -> dict[str, Any]:
    """The ``requestBody`` of a route, as its ``openapi_extra``; the route itself reads the body."""
    schema = _with_ranges(model.model_json_schema())
    if many:
        schema = {"type": "array", "items": schema}
    content = {media_type: {"schema": schema} for media_type in ("application/json", MSGPACK)}
    return {"requestBody": {"required": True, "content": content}}


def _with_ranges(schema: Any) -> Any:
    """Ranges by their names in JSON Schema: of fields that are looked at before, pydantic keeps its own."""
    if isinstance(schema, list):
        return [_with_ranges(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    names = {"ge": "minimum", "le": "maximum"}
    return {names.get(key, key): _with_ranges(value) for key, value in schema.items()}
