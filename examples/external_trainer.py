"""A trainer of your own: it polls ``/batch`` and does its update in plain torch.

Three processes, each in a terminal of its own. ``BASE`` is a model folder, such as ``runs/blackjack-1/base``,
which ``make demo`` leaves behind: a tiny model that knows the format of an answer and nothing of the game.

    atropos-gym serve --port 8000
    atropos-gym collect --to http://127.0.0.1:8000 --env atropos/Blackjack-v0 \
        --env-arg describe=terse --history latest --policy BASE
    python examples/external_trainer.py BASE http://127.0.0.1:8000

The trainer speaks the Atropos rollout API and two things that our server adds: the number of groups in an
update, and ``/policy``, by which the environment's engine learns of each new adapter.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

GROUPS = 16
CLIP = 0.2
LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between local processes


def call(url: str, body: dict | None = None) -> dict:
    """Sends one request, JSON in and JSON out."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with LOOPBACK.open(request, timeout=60) as reply:
        return json.load(reply)


def rows_of(groups: list[dict]) -> list[tuple[list[int], list[int], list[float], float, float]]:
    """Flattens groups into (ids, mask, old logprobs, advantage, temperature) of each sequence."""
    rows = []
    for group in groups:
        scores = group["scores"]
        mean = sum(scores) / len(scores)
        temperature = (group["generation_params"] or {}).get("temperature", 1.0)
        for ids, mask, old, score in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], scores, strict=True
        ):
            rows.append((ids, mask, old, score - mean, temperature))
    return rows


def loss_of(model: torch.nn.Module, rows: list) -> torch.Tensor:
    """Returns the clipped policy-gradient loss, a mean over the trained ids of the whole batch."""
    longest = max(len(ids) for ids, *_ in rows)
    ids_B_T = torch.zeros(len(rows), longest, dtype=torch.long)
    trained_B_T = torch.zeros(len(rows), longest, dtype=torch.bool)
    old_B_T = torch.zeros(len(rows), longest)
    for row, (ids, mask, old, _, _) in enumerate(rows):
        ids_B_T[row, : len(ids)] = torch.tensor(ids)
        trained_B_T[row, : len(ids)] = torch.tensor(mask) != -100
        old_B_T[row, : len(ids)] = torch.tensor(old)
    advantages_B = torch.tensor([advantage for *_, advantage, _ in rows])
    temperatures_B = torch.tensor([temperature for *_, temperature in rows])

    # Position t is predicted from the ids before it; padding on the right changes nothing to the left of it.
    logits_B_T_V = model(ids_B_T).logits[:, :-1].float() / temperatures_B[:, None, None]
    logprobs_B_T = torch.log_softmax(logits_B_T_V, -1).gather(-1, ids_B_T[:, 1:, None]).squeeze(-1)
    trained = trained_B_T[:, 1:]
    ratio = (logprobs_B_T - old_B_T[:, 1:])[trained].exp()
    advantage = advantages_B[:, None].expand_as(trained)[trained]
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return -surrogate.sum() / trained.sum()


def main(base: str, server: str, updates: int = 30, learning_rate: float = 4e-3) -> list[float]:
    """Trains an adapter on what the server hands out; returns the mean score of every batch."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    run, folder = uuid.uuid4().hex[:6], Path(tempfile.mkdtemp(prefix="adapters-"))
    registration = {
        "wandb_group": "examples",
        "wandb_project": "external_trainer",
        "batch_size": GROUPS * 8,
        "max_token_len": 0,
        "checkpoint_dir": str(folder),
        "save_checkpoint_interval": -1,
        "starting_step": 0,
        "num_steps": updates,
        "groups_per_update": GROUPS,
        "max_policy_lag": 0,
    }
    call(f"{server}/register", registration)
    policy = {"run": run, "version": 0, "model_name": f"{run}-v0", "adapter_path": None}
    call(f"{server}/policy", policy)

    history = []
    for version in range(1, updates + 1):
        while (batch := call(f"{server}/batch?groups={GROUPS}&wait_seconds=20")["batch"]) is None:
            time.sleep(0.1)
        rows = rows_of(batch)
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # A version is a new folder, complete before it is announced and never written again.
        adapter = folder / f"{run}-v{version}"
        model.save_pretrained(adapter, save_embedding_layers=False)
        policy |= {"version": version, "model_name": adapter.name, "adapter_path": str(adapter)}
        call(f"{server}/policy", policy)
        history.append(sum(sum(group["scores"]) for group in batch) / sum(len(g["scores"]) for g in batch))
        print(f"update {version:3d}  sequences {len(rows):4d}  mean score {history[-1]:+.3f}", flush=True)
    call(f"{server}/policy", {"run": run, "finished": True})
    return history


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} BASE_MODEL_FOLDER SERVER_URL")
    main(sys.argv[1], sys.argv[2])
