"""What goes wrong in a fake vLLM server, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: An answer that never starts, waits for ``FakeVLLM.gate``, is an error, or breaks off.
BEFORE = (
    "no answer",
    "slow",
    "500",
    "503",
    "429",
    "reset",
    "refused",
    "dead",
    "float",
    "grammar",
    "too long",
    "garbage",
)


def _each(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def of_all(answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            change(choice)

    return of_all


def _logprob(value: float | None) -> Callable[[dict[str, Any]], None]:
    """Replaces the logprob at position 3, or the last one of a shorter choice."""

    def change(choice: dict[str, Any]) -> None:
        values = choice["logprobs"]["token_logprobs"]
        values[min(3, len(values) - 1)] = value

    return _each(change)


def _short(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"].pop()


def _abort(choice: dict[str, Any]) -> None:
    half = len(choice["token_ids"]) // 2
    choice["token_ids"] = choice["token_ids"][:half]
    choice["logprobs"]["token_logprobs"] = choice["logprobs"]["token_logprobs"][:half]
    choice["finish_reason"] = "abort"


def _abort_first(answer: dict[str, Any]) -> None:
    _abort(answer["choices"][0])
    answer["usage"]["completion_tokens"] = sum(len(choice["token_ids"]) for choice in answer["choices"])


def _abort_all(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        _abort(choice)
    answer["usage"]["completion_tokens"] = sum(len(choice["token_ids"]) for choice in answer["choices"])


def _put(choice: dict[str, Any], name: str, value: Any) -> None:
    choice[name] = value


def _shift_prompt(choice: dict[str, Any]) -> None:
    ids = choice["prompt_token_ids"]
    choice["prompt_token_ids"] = [ids[0], *ids]


def _second_index_twice(answer: dict[str, Any]) -> None:
    answer["choices"][-1]["index"] = answer["choices"][0]["index"]


def _usage(answer: dict[str, Any]) -> None:
    answer["usage"]["completion_tokens"] += 1


#: A good answer made wrong, still with status 200.
AFTER: dict[str, Callable[[dict[str, Any]], None]] = {
    "order": lambda answer: answer["choices"].reverse(),
    "index": _second_index_twice,
    "no ids": _each(lambda choice: _put(choice, "token_ids", None)),
    "no ids key": _each(lambda choice: choice.pop("token_ids")),
    "no logprobs": _each(lambda choice: _put(choice, "logprobs", None)),
    "short logprobs": _each(_short),
    "null logprob": _logprob(None),
    "clamped logprob": _logprob(-9999.0),
    "-inf logprob": _logprob(float("-inf")),
    "nan logprob": _logprob(float("nan")),
    "positive logprob": _logprob(0.01),
    "rounded logprob": _logprob(5e-4),
    "text logprob": _logprob("-0.5"),  # type: ignore[arg-type]
    "usage": _usage,
    "abort": _abort_first,
    "abort all": _abort_all,
    "changed prompt": _each(_shift_prompt),
    "odd finish": _each(lambda choice: _put(choice, "finish_reason", "repetition")),
    "no choices": lambda answer: answer.pop("choices"),
}
