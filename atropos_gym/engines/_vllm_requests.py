"""One ``generate`` call against vLLM, from its place in the queue to its completions.

Lives on the engine's loop: queueing by lane, the deadline, tries and their fresh seeds, another replica where
one is gone, an adapter restored where a server forgot it, aborted samples asked for again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_gym.engines._choices import check_choices
from atropos_gym.engines._remote import Answer, Passing, RetryPolicy
from atropos_gym.engines._traffic import Traffic
from atropos_gym.engines._vllm_replica import VLLMReplica
from atropos_gym.engines._vllm_wire import cached_ids, completion_body, fresh_seed, read_completions
from atropos_gym.engines.base import Completion, Lane, SamplingParams
from atropos_gym.engines.replicas import Router
from atropos_gym.errors import ContextFull, EngineError, EngineTimeout

__all__ = ["Request", "Requests"]


@dataclass(slots=True, eq=False)
class Request:
    """One ``generate`` call, checked.

    Attributes:
        seed: of its first try; each further one derives its own.
        max_tokens: what the context leaves of ``params.max_tokens``.
        attempt: how many tries may have sampled something; each has a seed of its own.
        sent: one of them is on its way.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    n: int
    lane: Lane
    affinity: Hashable
    seed: int
    max_tokens: int
    attempt: int = 0
    sent: bool = False


class Requests:
    """Sends requests and reads their answers.

    Args:
        router: which replica gets one.
        policy: how often a failed try is repeated.
        traffic: told of every request.
        counters: of retries and aborted samples.
        model: served name of the base model.
        max_context: of it.
        rows: of its embedding.
        limits: most requests on their way, by lane.
        timeout: seconds from sending to the last id, all tries together.
    """

    def __init__(
        self,
        router: Router[VLLMReplica],
        policy: RetryPolicy,
        traffic: Traffic,
        counters: Counter[str],
        *,
        model: str,
        max_context: int,
        rows: int,
        limits: Mapping[str, int],
        timeout: float,
    ) -> None:
        self._router = router
        self._policy = policy
        self._traffic = traffic
        self._counters = counters
        self._model = model
        self._max_context = max_context
        self._rows = rows
        self._lanes = {lane: asyncio.Semaphore(limit) for lane, limit in limits.items()}
        self._timeout = timeout

    async def complete(self, request: Request, name: str, version: int) -> list[Completion]:
        """Returns the request's completions, sampled under the model or adapter ``name``.

        Raises:
            EngineError: as ``VLLMEngine.generate``.
        """
        check_choices(request.params, self._rows, self._max_context - len(request.prompt))
        self._traffic.queued += 1
        try:
            await self._lanes[request.lane].acquire()
        finally:
            self._traffic.queued -= 1
        try:
            with self._traffic.request() as counts:
                async with asyncio.timeout(self._timeout):
                    completions = await self._samples(request, name, version)
                counts.append(sum(len(completion.ids) for completion in completions))
        except TimeoutError as error:
            raise EngineTimeout(
                f"no answer within request_timeout={self._timeout} s from {self._model} "
                f"({request.attempt + 1} tries, prompt of {len(request.prompt)} ids)"
            ) from error
        finally:
            self._lanes[request.lane].release()
        if request.params.temperature == 0:
            return completions * request.n
        return completions

    async def _samples(self, request: Request, name: str, version: int) -> list[Completion]:
        """Asks until no sample is aborted; one that is aborted again and again is returned as such."""
        missing = 1 if request.params.temperature == 0 else request.n
        finished: list[Completion] = []
        rounds = 0
        while True:
            replica, data = await self._answer(request, name, missing)
            [batch] = read_completions(
                data,
                [request.prompt],
                request.params,
                missing,
                version=version,
                max_tokens=request.max_tokens,
                rows=self._rows,
            )
            self._traffic.prompt(len(request.prompt), cached_ids(data))
            aborted = [completion for completion in batch if completion.finish_reason == "abort"]
            finished += [completion for completion in batch if completion.finish_reason != "abort"]
            if not aborted:
                return finished
            self._counters["aborted"] += len(aborted)
            request.attempt += 1
            rounds += 1
            if rounds > self._policy.retries:
                return finished + aborted
            if len(aborted) == missing:
                await replica.until_resumed()
            missing = len(aborted)
            await asyncio.sleep(self._policy.pause(rounds, None))

    async def _answer(self, request: Request, name: str, n: int) -> tuple[VLLMReplica, Any]:
        """Returns who answered 200 and what, after as many tries as the policy has."""
        failed = restored = 0
        while True:
            replica = self._router.choose(request.affinity)
            body = completion_body(
                name,
                request.prompt,
                request.params,
                n,
                seed=fresh_seed(request.seed, request.attempt),
                max_tokens=request.max_tokens,
            )
            request.sent = True
            try:
                answer = await replica.endpoint.ask("POST", "/v1/completions", body)
                request.sent = False
            except Passing as error:
                request.sent = False
                request.attempt += 1
                failed = await replica.after(error, failed)
                continue
            if answer.status == 200:
                await replica.recognise(self._model)
                return replica, answer.data
            if _is_forgotten(answer) and name != self._model and restored <= self._policy.retries:
                restored += 1
                await replica.restore(name, self._model, self._max_context)
                continue
            raise self._refusal(answer, replica.url, request)

    def _refusal(self, answer: Answer, url: str, request: Request) -> EngineError:
        """Returns what an answer means that another try would not change."""
        said = answer.message
        if answer.status in (401, 403):
            return EngineError(f"{url} refuses the api key ({said}): give api_key= as in vLLM's --api-key")
        if "maximum context length" in said or "max_tokens must be at least 1, got 0" in said:
            return ContextFull(
                f"the prompt of {len(request.prompt)} ids does not fit in the server's context: {said}"
            )
        if request.params.choices is not None and "grammar" in said.lower():
            return EngineError(
                f"{url} cannot choose among replies by their ids ({said}): use vLLM >= 0.32, with the "
                "structured outputs backend xgrammar (auto takes it)"
            )
        if "Out of range float" in said:
            return EngineError(
                f"nothing could be sampled: min_tokens={request.params.min_tokens} with allowed_ids="
                f"{request.params.allowed_ids} and stop_ids={request.params.stop_ids} leaves no id ({said})"
            )
        if answer.status == 404:
            return EngineError(f"{url} does not serve {self._model}: {said}; is it a vLLM server?")
        return EngineError(f"{url} refused a request: {answer.status} {said}")


def _is_forgotten(answer: Answer) -> bool:
    return answer.status == 404 and "does not exist" in answer.message
