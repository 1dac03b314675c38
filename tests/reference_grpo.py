"""GRPO in one file of plain torch, as slow and plain as can be: the reference that ours is compared with.

One row at a time, all logits, no padding, no merging, no micro-batches, no adapter library, no package of
ours. ``main`` teaches a table to say the word it was told; ``update_loss`` is what the tests compare.

A *group* is a list of episodes from one start; an episode is a list of rows; a row is a dict with ``ids``,
``trained`` (a bool an id), ``engine`` (the sampler's logprob an id) and ``temperature``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: ids [T] -> logits [T, V]
Model = Callable[[Tensor], Tensor]


@dataclass
class Episode:
    """Rows of one episode and its score."""

    rows: list[dict[str, Any]]
    score: float


@dataclass
class Settings:
    """What the loss is made of; the names are the package's."""

    reduction: str = "token_mean"
    eps_low: float = 0.2
    eps_high: float = 0.2
    entropy_coef: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    kl_coef: float = 0.0
    drop_equal: bool = True
    max_length: int = 1
    max_grad_norm: float = 1.0


def advantages(group: list[Episode]) -> list[float]:
    """Score minus the mean over the group's episodes."""
    mean = sum(episode.score for episode in group) / len(group)
    return [episode.score - mean for episode in group]


def logprobs(model: Model, row: dict[str, Any]) -> Tensor:
    """log pi of every next id, [T - 1, V], at the row's temperature."""
    logits = model(torch.tensor(row["ids"]))
    return (logits[:-1] / row["temperature"]).log_softmax(-1)


def turns_of(row: dict[str, Any]) -> list[tuple[int, int]]:
    """Runs of trained ids, [start, end)."""
    runs, start = [], None
    for position, trained in enumerate([*row["trained"], False]):
        if trained and start is None:
            start = position
        elif not trained and start is not None:
            runs.append((start, position))
            start = None
    return runs


def answer_entropy(logp_next: Tensor, row: dict[str, Any], position: int, answers: list[list[int]]) -> Any:
    """Entropy over the ids that go on towards an answer, renormalised; None where there is no choice."""
    for start, end in turns_of(row):
        if start <= position < end:
            said = row["ids"][start:position]
            following = {a[len(said)] for a in answers if a[: len(said)] == said and len(a) > len(said)}
            if len(following) < 2:
                return None
            p = logp_next[sorted(following)].softmax(-1)
            return -(p * p.log()).sum()
    return None


def update_loss(model: Model, base: Model | None, groups: list[list[Episode]], s: Settings) -> Tensor:
    """The loss of one update, row by row and id by id."""
    played = []
    for group in groups:
        played += [(group, episode, a) for episode, a in zip(group, advantages(group), strict=True)]
    if s.drop_equal:
        kept = [x for x in played if len({episode.score for episode in x[0]}) > 1]
    else:
        kept = played
    rows = [(row, a) for _, episode, a in kept for row in episode.rows]
    tokens = sum(sum(row["trained"]) for row, _ in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row, a in rows:
        own = sum(row["trained"])
        weight = {
            "token_mean": 1 / tokens,
            "seq_mean": 1 / (len(rows) * own) if own else 0.0,
            "constant": 1 / (len(rows) * s.max_length),
            "episode_sum": 1 / len(played),
        }[s.reduction]
        logp = logprobs(model, row)
        logp_base = None if base is None else logprobs(base, row).detach()
        for position, trained in enumerate(row["trained"]):
            if not trained:
                continue
            next_, token = logp[position - 1], row["ids"][position]
            r = (next_[token] - row["engine"][position]).exp()
            policy = -torch.min(r * a, r.clamp(1 - s.eps_low, 1 + s.eps_high) * a)
            if s.answers:
                entropy = answer_entropy(next_, row, position, s.answers)
            else:
                entropy = -(next_.exp() * next_).sum()
            bonus = 0.0 if entropy is None else s.entropy_coef * entropy
            kl: Any = 0.0
            if logp_base is not None:
                d = next_[token] - logp_base[position - 1][token]
                kl = s.kl_coef * ((-d).exp() - 1 + d)
            total = total + weight * (policy - bonus + kl)
    return total


def train_step(
    model: nn.Module, groups: list[list[Episode]], s: Settings, optimizer: torch.optim.Optimizer
) -> float:
    """One clipped step on all groups."""
    optimizer.zero_grad()
    loss = update_loss(model, None, groups, s)
    if not loss.requires_grad:
        return 0.0  # nothing to learn from
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
    optimizer.step()
    return float(loss.detach())


class Table(nn.Module):
    """A bigram table as a language model: the logits after an id depend on that id alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, size, dtype=torch.float64)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns ``[T, V]``."""
        logits: Tensor = self.table(ids)
        return logits


@torch.no_grad()
def play(model: nn.Module, word: int, words: int, rng: random.Random) -> Episode:
    """The policy reads a word (id ``word``) and says one; it is paid for saying the same."""
    logp = model(torch.tensor([word]))[0].log_softmax(-1)
    said = rng.choices(range(len(logp)), weights=logp.exp().tolist())[0]
    row = {
        "ids": [word, said],
        "trained": [False, True],
        "engine": [1.0, float(logp[said])],
        "temperature": 1.0,
    }
    return Episode([row], float(said == word + words))


def main(words: int = 3, updates: int = 40, seed: int = 0) -> list[float]:
    """Learns to answer word k with its twin ``k + words``; returns the mean score of each update."""
    rng = random.Random(seed)
    model = Table(2 * words)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    curve = []
    for _ in range(updates):
        groups = [[play(model, k % words, words, rng) for _ in range(8)] for k in range(2 * words)]
        train_step(model, groups, Settings(entropy_coef=0.01), optimizer)
        curve.append(math.fsum(e.score for g in groups for e in g) / (8 * len(groups)))
    return curve


if __name__ == "__main__":
    for number, score in enumerate(main()):
        print(f"update {number:3d}  mean score {score:.2f}")
