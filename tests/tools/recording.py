"""Keeps what a vLLM server answered, as it came over the wire: for tests that compare groups with it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx

__all__ = ["Recording", "check_against"]


class Recording(httpx.AsyncBaseTransport):
    """Passes requests on and keeps prompts and samples of ``/v1/completions``.

    Args:
        inner: what reaches the server.

    Attributes:
        sampled: (prompt ids, sampled ids, logprobs) of every choice that was answered; what is above 0 is
            rounding and 0.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.sampled: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = Counter()
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Passes one request on."""
        asked = await request.aread()
        response = await self._inner.handle_async_request(request)
        body = await response.aread()
        await response.aclose()
        if request.url.path == "/v1/completions" and response.status_code == 200:
            self._keep(json.loads(asked), body)
        headers = [(k, v) for k, v in response.headers.raw if k.lower() not in (b"content-encoding",)]
        return httpx.Response(response.status_code, headers=headers, content=body, request=request)

    def _keep(self, asked: dict[str, Any], body: bytes) -> None:
        try:
            choices = json.loads(body)["choices"]
        except ValueError:  # a fake that answers garbage
            return
        for choice in choices:
            logprobs = [min(x, 0.0) for x in (choice.get("logprobs") or {}).get("token_logprobs") or ()]
            ids = choice.get("token_ids") or ()
            self.sampled[tuple(asked["prompt"]), tuple(ids), tuple(logprobs)] += 1

    async def aclose(self) -> None:
        """Closes what reaches the server."""
        await self._inner.aclose()


def check_against(group: Any, recording: Recording) -> int:
    """Holds a body of the wire against what the server sampled; returns how many turns it trains."""
    left = Counter(recording.sampled)
    turns = 0
    for row, extra in enumerate(group.overrides):
        ids, logprobs = group.tokens[row], group.inference_logprobs[row]
        places: set[int] = set()
        for start, end in extra["turns"]:
            key = (tuple(ids[:start]), tuple(ids[start:end]), tuple(logprobs[start:end]))
            assert left[key] > 0, "a turn that the server did not sample, or one that is trained twice"
            left[key] -= 1
            places.update(range(start, end))
            turns += 1
        assert group.masks[row] == [id_ if i in places else -100 for i, id_ in enumerate(ids)]
        assert all(value == 1.0 for i, value in enumerate(logprobs) if i not in places)
    return turns
