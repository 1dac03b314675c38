"""Any provider of OpenAI's chat completions: text alone, for evaluation, judges and data.

It is a ``TextEngine``; and as an ``Engine`` it plays environments whose tokenizer is ``"bytes"``: prompts are
read back as messages, replies written as bytes. Neither ids nor logprobs come from the model, so nothing of
it can be trained on.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_gym.engines._bytes_chat import messages_of
from atropos_gym.engines._ids import as_ids, room_left
from atropos_gym.engines._loop import LoopThread
from atropos_gym.engines._openai_wire import chat_body, completion_tokens, read_replies
from atropos_gym.engines._remote import Answer, Endpoint, Passing, RetryPolicy
from atropos_gym.engines._traffic import Traffic
from atropos_gym.engines._versions import ServesVersions, VersionTable
from atropos_gym.engines._vllm_wire import fresh_seed
from atropos_gym.engines.base import Completion, Held, Lane, Reference, SamplingParams
from atropos_gym.errors import (
    AnswerRefused,
    ConfigError,
    ContextFull,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
)
from atropos_gym.findings import Finding
from atropos_gym.messages import Message, Reply
from atropos_gym.tokenizers import BytesTokenizer, load_tokenizer

if TYPE_CHECKING:
    import httpx

__all__ = ["OpenAIEngine"]

_OPENAI = "https://api.openai.com/v1"


class OpenAIEngine(ServesVersions):
    """A model behind a provider's chat completions.

    Args:
        model: the provider's name of it.
        base_url: up to and with its version, such as ``https://openrouter.ai/api/v1``; OpenAI's if None.
        api_key: of the provider; if None, ``OPENAI_API_KEY`` of the environment. It is in no message.
        reasoning_effort: how much a reasoning model thinks, such as ``"low"``; sent where given.
        extra_body: further fields of each request, which win over ours; None takes a field out.
        max_tokens_field: what the provider calls the most tokens of a reply; if None,
            ``max_completion_tokens`` for OpenAI and ``max_tokens`` elsewhere.
        tokenizer: ``"bytes"``: no other prompt can be read back as messages.
        max_context: most ids (bytes) of prompt and reply of an environment.
        train_concurrency: most requests on their way that are not for evaluation.
        eval_concurrency: the same of evaluation, apart.
        request_timeout: seconds from sending a request to its answer, all tries together.
        retries: tries after the first, where a connection fails or the provider answers 429 or 5xx.
        retry_pause: seconds before the second try; doubled each time.
        transport: of httpx, instead of the network; for tests.

    Attributes:
        counters: ``content_filter``, ``retry/<why>``, ``lost/<why>``.

    Raises:
        ConfigError: arguments that do not fit together, or no key for OpenAI.

    Example:
        ``engine = OpenAIEngine("gpt-5-mini", reasoning_effort="low")``, then inside a coroutine
        ``[reply] = await engine.chat(messages, SamplingParams(max_tokens=500))``.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        reasoning_effort: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
        max_tokens_field: str | None = None,
        tokenizer: str | Path | Any = "bytes",
        max_context: int = 131_072,
        train_concurrency: int = 16,
        eval_concurrency: int = 16,
        request_timeout: float = 600.0,
        retries: int = 4,
        retry_pause: float = 1.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not model:
            raise ConfigError('engine "openai" needs a model: write "openai:MODEL"')
        url = (base_url or _OPENAI).rstrip("/")
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        if not key and url == _OPENAI:
            raise ConfigError(
                f"{_OPENAI} needs a key: set OPENAI_API_KEY, or give base_url= of another provider"
            )
        for lane, limit in (("train", train_concurrency), ("eval", eval_concurrency)):
            if limit < 1:
                raise ConfigError(f"{lane}_concurrency must be >= 1, got {limit}")
        self.tokenizer = load_tokenizer(tokenizer)
        if not isinstance(self.tokenizer, BytesTokenizer):
            raise ConfigError(
                f"tokenizer must be 'bytes' for an engine over text alone, got {self.tokenizer.name}: only "
                "its prompts can be read back as messages"
            )
        self.model = model
        self.max_context = max_context
        self._versions = VersionTable(1, 0.0, lambda version: None, "none")
        self.counters: Counter[str] = self._versions.counters
        self.traffic = Traffic()
        self._endpoint = Endpoint(url, key, transport=transport)
        # The endpoint's URL ends before /v1, as servers of other kinds have routes beside it.
        self._path = self._endpoint.below + "/chat/completions"
        self._key = key
        self._extra = dict(extra_body or {})
        if reasoning_effort is not None:
            self._extra.setdefault("reasoning_effort", reasoning_effort)
        self._limit_field = max_tokens_field or ("max_completion_tokens" if url == _OPENAI else "max_tokens")
        self._policy = RetryPolicy(retries, retry_pause)
        self._timeout = request_timeout
        self._lanes: dict[Lane, asyncio.Semaphore] = {
            "train": asyncio.Semaphore(train_concurrency),
            "eval": asyncio.Semaphore(eval_concurrency),
        }
        self._thread = LoopThread(f"openai-{model}")

    def __repr__(self) -> str:
        return f"OpenAIEngine({self.model!r}, {self._endpoint.url})"

    # -- text ------------------------------------------------------------------------------------------

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams, n: int = 1, *, lane: Lane = "eval"
    ) -> list[Reply]:
        """Returns ``n`` replies; a provider that gives one at a time is asked until there are enough.

        ``params.stop_ids`` are not sent: the provider ends turns where its model does. A reply that was cut
        by ``max_tokens`` or a content filter has ``complete=False``.

        Raises:
            ContextFull: the conversation is too long for the model.
            AnswerRefused: the answer cannot be read.
            EngineTimeout: no answer in time.
            EngineUnreachable: the provider fails at every try.
            EngineError: the request is not possible; the message has the provider's words.
        """
        if n < 1:
            raise EngineError(f"n must be >= 1, got {n}")
        if not messages:
            raise EngineError("a conversation needs at least one message")
        try:
            return await self._thread.run(self._chat(list(messages), params, n, lane))
        except EngineError as error:
            self.counters[f"lost/{type(error).__name__}"] += 1
            raise

    async def _chat(self, messages: list[Message], params: SamplingParams, n: int, lane: Lane) -> list[Reply]:
        self.traffic.queued += 1
        try:
            await self._lanes[lane].acquire()
        finally:
            self.traffic.queued -= 1
        try:
            with self.traffic.request() as counts:
                async with asyncio.timeout(self._timeout):
                    return await self._replies(messages, params, n, counts)
        except TimeoutError as error:
            raise EngineTimeout(
                f"no answer within request_timeout={self._timeout:g} s from {self.model}"
            ) from error
        finally:
            self._lanes[lane].release()

    async def _replies(
        self, messages: list[Message], params: SamplingParams, n: int, counts: list[int]
    ) -> list[Reply]:
        replies: list[Reply] = []
        asked = 0
        while len(replies) < n:
            missing = n - len(replies)
            seed = None if params.seed is None else fresh_seed(params.seed, asked)
            body = chat_body(
                self.model,
                messages,
                params,
                missing,
                limit_field=self._limit_field,
                seed=seed,
                extra=self._extra,
            )
            data = (await self._answer(body)).data
            replies += read_replies(data, missing)
            counts.append(completion_tokens(data))
            self.counters["content_filter"] += sum(
                choice["finish_reason"] == "content_filter" for choice in data["choices"]
            )
            asked += 1
        return replies

    async def _answer(self, body: dict[str, Any]) -> Answer:
        """Returns an answer 200, after as many tries as the policy has."""
        failures = 0
        while True:
            try:
                answer = await self._endpoint.ask("POST", self._path, body)
            except Passing as error:
                said = self._clean(str(error))
                if _code(error.answer) == "insufficient_quota":
                    raise EngineError(f"the account has no quota left: {said}") from None
                failures += 1
                if failures > self._policy.retries:
                    raise EngineUnreachable(said) from None
                self.counters[f"retry/{error.reason}"] += 1
                await asyncio.sleep(self._policy.pause(failures, error.after))
                continue
            if answer.status == 200:
                return answer
            raise self._refusal(answer)

    def _refusal(self, answer: Answer) -> EngineError:
        said, url = self._clean(answer.message), self._endpoint.url
        if answer.status in (401, 403):
            return EngineError(f"{url} refuses the api key ({said}): set OPENAI_API_KEY, or give api_key=")
        if _code(answer) == "context_length_exceeded" or "context length" in said:
            return ContextFull(f"the conversation is too long for {self.model}: {said}")
        if answer.status == 404:
            return EngineError(f"{url}{self._path} answers 404 ({said}): check model= and base_url=")
        return EngineError(
            f"{url} refused a request: {answer.status} {said}; a field that the model does not take goes "
            "away with extra_body={'field': None}"
        )

    def _clean(self, said: str) -> str:
        return said.replace(self._key, "***") if self._key else said

    # -- as an engine over ids -------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        *,
        version: int | None = None,
        lane: Lane = "train",
        affinity: Hashable = None,
    ) -> list[Completion]:
        """Says ``n`` replies to a conversation in the bytes tokenizer's form; none can be trained on.

        Replies are written as bytes and cut to ``max_tokens`` of them; what a model thought is left out.

        Raises:
            EngineError: as ``chat``; or the prompt is no conversation.
            AnswerRefused: a reply is empty though it has not ended: ``max_tokens`` went into reasoning.
        """
        prompt = as_ids(prompt_ids)
        room = room_left(prompt, self.max_context)
        limit = min(params.max_tokens, room)
        number = self._versions.enter_requests(version)
        try:
            replies = await self.chat(messages_of(prompt), params.with_(max_tokens=limit), n, lane=lane)
        finally:
            self._versions.leave_requests(Counter((number,)))
        return [self._completion(reply, params, limit, number) for reply in replies]

    def _completion(self, reply: Reply, params: SamplingParams, limit: int, version: int) -> Completion:
        ids = self.tokenizer.encode(reply.text)
        if not ids and not reply.complete:
            raise AnswerRefused(
                f"{self.model} said nothing within {limit} tokens, which may have gone into reasoning: raise "
                "max_tokens, or lower reasoning_effort"
            )
        if reply.complete:
            ids.append(BytesTokenizer.END)
        return Completion(
            ids=tuple(ids[:limit]),
            logprobs=None,
            finish_reason="stop" if reply.complete and len(ids) <= limit else "length",
            version=version,
            trainable=f"text only: {self.model} gives neither ids nor logprobs",
            cut_by_context=limit < params.max_tokens,
        )

    async def publish(self, version: int, adapter: str | Path) -> None:
        """Announces a version; the provider's model stays as it is."""

        async def load() -> None:
            return None

        await self._versions.publish(version, Path(adapter), load)

    def trial(self, adapter: str | Path) -> AbstractAsyncContextManager[Held]:
        """Refuses: a provider serves no adapter of ours.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"{self.model} is served by a provider, which loads no adapter such as {adapter}")

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Asks one short question; and says that nothing here can be trained on."""
        try:
            await self.chat([Message(role="user", content="Say ok.")], SamplingParams(max_tokens=512))
            found = Finding("text", "ok", f"{self.model} answers")
        except EngineError as error:
            found = Finding("text", "wrong", str(error))
        return [
            found,
            Finding(
                "ids and logprobs",
                "wrong",
                f"text only: {self.model} gives neither ids nor logprobs",
                "use it for evaluation, judges and data; train with engine hf, vllm or sglang",
            ),
        ]

    def metrics(self) -> dict[str, float]:
        """Returns requests, tokens a second as the provider counts them, queue, latency, retries, losses."""
        return self.traffic.metrics(self.counters)

    # -- end -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Refuses everything from now on and closes connections. Idempotent."""
        self._versions.close()
        if not self._thread.closed:
            self._thread.wait(self._disconnect())
            self._thread.close()

    async def close(self) -> None:
        """``shutdown`` without blocking the caller's event loop. Idempotent."""
        await asyncio.to_thread(self.shutdown)

    async def _disconnect(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._endpoint.close()


def _code(answer: Answer | None) -> str | None:
    """The provider's word for what is wrong."""
    data = None if answer is None else answer.data
    error = data.get("error") if isinstance(data, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None
