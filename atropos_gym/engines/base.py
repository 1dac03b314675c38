"""What an inference engine is: sampling parameters, completions and the ``Engine`` protocol.

An engine takes prompt ids and gives sampled ids with their logprobs, under a named version of the policy.
Text never passes through it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from atropos_gym.engines._ids import as_ids
from atropos_gym.errors import ConfigError, EngineError
from atropos_gym.findings import Finding
from atropos_gym.tokenizers import Tokenizer

__all__ = [
    "MASKS",
    "SERVERS",
    "Completion",
    "Engine",
    "FinishReason",
    "Held",
    "Lane",
    "Reference",
    "SamplingParams",
    "SwapMode",
    "sampling_trainable",
]

#: Kinds of engine that are servers of their own, and the variable that holds the key of one.
SERVERS = {"vllm": "VLLM_API_KEY", "sglang": "SGLANG_API_KEY"}

#: Fields of ``SamplingParams`` that mask ids: a learner's plain softmax is over all of them.
MASKS = ("allowed_ids", "choices")

FinishReason = Literal["stop", "length", "abort"]

#: What a request is for: engines that limit requests in flight have a limit for each.
Lane = Literal["train", "eval"]

#: How a published version comes into force. ``hot_swap``: beside the older ones, which play on until nobody
#: holds them. ``restart``: alone: whoever plays ends first, who begins waits. ``in_place``: at once, in the
#: middle of what runs. ``none``: never: publishing is an announcement, the engine stays as it is.
SwapMode = Literal["hot_swap", "restart", "none", "in_place"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a completion is sampled. All fields are sent explicitly to every engine.

    Attributes:
        max_tokens: most ids to sample, the end id included; >= 1.
        temperature: 0 is greedy (such completions carry no logprobs and cannot be trained on).
        top_p: nucleus; 1 is off.
        top_k: -1 is off.
        min_p: 0 is off.
        repetition_penalty: 1 is off.
        presence_penalty: 0 is off.
        frequency_penalty: 0 is off.
        min_tokens: no stop id before this many ids.
        seed: 63-bit seed of this request alone; None draws one from the engine's own stream.
        stop_ids: ids that end a completion; the matched one is the last of its ids.
        allowed_ids: if given, only these can be sampled.
        choices: if given, only these replies can be sampled, each whole: ids as ``ChatRenderer.say`` gives
            them, the end id included, thinking too. Those said twice count once.

    Raises:
        ConfigError: a value out of range, named.

    Example:
        >>> SamplingParams(max_tokens=16, seed=7).temperature
        1.0
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    choices: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < -1:
            raise ConfigError(f"top_k must be -1 (off) or >= 1, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        if self.min_tokens < 0:
            raise ConfigError(f"min_tokens must be >= 0, got {self.min_tokens}")
        if self.allowed_ids is not None and not self.allowed_ids:
            raise ConfigError("allowed_ids must name at least one id, or be None")
        if self.choices is not None:
            self._check_choices(self.choices)

    def _check_choices(self, choices: tuple[tuple[int, ...], ...]) -> None:
        try:
            replies = tuple(map(as_ids, choices))
        except (TypeError, EngineError) as error:
            raise ConfigError(
                f"choices are replies, each as its ids, got {choices!r:.60}: ChatRenderer.say(text) gives a "
                "text's ids"
            ) from error
        if not replies or not all(replies):
            raise ConfigError("choices must hold at least one reply, and each of them an id; or be None")
        for name, off in (("allowed_ids", None), ("min_tokens", 0)):
            if getattr(self, name) != off:
                raise ConfigError(
                    f"{name}={getattr(self, name)} and choices exclude each other: choices say already which "
                    "ids can be sampled and how many"
                )
        object.__setattr__(self, "choices", tuple(dict.fromkeys(replies)))

    def with_(self, **changes: Any) -> SamplingParams:
        """Returns a copy with some fields changed."""
        return replace(self, **changes)


def sampling_trainable(params: SamplingParams) -> Literal[True] | str:
    """Returns True where a plain softmax at this temperature is what was sampled from, else the reason.

    Example:
        >>> sampling_trainable(SamplingParams(max_tokens=1, top_p=0.9))
        'top_p=0.9'
    """
    if params.temperature == 0:
        return "temperature=0"
    neutral = {
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
    }
    for name, value in neutral.items():
        if getattr(params, name) != value:
            return f"{name}={getattr(params, name)}"
    if params.top_k > 0:
        return f"top_k={params.top_k}"
    for name in MASKS:
        if getattr(params, name) is not None:
            return name
    return True


@dataclass(frozen=True, slots=True)
class Completion:
    """What the engine sampled.

    Attributes:
        ids: sampled ids, the end id included when it was sampled.
        logprobs: ``logprobs[i]`` is of the distribution that ``ids[i]`` was drawn from (temperature
            applied); None at temperature 0.
        finish_reason: ``stop`` (a stop id was sampled), ``length``, or ``abort``.
        version: the policy version that produced the ids.
        trainable: True, or the reason why these ids cannot be trained on.
        cut_by_context: ``max_tokens`` was lowered to what the context had left.
        last_version: the version of the last id, where weights changed while it ran (``in_place`` swaps);
            ``version`` is then that of the first. None: the same.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason
    version: int = 0
    trainable: Literal[True] | str = True
    cut_by_context: bool = False
    last_version: int | None = None


class Held(Protocol):
    """What ``hold`` yields: ``version`` stays servable until the context is left."""

    version: int


class Reference(Protocol):
    """The learner, as an engine's check sees it: what ids mean and how likely they are.

    Attributes:
        rows: rows of its embedding: ids are below it.
        stop_ids: ids that end a turn.
        tokenizer: what its ids mean.
        dtype: it computes in, such as ``float32``.
        temperature: of the run's sampling.
        rank: of its adapters; None for a learner without one.
        adapter_dir: where its adapters are: the check's own is written there too, so that it is seen
            whether the engine can read the folder.
    """

    rows: int
    stop_ids: tuple[int, ...]
    tokenizer: Tokenizer
    dtype: str
    temperature: float
    rank: int | None
    adapter_dir: Path

    def logprobs(
        self, ids: Sequence[int], start: int, *, adapter: Path | None = None, temperature: float = 1.0
    ) -> list[float]:
        """Returns the logprob of each of ``ids[start:]``, given all ids before it.

        Args:
            ids: prompt and completion.
            start: of the completion; >= 1.
            adapter: a folder in PEFT's form whose weights are in force; None: the base alone.
            temperature: that logits are divided by.
        """
        ...

    def canary(self, folder: Path) -> Path:
        """Writes an adapter with large known weights to a new folder and returns it."""
        ...


@runtime_checkable
class Engine(Protocol):
    """An inference engine: ids in, ids and logprobs out, several policy versions at a time.

    Version 0 is the base model. ``publish`` makes a newer one from a folder in PEFT's form; an episode
    keeps the version it began with by ``hold``.

    An engine may have ``trial(adapter)`` besides, an async context manager that serves an adapter under a
    negative version number within it only: ``check`` tries one so, without publishing a version.
    """

    tokenizer: Tokenizer
    model: str
    max_context: int

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
        """Samples ``n`` completions of one prompt.

        Args:
            prompt_ids: what is continued; at least one id.
            params: how it is sampled.
            n: how many completions.
            version: of the policy; None is the newest.
            lane: what it is for; engines that limit requests in flight have a limit for each.
            affinity: whose turn it is: requests of equal affinity (an episode's turns) go to one replica and
                find their earlier turns in its prefix cache.
        """
        ...

    def hold(self, version: int | None = None) -> AbstractAsyncContextManager[Held]:
        """Keeps a version alive (the newest if None) from entering to leaving."""
        ...

    async def publish(self, version: int, adapter: Path) -> None:
        """Makes ``version`` the newest; returns when new requests get it."""
        ...

    async def retire(self, version: int) -> None:
        """Admits no new holders, waits for the present ones, unloads."""
        ...

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on and says what it found; ``wrong`` findings are errors."""
        ...

    async def close(self) -> None:
        """Releases everything; idempotent."""
        ...
