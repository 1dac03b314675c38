"""The in-process engine: a transformers model, batched with a KV cache, several LoRA versions at a time.

The reference for what sampling means here, and the default. Concurrent ``generate`` calls are answered as
one batch by a worker thread, so event loops stay responsive; they may come from several loops and threads. A
sample's ids depend on the weights, its prompt, its parameters, its seed and its number among the request's
``n``, not on what shares the batch (rounding can flip an id that lies within about 1e-7 of a boundary).

Nothing is scored here: logprobs come with the samples.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Coroutine, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atropos_gym.engines._batching import Batcher, Outcome, Request
from atropos_gym.engines._choices import check_choices
from atropos_gym.engines._decode import TrieDecoder
from atropos_gym.engines._ids import as_ids, check_ids, check_samplable, room_left
from atropos_gym.engines._lora import Adapters
from atropos_gym.engines._model import build_model, check_layers, context_limit, load_model
from atropos_gym.engines._versions import Hold, ServesVersions, VersionTable
from atropos_gym.engines.base import Completion, Lane, Reference, SamplingParams, SwapMode, sampling_trainable
from atropos_gym.engines.checks import check_engine
from atropos_gym.errors import ConfigError, EngineError, VersionExpired
from atropos_gym.findings import Finding
from atropos_gym.tokenizers import Tokenizer, load_tokenizer

__all__ = ["HFEngine"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class HFEngine(ServesVersions):
    """A causal language model in this process.

    Args:
        model: folder (or hub name) of a transformers model.
        base: instead of ``model``: the model's tensors, as ``state_dict()`` names them. They are shared, not
            copied: a learner that trains them in place is seen at once.
        config: the transformers configuration that belongs to ``base``.
        tokenizer: as for ``load_tokenizer``; the model's folder if None.
        dtype: ``float32``, ``bfloat16`` or ``float16``; with ``base`` it must be what the tensors have.
        device: where the model runs; with ``base`` where the tensors are.
        max_batch: most samples of one batch.
        max_context: most ids of prompt and completion; the model's own limit if None.
        max_live_versions: most adapter versions at a time; the base does not count.
        publish_timeout: seconds that a publish waits for the oldest version's holders before it drops them.
        seed: start of the stream that seeds requests without one; drawn from the system if None.
        swap: how a published version comes into force. ``"hot_swap"``: beside the older ones; ``"restart"``:
            alone, when all that plays has ended; ``"in_place"``: at the next id of whatever runs (its
            completion says the first and the last version); ``"none"``: never, the base goes on.

    Attributes:
        tokenizer: what its ids mean.
        model: name or folder of the model, ``base`` where tensors were given.
        max_context: most ids of prompt and completion.
        counters: ``published``, ``retired``, ``version_expired`` (holders dropped by a publish).

    Raises:
        ConfigError: arguments that do not fit together, named.
        MissingData: no such model.

    Example:
        ``engine = HFEngine("models/SmolLM2-135M-Instruct")``, then inside a coroutine
        ``[c] = await engine.generate(ids, SamplingParams(max_tokens=16, seed=7))``.
    """

    #: It shares the learner's process, and what is published cannot be lost on the way.
    in_process = True

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        base: Mapping[str, Tensor] | None = None,
        config: Any = None,
        tokenizer: str | Path | Any = None,
        dtype: str = "float32",
        device: str = "cpu",
        max_batch: int = 1024,
        max_context: int | None = None,
        max_live_versions: int = 3,
        publish_timeout: float = 600.0,
        seed: int | None = None,
        swap: SwapMode = "hot_swap",
    ) -> None:
        if (model is None) == (base is None):
            raise ConfigError("give one of model= (a folder) and base= (a learner's tensors)")
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        if max_batch < 1:
            raise ConfigError(f"max_batch must be >= 1, got {max_batch}")
        if model is not None:
            network = load_model(model, _DTYPES[dtype])
            network.to(device)
        else:
            assert base is not None
            network = build_model(base, config, _DTYPES[dtype], torch.device(device))
        network.eval().requires_grad_(False)
        text_config = network.config.get_text_config()
        check_layers(text_config)
        self._rows = int(network.get_input_embeddings().weight.shape[0])
        if tokenizer is None:
            if model is None:
                raise ConfigError("base= needs tokenizer= too: the learner's")
            tokenizer = model
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer, rows=self._rows)
        self.model = "base" if model is None else str(model)
        self.max_context = context_limit(text_config, max_context)

        self._adapters = Adapters(network)
        self._between_steps = threading.Lock() if swap == "in_place" else None
        self._versions = VersionTable(max_live_versions, publish_timeout, self._unload, swap)
        self._batcher = Batcher(self._run, self._versions.leave_requests, max_batch)
        self._decoder: TrieDecoder | None = TrieDecoder(
            network,
            self._adapters.plan,
            lambda: self._batcher.stopping,
            in_place=None if self._between_steps is None else (self._between_steps, lambda: self.newest),
        )
        self._seeds = random.Random(seed)
        self._known_ids: set[tuple[int, ...]] = {()}  # stop and allowed ids that were checked already
        self.counters: Counter[str] = self._versions.counters

    def __repr__(self) -> str:
        return f"HFEngine({self.model!r}, newest={self.newest}, live={list(self.live_versions)})"

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

        ``lane`` and ``affinity`` change nothing here: what waits is one batch.

        Raises:
            EngineError: the prompt is empty, does not fit in ``max_context`` or has an id outside the
                vocabulary; no id can be sampled; the engine is closed.
            VersionExpired: the version is no longer served.
        """
        while True:
            if version is None:  # who holds one plays on through a restart
                await self._versions.admitted()
            try:
                request = self._admit(prompt_ids, params, n, version)
            except VersionExpired:
                if not self._versions.passing(version):
                    raise
            else:
                return await self._batcher.ask(request)

    def generate_sync(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1, *, version: int | None = None
    ) -> list[Completion]:
        """``generate`` for code without an event loop; blocks the calling thread."""
        return self._batcher.ask_now([self._admit(prompt_ids, params, n, version)])[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        version: int | None = None,
    ) -> list[Completion]:
        """Samples one completion of each prompt, as one batch; blocks the calling thread.

        Args:
            prompts: ids of each prompt.
            params: one for all (its seed is shared, so equal prompts give equal samples), or one each.
            version: the newest if None.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise EngineError(f"{len(prompts)} prompts came with {len(each)} params; give as many, or one")
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                requests.append(self._admit(prompt, one, 1, version))
        except BaseException:
            self._versions.leave_requests(Counter(request.version for request in requests))
            raise
        return [completions[0] for completions in self._batcher.ask_now(requests)]

    def _run(self, requests: list[Request]) -> list[Outcome]:
        if self._decoder is None:
            raise EngineError("the engine is closed")
        return self._decoder.run(requests)

    def _admit(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, version: int | None
    ) -> Request:
        """Checks a request and counts it in."""
        prompt = as_ids(prompt_ids)
        if not prompt:
            raise EngineError("the prompt is empty; an engine continues at least one id")
        check_ids(prompt, self._rows, "prompt")
        room = room_left(prompt, self.max_context)
        if n < 1:
            raise EngineError(f"n must be >= 1, got {n}")
        self._check_params(params)
        check_choices(params, self._rows, room)
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        return Request(
            prompt=prompt,
            params=params,
            n=n,
            version=self._versions.enter_requests(version),
            seed=seed,
            max_tokens=min(params.max_tokens, room),
            trainable=sampling_trainable(params),
            cut_by_context=params.max_tokens > room,
        )

    def _check_params(self, params: SamplingParams) -> None:
        for name, ids in (("stop_ids", params.stop_ids), ("allowed_ids", params.allowed_ids or ())):
            if ids not in self._known_ids:
                check_ids(ids, self._rows, name)
                self._known_ids.add(ids)
        check_samplable(params)

    # -- versions --------------------------------------------------------------------------------------

    async def publish(self, version: int, adapter: str | Path) -> None:
        """Checks the folder whole and makes it the newest version; returns when requests get it.

        The same version from the same folder again changes nothing. With ``max_live_versions`` loaded it
        waits for the oldest one's holders, then drops them (``counters["version_expired"]``).

        Raises:
            EngineError: the folder is not usable, version or folder was used before, or the version does not
                grow; whatever was served goes on being served.
        """
        folder = Path(adapter)

        async def load() -> None:
            pairs = await asyncio.to_thread(self._adapters.read, folder)
            self._adapters.install(version, pairs)

        await self._versions.publish(version, folder, load)

    def _unload(self, version: int) -> Awaitable[None] | None:
        if self._between_steps is not None:
            return asyncio.to_thread(self._unload_between_steps, version)
        self._adapters.unload(version)
        return None

    def _unload_between_steps(self, version: int) -> None:
        assert self._between_steps is not None
        with self._between_steps:  # a step under way has these weights in hand
            self._adapters.unload(version)

    def publish_sync(self, version: int, adapter: str | Path) -> None:
        """``publish`` for code without an event loop; blocks the calling thread."""
        _finish(self.publish(version, adapter))

    @asynccontextmanager
    async def trial(self, adapter: str | Path) -> AsyncIterator[Hold]:
        """Serves an adapter under a negative version number within the context only; never the newest."""
        folder = Path(adapter)

        async def load(number: int) -> None:
            self._adapters.install(number, await asyncio.to_thread(self._adapters.read, folder))

        async with self._versions.trial(folder, load) as held:
            yield held

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on; see ``engines.checks``."""
        return await check_engine(self, reference)

    # -- end -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Stops serving at once: what waits is refused, a running batch ends at its next step. Idempotent."""
        self._versions.close()
        running = self._batcher.close()
        self._decoder = None if running is None else self._decoder

    async def close(self) -> None:
        """``shutdown``, then waits until nothing runs any more and lets the model go. Idempotent."""
        self._versions.close()
        running = self._batcher.close()
        if running is not None:
            await asyncio.wrap_future(running)
        self._decoder = None


def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end, whether or not this thread has a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    failures: list[BaseException] = []

    def in_thread() -> None:
        try:
            asyncio.run(work)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_thread, name="hf-engine-publish", daemon=False)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
