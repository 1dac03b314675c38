"""Environments of the original, unmodified, against our server and our learner.

Groups in all: ``ATROPOS_GROUPS``, 50 unless it says otherwise.

1. What the original's sender was told is stored is delivered once, whole, with the ids it sent.
2. Nothing arrives that was not sent. (The original cancels posts when it throttles or evaluates, and never
   repeats them; such a group may arrive or not.)
3. A batch has the registered number of sequences while enough are queued.
4. One sender's groups come in the order in which it sent them.
5. An environment with a minimum has its share, in all and in nearly every batch, while it sends.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_gym.trainers.adapters import Lora
from atropos_gym.trainers.grpo import GRPO
from tests.conformity.conftest import Environment, serving

pytestmark = [pytest.mark.atropos, pytest.mark.timeout(900)]

GROUPS = int(os.environ.get("ATROPOS_GROUPS", "50"))
BATCH = 24
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
REGISTRATION = {
    "wandb_group": "conformity",
    "wandb_project": "conformity",
    "batch_size": BATCH,
    "max_token_len": 64,
    "checkpoint_dir": "",
    "save_checkpoint_interval": -1,
    "starting_step": 0,
    "num_steps": 100_000,
}
ITEM_KEYS = {
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
}  # fmt: skip


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with DIRECT.open(request, timeout=60) as reply:
        return json.load(reply)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving("--store", tmp_path / "server.sqlite") as found:
        yield found


def train(url: str, environments: list[Environment]) -> tuple[list[list[dict[str, Any]]], list[Any]]:
    """A trainer of the original API, until every environment is done; returns its batches and the rest."""
    batches = []
    while True:
        running = [environment for environment in environments if environment.running()]
        batch = call(f"{url}/batch")["batch"]
        if batch is not None:
            batches.append(batch)
        elif not running:
            break
        else:
            time.sleep(0.05)
    rest = []
    while (left := call(f"{url}/batch?groups=100&partial=true")["batch"]) is not None:
        rest += left
    return batches, rest


def check_delivery(environment: Environment, groups: list[dict[str, Any]]) -> None:
    """Promises 1 and 2 for one environment."""
    begun = {line["sample"]: line["size"] for line in environment.lines("begun")}
    answered = [line["sample"] for line in environment.lines("answered")]
    came = [group["group_overrides"]["sample"] for group in groups]
    assert len(came) == len(set(came)), "delivered twice"
    assert set(answered) <= set(came) <= set(begun)
    assert len({line["item"] for line in environment.lines("begun")}) == environment.items
    for group in groups:
        check_group(environment.kind, group, begun[group["group_overrides"]["sample"]])


def check_group(kind: str, group: dict[str, Any], size: int) -> None:
    logprobs = group.pop("inference_logprobs", None)
    assert set(group) == ITEM_KEYS
    assert len(group["tokens"]) == len(group["masks"]) == len(group["scores"]) == size
    asked = f"{kind} {group['group_overrides']['item']}".encode()
    for ids, mask in zip(group["tokens"], group["masks"], strict=True):
        assert ids[: len(asked) + 3] == [257, 260, *asked, 261]
        assert ids[-1] == mask[-1] == 258
        assert all(m in (-100, i) for m, i in zip(mask, ids, strict=True))
        assert mask.count(258) == (2 if kind == "multi" else 1), "one trained end a turn"
    if kind == "default":  # the original drops them on this path
        assert logprobs is None and group["generation_params"] is None
    else:
        assert group["generation_params"] == {"temperature": 1.0}
        for row, mask in zip(logprobs, group["masks"], strict=True):
            assert all((x == 1.0) == (m == -100) for x, m in zip(row, mask, strict=True))


def test_five_kinds_side_by_side(url: str, launch: Callable[..., Environment]) -> None:
    share = max(1, GROUPS // 6)
    call(f"{url}/register", REGISTRATION)
    assert call(f"{url}/batch")["batch"] is None
    environments = [
        launch("single", url, share),
        launch("multi", url, share),
        launch("default", url, share),
        launch("mixed", url, share // 2 + 1),  # two groups an item
        launch("minimum", url, 2 * share, "--minimum", "0.25"),
    ]
    batches, rest = train(url, environments)
    names = {env["env_id"]: env["name"] for env in call(f"{url}/envs")["envs"]}
    assert sorted(names.values()) == sorted(environment.kind for environment in environments)
    groups = [group for batch in batches for group in batch]
    for environment in environments:
        check_delivery(environment, [g for g in [*groups, *rest] if names[g["env_id"]] == environment.kind])

    sums = [sum(len(group["tokens"]) for group in batch) for batch in batches]
    assert all(total <= BATCH for total in sums) and sums.count(BATCH) >= len(sums) - 2, sums
    status = call(f"{url}/status")
    assert status["queue_size"] == 0 and status["current_step"] >= len(batches)
    assert sum(env["groups_refused"] for env in call(f"{url}/envs")["envs"]) == 0

    # Its share, from its first batch to its last. Where it has less than that queued, or where it stands in
    # the way of an exact batch with the oldest group, a batch may have less of it.
    shares = [
        sum(len(g["tokens"]) for g in batch if names[g["env_id"]] == "minimum") / BATCH for batch in batches
    ]
    present = [k for k, part in enumerate(shares) if part]
    span = shares[present[0] : present[-1]]
    assert np.mean(span) >= 0.25 and np.mean([part >= 0.25 for part in span]) >= 0.8, shares


def test_the_order_of_one_sender_is_kept(url: str, launch: Callable[..., Environment]) -> None:
    call(f"{url}/register", REGISTRATION)
    call(f"{url}/batch")
    environment = launch("single", url, max(8, GROUPS // 4), "--workers", "1")
    batches, rest = train(url, [environment])
    came = [group["group_overrides"]["sample"] for batch in [*batches, rest] for group in batch]
    assert came == sorted(came)
    check_delivery(environment, [group for batch in [*batches, rest] for group in batch])


@pytest.mark.filterwarnings("ignore:this tiny model is untrained")
@pytest.mark.filterwarnings("ignore:engine and learner disagree")  # the fake engine's logprobs are made up
def test_our_learner_trains_from_them(url: str, launch: Callable[..., Environment], tmp_path: Path) -> None:
    """One turn and two; groups of the default path, which loses their logprobs, are dropped and counted."""
    settings = {"group_size": 4, "groups_per_update": 6, "lora": Lora(rank=2), "seed": 0, "device": "cpu"}
    with GRPO("tiny", env=url, max_staleness=3, folder=tmp_path / "run", **settings) as model:
        untrained = parameters_of(model)
        launch("single", url, 1000)
        launch("multi", url, 1000)
        launch("default", url, 1000)
        model.learn(updates=8)
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert model.version == 8 and len(lines) == 8
        for line in lines:  # who is quicker than the others differs from run to run
            assert line.get("train/rows", 0) + line.get("train/dropped/no_logprobs", 0) == 24
        trained = [line for line in lines if "train/rows" in line]
        assert trained and all(np.isfinite(line["train/loss"]) for line in trained)
        assert all(line["train/grad_norm"] > 0 for line in trained)
        assert any(not np.array_equal(a, b) for a, b in zip(untrained, parameters_of(model), strict=True))


def parameters_of(model: GRPO) -> list[Any]:
    return [p.detach().cpu().numpy().copy() for p in model.policy.parameters() if p.requires_grad]
