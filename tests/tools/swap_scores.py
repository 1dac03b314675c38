"""What a learner makes of ids that an engine sampled under its versions, and under others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.trainers.adapters import AdapterState, load_adapter
from atropos_gym.trainers.batches import Row
from atropos_gym.trainers.grpo import GRPO
from atropos_gym.trainers.scoring import adapter_off, score_rows

__all__ = ["Sampled", "score_groups"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Logprobs of all sampled ids, ``[K]``: the engine's, and the learner's under four kinds of weights.

    Attributes:
        version_K: that sampled each id.
        engine_K: what the engine returned.
        own_K: under the version that the id names.
        previous_K: under the version before it.
        control_K: under a control adapter, B drawn at 0.01.
    """

    version_K: NDArray[np.int64]
    engine_K: NDArray[np.float64]
    own_K: NDArray[np.float64]
    previous_K: NDArray[np.float64]
    control_K: NDArray[np.float64]


def score_groups(model: GRPO, groups: Sequence[EpisodeGroup]) -> Sampled:
    """Scores every id under the version that it names, the one before, and the control."""
    rows, versions = [], []
    for group in groups:
        for episode in group.episodes:
            [row] = episode.rows
            positions = np.flatnonzero(np.array(row.mask) != -100).astype(np.int32)
            logprobs = np.array(row.logprobs)[positions]
            ids = np.array(row.ids, dtype=np.int32)
            rows.append(Row(ids, positions, logprobs, np.zeros(len(positions)), group.temperature))
            versions.append(np.concatenate([[turn.version] * (turn.end - turn.start) for turn in row.turns]))
    version_K = np.concatenate(versions)

    def under(version: int) -> NDArray[np.float64]:
        if version == 0:
            with adapter_off(model.policy.model):
                return np.concatenate(score_rows(model._parts.scorer, rows))
        load_adapter(model.policy.model, model.adapter_dir / f"{model.run}-v{version}")
        return np.concatenate(score_rows(model._parts.scorer, rows))

    by_version = np.stack([under(version) for version in range(int(version_K.max()) + 1)])
    every = np.arange(len(version_K))
    adapter = AdapterState(model.policy.model)
    generator = torch.Generator().manual_seed(0)
    adapter.load_state_dict(
        {
            name: 0.01 * torch.randn(tensor.shape, generator=generator) if ".lora_B." in name else tensor
            for name, tensor in adapter.state_dict().items()
        }
    )
    return Sampled(
        version_K,
        np.concatenate([row.logprobs for row in rows]),
        by_version[version_K, every],
        by_version[version_K - 1, every],
        np.concatenate(score_rows(model._parts.scorer, rows)),
    )
