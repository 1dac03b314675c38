"""The tool that agents of tests calculate with."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ADD", "add"]

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def add(arguments: str) -> str:
    """Returns what the tool says, to calls that make no sense too."""
    try:
        given = json.loads(arguments)
        return str(given["a"] + given["b"])
    except (KeyError, TypeError, ValueError):
        return "error: a and b are needed"
