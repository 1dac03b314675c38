"""What only a vLLM server can be asked before a run: adapters at run time, tokenizer, context, its metrics.

Numbers are compared in ``engines.checks``; here are the flags and settings.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from atropos_gym.engines._remote import Answer
from atropos_gym.engines._vllm_adapters import load_refusal
from atropos_gym.engines._vllm_replica import VLLMReplica
from atropos_gym.engines.base import Reference
from atropos_gym.errors import EngineError
from atropos_gym.findings import Finding
from atropos_gym.tokenizers import Tokenizer

__all__ = ["read_metrics", "server_findings"]

#: Texts whose ids differ between tokenizers that look alike.
GOLDENS = (
    "a  12",
    "Step\n\n1. x",
    "1234567890",
    "  two  spaces",
    "tab\tand\r\nline",
    "naïve café",
    "日本語のテキスト",
    "🙂 emoji",
    "def f(x):\n    return x+1",
    "½ × 3 = 1.5",
)
_SAMPLE = re.compile(r"^vllm:(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


async def server_findings(
    replicas: Sequence[VLLMReplica],
    model: str,
    max_context: int,
    reference: Reference | None,
    tokenizer: Tokenizer,
) -> list[Finding]:
    """Returns what was found of each replica; the numbers of several stand one after another."""
    findings: list[Finding] = []
    for replica in replicas:
        try:
            findings += await _adapters(replica, reference)
            findings += await _tokenizer(replica, tokenizer)
        except EngineError as error:
            findings.append(Finding("server", "wrong", str(error)))
        findings.append(Finding("context", "ok", f"{replica.url} serves {model} with {max_context} ids"))
    return findings


async def _adapters(replica: VLLMReplica, reference: Reference | None) -> list[Finding]:
    """Whether adapters can be loaded at all: a folder that is not there must be what is wrong."""
    nowhere = Path(f"/atropos-gym-check-{uuid.uuid4().hex}")
    body = {"lora_name": nowhere.name, "lora_path": str(nowhere)}
    answer = await replica.ask("POST", "/v1/load_lora_adapter", body, keep=frozenset({500}))
    if answer.status == 404 and "No adapter found" in answer.message:
        return [Finding("adapters", "ok", f"{replica.url} loads adapters while it serves")]
    # Without a learner nothing needs adapters, and the base can be evaluated.
    status = "note" if reference is not None and reference.rank is None else "wrong"
    return [_refused(answer, nowhere, replica.url, status)]


def _refused(answer: Answer, folder: Path, url: str, status: str) -> Finding:
    detail, _, remedy = load_refusal(answer, folder.name, folder, url).partition(": ")
    return Finding("adapters", "note" if status == "note" else "wrong", detail, remedy)


async def _tokenizer(replica: VLLMReplica, tokenizer: Tokenizer) -> list[Finding]:
    """Whether the server's tokenizer gives our ids: its model was made for the same ones."""
    for text in GOLDENS:
        answer = await replica.ask(
            "POST", "/tokenize", {"prompt": text, "add_special_tokens": False}, keep=frozenset({500})
        )
        data = answer.data
        theirs = data.get("tokens") if isinstance(data, dict) else None
        if answer.status != 200 or not isinstance(theirs, list):
            return [Finding("tokenizer", "note", f"{replica.url} does not say its ids (/tokenize)")]
        ours = tokenizer.encode(text)
        if theirs != ours:
            return [
                Finding(
                    "tokenizer",
                    "wrong",
                    f"{text!r} is {theirs[:12]} for the server at {replica.url} and {ours[:12]} for "
                    f"{tokenizer.name}",
                    "give server and learner the same model folder (--model, --tokenizer)",
                )
            ]
    return [Finding("tokenizer", "ok", f"{len(GOLDENS)} texts have the same ids in {replica.url} and here")]


async def read_metrics(replicas: Sequence[VLLMReplica]) -> dict[str, float]:
    """Returns ``vllm:…`` values by name, summed over labels and replicas."""
    total: Counter[str] = Counter()
    for replica in replicas:
        answer = await replica.ask("GET", "/metrics")
        for sample in _SAMPLE.finditer(answer.body.decode("utf-8", "replace")):
            total[sample["name"]] += float(sample["value"])  # type: ignore[assignment]
    return dict(total)
