"""Answers as server-sent events: signs of life while an answer is being sampled, then its pieces.

A reply is told when it is whole. An engine that fails in the middle of one is asked again under another seed,
and pieces that were told already could not be taken back. Until then comments that every reader of events
skips keep programs and proxies from giving up.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atropos_gym.model_server.refusals import Refusal, refusal_of

__all__ = ["EventStream", "event"]

T = TypeVar("T")

#: Says that all is said: it comes after the last piece, and never after an error.
_DONE = b"data: [DONE]\n\n"
_ALIVE = b": keep-alive\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    r"""Returns one event.

    >>> event({"a": 1})
    b'data: {"a": 1}\n\n'
    """
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


class EventStream(Response, Generic[T]):
    """What is told of an answer that may not be there yet.

    Whoever asks for it watches the connection: where the program has left, the answer fails.

    Args:
        answer: the answer, which is being made.
        bodies: its events, in parts that are sent at a time.
        every: seconds between two signs of life.
        headers: of the response.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: asyncio.Task[T],
        bodies: Callable[[T], Iterator[bytes]],
        *,
        every: float,
        headers: Mapping[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        # Without the second, proxies such as nginx keep events back until there are many.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._answer = answer
        self._bodies = bodies
        self._every = every

    @classmethod
    async def begin(
        cls,
        answer: Coroutine[Any, Any, T],
        bodies: Callable[[T], Iterator[bytes]],
        *,
        every: float,
        headers: Mapping[str, str],
    ) -> EventStream[T]:
        """Asks, and returns the response once there is something to say.

        What fails before the first sign of life is raised, and so becomes a status that clients know to
        handle; later it can only be an event.
        """
        task = asyncio.create_task(answer)
        try:
            await asyncio.wait([task], timeout=every)
            if task.done():
                task.result()
            return cls(task, bodies, every=every, headers=headers)
        except BaseException:
            await _end(task)
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with aclosing(self._parts()) as parts:
                async for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            error = self._answer.exception()
            if isinstance(error, Exception) and refusal_of(error) is None:
                raise error  # nobody expected it: to the server's log
        finally:
            await _end(self._answer)

    async def _parts(self) -> AsyncGenerator[bytes]:
        while not self._answer.done():
            yield _ALIVE
            await asyncio.wait([self._answer], timeout=self._every)
        try:
            answer = self._answer.result()
        except Exception as error:
            refusal = refusal_of(error) or Refusal.internal()
            yield event(refusal.body())
            return
        for part in self._bodies(answer):
            yield part
        yield _DONE


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancels what nobody waits for any more."""
    task.cancel()
    await asyncio.wait([task])
    _ = task.cancelled() or task.exception()
