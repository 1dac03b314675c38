"""The shapes of OpenAI's answers: whole ones, and the events of a stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from atropos_gym.html import Pieces
from atropos_gym.model_server.stream import event
from atropos_gym.rollout.conversation import Said

__all__ = ["Answer", "chat_answer", "chat_events", "completion_answer", "completion_events"]

_WORDS = re.compile(r"\S+\s*|\s+")


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said to one request, and how it is told.

    Attributes:
        key: the answer's id.
        created: seconds since 1970.
        model: who spoke.
        said: the replies, in order; those to one prompt stand together.
        pieces: how ids are shown.
        logprobs: tell the logprobs of the sampled ids too.
        ids: tell the ids too.
    """

    key: str
    created: int
    model: str
    said: Sequence[Said]
    pieces: Pieces
    logprobs: bool = False
    ids: bool = False

    @property
    def usage(self) -> dict[str, int]:
        """How many ids there were; a prompt counts once for all its replies."""
        prompts = {said.prompt for said in self.said}
        prompted = sum(len(prompt.whole()) for prompt in prompts)
        completed = sum(len(said.ids) for said in self.said)
        return {
            "prompt_tokens": prompted,
            "completion_tokens": completed,
            "total_tokens": prompted + completed,
        }

    def head(self, kind: str) -> dict[str, Any]:
        """What each body of it begins with."""
        return {"id": self.key, "object": kind, "created": self.created, "model": self.model}

    def choice(self, index: int, said: Said, **told: Any) -> dict[str, Any]:
        """One reply; with its ids where they are wanted."""
        ids = {"token_ids": list(said.ids), "prompt_token_ids": said.prompt.whole()} if self.ids else {}
        return {"index": index, **told, **ids}


def chat_answer(answer: Answer) -> dict[str, Any]:
    """Returns the body of ``chat.completion``."""
    choices = [
        answer.choice(
            index,
            said,
            message=_message(said),
            logprobs=_chat_logprobs(said, answer),
            finish_reason=said.finish_reason,
        )
        for index, said in enumerate(answer.said)
    ]
    return {**answer.head("chat.completion"), "choices": choices, "usage": answer.usage}


def completion_answer(answer: Answer) -> dict[str, Any]:
    """Returns the body of ``text_completion``."""
    choices = [
        answer.choice(
            index,
            said,
            text=said.message["content"],
            logprobs=_text_logprobs(said, answer),
            finish_reason=said.finish_reason,
        )
        for index, said in enumerate(answer.said)
    ]
    return {**answer.head("text_completion"), "choices": choices, "usage": answer.usage}


def chat_events(answer: Answer, *, usage: bool) -> Iterator[bytes]:
    """Yields a streamed ``chat.completion``, the events of a choice at a time."""
    head = answer.head("chat.completion.chunk") | ({"usage": None} if usage else {})
    for index, said in enumerate(answer.said):
        told = {"index": index, "finish_reason": None}
        deltas = _deltas(_message(said), _spelt(said, answer.pieces))
        chunks = [head | {"choices": [{**told, "delta": delta}]} for delta in deltas]
        logprobs = _chat_logprobs(said, answer)
        last = answer.choice(index, said, delta={}, logprobs=logprobs, finish_reason=said.finish_reason)
        yield b"".join(map(event, [*chunks, head | {"choices": [last]}]))
    if usage:
        yield event(head | {"choices": [], "usage": answer.usage})


def completion_events(answer: Answer, *, usage: bool) -> Iterator[bytes]:
    """Yields a streamed ``text_completion``, the events of a choice at a time."""
    head = answer.head("text_completion") | ({"usage": None} if usage else {})
    for index, said in enumerate(answer.said):
        told = {"index": index, "logprobs": None, "finish_reason": None}
        pieces = _cut(said.message["content"], _spelt(said, answer.pieces))
        chunks = [head | {"choices": [{**told, "text": piece}]} for piece in pieces]
        logprobs = _text_logprobs(said, answer)
        last = answer.choice(index, said, text="", logprobs=logprobs, finish_reason=said.finish_reason)
        yield b"".join(map(event, [*chunks, head | {"choices": [last]}]))
    if usage:
        yield event(head | {"choices": [], "usage": answer.usage})


def _deltas(message: dict[str, Any], spelt: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a message bit by bit; each call begins with its id and name, its arguments follow."""
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        for piece in _cut(message.get(name), spelt):
            yield {name: piece}
    for number, call in enumerate(message.get("tool_calls", ())):
        function = {"name": call["function"]["name"], "arguments": ""}
        yield {"tool_calls": [{"index": number, **call, "function": function}]}
        for piece in _cut(call["function"]["arguments"], spelt):
            yield {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}


def _message(said: Said) -> dict[str, Any]:
    """Returns the assistant's message; content beside calls is null where there is none, as OpenAI has it."""
    message: dict[str, Any] = {**said.message, "refusal": None}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _spelt(said: Said, pieces: Pieces) -> list[str]:
    """Returns the sampled ids as text, those of one character together."""
    return [text for _, text in pieces.chunks(said.ids)]


def _cut(text: str | None, spelt: Sequence[str]) -> list[str]:
    """Returns a text in pieces: as its ids are, where it was sampled as it stands, else word by word.

    >>> _cut("in short", [" in", " sh", "ort", " "]), _cut("in  short", ["x"]), _cut(None, [])
    (['in', ' sh', 'ort'], ['in  ', 'short'], [])
    """
    if not text:
        return []
    start = "".join(spelt).find(text)
    if start < 0:
        return _WORDS.findall(text)
    ends = [end - start for end in accumulate(map(len, spelt)) if 0 < end - start < len(text)]
    return [text[one:other] for one, other in pairwise([0, *ends, len(text)]) if one < other]


def _bytes(said: Said, pieces: Pieces) -> list[bytes]:
    """Returns the bytes of each sampled id; control ids by name."""
    names = (pieces.control(id_) for id_ in said.ids)
    texts = (pieces.text(id_) if name is None else name for id_, name in zip(said.ids, names, strict=True))
    return [text.encode("utf-8", "surrogateescape") for text in texts]


def _chat_logprobs(said: Said, answer: Answer) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    return {
        "content": [
            {
                "token": spelt.decode("utf-8", "replace"),
                "logprob": logprob,
                "bytes": list(spelt),
                "top_logprobs": [],
            }
            for spelt, logprob in zip(_bytes(said, answer.pieces), said.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _text_logprobs(said: Said, answer: Answer) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    tokens = [spelt.decode("utf-8", "replace") for spelt in _bytes(said, answer.pieces)]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": list(said.logprobs),
        "top_logprobs": None,
        "text_offset": offsets[: len(tokens)],
    }
