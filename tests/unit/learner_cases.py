"""The learner's numbers (tests/cases/e_learner.json): loading, comparing, and rows built from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atropos_gym.trainers.batches import Row, RowRules, read_batch
from atropos_gym.trainers.packing import MicroBatch
from atropos_gym.wire import ScoredDataGroup

_FILE = json.loads((Path(__file__).parent.parent / "cases" / "e_learner.json").read_text())
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in _FILE["cases"]}

#: Cases that are not run, and why.
LEFT_OUT = {
    "e59": "replayed rows: there is no replay buffer; its weights and advantages are those of e33 and e01",
}


def by_op(*ops: str) -> list[Any]:
    """Parameters of the cases with these ops; a test's id is the case's."""
    chosen = [case for case in CASES.values() if case["op"] in ops and case["id"] not in LEFT_OUT]
    return [pytest.param(case, id=case["id"]) for case in chosen]


def close(got: Any, want: Any, case: dict[str, Any]) -> None:
    """Asserts |got - want| <= abs + rel |want|, number by number, through nested lists."""
    if isinstance(want, dict):
        assert set(got) == set(want)
        for key in want:
            close(got[key], want[key], case)
        return
    if isinstance(want, list):
        assert len(got) == len(want), (got, want)
        for g, w in zip(got, want, strict=True):
            close(g, w, case)
        return
    if isinstance(want, (str, bool)) or want is None:
        assert got == want
        return
    tolerance = case["tolerance"]
    value = float(got.detach() if isinstance(got, Tensor) else got)
    assert abs(value - want) <= tolerance["abs"] + tolerance["rel"] * abs(want), (value, want)


def numbers(values: Any) -> Any:
    """Reads the file's "nan", "inf" and "-inf" as floats."""
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return float(values) if isinstance(values, str) else values


class Flat:
    """A batch of padded rows as flat tensors over its trained ids, with a gradient on ``logp``."""

    def __init__(self, inputs: dict[str, Any], new: str = "logp_new", old: str = "logp_old") -> None:
        self.mask = [[bool(m) for m in row] for row in inputs["mask"]]
        self.logp = self.pick(inputs[new]).requires_grad_()
        self.old = self.pick(inputs[old]) if old in inputs else torch.zeros_like(self.logp)
        self.advantage = self.pick(inputs["advantages"]) if "advantages" in inputs else None
        self.row = torch.tensor([r for r, row in enumerate(self.mask) for m in row if m])

    def pick(self, values: list[Any]) -> Tensor:
        """The values at trained ids; one value a row is spread over it."""
        spread = [v if isinstance(v, list) else [v] * len(m) for v, m in zip(values, self.mask, strict=True)]
        flat = [
            v for row, m in zip(spread, self.mask, strict=True) for v, on in zip(row, m, strict=True) if on
        ]
        return torch.tensor(flat, dtype=torch.float64)

    def lay(self, flat_M: Tensor) -> list[list[float]]:
        """Back to rows, 0 where nothing is trained."""
        rows = [[0.0] * len(row) for row in self.mask]
        places = [(r, c) for r, row in enumerate(self.mask) for c, on in enumerate(row) if on]
        for (r, c), value in zip(places, flat_M.tolist(), strict=True):
            rows[r][c] = value
        return rows


class Bigram(nn.Module):
    """The cases' model: the logits at position t are ``W[tokens[t]]``."""

    def __init__(self, weights: list[list[float]]) -> None:
        super().__init__()
        table = torch.tensor(weights, dtype=torch.float64)
        self.table = nn.Embedding.from_pretrained(table, freeze=False)

    def score(self, batch: MicroBatch) -> Tensor:
        logits: Tensor = self.table(batch.ids_BL)[batch.row_M, batch.column_M]
        return logits / batch.temperature_M[:, None]


def group_of(rows: list[dict[str, Any]], **fields: Any) -> ScoredDataGroup:
    """A wire body from a case's rows, with only what they name."""
    logprobs = [row["inference_logprobs"] or [] for row in rows]
    with_advantages = any("advantages" in row for row in rows)
    return ScoredDataGroup.model_construct(
        tokens=[row["tokens"] for row in rows],
        masks=[row["masks"] for row in rows],
        scores=[row.get("score", 0.0) for row in rows],
        inference_logprobs=logprobs if any(logprobs) else None,
        advantages=[row.get("advantages", []) for row in rows] if with_advantages else None,
        overrides=[{"temperature": row["temperature"]} if "temperature" in row else {} for row in rows],
        **fields,
    )


def rows_of_case(inputs: dict[str, Any]) -> list[Row]:
    """Rows as the wire gives them; a case's plain ``advantage`` travels as per-token advantages."""
    rows = [
        {**row, "advantages": row.get("advantages", [row.get("advantage", 0.0)] * len(row["tokens"]))}
        for row in inputs["rows"]
    ]
    batch = read_batch([group_of(rows)], RowRules(vocab_size=len(inputs["W"])))
    assert not batch.dropped
    return batch.rows


def row(ids: list[int], trained: list[int], advantage: float = 1.0, **fields: Any) -> Row:
    """A row whose ids at ``trained`` are trained."""
    count = len(trained)
    return Row(
        ids=np.array(ids, dtype=np.int32),
        positions=np.array(trained, dtype=np.int32),
        logprobs=np.asarray(fields.pop("logprobs", [-1.0] * count), dtype=np.float64),
        advantages=np.full(count, advantage),
        **fields,
    )
