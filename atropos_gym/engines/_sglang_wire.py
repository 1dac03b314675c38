"""SGLang's ``/generate`` as data: a request in vLLM's form is translated, and so is the answer.

No I/O. One request of SGLang holds all samples, each under an id and a seed of its own: SGLang gives every
sample of ``n`` the same seed, and says of an answer only whose it is. Ids come twice, alone and beside their
logprobs, and must be the same. What is common to all servers is checked in ``_vllm_wire``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atropos_gym.errors import AnswerRefused, EngineError

__all__ = ["as_choices", "generate_body"]


def generate_body(body: Mapping[str, Any], request_ids: Sequence[str], adapter: str | None) -> dict[str, Any]:
    """Returns a request of SGLang.

    Args:
        body: of ``completion_body``.
        request_ids: one for each sample, never used before.
        adapter: name of the adapter in force; None: the base.

    Raises:
        EngineError: SGLang cannot sample so.
    """
    if "structured_outputs" in body:
        raise EngineError(
            "SGLang cannot choose among replies by their ids; leave choices (legal_only) out, or use vLLM"
        )
    if "allowed_token_ids" in body:
        raise EngineError("SGLang cannot limit sampling to allowed_ids; leave them out, or use vLLM")
    common = {
        "max_new_tokens": body["max_tokens"],
        "min_new_tokens": body["min_tokens"],
        "temperature": body["temperature"],
        "top_p": body["top_p"],
        "top_k": body["top_k"],
        "min_p": body["min_p"],
        "repetition_penalty": body["repetition_penalty"],
        "presence_penalty": body["presence_penalty"],
        "frequency_penalty": body["frequency_penalty"],
        "stop_token_ids": body["stop_token_ids"],
        "ignore_eos": True,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "n": 1,
    }
    count = len(request_ids)
    sent: dict[str, Any] = {
        "rid": list(request_ids),
        "input_ids": [body["prompt"]] * count,
        "sampling_params": [{**common, "sampling_seed": body["seed"] + i} for i in range(count)],
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    if adapter is not None:
        sent["lora_path"] = [adapter] * count
    return sent


def as_choices(data: Any, request_ids: Sequence[str], prompt: Sequence[int]) -> dict[str, Any]:
    """Returns an answer in the form of ``/v1/completions``, for ``read_completions``.

    Raises:
        AnswerRefused: an answer is missing, not ours or of other ids than its logprobs; named.

    Example:
        >>> answer = {"output_ids": [5], "meta_info": {"id": "a", "finish_reason": {"type": "length"},
        ...           "prompt_tokens": 2, "cached_tokens": 1, "output_token_logprobs": [[-0.5, 5, None]]}}
        >>> choice = as_choices([answer], ["a"], [1, 2])["choices"][0]
        >>> choice["token_ids"], choice["logprobs"]["token_logprobs"]
        ([5], [-0.5])
    """
    answers = data if isinstance(data, list) else [data]
    metas = [_meta(answer) for answer in answers]
    said = [meta.get("id") for meta in metas]
    if sorted(map(str, said)) != sorted(request_ids):
        raise AnswerRefused(
            f"the answer is of requests {said}, wanted {list(request_ids)} each once: samples cannot be told "
            "apart; is this an SGLang server without a proxy?"
        )
    index = {request_id: i for i, request_id in enumerate(request_ids)}
    return {
        "choices": [
            _choice(index[meta["id"]], answer, meta, prompt)
            for answer, meta in zip(answers, metas, strict=True)
        ],
        "usage": {
            "completion_tokens": _sum(metas, "completion_tokens"),
            "prompt_tokens_details": {"cached_tokens": max(map(_cached, metas))},
        },
    }


def _meta(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise AnswerRefused(f"the answer has no meta_info: {str(answer)[:120]!r}; is this an SGLang server?")
    return meta


def _choice(
    index: int, answer: dict[str, Any], meta: dict[str, Any], prompt: Sequence[int]
) -> dict[str, Any]:
    told = meta.get("prompt_tokens")
    if told is not None and told != len(prompt):
        raise AnswerRefused(
            f"engine changed the prompt: {len(prompt)} ids sent, {told} used; start SGLang without "
            "settings that add or cut ids"
        )
    ids = answer.get("output_ids")
    if ids is None:
        raise AnswerRefused(
            f"choice {index} has no output_ids: use SGLang >= 0.5 (text is never tokenised again)"
        )
    finish = meta.get("finish_reason")
    if not isinstance(finish, dict):
        raise AnswerRefused(f"choice {index} has finish_reason {finish!r}, wanted an object with type")
    matched = finish.get("matched")
    if finish.get("type") == "stop" and type(matched) is int and (not ids or ids[-1] != matched):
        raise AnswerRefused(f"choice {index} was ended by id {matched}, which is not the last of its ids")
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": _logprobs(index, ids, meta.get("output_token_logprobs")),
        "finish_reason": finish.get("type"),
    }


def _logprobs(index: int, ids: Any, triples: Any) -> dict[str, Any] | None:
    """Returns logprobs in vLLM's form once their ids are those sampled; None where there are none."""
    if triples is None:
        return None
    if not isinstance(triples, list) or not all(isinstance(one, list) and len(one) >= 2 for one in triples):
        raise AnswerRefused(
            f"choice {index} has output_token_logprobs {str(triples)[:60]}, wanted [logprob, id, text] each"
        )
    if isinstance(ids, list):
        for position, (value, triple) in enumerate(zip(ids, triples, strict=False)):
            if triple[1] != value:
                raise AnswerRefused(
                    f"choice {index} has id {value} in output_ids and {triple[1]} in output_token_logprobs "
                    f"at position {position}: which one was sampled cannot be told"
                )
    return {"token_logprobs": [triple[0] for triple in triples]}


def _sum(metas: Sequence[Mapping[str, Any]], key: str) -> int | None:
    counts = [meta.get(key) for meta in metas]
    return None if any(type(count) is not int for count in counts) else sum(counts)  # type: ignore[arg-type]


def _cached(meta: Mapping[str, Any]) -> int:
    cached = meta.get("cached_tokens")
    return cached if type(cached) is int else 0
