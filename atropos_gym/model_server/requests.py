"""What programs ask for: the bodies of OpenAI's API as far as they mean something here, and of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from atropos_gym.engines.base import SamplingParams
from atropos_gym.model_server.refusals import Refusal

__all__ = ["Asking", "ChatRequest", "CompletionRequest", "Finish", "OpenSession", "Wishes", "read_body"]

Wishes = Literal["session", "request", "refuse"]
"""Whose sampling counts: the session's (what a program asks for is ignored and counted), the request's (then
replies that were sampled otherwise are not trained), or nobody's: the request is refused."""

#: So many names of fields that nobody knows are told of a request, and so many letters of each.
_UNKNOWN = 16, 40

#: What a request may ask of sampling, and the value that changes nothing; temperature is the session's.
_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


async def read_body(request: Request, most: int) -> bytes:
    """Returns the body of a request, of which no more than ``most`` bytes are ever kept.

    Raises:
        Refusal: it is longer; 413.
    """
    body = bytearray()
    said = request.headers.get("content-length", "")
    too_long = said.isdecimal() and int(said) > most
    if not too_long:
        async for part in request.stream():
            if too_long := len(body) + len(part) > most:
                break
            body += part
    if too_long:
        shown = f"{most / 2**20:g} MiB"
        raise Refusal(f"the body is longer than {shown}: send less at a time", 413, code="body_too_large")
    return bytes(body)


def _one_if_null(value: Any) -> Any:
    return 1 if value is None else value


class Asking(BaseModel):
    """What both ways of asking have in common; null is the same as absent."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    n: Annotated[int, BeforeValidator(_one_if_null), Field(ge=1, le=128)] = 1
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        """The texts at which a reply ends."""
        return [self.stop] if isinstance(self.stop, str) else [word for word in self.stop or () if word]

    @property
    def most(self) -> int | None:
        """Most ids of a reply, where the request says."""
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with how many ids there were."""
        return bool((self.stream_options or {}).get("include_usage"))

    def sampling(self, session: SamplingParams, wishes: Wishes) -> tuple[SamplingParams, list[str]]:
        """Returns how its replies are sampled, and which of its wishes are not followed.

        Raises:
            Refusal: it asks for something that cannot be trained on or not be done.
        """
        if self.logit_bias:
            raise Refusal("logit_bias is not supported: leave it out", param="logit_bias")
        most = session.max_tokens if self.most is None else min(self.most, session.max_tokens)
        asked = {"temperature": self.temperature} | {name: getattr(self, name) for name in _SAMPLING}
        neutral = {"temperature": session.temperature, **_SAMPLING}
        differs = {k: v for k, v in asked.items() if v is not None and v != neutral[k]}
        if self.top_k == 0:
            differs.pop("top_k")  # another spelling of "off"
        if differs and wishes == "refuse":
            name, value = next(iter(differs.items()))
            raise Refusal(
                f"{name}={value} is not how this session samples ({neutral[name]}): leave it out", param=name
            )
        ignored = [] if wishes == "request" else [f"{name}={value:g}" for name, value in differs.items()]
        if self.seed is not None:  # members of a group that all sample alike could not be compared
            ignored.append("seed")
        changes = differs if wishes == "request" else {}
        return session.with_(max_tokens=most, **changes), ignored + self._unknown()

    def _unknown(self) -> list[str]:
        """Returns the names of fields that say something that nobody here knows."""
        most, letters = _UNKNOWN
        names = sorted(name for name, value in (self.model_extra or {}).items() if value is not None)
        plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= letters]
        return plain[:most] + ["other fields"] * (len(plain[:most]) < len(names))


class ChatRequest(Asking):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    functions: Any = None

    @property
    def most(self) -> int | None:
        """Most ids of a reply, where the request says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def sampling(self, session: SamplingParams, wishes: Wishes) -> tuple[SamplingParams, list[str]]:
        """As the parent's.

        What only constrained decoding could keep is ignored, as other wishes are: the model is told of it
        and a policy learns it by its scores.
        """
        ignored = [*filter(None, (self._forced, self._form))]
        if ignored and wishes != "session":
            raise Refusal(
                f"{ignored[0]} needs constrained decoding, whose samples cannot be trained on: leave it out",
                param=ignored[0].partition("=")[0],
            )
        if self.functions:
            raise Refusal("functions are not supported any more: use tools", param="functions")
        params, others = super().sampling(session, wishes)
        if self.top_logprobs:
            ignored.append("top_logprobs")
        if self.parallel_tool_calls is False:
            ignored.append("parallel_tool_calls=false")
        return params, ignored + others

    @property
    def told(self) -> list[dict[str, Any]]:
        """The messages, with the form of the answer that OpenAI's models are told of out of sight."""
        if self._form != "response_format=json_schema":
            return self.messages
        schema = json.dumps(self.response_format["json_schema"]["schema"], ensure_ascii=False)  # type: ignore[index]
        told = {"type": "text", "text": f"Answer with JSON alone, as this schema has it:\n{schema}"}
        first = self.messages[0] if self.messages else {}
        if first.get("role") not in ("system", "developer"):
            return [{"role": "system", "content": told["text"]}, *self.messages]
        content = first.get("content")
        if isinstance(content, list):
            return [{**first, "content": [*content, told]}, *self.messages[1:]]
        if isinstance(content, str | None):
            text = f"{content}\n\n{told['text']}" if content else told["text"]
            return [{**first, "content": text}, *self.messages[1:]]
        return self.messages  # content that is refused where it is read

    @property
    def _forced(self) -> str | None:
        """What its ``tool_choice`` would force; None where the policy is free."""
        if self.tool_choice in (None, "auto", "none"):
            return None
        if isinstance(self.tool_choice, Mapping):
            return "tool_choice=function"
        if self.tool_choice == "required":
            return "tool_choice=required"
        raise Refusal(
            f"tool_choice must be 'none', 'auto', 'required' or a function, got {self.tool_choice!r:.40}",
            param="tool_choice",
        )

    @property
    def _form(self) -> str | None:
        """What its ``response_format`` would force; None where the policy is free."""
        form = self.response_format or {}
        kind = form.get("type", "text")
        if kind == "text":
            return None
        schema = form.get("json_schema")
        if (
            kind == "json_schema"
            and isinstance(schema, Mapping)
            and isinstance(schema.get("schema"), Mapping)
        ):
            return "response_format=json_schema"
        if kind == "json_object":  # by OpenAI's own rule a message asks for it
            return "response_format=json_object"
        raise Refusal(
            "response_format must be of type 'text', 'json_object' or 'json_schema' with a schema, "
            f"got {form!r:.60}",
            param="response_format",
        )


class CompletionRequest(Asking):
    """Body of ``/v1/completions``; a prompt is a text, ids, or a list of those."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        if not self.prompt:
            raise Refusal("prompt is an empty list: nothing is asked for", param="prompt")
        return cast(Sequence[str | list[int]], self.prompt)

    def sampling(self, session: SamplingParams, wishes: Wishes) -> tuple[SamplingParams, list[str]]:
        """As the parent's."""
        for name, value in {"echo": self.echo, "suffix": self.suffix}.items():
            if value:
                raise Refusal(f"{name} is not supported: leave it out", param=name)
        if self.best_of not in (None, self.n):
            raise Refusal("best_of is not supported: ask for n and choose", param="best_of")
        return super().sampling(session, wishes)


class OpenSession(BaseModel):
    """Body of ``POST /sessions``: a group that programs are going to play.

    Attributes:
        group_size: how many members.
        name: of the task, in the group's messages and at the batch server.
        temperature: in place of the server's.
        max_tokens: most ids of a reply, in place of the server's.
        idle_seconds: after so long without a request it is given up, in place of the server's.
    """

    model_config = ConfigDict(extra="forbid")

    group_size: Annotated[int, Field(ge=1, le=1024)]
    name: str | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    idle_seconds: Annotated[float, Field(gt=0)] | None = None

    def changes(self) -> Mapping[str, Any]:
        """What of the sampling it sets."""
        wanted = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in wanted.items() if value is not None}


class Finish(BaseModel):
    """Body of ``POST /sessions/ID/finish``: a score for each member, null for those that have none."""

    model_config = ConfigDict(extra="forbid")

    scores: list[Annotated[float, Field(allow_inf_nan=False)] | None]
