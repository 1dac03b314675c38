"""Asks the engine for n completions of one prompt, those that it aborts again, and cuts at stop strings."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from atropos_gym.engines.base import Completion, Engine, SamplingParams
from atropos_gym.errors import EngineError
from atropos_gym.rollout._rows import BrokenIds, checked_logprobs
from atropos_gym.tokenizers import Tokenizer

__all__ = ["cut_at", "sample"]

#: How often a completion is asked for again when the engine aborts it.
ABORTS = 3


async def sample(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    n: int,
    *,
    version: int,
    seed_of: Callable[[int], int],
    affinity: Hashable = None,
    on_abort: Callable[[], None] = lambda: None,
) -> list[Completion]:
    """Returns ``n`` whole completions, their logprobs checked.

    Args:
        engine: who speaks.
        prompt: what is continued.
        params: how; the seed is ``seed_of``'s.
        n: how many.
        version: of the policy, held by the caller.
        seed_of: the attempt to its seed.
        affinity: whose turn it is.
        on_abort: told of every completion that is asked for again.

    Raises:
        EngineError: it failed, aborted too often, or what it returned does not fit together.
    """
    whole: list[Completion] = []
    for attempt in range(ABORTS + 1):
        try:
            found = await engine.generate(
                prompt,
                params.with_(seed=seed_of(attempt)),
                n - len(whole),
                version=version,
                affinity=affinity,
            )
        except EngineError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            _let_through(error)
            raise EngineError(f"engine {engine.model}: {type(error).__name__}: {error}") from error
        for completion in found:
            if completion.finish_reason == "abort":
                on_abort()
            else:
                whole.append(_checked(completion, params.max_tokens))
        if len(whole) >= n:
            return whole
    raise EngineError(f"{engine.model} aborted {n - len(whole)} of {n} replies, each {ABORTS + 1} times")


def cut_at(
    completion: Completion, stop: Sequence[str], tokenizer: Tokenizer
) -> tuple[Completion, str | None]:
    """Returns a completion that ends with the id that completes a stop string, and that string.

    What was sampled before an id does not depend on what comes after it, so the logprobs of the ids that
    stay are right as they are.
    """
    text = tokenizer.decode(completion.ids) if stop else ""
    ends = [(text.index(word) + len(word), -len(word), word) for word in stop if word and word in text]
    if not ends:
        return completion, None
    word = min(ends)[2]  # the one that was complete first
    ids = completion.ids
    size = 1 + bisect_left(range(1, len(ids)), True, key=lambda size: word in tokenizer.decode(ids[:size]))
    logprobs = completion.logprobs
    return (
        replace(
            completion,
            ids=ids[:size],
            logprobs=None if logprobs is None else logprobs[:size],
            finish_reason="stop",
        ),
        word,
    )


def _checked(completion: Completion, most: int) -> Completion:
    if len(completion.ids) > most:
        raise EngineError(f"engine returned {len(completion.ids)} ids where at most {most} were asked for")
    try:
        return replace(completion, logprobs=tuple(checked_logprobs(completion)))
    except BrokenIds as broken:
        raise EngineError(str(broken)) from broken


def _let_through(error: BaseException) -> None:
    """Raises a cancellation of this task again; one that came from within is a failure like any other."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
