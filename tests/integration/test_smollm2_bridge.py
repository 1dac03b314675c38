"""The whole bridge on a real model: SmolLM2-135M-Instruct plays, learns, and is swapped while it serves.

1. ``atropos-gym collect`` plays 8 GSM8K groups of 4.
2. 20 GRPO steps on Arithmetic: at every version engine and learner agree about the sampled ids, before and
   after the swap, and a control adapter disagrees by 100 times more; neighbouring versions are told apart.

Run with ``-s`` to see the figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import atropos_gym  # noqa: F401  (registers the environments)
from atropos_gym.rollout.writers import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
STEPS, MOST_UPDATES = 20, 30  # an update whose groups all have equal scores takes no step
MEAN, MAX = 2e-5, 2e-4


@pytest.fixture(scope="module")
def gsm8k() -> Path:
    path = Path(
        os.environ.get("ATROPOS_GYM_GSM8K") or ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
    )
    if not path.is_file():
        pytest.skip("no GSM8K file: set ATROPOS_GYM_GSM8K to a JSONL with question and answer on each line")
    return path


def test_collect_plays_gsm8k_in_groups(smollm2_folder: Path, gsm8k: Path, tmp_path: Path) -> None:
    out = tmp_path / "gsm8k.jsonl"
    command = [sys.executable, "-m", "atropos_gym", "collect", "--env", "atropos/GSM8K-v0"]
    command += ["--env-arg", f"data={gsm8k}", "--env-arg", "max_turn_tokens=160"]
    command += ["--policy", str(smollm2_folder), "--groups", "8", "--group-size", "4", "--out", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    groups = list(read_jsonl(out))
    assert [len(group.episodes) for group in groups] == [4] * 8
    for group in groups:
        starts = {tuple(episode.rows[0].ids[: episode.rows[0].turns[0].start]) for episode in group.episodes}
        assert len(starts) == 1
        assert len({tuple(episode.rows[0].ids) for episode in group.episodes}) > 1
    returns = [episode.episode_return for group in groups for episode in group.episodes]
    assert set(returns) <= {0.0, 1.0}
    print(json.dumps({"gsm8k_right": sum(returns), "of": len(returns)}))


def last_line(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text().splitlines()[-1]))


class Reference:
    """Scores ids under any version's folder: a plain forward of transformers and peft, row by row."""

    def __init__(self, base: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def add(self, name: str, folder: Path) -> None:
        from peft import PeftModel

        if not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self.model, folder, adapter_name=name)
        else:
            self.model.load_adapter(folder, adapter_name=name)
        self.model.eval()

    def add_control(self, like: str) -> None:
        """Adds the adapter ``control``: the shape of ``like``, with B drawn from N(0, 0.01)."""
        import torch

        self.model.add_adapter("control", self.model.peft_config[like])
        generator = torch.Generator().manual_seed(5)
        for name, parameter in self.model.named_parameters():
            if ".lora_B.control." in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(noise * 0.01)
        self.model.eval()

    def __call__(self, name: str, rows: list[tuple[list[int], list[int]]]) -> np.ndarray:
        from tests.tools.tiny_llama import full_logprobs

        self.model.set_adapter(name)
        return np.concatenate([full_logprobs(self.model, prompt, ids) for prompt, ids in rows])


def test_grpo_learns_arithmetic_with_a_swapped_adapter(smollm2_folder: Path, tmp_path: Path) -> None:
    import torch

    from atropos_gym import GRPO, evaluate
    from atropos_gym.engines.base import SamplingParams
    from atropos_gym.trainers.slope import Slope, slope_test

    torch.set_num_threads(os.cpu_count() or 1)  # one thread is for tiny models
    env_kwargs = {"difficulty": 1, "max_turn_tokens": 16}
    with GRPO(
        str(smollm2_folder),
        "atropos/Arithmetic-v0",
        env_kwargs=env_kwargs,
        group_size=4,
        groups_per_update=4,
        learning_rate=1e-4,
        temperature=0.7,
        folder=tmp_path / "run",
        seed=0,
    ) as model:
        before = evaluate("atropos/Arithmetic-v0", model, 48, seed=1, env_kwargs=env_kwargs)
        reference = Reference(smollm2_folder)
        env = gymnasium.make("atropos/Arithmetic-v0", tokenizer=model.tokenizer, **env_kwargs)
        prompts = [env.reset(seed=seed)[0].tolist() for seed in range(4)]
        stop_ids = env.unwrapped.stop_ids

        def sample() -> tuple[list[tuple[list[int], list[int]]], np.ndarray]:
            """Rows that the engine samples under its newest version, and its logprobs of them."""
            params = [SamplingParams(16, seed=i, stop_ids=stop_ids) for i in range(len(prompts))]
            said = model.engine.generate_batch(prompts, params)
            rows = [(p, list(c.ids)) for p, c in zip(prompts, said, strict=True)]
            return rows, np.concatenate([np.array(c.logprobs) for c in said])

        def learner(rows: list[tuple[list[int], list[int]]]) -> np.ndarray:
            return np.concatenate(model.score([p for p, _ in rows], [ids for _, ids in rows]))

        differences: list[np.ndarray] = []
        rows, engine_says = sample()  # under the base
        slopes: list[Slope] = []
        controls: list[float] = []
        steps = 0
        for update in range(1, MOST_UPDATES + 1):
            differences.append(learner(rows) - engine_says)  # before the swap
            model.learn(updates=1, reset_num_timesteps=False)
            assert model.engine.newest == model.version == update
            stepped = "train/grad_norm" in last_line(tmp_path / "run" / "metrics.jsonl")
            steps += stepped
            rows, engine_says = sample()
            differences.append(learner(rows) - engine_says)  # after the swap
            if stepped and update > 1 and (len(slopes) < 3 or steps == STEPS):
                old, new = f"{model.run}-v{update - 1}", f"{model.run}-v{update}"
                for name in (old, new):
                    reference.add(name, next(model.adapter_dir.glob(f"**/{name}")))
                if not controls:
                    reference.add_control(new)
                now = reference(new, rows)
                assert np.abs(now - engine_says).mean() < MEAN
                controls.append(np.abs(reference("control", rows) - engine_says).mean())
                previous = reference(old, rows)
                slopes.append(slope_test(engine_says, now, previous))
                stale = slope_test(previous, now, previous)
                assert stale.verdict == "not_swapped", stale
            if steps == STEPS:
                break
        after = evaluate("atropos/Arithmetic-v0", model, 48, seed=1, env_kwargs=env_kwargs)

    every = np.abs(np.concatenate(differences))
    figures = {
        "updates": update,
        "steps": steps,
        "mean": float(every.mean()),
        "max": float(every.max()),
        "ids": int(every.size),
        "control_mean": float(min(controls)),
        "slopes": [round(s.slope, 4) for s in slopes],
        "slope_rms": [float(f"{s.rms:.2g}") for s in slopes],
        "accuracy_before": before.mean,
        "accuracy_after": after.mean,
        "stderr": after.stderr,
    }
    print(json.dumps(figures))
    assert every.mean() < MEAN
    assert every.max() < MAX
    assert min(controls) > 100 * every.mean()
    assert steps == STEPS
    assert [s.verdict for s in slopes] == ["swapped"] * 4
