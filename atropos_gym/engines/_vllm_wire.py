"""vLLM's ``/v1/completions`` as data: what is sent, and how an answer becomes completions or is refused.

No I/O. A server ignores fields that it does not know and answers with status 200, so nothing in an answer is
taken for granted: ids, logprobs, counts, order and the prompt itself are checked one by one. Text is never
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast

from atropos_gym.engines._choices import Choices, check_chosen
from atropos_gym.engines.base import Completion, FinishReason, SamplingParams, sampling_trainable
from atropos_gym.errors import AnswerRefused

__all__ = ["cached_ids", "choices_grammar", "completion_body", "fresh_seed", "read_completions"]

#: Above it a logprob is an error, below it rounding (0 is meant); the same in server and learner.
ROUNDING = 1e-3
#: What vLLM writes for a logprob of minus infinity.
_CLAMPED = -9999.0
_LARGEST_SEED = 2**63 - 1


def completion_body(
    model: str, prompt: Sequence[int], params: SamplingParams, n: int, *, seed: int, max_tokens: int
) -> dict[str, Any]:
    """Returns a request with every field said, so that no default of a server or a model applies.

    Stopping is by ``stop_token_ids`` alone: the server's own end ids are ignored, so that a completion ends
    where the caller said and nowhere else.

    Args:
        model: served name of the base model or of an adapter.
        prompt: ids.
        params: how to sample; its own seed and ``max_tokens`` are not read.
        n: how many samples; sample ``i`` is drawn with ``seed + i``.
        seed: in ``[0, 2**63)``.
        max_tokens: most ids of a sample.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True,
        "seed": min(seed, _LARGEST_SEED - n),
        "n": n,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
        "echo": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if params.allowed_ids is not None:
        body["allowed_token_ids"] = list(params.allowed_ids)
    if params.choices is not None:
        body["structured_outputs"] = {"grammar": choices_grammar(params.choices)}
        # A grammar may be ended by any end id that the server knows: only that of the choices stays.
        body["allowed_token_ids"] = sorted({value for choice in params.choices for value in choice})
    return body


def choices_grammar(choices: Choices) -> str:
    """Returns what may be sampled before the end, as a grammar of xgrammar whose letters are ids.

    Texts would admit every way to cut them into ids; a policy that keeps to the format has one.

    Example:
        >>> choices_grammar(((104, 105, 258), (104, 258), (258,)))
        'root ::= Token(104) Token(105) | Token(104) | ""'
    """
    bodies = (" ".join(f"Token({value})" for value in choice[:-1]) for choice in choices)
    return "root ::= " + " | ".join(body or '""' for body in bodies)


def fresh_seed(seed: int, attempt: int) -> int:
    """Returns the seed of another try of one request: 63 bits, far from its neighbours' seeds.

    Example:
        >>> fresh_seed(7, 0), fresh_seed(7, 1) != fresh_seed(8, 1)
        (7, True)
    """
    if attempt == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}:{attempt}".encode(), digest_size=8).digest(), "big") >> 1


def read_completions(
    data: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    n: int,
    *,
    version: int = 0,
    max_tokens: int | None = None,
    rows: int | None = None,
) -> list[list[Completion]]:
    """Returns the ``n`` completions of each prompt, in order of their index.

    Args:
        data: the answer's JSON.
        prompts: ids that were sent.
        params: how was sampled.
        n: samples of each prompt.
        version: that they are recorded with.
        max_tokens: that was sent, if it was not ``params.max_tokens``.
        rows: rows of the model's embedding, if known.

    Raises:
        AnswerRefused: anything in the answer is missing, does not fit together or cannot be trained on; the
            first such thing is named.

    Example:
        >>> choice = {"index": 0, "token_ids": [5], "finish_reason": "length",
        ...           "logprobs": {"token_logprobs": [-0.5]}}
        >>> read_completions({"choices": [choice]}, [[1, 2]], SamplingParams(max_tokens=1), 1)[0][0].ids
        (5,)
    """
    limit = params.max_tokens if max_tokens is None else max_tokens
    choices = _in_order(data, len(prompts) * n)
    _check_usage(data, choices)
    return [
        [
            _completion(choice, prompt, params, limit, version, rows)
            for choice in choices[number * n : (number + 1) * n]
        ]
        for number, prompt in enumerate(prompts)
    ]


def cached_ids(data: Any) -> int:
    """Returns how many ids of the prompt came from the prefix cache, where the server says it.

    Example:
        >>> cached_ids({"usage": {"prompt_tokens_details": {"cached_tokens": 64}}}), cached_ids({})
        (64, 0)
    """
    usage = data.get("usage") if isinstance(data, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int else 0


def _in_order(data: Any, count: int) -> list[dict[str, Any]]:
    """Returns the choices sorted by index: a server answers in any order."""
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise AnswerRefused(f"the answer has no choices: {str(data)[:120]!r}; is this a vLLM server?")
    indexes = [choice.get("index") for choice in choices]
    if any(type(index) is not int for index in indexes) or sorted(indexes) != list(range(count)):
        raise AnswerRefused(
            f"the answer has choices with index {indexes}, wanted each of 0..{count - 1} once: "
            "samples cannot be told apart"
        )
    return sorted(choices, key=lambda choice: cast(int, choice["index"]))


def _check_usage(data: dict[str, Any], choices: list[dict[str, Any]]) -> None:
    usage = data.get("usage")
    told = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if told is None:
        return
    counts = [len(choice["token_ids"]) for choice in choices if isinstance(choice.get("token_ids"), list)]
    if len(counts) == len(choices) and told != sum(counts):
        raise AnswerRefused(
            f"the answer has {sum(counts)} token_ids and usage.completion_tokens says {told}: ids are missing"
        )


def _completion(
    choice: dict[str, Any],
    prompt: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    version: int,
    rows: int | None,
) -> Completion:
    index = choice["index"]
    _check_prompt(choice.get("prompt_token_ids"), prompt)
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length", "abort"):
        raise AnswerRefused(f"choice {index} has finish_reason {finish!r}, wanted stop, length or abort")
    ids = _ids(choice, rows)
    if len(ids) > max_tokens:
        raise AnswerRefused(f"choice {index} has {len(ids)} ids where at most {max_tokens} were asked for")
    if not ids and finish != "abort":
        raise AnswerRefused(f"choice {index} has no ids and finish_reason {finish!r}")
    if params.allowed_ids is not None:
        _check_mask(ids, params.allowed_ids)
    if params.choices is not None and finish != "abort":
        check_chosen(ids, params.choices)
    logprobs = _logprobs(choice, ids)
    return Completion(
        ids=tuple(ids),
        logprobs=None if params.temperature == 0 else logprobs,
        finish_reason=cast(FinishReason, finish),
        version=version,
        trainable="aborted" if finish == "abort" else sampling_trainable(params),
        cut_by_context=max_tokens < params.max_tokens,
    )


def _check_prompt(said: Any, sent: Sequence[int]) -> None:
    if said is None or said == list(sent):
        return
    if not isinstance(said, list):
        raise AnswerRefused(f"prompt_token_ids is {str(said)[:60]!r}, wanted the ids sent")
    position = next(
        (i for i, (a, b) in enumerate(zip(said, sent, strict=False)) if a != b), min(len(said), len(sent))
    )
    raise AnswerRefused(
        f"engine changed the prompt: first difference at position {position} "
        f"(sent {_at(sent, position)}, used {_at(said, position)}; {len(sent)} ids sent, {len(said)} used); "
        "nothing between here and vLLM may rewrite requests"
    )


def _at(ids: Sequence[Any], position: int) -> str:
    return str(ids[position]) if position < len(ids) else "nothing"


def _ids(choice: dict[str, Any], rows: int | None) -> list[int]:
    ids = choice.get("token_ids")
    if ids is None:
        raise AnswerRefused(
            f"choice {choice['index']} has no token_ids: the server does not know return_token_ids, or a "
            "proxy drops it; use vLLM >= 0.10.2 without a proxy (text is never tokenised again)"
        )
    if not isinstance(ids, list) or any(type(value) is not int for value in ids):
        raise AnswerRefused(f"choice {choice['index']} has token_ids {str(ids)[:60]}, wanted a list of ints")
    if ids and (min(ids) < 0 or (rows is not None and max(ids) >= rows)):
        position = next(i for i, value in enumerate(ids) if value < 0 or (rows is not None and value >= rows))
        raise AnswerRefused(
            f"choice {choice['index']} has id {ids[position]} at position {position}, outside the vocabulary "
            f"of {rows}: engine and tokenizer belong to different models"
        )
    return ids


def _check_mask(ids: list[int], allowed: Sequence[int]) -> None:
    members = frozenset(allowed)
    for position, value in enumerate(ids):
        if value not in members:
            raise AnswerRefused(
                f"id {value} at position {position} was sampled outside allowed_ids {list(allowed)[:8]}: "
                "min_tokens can leave nothing to sample"
            )


def _logprobs(choice: dict[str, Any], ids: list[int]) -> tuple[float, ...]:
    """Returns the sampled ids' logprobs; rounding above 0 becomes 0."""
    found = choice.get("logprobs")
    values = found.get("token_logprobs") if isinstance(found, dict) else None
    if values is None and not ids:
        return ()
    if not isinstance(values, list):
        raise AnswerRefused(
            f"choice {choice['index']} has no logprobs: the server or a proxy drops them from the request"
        )
    if len(values) != len(ids):
        raise AnswerRefused(
            f"choice {choice['index']} has {len(ids)} token_ids and {len(values)} token_logprobs; "
            "neither is cut or filled up"
        )
    return tuple(_logprob(value, position) for position, value in enumerate(values))


def _logprob(value: Any, position: int) -> float:
    if type(value) not in (float, int) or not math.isfinite(value) or value <= _CLAMPED:
        raise AnswerRefused(f"no finite logprob at position {position}: got {value!r}")
    if value > ROUNDING:
        raise AnswerRefused(f"logprob {value} at position {position} is above 0: it is no probability")
    return min(float(value), 0.0)
