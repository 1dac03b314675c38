"""A fake engine for tests: answers from a function or a table, late or broken where a test wants it.

It keeps versions, holds and requests as the real one does, so whatever is built on engines can be tested
without a model. It never sleeps and reads no clock: a delay is an awaitable that the test controls.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from math import exp, fsum, log
from operator import index
from pathlib import Path
from typing import Any, Literal

from atropos_gym.engines._choices import Choices, check_choices, following
from atropos_gym.engines._ids import as_ids, check_ids, room_left
from atropos_gym.engines._versions import Hold, ServesVersions, VersionTable
from atropos_gym.engines.base import (
    Completion,
    FinishReason,
    Lane,
    Reference,
    SamplingParams,
    SwapMode,
    sampling_trainable,
)
from atropos_gym.engines.checks import check_engine
from atropos_gym.errors import ConfigError, EngineError, VersionExpired
from atropos_gym.findings import Finding
from atropos_gym.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Call", "Fault", "Script", "ScriptedEngine", "derived_logprob"]

Script = (
    Callable[[tuple[int, ...], SamplingParams, int], Sequence[int] | Completion]
    | Mapping[tuple[int, ...], Sequence[int]]
)
"""``f(prompt_ids, params, call_number) -> ids or Completion``, or ids by prompt."""

Fault = Exception | Literal["abort", "cut"]
"""Raise it; end with half the ids and ``abort``; or lose the last id, as a length limit does."""


@dataclass(slots=True)
class Call:
    """One sample that was asked for.

    Attributes:
        number: from 0, in order of asking; each of ``n`` samples has its own.
        prompt_ids: what was continued.
        params: as given.
        version: what it ran under.
        outcome: the completion, or the exception that was raised; None while it is delayed or when cancelled.
        lane: as given.
        affinity: as given.
    """

    number: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    version: int
    outcome: Completion | Exception | None = None
    lane: Lane = "train"
    affinity: Hashable = None


def derived_logprob(prompt_ids: Sequence[int], ids: Sequence[int], position: int, version: int) -> float:
    """Returns a logprob in (-4, 0) that depends on everything a real one depends on.

    Equal prefixes under one version give equal values, anything else gives another: a test sees at once when
    logprobs are shifted, swapped or kept across versions.

    Example:
        >>> derived_logprob([1, 2], [3], 0, 0) == derived_logprob([1], [2, 3], 1, 0)
        True
    """
    prefix = ",".join(str(i) for i in (*prompt_ids, *ids[: position + 1]))
    digest = hashlib.blake2b(f"{version}:{prefix}".encode(), digest_size=4).digest()
    return -4.0 * (int.from_bytes(digest, "big") + 1) / (2**32 + 1)


class ScriptedEngine(ServesVersions):
    """Answers from a script instead of a model.

    Args:
        script: a function ``(prompt_ids, params, call_number) -> ids`` (or a whole ``Completion``, which is
            handed on as it is but for its version), or a table ``{prompt_ids: ids}``. Ids are cut after the
            first stop id and at ``max_tokens``, as a model's would be; under ``choices`` an id that cannot
            follow gives way to the likeliest that can.
        tokenizer: as for ``load_tokenizer``.
        model: its name.
        max_context: most ids of prompt and completion.
        max_live_versions: most published versions at a time.
        publish_timeout: seconds that a publish waits for the oldest version's holders.
        delay: called with the number of each call; what it returns is awaited before the answer.
        faults: by number of the call, or a function of it: an exception to raise, ``"abort"`` or ``"cut"``.
        logprob: ``(prompt_ids, ids, position, version) -> logprob`` for ids of the script.
        swap: as the hf engine's; in place, a version changes while a delay is awaited.

    Attributes:
        calls: every call so far, in order.
        published: (version, folder) in order.
        counters: as the hf engine's.

    Example:
        >>> import asyncio
        >>> engine = ScriptedEngine(lambda prompt, params, number: [104, 105, 258])
        >>> params = SamplingParams(max_tokens=8, stop_ids=(258,))
        >>> asyncio.run(engine.generate([1, 2], params))[0].finish_reason
        'stop'
    """

    #: It shares the learner's process, and what is published cannot be lost on the way.
    in_process = True

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: str | Path | Any = "bytes",
        model: str = "scripted",
        max_context: int = 8192,
        max_live_versions: int = 3,
        publish_timeout: float = 600.0,
        delay: Callable[[int], Awaitable[object]] | None = None,
        faults: Mapping[int, Fault] | Callable[[int], Fault | None] | None = None,
        logprob: Callable[[Sequence[int], Sequence[int], int, int], float] = derived_logprob,
        swap: SwapMode = "hot_swap",
    ) -> None:
        if not callable(script) and not isinstance(script, Mapping):
            raise ConfigError(
                "script must be a function (prompt_ids, params, call_number) -> ids, or a table of ids by "
                f"prompt, got {type(script).__name__}"
            )
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self.model = model
        self.max_context = max_context
        self.calls: list[Call] = []
        self.published: list[tuple[int, Path]] = []
        self._script = script
        self._delay = delay
        self._faults = faults
        self._logprob = logprob
        self._versions = VersionTable(max_live_versions, publish_timeout, lambda version: None, swap)
        self.counters: Counter[str] = self._versions.counters

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
        """Gives ``n`` scripted completions, one after another; ``version=None`` is the newest.

        Raises:
            EngineError: as the hf engine, and where a table has no answer for the prompt.
            VersionExpired: the version is no longer served.
        """
        prompt = as_ids(prompt_ids)
        self._check(prompt, params, n)
        while True:
            if version is None:  # who holds one plays on through a restart
                await self._versions.admitted()
            try:
                number = self._versions.enter_requests(version)
                break
            except VersionExpired:
                if not self._versions.passing(version):
                    raise
        try:
            return [await self._answer(prompt, params, number, lane, affinity) for _ in range(n)]
        finally:
            self._versions.leave_requests(Counter((number,)))

    def _check(self, prompt: tuple[int, ...], params: SamplingParams, n: int) -> None:
        if not prompt:
            raise EngineError("the prompt is empty; an engine continues at least one id")
        check_ids(prompt, self.tokenizer.rows, "prompt")
        check_choices(params, self.tokenizer.rows, room_left(prompt, self.max_context))
        if n < 1:
            raise EngineError(f"n must be >= 1, got {n}")

    async def _answer(
        self, prompt: tuple[int, ...], params: SamplingParams, version: int, lane: Lane, affinity: Hashable
    ) -> Completion:
        number = len(self.calls)
        call = Call(number, prompt, params, version, lane=lane, affinity=affinity)
        self.calls.append(call)
        if self._delay is not None:
            await self._delay(number)
        first = version
        if self.swap == "in_place" and version >= 0:
            version = self.newest
        fault = self._faults(number) if callable(self._faults) else (self._faults or {}).get(number)
        try:
            if isinstance(fault, Exception):
                raise fault
            completion = _faulty(self._completion(prompt, params, number, version), fault)
            if version != first:
                completion = replace(completion, version=first, last_version=version)
        except Exception as error:
            call.outcome = error
            raise
        call.outcome = completion
        return completion

    def _completion(
        self, prompt: tuple[int, ...], params: SamplingParams, number: int, version: int
    ) -> Completion:
        if callable(self._script):
            said = self._script(prompt, params, number)
        elif prompt in self._script:
            said = self._script[prompt]
        else:
            raise EngineError(f"the script has no answer for the prompt {list(prompt)} (call {number})")
        if isinstance(said, Completion):
            return replace(said, version=version)
        room = self.max_context - len(prompt)
        answer = _ids_of(said)
        check_ids(answer, self.tokenizer.rows, "the script's answer")
        if params.choices is None:
            ids = _as_sampled(answer, params.stop_ids, min(params.max_tokens, room))
            logprobs = tuple(self._logprob(prompt, ids, i, version) for i in range(len(ids)))
        else:
            ids, logprobs = self._chosen(prompt, answer, params.choices, version)
        greedy = params.temperature == 0
        finish: FinishReason = "stop" if ids and ids[-1] in params.stop_ids else "length"
        return Completion(
            ids=ids,
            logprobs=None if greedy else logprobs,
            finish_reason=finish,
            version=version,
            trainable=sampling_trainable(params),
            cut_by_context=params.max_tokens > room,
        )

    def _chosen(
        self, prompt: tuple[int, ...], wanted: Sequence[int], choices: Choices, version: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the choice nearest to what the script wanted, with logprobs renormalised over the trie."""
        ids: list[int] = []
        logprobs: list[float] = []
        while allowed := following(choices).get(tuple(ids)):
            at = len(ids)
            values = {one: self._logprob(prompt, [*ids, one], at, version) for one in allowed}
            likeliest = max(allowed, key=values.__getitem__)
            one = wanted[at] if at < len(wanted) and wanted[at] in values else likeliest
            total = values[likeliest] + log(fsum(exp(v - values[likeliest]) for v in values.values()))
            ids.append(one)
            logprobs.append(min(values[one] - total, 0.0))
        return tuple(ids), tuple(logprobs)

    async def publish(self, version: int, adapter: str | Path) -> None:
        """Makes ``version`` the newest, under the rules of the real engine; the folder is never opened."""
        folder = Path(adapter)

        async def load() -> None:
            self.published.append((version, folder))

        await self._versions.publish(version, folder, load)

    @asynccontextmanager
    async def trial(self, adapter: str | Path) -> AsyncIterator[Hold]:
        """Answers under a negative version number within the context; the folder is never opened."""

        async def load(number: int) -> None:
            self.published.append((number, Path(adapter)))

        async with self._versions.trial(Path(adapter), load) as held:
            yield held

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on; see ``engines.checks``."""
        return await check_engine(self, reference)

    async def close(self) -> None:
        """Refuses everything from now on; idempotent."""
        self._versions.close()


def _ids_of(said: Any) -> list[int]:
    """Returns a script's answer as ids; text is refused, since its ids are the script's to choose."""
    if not isinstance(said, (str, bytes)):
        with suppress(TypeError):
            return [index(i) for i in said]
    raise EngineError(
        f"a script answers with ids or a Completion, got {type(said).__name__} {said!r:.60}; "
        "ChatRenderer.say(text) gives the ids of a text"
    )


def _as_sampled(ids: Sequence[int], stop_ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns what a model that wanted to say ``ids`` would have got out."""
    for position, value in enumerate(ids[:most]):
        if value in stop_ids:
            return tuple(ids[: position + 1])
    return tuple(ids[:most])


def _faulty(completion: Completion, fault: Fault | None) -> Completion:
    if fault is None:
        return completion
    if fault not in ("abort", "cut"):
        raise ConfigError(f'a fault is an exception, "abort" or "cut", got {fault!r}')
    keep = len(completion.ids) // 2 if fault == "abort" else len(completion.ids) - 1
    return replace(
        completion,
        ids=completion.ids[:keep],
        logprobs=None if completion.logprobs is None else completion.logprobs[:keep],
        finish_reason="abort" if fault == "abort" else "length",
    )
