"""One vLLM server and the adapters that should be on it: loaded, unloaded, and restored after its restart.

A server that is restarted has forgotten all adapters that were loaded at run time; whoever notices first
restores all of them, under one lock. The base model never stands in for an adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from atropos_gym.engines._remote import Answer, Endpoint, Passing, RetryPolicy
from atropos_gym.engines._vllm_adapters import already_loaded, load_refusal
from atropos_gym.engines._vllm_wire import completion_body, read_completions
from atropos_gym.engines.base import SamplingParams
from atropos_gym.errors import EngineError, EngineTimeout, EngineUnreachable, VersionExpired

__all__ = ["VLLMReplica"]

log = logging.getLogger(__name__)

#: Seconds between two looks whether a server is back.
_LONGEST_LOOK = 5.0
#: A server whose engine is dead says so to every request, until its process ends.
_DYING = "EngineCore encountered an issue"
#: Samples of one id each, by which a server is known again.
_PROBES = 16
#: Mean difference of logprobs, in nats, that rounding explains in any precision.
_NOISE = 0.1


class VLLMReplica:
    """A server behind an engine. Lives on the engine's loop.

    Args:
        endpoint: where it is.
        policy: how often a failed try is repeated.
        timeout: seconds for an answer about models and adapters, all tries together.
        restart_timeout: seconds that requests wait for a server that was there and is gone.
        counters: shared with the engine; ``restored`` counts adapters loaded again, ``not_recognised``
            restarts after which there was nothing to compare.
        seeded: whether the server honours seeds, so that it draws the same ids after a restart.

    Attributes:
        adapters: folders by name: what the server should have.
        uncertain: names that it may have besides: whether they were loaded, or unloaded, it never said.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        policy: RetryPolicy,
        counters: Counter[str],
        *,
        timeout: float,
        restart_timeout: float,
        seeded: bool = True,
    ) -> None:
        self.endpoint = endpoint
        self.adapters: dict[str, Path] = {}
        self.uncertain: set[str] = set()
        self._policy = policy
        self._timeout = timeout
        self._restart_timeout = restart_timeout
        self._counters = counters
        self._restoring = asyncio.Lock()
        self._seeded = seeded
        self._sample: dict[int, float] | None = None
        self._breaks = 0  # connections that broke: another server may be there since
        self._compared = 0  # of them, those after which it was seen to be the same
        self._looking: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self.endpoint.url

    @property
    def running(self) -> int:
        """Requests on their way."""
        return self.endpoint.running

    @property
    def down(self) -> bool:
        """Whether it could not be reached when it was last tried."""
        return self.endpoint.down

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        keep: frozenset[int] = frozenset(),
        failed: list[Passing] | None = None,
    ) -> Answer:
        """Asks until there is an answer, within the policy.

        Args:
            method: of HTTP.
            path: of the URL.
            body: as JSON.
            keep: statuses that are answers, though others like them may pass.
            failed: gets the tries that failed.

        Raises:
            EngineUnreachable: every try failed, or the server is gone for longer than there is time.
            EngineTimeout: no answer in time.
        """
        failures = 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    try:
                        return await self.endpoint.ask(method, path, body)
                    except Passing as error:
                        said = error.answer
                        if said is not None and said.status in keep and _DYING not in said.message:
                            return said
                        if failed is not None:
                            failed.append(error)
                        failures = await self.after(error, failures)
        except TimeoutError as error:
            kind = EngineUnreachable if self.down else EngineTimeout
            raise kind(f"no answer from {self.url}{path} within {self._timeout:g} s") from error

    async def after(self, error: Passing, failures: int) -> int:
        """Waits until another try makes sense.

        Args:
            error: of the try that failed.
            failures: before it, in a row.

        Returns:
            How many failed in a row; 0 after a server that was gone is back.

        Raises:
            EngineUnreachable: that was the last try.
        """
        failures += 1
        if error.reason == "connection" and self.endpoint.seen:
            self.endpoint.down = True
            self._breaks += 1
            self._watch()
        if failures <= self._policy.retries:
            await asyncio.sleep(self._policy.pause(failures, error.after))
        elif self.down and await self._until_up():
            failures = 0
        else:
            raise EngineUnreachable(str(error)) from error
        self._counters[f"retry/{error.reason}"] += 1
        return failures

    async def models(self) -> dict[str, dict[str, Any]]:
        """Returns what is served, base models and adapters, by name.

        Raises:
            EngineError: the answer is not vLLM's.
        """
        answer = await self.ask("GET", "/v1/models")
        if answer.status in (401, 403):
            raise EngineError(f"{self.url} refuses the api key ({answer.message}): give api_key=")
        data = answer.data
        entries = data.get("data") if isinstance(data, dict) else None
        if answer.status != 200 or not isinstance(entries, list):
            raise EngineError(
                f"{self.url}/v1/models answers {answer.status} {answer.message[:80]!r}: is it a vLLM server?"
            )
        return {str(entry.get("id")): entry for entry in entries if isinstance(entry, dict)}

    async def load(self, name: str, folder: Path) -> None:
        """Loads an adapter; one of that name is accepted only if an answer to this request can be lost.

        Without an answer the name is ``uncertain``: give the next try another one.

        Raises:
            EngineError: the server refused it; the message names the flag or setting to change.
            EngineUnreachable: no answer.
        """
        self.uncertain.add(name)
        await self._load(name, folder)
        self.adapters[name] = folder

    async def _load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}  # never load_inplace: it would stick
        failed: list[Passing] = []
        answer = await self.ask("POST", "/v1/load_lora_adapter", body, keep=frozenset({500}), failed=failed)
        taken = already_loaded(answer)
        root = (await self.models()).get(name, {}).get("root") if taken else None
        self.uncertain.discard(name)
        if answer.status == 200:
            return
        if taken:
            if root == str(folder) and (failed or name in self.adapters):
                return
            # From the same folder too: it may have held other weights then.
            raise EngineError(
                f"{self.url} has an adapter {name} from {root} already, so {folder} would never be served: "
                "give another run="
            )
        raise EngineError(load_refusal(answer, name, folder, self.url))

    async def unload(self, name: str) -> None:
        """Makes the server forget an adapter; one that it does not know is as good.

        Raises:
            EngineError: it refused: the folder must stay.
        """
        async with self._restoring:  # else one under way could load it again
            self.adapters.pop(name, None)
            self.uncertain.add(name)
            try:
                answer = await self._ask_to_unload(name)
            except (Passing, TimeoutError, EngineUnreachable) as error:
                if self.down:
                    self.uncertain.discard(name)
                    return  # a server that is gone has forgotten it
                raise EngineUnreachable(f"{self.url} did not unload adapter {name}: {error}") from error
        if answer.status not in (200, 404):
            raise EngineError(f"{self.url} did not unload adapter {name}: {answer.status} {answer.message}")
        self.uncertain.discard(name)

    async def _ask_to_unload(self, name: str) -> Answer:
        path, body = "/v1/unload_lora_adapter", {"lora_name": name}
        if not self.down:
            return await self.ask("POST", path, body)
        async with asyncio.timeout(_LONGEST_LOOK):  # it may only have dropped a connection
            return await self.endpoint.ask("POST", path, body)

    async def restore(self, name: str, model: str, max_context: int) -> None:
        """Loads again what the server has forgotten, once however many ask at a time.

        Args:
            name: adapter that the server said it does not have.
            model: base model that it must serve.
            max_context: that it must have.

        Raises:
            VersionExpired: the adapter was unloaded on purpose.
            EngineError: another model is served now, or an adapter cannot be loaded.
        """
        async with self._restoring:
            if name not in self.adapters:
                raise VersionExpired(
                    f"adapter {name} is no longer served; start again under the newest version"
                )
            served = await self.models()
            if name in served:
                return
            context = served.get(model, {}).get("max_model_len")
            if model not in served or context not in (None, max_context):
                raise EngineError(
                    f"{self.url} was restarted as another server: it serves {', '.join(served)} with "
                    f"max_model_len {context}, wanted {model} with {max_context}"
                )
            await self._compare(model)
            for missing, folder in list(self.adapters.items()):
                if missing not in served:
                    await self._load(missing, folder)
                    self._counters["restored"] += 1

    async def remember(self, model: str) -> None:
        """Samples the base once, to know the server again after a restart."""
        self._sample = await self._probe(model)

    async def recognise(self, model: str) -> None:
        """Refuses a server that is another one since connections to it broke; asked before answers count.

        Raises:
            EngineError: it was started with another mode, dtype or model.
        """
        if self._compared == self._breaks:
            return
        async with self._restoring:
            if self._compared != self._breaks:
                await self._compare(model)

    async def _compare(self, model: str) -> None:
        """Refuses a server that now gives other logprobs to the ids that it draws."""
        breaks = self._breaks
        if self._sample:
            before, after = self._sample, await self._probe(model)
            both = sorted(before.keys() & after.keys())
            if not both and self._seeded:
                raise EngineError(
                    f"{self.url} was restarted as another server: under the same seeds it draws ids "
                    f"{sorted(after)[:8]} and drew {sorted(before)[:8]}; start it with the same model and "
                    "flags"
                )
            if sum(abs(before[i] - after[i]) for i in both) > _NOISE * len(both):
                raise EngineError(
                    f"{self.url} was restarted with other settings: the ids {both} had the logprobs "
                    f"{[before[i] for i in both]} and now have {[after[i] for i in both]}; start it with the "
                    "same flags"
                )
            self._counters["not_recognised"] += not both
        self._compared = breaks

    async def _probe(self, model: str) -> dict[int, float]:
        """Returns the logprobs of some first ids."""
        params = SamplingParams(max_tokens=1, temperature=0.7)
        prompt = list(range(1, 9))
        body = completion_body(model, prompt, params, _PROBES, seed=0x5EED, max_tokens=1)
        answer = await self.ask("POST", "/v1/completions", body)
        [samples] = read_completions(answer.data, [prompt], params, _PROBES)
        return {sample.ids[0]: sample.logprobs[0] for sample in samples if sample.ids and sample.logprobs}

    def _watch(self) -> asyncio.Task[None]:
        """Looks for a server that is gone until it is back; one look for all who wait."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        tries = 0
        while self.down:
            tries += 1
            await asyncio.sleep(min(self._policy.pause(tries, None), _LONGEST_LOOK))
            try:
                async with asyncio.timeout(_LONGEST_LOOK):
                    await self.endpoint.ask("GET", "/health")  # an answer clears `down`
            except (Passing, TimeoutError):
                continue

    async def _until_up(self) -> bool:
        """Waits for a server that is gone; returns whether it came back in time."""
        try:
            async with asyncio.timeout(self._restart_timeout):
                await asyncio.shield(self._watch())
        except TimeoutError:
            return False
        return True

    async def until_resumed(self) -> None:
        """Waits while the server says that generation is paused; one without that route queues requests."""
        tries = 0
        while True:
            answer = await self.ask("GET", "/is_paused")
            data = answer.data
            if answer.status != 200 or not isinstance(data, dict) or not data.get("is_paused"):
                return
            tries += 1
            await asyncio.sleep(min(self._policy.pause(tries, None), _LONGEST_LOOK))

    async def close(self) -> None:
        """Unloads what is still loaded, as far as the server lets us, and closes the connections."""
        if self._looking is not None:
            self._looking.cancel()
        try:
            left = list(self.adapters | dict.fromkeys(self.uncertain, Path()))
            while left and await self._leave(left[-1]):
                left.pop()
            self._counters["left_loaded"] += len(left)
        finally:
            await self.endpoint.close()

    async def _leave(self, name: str) -> bool:
        """Unloads an adapter; returns whether to ask for another one: an end is not held up by a failure."""
        try:
            async with asyncio.timeout(_LONGEST_LOOK):
                await self.endpoint.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except Exception as error:
            log.warning("%s keeps adapter %s: %s", self.url, name, error or type(error).__name__)
            return False
        return True
