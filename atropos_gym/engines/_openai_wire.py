"""OpenAI's chat completions as data: what is sent, and how an answer becomes replies or is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atropos_gym.engines.base import MASKS, SamplingParams
from atropos_gym.errors import AnswerRefused, EngineError
from atropos_gym.messages import Message, Reply, ToolCall

__all__ = ["chat_body", "completion_tokens", "read_replies"]

_FINISHED = ("stop", "tool_calls", "function_call")
_KNOWN = (*_FINISHED, "length", "content_filter")
#: What chat completions have no field for, and the value that asks for nothing.
_FOREIGN = {"top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,), "min_tokens": (0,)}


def chat_body(
    model: str,
    messages: Sequence[Message],
    params: SamplingParams,
    n: int,
    *,
    limit_field: str,
    seed: int | None,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns a request; what is neutral is left out, for providers refuse what their model does not take.

    Args:
        model: the provider's name of it.
        messages: of the conversation.
        params: how to sample; ``stop_ids`` are the provider's own end of turn.
        n: how many replies.
        limit_field: what the provider calls the most tokens of a reply.
        seed: of this request.
        extra: further fields, which win; None takes a field out.

    Raises:
        EngineError: ``params`` ask for what chat completions cannot do.

    Example:
        >>> said = [Message(role="user", content="hi")]
        >>> body = chat_body("m", said, SamplingParams(max_tokens=5), 1, limit_field="max_tokens", seed=None,
        ...                  extra={"reasoning_effort": "low", "temperature": None})
        >>> [(name, body[name]) for name in body if name != "messages"]
        [('model', 'm'), ('max_tokens', 5), ('reasoning_effort', 'low')]
    """
    for name, off in _FOREIGN.items():
        value = getattr(params, name)
        if value not in off and name not in extra:
            raise EngineError(
                f"chat completions have no {name} (got {value}): leave it out, or give it in extra_body= "
                "where the provider takes it"
            )
    for name in MASKS:
        if getattr(params, name) is not None:
            raise EngineError(f"chat completions know no ids, so {name} cannot be asked for; leave them out")
    body: dict[str, Any] = {
        "model": model,
        "messages": [dict(message) for message in messages],
        limit_field: params.max_tokens,
        "temperature": params.temperature,
    }
    if n != 1:
        body["n"] = n
    if params.top_p != 1:
        body["top_p"] = params.top_p
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name):
            body[name] = getattr(params, name)
    if seed is not None:
        body["seed"] = seed % 2**31  # some providers take no larger ones
    body |= extra
    return {name: value for name, value in body.items() if value is not None}


def read_replies(data: Any, n: int) -> list[Reply]:
    """Returns the replies in order of index; providers that know no ``n`` send fewer than were asked for.

    Raises:
        AnswerRefused: no replies, more than were asked for, or one that cannot be read; named.

    Example:
        >>> choice = {"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}
        >>> read_replies({"choices": [choice]}, 1)[0].content
        'ok'
    """
    choices = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(one, dict) for one in choices):
        raise AnswerRefused(
            f"the answer has no choices: {str(data)[:120]!r}; is base_url= that of chat completions?"
        )
    indexes = [choice.get("index", 0) for choice in choices]
    if len(choices) > n or sorted(map(str, indexes)) != sorted(map(str, range(len(choices)))):
        raise AnswerRefused(f"the answer has choices with index {indexes} where {n} were asked for")
    return [
        _reply(choice) for _, choice in sorted(zip(indexes, choices, strict=True), key=lambda one: one[0])
    ]


def completion_tokens(data: Any) -> int:
    """Returns how many tokens the provider counted in an answer, its reasoning included; 0 if it does not."""
    usage = data.get("usage") if isinstance(data, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if type(count) is int else 0


def _reply(choice: Mapping[str, Any]) -> Reply:
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict):
        raise AnswerRefused(f"choice {choice.get('index')} has no message: {str(choice)[:120]!r}")
    if finish not in _KNOWN:
        raise AnswerRefused(
            f"choice {choice.get('index')} has finish_reason {finish!r}, wanted {', '.join(_KNOWN)}"
        )
    content = message.get("content") or message.get("refusal") or ""
    if not isinstance(content, str):
        raise AnswerRefused(f"choice {choice.get('index')} has content {str(content)[:60]!r}, wanted text")
    thinking = message.get("reasoning_content") or message.get("reasoning")
    return Reply(
        text=content,
        content=content,
        thinking=thinking if isinstance(thinking, str) else None,
        tool_calls=tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
        complete=finish in _FINISHED,
    )


def _tool_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    try:
        arguments = json.loads(function["arguments"] or "{}")  # type: ignore[index]
        return ToolCall(str(function["name"]), dict(arguments), call.get("id"))  # type: ignore[index]
    except (TypeError, KeyError, ValueError) as error:
        raise AnswerRefused(f"a tool call cannot be read: {str(call)[:120]!r} ({error})") from error
