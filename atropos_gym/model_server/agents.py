"""AgentCollector: runs an agent program k times from each start and makes groups of it.

The program gets a base URL and an api key, does whatever it does with an OpenAI client, and returns its
score.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import httpx

from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.wire import ScoredDataGroup

__all__ = ["Agent", "AgentCollector", "AgentGroup"]

Agent = Callable[[str, str, Any], Awaitable[float | None]] | Callable[[str, str, Any], float | None]
"""``agent(base_url, api_key, start) -> score``, plain ones in threads; None leaves this run out."""


@dataclass(frozen=True, slots=True)
class AgentGroup:
    """What became of the runs from one start.

    Attributes:
        start: as it was given.
        scores: of each run; None where it failed or gave none.
        failures: what the runs raised, in order of their members; a cancellation of their own among it.
        group: the scored group, unless the server posts groups by itself or withheld it.
        posted: its name at the batch server, where it was posted.
        withheld: why there is no group.
        report: what the server said and counted.
    """

    start: Any
    scores: list[float | None]
    failures: list[BaseException]
    group: ScoredDataGroup | None
    posted: str | bool | None
    withheld: str | None
    report: dict[str, Any]


class AgentCollector:
    """Plays groups with an agent program against a model server.

    Args:
        agent: ``agent(base_url, api_key, start) -> score``, async or plain.
        url: of the model server.
        group_size: runs from each start.
        concurrency: starts that are played at a time.
        name: of the task.
        temperature: of sampling; None is the server's.
        max_tokens: most ids of a reply; None is the server's.
        deadline: seconds that one run may take; then it has failed.
        token: opens the server's sessions, where it asks for one.
        transport: another way to reach it, such as ``httpx.ASGITransport(app)``.

    Attributes:
        counts: groups by what became of them, failed runs by what they raised.

    Example:
        >>> async def agent(base_url, api_key, start):
        ...     client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...     said = await client.chat.completions.create(
        ...         model="any", messages=[{"role": "user", "content": start}])
        ...     return float("42" in said.choices[0].message.content)
        >>> collector = AgentCollector(agent, server.url)  # doctest: +SKIP
        >>> groups = await collector.collect(["What is 6 times 7?"])  # doctest: +SKIP
    """

    def __init__(
        self,
        agent: Agent,
        url: str,
        *,
        group_size: int = 8,
        concurrency: int = 8,
        name: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        deadline: float | None = 600.0,
        token: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if group_size < 1 or concurrency < 1:
            raise ConfigError(f"group_size and concurrency must be >= 1, got {group_size} and {concurrency}")
        self.counts: Counter[str] = Counter()
        self._agent = agent
        self._threads: ThreadPoolExecutor | None = None
        if not inspect.iscoroutinefunction(agent):  # it blocks: a thread for each run
            self._threads = ThreadPoolExecutor(group_size * concurrency, thread_name_prefix="agent")
        self._url = url.rstrip("/")
        self._concurrency = concurrency
        self._deadline = deadline
        self._session = {
            "group_size": group_size,
            "name": name,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._options: dict[str, Any] = {
            "base_url": self._url,
            "headers": headers,
            "transport": transport,
            "timeout": None,  # a finished group may wait for its trainer
            "trust_env": False,
        }

    async def collect(self, starts: Iterable[Any]) -> list[AgentGroup]:
        """Plays a group from each start; in the order of the starts.

        Raises:
            ServerError: the server cannot be reached, or opens no groups.
        """
        places: list[tuple[int, AgentGroup]] = [one async for one in self._stream(starts)]
        return [group for _, group in sorted(places, key=lambda one: one[0])]

    async def stream(self, starts: Iterable[Any]) -> AsyncIterator[AgentGroup]:
        """Plays a group from each start, and yields each as it is finished.

        It ends with the starts, or when the trainer behind the server has finished.

        Raises:
            ServerError: the server cannot be reached, or opens no groups.
        """
        async for _, group in self._stream(starts):
            yield group

    async def _stream(self, starts: Iterable[Any]) -> AsyncIterator[tuple[int, AgentGroup]]:
        running: set[asyncio.Task[tuple[int, AgentGroup]]] = set()
        coming = enumerate(starts)
        wanted = True
        async with httpx.AsyncClient(**self._options) as http:
            try:
                while True:
                    while wanted and len(running) < self._concurrency:
                        if (following := next(coming, None)) is None:
                            wanted = False
                        else:
                            running.add(asyncio.create_task(self._play(http, *following)))
                    if not running:
                        return
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        try:
                            yield task.result()
                        except _NoMoreWanted:
                            wanted = False
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _play(self, http: httpx.AsyncClient, place: int, start: Any) -> tuple[int, AgentGroup]:
        try:
            session = await _call(http, "POST", "/sessions", self._session)
        except ServerError as error:
            if error.status == 410:
                raise _NoMoreWanted from error
            raise
        path = f"/sessions/{session['id']}"
        try:
            ended = await asyncio.gather(*(self._run(member, start) for member in session["members"]))
        except BaseException:  # cancelled: what was played so far is nobody's any more
            with suppress(httpx.HTTPError):
                await asyncio.shield(http.delete(path))
            raise
        scores = [one if not isinstance(one, BaseException) else None for one in ended]
        failures = [one for one in ended if isinstance(one, BaseException)]
        self.counts.update(f"failed run: {type(error).__name__}" for error in failures)
        try:
            done = await _call(http, "POST", f"{path}/finish", {"scores": scores})
        except ServerError as error:  # this group is lost; the next one need not be
            self.counts["not finished"] += 1
            return place, AgentGroup(start, scores, failures, None, None, str(error), {})
        self.counts["withheld" if done["withheld"] else "finished"] += 1
        group = None if done["group"] is None else ScoredDataGroup.model_validate(done["group"])
        told = ("version", "number", "members", "counts", "ignored", "left_out")
        report = {name: done[name] for name in told}
        return place, AgentGroup(start, scores, failures, group, done["posted"], done["withheld"], report)

    async def _run(self, member: dict[str, Any], start: Any) -> float | None | BaseException:
        """Runs the program once; what it raises ends this run only."""
        try:
            async with asyncio.timeout(self._deadline):
                score = await self._called(member["base_url"], member["api_key"], start)
            if score is not None and not isfinite(score):
                raise ValueError(f"a score must be a finite number or None, got {score}")
            return None if score is None else float(score)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return error  # nobody cancels us: something within the program was cancelled
        except Exception as error:
            return error

    async def _called(self, *about: Any) -> float | None:
        if self._threads is None:
            return await cast(Awaitable[float | None], self._agent(*about))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, cast(Callable[..., float | None], self._agent), *about
        )


class _NoMoreWanted(Exception):
    """The trainer has finished."""


async def _call(http: httpx.AsyncClient, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body)
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        raise ServerError(
            f"no answer from {http.base_url}: {reason}; is it running (`atropos-gym serve-model`)?"
        ) from error
    told: dict[str, Any] = response.json()
    if response.is_error:
        message = told.get("error", {}).get("message", response.text[:200])
        raise ServerError(f"{method} {path}: {message}", status=response.status_code)
    return told
