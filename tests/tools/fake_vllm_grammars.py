"""Structured outputs of a fake vLLM server: grammars whose letters are ids (xgrammar's ``Token(5)``)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

__all__ = ["admitted", "chosen"]

Choices = tuple[tuple[int, ...], ...]


def admitted(request: dict[str, Any], eos: tuple[int, ...]) -> Choices | None:
    """Returns what a request's grammar lets through, each with every end that is left; None without one.

    As the real server: a grammar may be ended by every stop id and every end id of the model, whatever
    ``ignore_eos`` says.
    """
    grammar = (request.get("structured_outputs") or {}).get("grammar", "")
    if not re.fullmatch(r"root ::= (Token\(\d+\)|\"\"| \| | )+", grammar):
        return None
    bodies = [
        [int(value) for value in re.findall(r"\d+", part)]
        for part in grammar.removeprefix("root ::= ").split(" | ")
    ]
    ends = sorted({*(request.get("stop_token_ids") or ()), *eos})
    allowed = request.get("allowed_token_ids")
    left = [end for end in ends if allowed is None or end in allowed]
    return tuple((*body, end) for body in bodies for end in left)


def chosen(
    choices: Choices,
    wanted: list[int],
    limit: int,
    logprob: Callable[[list[int], int], float],
    *,
    renormalised: bool,
) -> tuple[list[int], list[float], str]:
    """Goes where the ids wanted point to, among those that a grammar leaves.

    Args:
        choices: what it lets through.
        wanted: ids that a script says.
        limit: most ids.
        logprob: of the last of some ids, at its position.
        renormalised: over what is left, as processed logprobs are.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    while len(ids) < limit and tuple(ids) not in choices:
        at = len(ids)
        left = sorted({choice[at] for choice in choices if list(choice[:at]) == ids})
        one = wanted[at] if at < len(wanted) and wanted[at] in left else left[sum(wanted) % len(left)]
        values = {value: logprob([*ids, value], at) for value in left}
        forced = renormalised and len(left) == 1
        total = math.log(sum(map(math.exp, values.values()))) if renormalised else 0.0
        ids.append(one)
        logprobs.append(0.0 if forced else values[one] - total)
    return ids, logprobs, "stop" if tuple(ids) in choices else "length"
