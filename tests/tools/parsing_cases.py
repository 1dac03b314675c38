"""The shared cases of actions and tool calls: their spaces, texts and what is expected of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from atropos_gym.messages import ToolCall
from atropos_gym.parsing import ToolCalls

CASES = Path(__file__).parent.parent / "cases"

BLACKJACK = ("stick", "hit")
LAKE = ("left", "down", "right", "up")
TAXI = ("south", "north", "east", "west", "pickup", "dropoff")


def cases_of(file: str) -> list[dict[str, Any]]:
    return json.loads((CASES / file).read_text(encoding="utf-8"))


def text_of(case: dict[str, Any]) -> str:
    if "completion" in case:
        return case["completion"]
    return "".join(text * count for text, count in case["completion_repeat"])


def space_of(described: dict[str, Any]) -> tuple[Space[Any], Any, Any]:
    """The space of a case, with the names and aliases that mirror it."""
    kind = described["type"]
    if kind == "discrete":
        space = spaces.Discrete(described["n"], start=described.get("start", 0))
        return space, described.get("names"), described.get("aliases")
    if kind == "multi_discrete":
        return spaces.MultiDiscrete(described["nvec"]), None, None
    if kind == "multi_binary":
        return spaces.MultiBinary(described["n"]), None, None
    if kind == "box":
        dtype = np.dtype(described["dtype"])
        low, high = (np.array([float(x) for x in described[end]]).astype(dtype) for end in ("low", "high"))
        return spaces.Box(low, high, tuple(described["shape"]), dtype.type), None, None
    if kind == "dict":
        parts = {key: space_of(part) for key, part in described["spaces"].items()}
        first, second, third = ({key: part[k] for key, part in parts.items()} for k in range(3))
        return spaces.Dict(first), second, third
    members = [space_of(part) for part in described["spaces"]]
    return spaces.Tuple([m[0] for m in members]), [m[1] for m in members], [m[2] for m in members]


def plain(value: Any) -> Any:
    """A member of a space as the cases write it; types are kept, so that 1 is not 1.0 and not true."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def turn_of(found: ToolCalls) -> list[dict[str, Any]]:
    """What was found, as the cases write it."""
    return [
        {"call": {"name": entry.name, "arguments": entry.arguments}}
        if isinstance(entry, ToolCall)
        else {"error": entry.kind}
        for entry in found.turn
    ]
