"""The shapes of OpenAI's answers: whole ones, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_gym.html import Pieces
from atropos_gym.rollout.conversation import Said

__all__ = ["Answer", "as_events", "chat_answer", "chat_events", "completion_answer", "completion_events"]

PIECE = 32
"""Characters in each event of a stream: replies are whole before they are sent."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said to one request, and how it is told.

    Attributes:
        key: the answer's id.
        created: seconds since 1970.
        model: who spoke.
        said: the replies, in order; those to one prompt stand together.
        pieces: how ids are shown; None leaves logprobs out.
        ids: tell the ids too.
    """

    key: str
    created: int
    model: str
    said: Sequence[Said]
    pieces: Pieces | None = None
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
            logprobs=_chat_logprobs(said, answer.pieces),
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
            logprobs=_text_logprobs(said, answer.pieces),
            finish_reason=said.finish_reason,
        )
        for index, said in enumerate(answer.said)
    ]
    return {**answer.head("text_completion"), "choices": choices, "usage": answer.usage}


def chat_events(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yields the bodies of ``chat.completion.chunk``, without usage."""
    for index, said in enumerate(answer.said):
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        message = _message(said)
        deltas += [{"reasoning_content": piece} for piece in _pieces(message.get("reasoning_content"))]
        deltas += [{"content": piece} for piece in _pieces(message["content"])]
        for number, call in enumerate(message.get("tool_calls", ())):
            function = {"name": call["function"]["name"], "arguments": ""}
            deltas.append({"tool_calls": [{**call, "index": number, "function": function}]})
            deltas += [
                {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
                for piece in _pieces(call["function"]["arguments"])
            ]
        for delta in deltas:
            yield _chat_chunk(answer, {"index": index, "delta": delta, "finish_reason": None})
        logprobs = _chat_logprobs(said, answer.pieces)
        last = answer.choice(index, said, delta={}, logprobs=logprobs, finish_reason=said.finish_reason)
        yield _chat_chunk(answer, last)


def completion_events(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yields the bodies of a streamed ``text_completion``, without usage."""
    for index, said in enumerate(answer.said):
        for piece in _pieces(said.message["content"]):
            choice = {"index": index, "text": piece, "logprobs": None, "finish_reason": None}
            yield {**answer.head("text_completion"), "choices": [choice]}
        logprobs = _text_logprobs(said, answer.pieces)
        last = answer.choice(index, said, text="", logprobs=logprobs, finish_reason=said.finish_reason)
        yield {**answer.head("text_completion"), "choices": [last]}


def as_events(bodies: Iterator[dict[str, Any]], answer: Answer, *, usage: bool) -> Iterator[bytes]:
    """Yields server-sent events; the last one says that all is said."""
    kind = None
    for body in bodies:
        kind = body["object"]
        yield _event(body | ({"usage": None} if usage else {}))
    if usage:
        yield _event({**answer.head(kind or "text_completion"), "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


def _chat_chunk(answer: Answer, choice: dict[str, Any]) -> dict[str, Any]:
    return {**answer.head("chat.completion.chunk"), "choices": [choice]}


def _message(said: Said) -> dict[str, Any]:
    """Returns the assistant's message; content beside calls is null where there is none, as OpenAI has it."""
    message: dict[str, Any] = {**said.message, "refusal": None}
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _pieces(text: str | None) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)] if text else []


def _spelt(said: Said, pieces: Pieces) -> list[bytes]:
    """Returns the bytes of each sampled id; control ids by name."""
    names = (pieces.control(id_) for id_ in said.ids)
    texts = (pieces.text(id_) if name is None else name for id_, name in zip(said.ids, names, strict=True))
    return [text.encode("utf-8", "surrogateescape") for text in texts]


def _chat_logprobs(said: Said, pieces: Pieces | None) -> dict[str, Any] | None:
    if pieces is None:
        return None
    return {
        "content": [
            {
                "token": spelt.decode("utf-8", "replace"),
                "logprob": logprob,
                "bytes": list(spelt),
                "top_logprobs": [],
            }
            for spelt, logprob in zip(_spelt(said, pieces), said.logprobs, strict=True)
        ],
        "refusal": None,
    }


def _text_logprobs(said: Said, pieces: Pieces | None) -> dict[str, Any] | None:
    if pieces is None:
        return None
    tokens = [spelt.decode("utf-8", "replace") for spelt in _spelt(said, pieces)]
    offsets = [0]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": list(said.logprobs),
        "top_logprobs": None,
        "text_offset": offsets[: len(tokens)],
    }
