"""vLLM's stock server as an engine: ids in, ids and logprobs out, adapters loaded while it serves.

Everything runs on one event loop in a thread of the engine's own, so collectors, learners and plain threads
may call at the same time. Text is never sent, and nothing is scored through the server.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from atropos_gym.engines._ids import as_ids, check_ids, check_samplable
from atropos_gym.engines._loop import LoopThread
from atropos_gym.engines._remote import Endpoint, RetryPolicy
from atropos_gym.engines._traffic import Traffic
from atropos_gym.engines._versions import Hold, ServesVersions, VersionTable
from atropos_gym.engines._vllm_adapters import check_adapter, model_shapes
from atropos_gym.engines._vllm_folders import SharedFolder
from atropos_gym.engines._vllm_replica import VLLMReplica
from atropos_gym.engines._vllm_requests import Request, Requests
from atropos_gym.engines._vllm_served import ask_what_is_served, find_tokenizer
from atropos_gym.engines.base import Completion, Lane, Reference, SamplingParams, SwapMode
from atropos_gym.engines.replicas import Router
from atropos_gym.errors import ConfigError, ContextFull, EngineError, EngineUnreachable, VersionExpired
from atropos_gym.findings import Finding

if TYPE_CHECKING:
    import httpx

    from atropos_gym.engines.launch import VLLMServer

__all__ = ["VLLMEngine"]

log = logging.getLogger(__name__)


class VLLMEngine(ServesVersions):
    """A model behind one or several vLLM servers that are already running.

    Args:
        url: of the server, or of several replicas that serve the same model.
        model: served name (or folder) of the base model; the only one served if None.
        tokenizer: as for ``load_tokenizer``; if None, of the folder that the server or ``model`` names.
        api_key: vLLM's ``--api-key``.
        run: names this incarnation of the learner; adapters are called ``<run>-v<version>``, and otherwise
            where the server has one of that name. A fresh name if None: what was loaded under one that was
            used before may still be in a server's prefix cache.
        adapter_dir: a folder that this process and the server see under one path: adapters from elsewhere are
            copied there before they are loaded. None: they are loaded from where they are.
        max_live_versions: most published versions at a time; the server needs ``--max-cpu-loras`` one above.
        publish_timeout: seconds that a publish waits for the oldest version's holders before it drops them.
        train_concurrency: most requests of training on their way; the others queue here.
        eval_concurrency: the same of evaluation, apart.
        request_timeout: seconds from sending a request to its answer, all tries together.
        retries: tries after the first, where a connection fails or the server answers 429 or 5xx.
        retry_pause: seconds before the second try; doubled each time.
        restart_timeout: seconds that requests wait for a server that answered before and is gone.
        cancel_grace: seconds for which a cancelled request still counts: a server drops it a moment later.
        min_room: fewest ids that a completion must have room for.
        transport: of httpx, instead of the network; for tests.
        server: closed with the engine.
        swap: how a published version comes into force: ``"hot_swap"``, beside the older ones; ``"restart"``,
            alone, on a ``server`` that is started anew; ``"none"``, never.

    Attributes:
        tokenizer: what its ids mean.
        model: served name of the base model.
        max_context: most ids of prompt and completion.
        counters: ``published``, ``retired``, ``version_expired``, ``restored`` (adapters loaded again after a
            restart), ``renamed`` (those whose name was taken), ``aborted`` (samples asked for again),
            ``cut_by_context``, ``retry/<why>``, ``lost/<why>``.

    Raises:
        ConfigError: arguments or servers that do not fit together.
        EngineUnreachable: no server there.

    Example:
        ``engine = VLLMEngine("http://127.0.0.1:8000", api_key=key)``, then inside a coroutine
        ``[c] = await engine.generate(ids, SamplingParams(max_tokens=16, seed=7))``.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        model: str | Path | None = None,
        tokenizer: str | Path | Any = None,
        api_key: str | None = None,
        run: str | None = None,
        adapter_dir: str | Path | None = None,
        max_live_versions: int = 3,
        publish_timeout: float = 600.0,
        train_concurrency: int = 512,
        eval_concurrency: int = 64,
        request_timeout: float = 600.0,
        retries: int = 4,
        retry_pause: float = 0.5,
        restart_timeout: float = 300.0,
        cancel_grace: float = 5.0,
        min_room: int = 1,
        transport: httpx.AsyncBaseTransport | None = None,
        server: VLLMServer | None = None,
        swap: SwapMode = "hot_swap",
    ) -> None:
        if run is None:
            run = f"r-{secrets.token_hex(4)}"
        if not run or "/" in run:
            raise ConfigError(f"run names adapters and must be a plain word, got {run!r}")
        if min_room < 1:
            raise ConfigError(f"min_room must be >= 1, got {min_room}")
        if swap == "in_place":
            raise ConfigError(
                "swap='in_place': vLLM would read the folder again at every step and mix versions in its "
                "prefix cache; use 'hot_swap', with version='turn' in the collector to change between turns"
            )
        if swap == "restart" and server is None:
            raise ConfigError("swap='restart' starts the server anew: launch it (engine 'vllm'), or hot_swap")
        self._versions = VersionTable(max_live_versions, publish_timeout, self._unload, swap)
        self.counters: Counter[str] = self._versions.counters
        self.run = run
        self._min_room = min_room
        self._names: dict[int, str] = {}
        self._folders = SharedFolder(adapter_dir)
        self._seeds = random.Random(secrets.randbits(63))
        self._server = server
        policy = RetryPolicy(retries, retry_pause)
        limits = {"train": train_concurrency, "eval": eval_concurrency}
        for lane, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"{lane}_concurrency must be >= 1, got {limit}")
        urls = [url] if isinstance(url, str) else list(url)
        endpoints = [self._open(one, api_key, transport) for one in urls]
        self._router = Router(
            [
                VLLMReplica(
                    endpoint,
                    policy,
                    self.counters,
                    timeout=request_timeout,
                    restart_timeout=restart_timeout,
                    seeded=self._seeded,
                )
                for endpoint in endpoints
            ]
        )
        self.traffic = Traffic()
        self._thread = LoopThread(f"vllm-{self._router.replicas[0].url}")
        try:
            self._thread.wait(self._start())
            served = self._thread.wait(ask_what_is_served(self._router.replicas, model))
            self.model, self.max_context = served.name, served.max_context
            self._taken = set(served.adapters)  # names that no adapter is given from now on
            self.tokenizer = find_tokenizer(tokenizer, served, model)
        except BaseException:
            self._thread.wait(self._disconnect())
            self._thread.close()
            raise
        self._base_shapes: dict[str, tuple[int, ...]] | None = None
        self._base_folder = Path(served.root)
        self._requests = Requests(
            self._router,
            policy,
            self.traffic,
            self.counters,
            model=self.model,
            max_context=self.max_context,
            rows=self.tokenizer.rows,
            limits=limits,
            timeout=request_timeout,
        )
        self._cancel_grace = cancel_grace

    def __repr__(self) -> str:
        urls = ", ".join(replica.url for replica in self._router.replicas)
        return f"VLLMEngine({urls}, {self.model!r}, newest={self.newest}, live={list(self.live_versions)})"

    # -- what other kinds of engine do otherwise ---------------------------------------------------------

    #: Whether the same seed draws the same ids.
    _seeded: ClassVar[bool] = True

    def _open(self, url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None) -> Endpoint:
        """Returns what is asked at a URL: it has vLLM's routes, whatever is behind it."""
        return Endpoint(url, api_key, transport=transport)

    async def _start(self) -> None:
        """Does on the engine's loop what comes before the first question."""

    # -- sampling --------------------------------------------------------------------------------------

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
        """Samples ``n`` completions of one prompt; ``version=None`` is the newest.

        A try that fails in a way that may pass is repeated under a fresh seed; ``max_tokens`` is lowered to
        what the context has left; samples that the server aborts are asked for again.

        Raises:
            ContextFull: no room for a reply.
            AnswerRefused: the answer cannot be trusted.
            EngineTimeout: no answer in time.
            EngineUnreachable: no server, or it fails at every try.
            VersionExpired: the version is no longer served.
            EngineError: the request is not possible.
        """
        request = self._request(prompt_ids, params, n, lane, affinity)
        number = -1
        while True:
            if version is None:  # who holds one plays on through a restart
                await self._versions.admitted()
            try:
                last, number = number, self._versions.enter_requests(version)
            except VersionExpired as error:
                if self._versions.passing(version):
                    continue
                self._lost(error)
                raise
            try:
                return await self._under(number, request)
            except VersionExpired as error:
                # Unloaded by somebody else while it queued: the newest plays on, if there is a newer one.
                if version is not None or self.newest == last or number == last:
                    self._lost(error)
                    raise
            except EngineError as error:
                self._lost(error)
                raise

    def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, lane: Lane, affinity: Hashable
    ) -> Request:
        """Checks what can be known before anything is sent."""
        prompt = as_ids(prompt_ids)
        if not prompt:
            raise EngineError("the prompt is empty; an engine continues at least one id")
        if n < 1:
            raise EngineError(f"n must be >= 1, got {n}")
        if lane not in ("train", "eval"):
            raise EngineError(f'lane must be "train" or "eval", got {lane!r}')
        rows = self.tokenizer.rows
        check_ids(prompt, rows, "prompt")
        check_ids(params.stop_ids, rows, "stop_ids")
        check_ids(params.allowed_ids or (), rows, "allowed_ids")
        check_samplable(params)
        room = self.max_context - len(prompt)
        wanted = max(self._min_room, params.min_tokens)
        if room < wanted:
            self.counters["lost/ContextFull"] += 1
            raise ContextFull(
                f"the prompt has {len(prompt)} ids and max_context is {self.max_context}: no room for a "
                f"reply of {wanted}"
            )
        if params.max_tokens > room:
            self.counters["cut_by_context"] += 1
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        return Request(prompt, params, n, lane, affinity, seed=seed, max_tokens=min(params.max_tokens, room))

    async def _under(self, version: int, request: Request) -> list[Completion]:
        """Runs a request that was counted in; it is counted out once the server is done with it."""

        def leave() -> None:
            self._versions.leave_requests(Counter((version,)))

        def done(task: asyncio.Task[list[Completion]]) -> None:
            if request.sent:  # its caller is gone or its deadline past, and the server still at it
                self._thread.loop.call_later(self._cancel_grace, leave)
            else:
                leave()

        name = self._names[version] if version else self.model
        work = self._requests.complete(request, name, version)
        try:
            future = self._thread.submit(work, done)
        except BaseException:
            leave()
            raise
        return await asyncio.wrap_future(future)

    def _lost(self, error: EngineError) -> None:
        self.counters[f"lost/{type(error).__name__}"] += 1

    # -- versions --------------------------------------------------------------------------------------

    async def publish(self, version: int, adapter: str | Path) -> None:
        """Checks the folder, loads it into every replica and makes it the newest version.

        The same version from the same folder again changes nothing. With ``max_live_versions`` loaded it
        waits for the oldest one's holders, then drops them (``counters["version_expired"]``).

        Raises:
            EngineError: the folder cannot be served, version or folder was used before, or the version does
                not grow; whatever was served goes on being served.
            EngineUnreachable: no replica could be reached.
        """
        folder = Path(adapter).expanduser().resolve()  # a link may lead elsewhere when it is read again

        async def load() -> None:
            if self.swap == "restart" and self._server is not None:
                await asyncio.to_thread(self._server.restart)
            await self._load(version, self._name(version), folder)

        with self.traffic.publishing():
            await self._versions.publish(version, folder, load)

    def _name(self, version: int) -> str:
        """Names a version's adapter; what an earlier life has left loaded is never served in its place."""
        name = f"{self.run}-v{version}"
        if name not in self._taken:
            return name
        self.counters["renamed"] += 1
        return f"{name}-{secrets.token_hex(4)}"

    @asynccontextmanager
    async def trial(self, adapter: str | Path) -> AsyncIterator[Hold]:
        """Serves an adapter under a negative version number within the context only; never the newest."""
        folder = Path(adapter).expanduser().resolve()

        async def load(number: int) -> None:
            await self._load(number, f"{self.run}-trial-{secrets.token_hex(4)}", folder)

        async with self._versions.trial(folder, load) as held:
            yield held

    async def _load(self, version: int, name: str, folder: Path) -> None:
        await asyncio.to_thread(self._check_adapter, folder)
        try:
            seen = await asyncio.to_thread(self._folders.place, name, folder)
        except OSError as error:
            raise EngineError(
                f"adapter folder {folder} cannot be copied to adapter_dir: {error}; give it one with room "
                "that this process may write to"
            ) from error
        self._names[version] = name
        try:
            await self._thread.run(self._load_everywhere(name, seen))
        except BaseException:
            self._names.pop(version, None)
            if name in self._uncertain():  # the server may load it yet, and read its folder
                self._taken.add(name)
            else:
                await asyncio.to_thread(self._folders.remove, name)
            raise

    def _check_adapter(self, folder: Path) -> None:
        if self._base_shapes is None:
            self._base_shapes = model_shapes(self._base_folder) or {}
        check_adapter(folder, self._base_shapes or None)

    async def _load_everywhere(self, name: str, folder: Path) -> None:
        """Loads into all replicas; one that is gone gets it when it is back, if another one has it."""
        replicas = self._router.replicas
        present = [replica for replica in replicas if not replica.down] or replicas
        results = await asyncio.gather(
            *(replica.load(name, folder) for replica in present), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        refusals = [failure for failure in failures if not isinstance(failure, EngineUnreachable)]
        if refusals or len(failures) == len(present):
            for replica in present:
                if name in replica.adapters:
                    await replica.unload(name)
            raise (refusals or failures)[0]
        for replica in replicas:
            if name not in replica.adapters:
                replica.adapters[name] = folder  # restored by the first request that misses it
                self.counters["published_without_replica"] += 1

    async def _unload(self, version: int) -> None:
        name = self._names.pop(version, None)
        if name is None:
            return
        left = self._uncertain() - set(self._names.values())  # those are on their way to be served
        await self._forget(name)
        for other in sorted(left):
            try:
                await self._forget(other)
            except EngineError as error:  # the next one that is unloaded tries again, then the close
                log.warning("adapter %s may still be loaded: %s", other, error)

    async def _forget(self, name: str) -> None:
        await self._thread.run(self._unload_everywhere(name))
        await asyncio.to_thread(self._folders.remove, name)

    async def _unload_everywhere(self, name: str) -> None:
        await asyncio.gather(*(replica.unload(name) for replica in self._router.replicas))

    def _uncertain(self) -> set[str]:
        """Names that some server may have, though nobody is served by them."""
        return set().union(*(replica.uncertain for replica in self._router.replicas))

    # -- what is known ---------------------------------------------------------------------------------

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on; ``wrong`` findings name the flag or setting to change."""
        from atropos_gym.engines._vllm_checks import server_findings
        from atropos_gym.engines.checks import check_engine

        found = server_findings(
            self._router.replicas, self.model, self._base_folder, self.max_context, self.tokenizer, reference
        )
        return [*await self._thread.run(found), *await check_engine(self, reference)]

    def metrics(self) -> dict[str, float]:
        """Returns requests, ids a second, queue, latency, cached prompts, retries, losses, publish waits."""
        return self.traffic.metrics(self.counters)

    async def server_metrics(self) -> dict[str, float]:
        """Returns the servers' own metrics (``vllm:…``), summed over labels and replicas."""
        from atropos_gym.engines._vllm_checks import read_metrics

        return await self._thread.run(read_metrics(self._router.replicas))

    # -- end -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Refuses everything from now on, unloads the adapters and closes connections. Idempotent."""
        self._versions.close()
        with ExitStack() as ends:  # in reverse, each of them whatever fails
            if self._server is not None:
                ends.callback(self._server.close)
            if not self._thread.closed:
                ends.callback(self._folders.clear)
                ends.callback(self._thread.close)
                self._thread.wait(self._disconnect())

    async def close(self) -> None:
        """``shutdown`` without blocking the caller's event loop. Idempotent."""
        await asyncio.to_thread(self.shutdown)

    async def _disconnect(self) -> None:
        own = asyncio.current_task()
        running = [task for task in asyncio.all_tasks() if task is not own]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        closing = (replica.close() for replica in self._router.replicas)
        for end in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(end, BaseException):
                raise end
