"""``atropos-gym check-engine``: whether an engine can be trained with, and which flag or setting to change.

Exit code 0: fit to train with. 1: training with it would be wrong. 2: a mistake on the command line.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from atropos_gym._urls import without_token
from atropos_gym.cli.command import Command
from atropos_gym.cli.engines import SERVERS
from atropos_gym.cli.mistakes import need_learner
from atropos_gym.cli.models import find_model
from atropos_gym.engines import make_engine
from atropos_gym.engines.base import Reference
from atropos_gym.errors import ConfigError, TemplateError
from atropos_gym.findings import Finding, fit, table, verdict
from atropos_gym.rendering import chat_renderer
from atropos_gym.tokenizers import Tokenizer, load_tokenizer

__all__ = ["COLOURS", "run"]

COLOURS = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def run(command: Command) -> int:
    """Prints the findings and returns 0, or 1 where training would be wrong."""
    options = command.options
    if not options["temperature"] > 0:
        raise ConfigError(
            f"--temperature must be > 0, got {options['temperature']}: greedy samples teach nothing"
        )
    if options["lora_rank"] < 1:
        raise ConfigError(f"--lora-rank must be >= 1, got {options['lora_rank']}")
    with tempfile.TemporaryDirectory(prefix="atropos-gym-check-") as temporary:
        folder = Path(options["adapter_dir"] or temporary).absolute()
        findings = _check(command.target, options, folder)
    shown = without_token(command.target)
    if options["json"]:
        print(json.dumps(_plain(shown, findings), ensure_ascii=False, indent=2))
        return 0 if fit(findings) else 1
    console = Console(highlight=False)
    lines = table(findings, min(100, console.width) if console.is_terminal else 100)
    text = Text(f"{shown}\n\n{lines}\n\n{verdict(findings, train='train with')}")
    for status, colour in COLOURS.items():
        text.highlight_regex(rf"(?m)^{status}\b", colour)
    console.print(text, soft_wrap=True)
    return 0 if fit(findings) else 1


def _plain(spec: str, findings: list[Finding]) -> dict[str, Any]:
    return {"engine": spec, "ok": fit(findings), "findings": [asdict(finding) for finding in findings]}


def _check(spec: str, options: Mapping[str, Any], folder: Path) -> list[Finding]:
    """Opens the engine, compares it with the learner's model where one is named, and closes it."""
    kind, _, path = spec.partition(":")
    named = options["model"] or (path if kind == "hf" else None)
    model = find_model(named) if named else None
    reference = None if model is None else _reference(model, options, folder)
    with _opened(spec, model, options, folder) as engine:
        findings: list[Finding] = asyncio.run(engine.check(reference))
    return findings


@contextmanager
def _opened(spec: str, model: str | None, options: Mapping[str, Any], folder: Path) -> Iterator[Any]:
    kind, _, path = spec.partition(":")
    more: dict[str, Any] = {}
    if kind == "hf":
        more["dtype"] = options["dtype"]
        spec, model = f"hf:{find_model(path)}" if path else spec, None if path else model
    else:
        more["adapter_dir"] = options["adapter_dir"]
        more["api_key"] = options["api_key"] or os.environ.get(SERVERS.get(kind, ""))
        if kind == "vllm":
            more["python"] = options["vllm_python"]
        if spec == "vllm":
            more |= {"dtype": options["dtype"], "max_lora_rank": options["lora_rank"]}
    engine = make_engine(
        spec, model=model, **{name: value for name, value in more.items() if value is not None}
    )
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def _reference(model: str, options: Mapping[str, Any], folder: Path) -> Reference:
    """Returns the learner that the engine is compared with: the model with an adapter of the run's shape."""
    need_learner()
    import torch

    from atropos_gym.trainers._model import base_model
    from atropos_gym.trainers.adapters import Lora, add_lora
    from atropos_gym.trainers.reference import LearnerReference

    tokenizer = load_tokenizer(model)
    base = base_model(model, tokenizer, dtype=options["dtype"], device=torch.device("cpu"), seed=0)
    return LearnerReference(
        add_lora(base, Lora(rank=options["lora_rank"]), base_name=model),
        tokenizer,
        adapter_dir=folder,
        stop_ids=_stop_ids(tokenizer),
        dtype=options["dtype"],
        temperature=options["temperature"],
    )


def _stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that end a turn; none for a model whose template `check-model` refuses."""
    try:
        return tuple(chat_renderer(tokenizer).stop_ids)
    except TemplateError:
        return ()
