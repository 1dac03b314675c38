"""The format lesson: a model learns how conversations look before it learns what pays.

Whole transcripts of a uniformly random legal player, loss on every id, observations and outcome line too:
predicting what happens makes the hidden states encode what matters. It teaches no preference between answers.
The outcome line is said wherever the lesson's scores are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import gymnasium
import numpy as np
import torch

from atropos_gym.errors import ConfigError
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.packing import collate, micro_batches
from atropos_gym.trainers.scoring import Scorer, logprobs_of

__all__ = ["interleave", "lesson_bar", "lesson_steps", "trainable", "transcripts"]

_Item = TypeVar("_Item")

#: Share of the steps, at the end, whose weights are averaged. A few thousand transcripts decide how likely
#: each answer is; the average is several times closer to the player's own odds than the last step's weights.
AVERAGED = 0.15

#: Length-sorted pieces of a lesson's batch: padding was half its cost without them.
PIECES = 4


def transcripts(env: gymnasium.Env[Any, Any], *, seed: int) -> Iterator[list[int]]:
    """Yields whole conversations of a random legal player as ids, without end.

    Args:
        env: a TextEnv, wrapped or not, that knows ``sample_reply``.
        seed: of the first start; later ones go on from there.

    Raises:
        ConfigError: the environment does not say what a legal player would say.
    """
    text_env: Any = env.unwrapped
    renderer = text_env.renderer
    start: int | None = seed
    while True:
        text_env.reset(seed=start)
        start, over = None, False
        while not over:
            reply = text_env.sample_reply()
            if reply is None:
                raise ConfigError(
                    f"{type(text_env).__name__} has no sample_reply(): define it for a format lesson"
                )
            _, _, terminated, truncated, _ = text_env.step(np.asarray(text_env.say(reply), dtype=np.int32))
            over = terminated or truncated
        ids, _ = renderer.transcript(text_env.messages)
        yield list(ids)


def lesson_steps(
    scorer: Scorer,
    parameters: Sequence[torch.nn.Parameter],
    conversations: Iterator[list[int]],
    *,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    warm_up_steps: int = 20,
    betas: tuple[float, float] = (0.9, 0.95),
    max_grad_norm: float = 1.0,
    max_ids: int = 8192,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Trains on fresh conversations each step; returns the mean loss in nats an id, a step each.

    AdamW without decay; the rate rises over ``warm_up_steps``, then falls linearly to 0. What is left in the
    end is the average of the weights after each of the last steps.

    Args:
        scorer: of the model.
        parameters: what is trained.
        conversations: ids of whole conversations.
        steps: optimizer steps, >= 1.
        batch_size: conversations a step.
        learning_rate: at its peak.
        warm_up_steps: until the peak.
        betas: of AdamW.
        max_grad_norm: gradient norm is clipped to it.
        max_ids: most ids of a micro-batch.
        device: of the model.
        on_step: told step (from 1) and loss.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=0.0)
    losses: list[float] = []
    averaged_from = steps - max(1, int(AVERAGED * steps))
    averages = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    for step in range(steps):
        rate = learning_rate * min(1.0, (step + 1) / max(1, warm_up_steps)) * (1.0 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = [_all_trained(next(conversations)) for _ in range(batch_size)]
        total = sum(len(row.positions) for row in rows)
        optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for index in micro_batches(rows, at_least=PIECES, max_ids=max_ids):
            batch = collate(rows, index, device=device)
            loss = -logprobs_of(scorer(batch), batch.target_M).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        losses.append(loss_sum)
        if step >= averaged_from:
            for average, parameter in zip(averages, parameters, strict=True):
                average += (parameter.detach() - average) / (step - averaged_from + 1)
        if on_step is not None:
            on_step(step + 1, loss_sum)
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for average, parameter in zip(averages, parameters, strict=True):
            parameter.copy_(average)
    return losses


def _all_trained(ids: Sequence[int]) -> Row:
    """A conversation with loss on every id but the first, which nothing predicts."""
    positions = np.arange(1, len(ids), dtype=np.int32)
    zeros = np.zeros(len(positions))
    return Row(np.asarray(ids, dtype=np.int32), positions, zeros, zeros)


@contextmanager
def trainable(policy_model: Any, *, base: bool) -> Iterator[list[torch.nn.Parameter]]:
    """Within it the base's weights are trained with the adapter off, or the adapter's."""
    parameters = dict(policy_model.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    chosen = [p for name, p in parameters.items() if ("lora_" in name) != base]
    try:
        with policy_model.disable_adapter() if base else nullcontext():
            for parameter in chosen:
                parameter.requires_grad_(True)
            yield chosen
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


@contextmanager
def lesson_bar(
    steps: int, wanted: bool, on_step: Callable[[int, float], None] | None
) -> Iterator[Callable[[int, float], None]]:
    """Yields what each step is told to: a progress bar, if wanted, and the caller's own function."""
    from tqdm.auto import tqdm

    with tqdm(total=steps, desc="format lesson", unit="step", disable=not wanted) as bar:

        def tell(step: int, loss: float) -> None:
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            if on_step is not None:
                on_step(step, loss)

        yield tell


def interleave(streams: Sequence[Iterator[_Item]]) -> Iterator[_Item]:
    """Yields from each stream in turn, without end."""
    while True:
        for stream in streams:
            yield next(stream)
