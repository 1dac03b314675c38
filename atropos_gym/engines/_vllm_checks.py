"""What only a vLLM server can be asked before a run: adapters at run time, tokenizer, context, its metrics.

Numbers are compared in ``engines.checks``; here are the flags and settings.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from atropos_gym.engines._vllm_adapters import load_refusal
from atropos_gym.engines._vllm_replica import VLLMReplica
from atropos_gym.engines._vllm_wire import completion_body
from atropos_gym.engines.base import Reference, SamplingParams
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
_ONE_FOLDER = "give server and learner the same model folder (--model, --policy)"
_SAMPLE = re.compile(r"^(?:vllm|sglang):(?P<name>\w+)(?:\{[^}]*\})? (?P<value>\S+)$", re.MULTILINE)


async def server_findings(
    replicas: Sequence[VLLMReplica],
    model: str,
    folder: Path,
    max_context: int,
    tokenizer: Tokenizer,
    reference: Reference | None,
) -> list[Finding]:
    """Returns what was found of each replica.

    Args:
        replicas: all of them.
        model: served name of the base model.
        folder: that the server has it from.
        max_context: of it.
        tokenizer: the engine's.
        reference: the learner's scorer, if there is one.
    """
    findings: list[Finding] = []
    for replica in replicas:
        findings.append(Finding("context", "ok", f"{replica.url} serves {model} with {max_context} ids"))
        try:
            findings += await _adapters(replica, reference)
            findings += await _tokenizer(replica, tokenizer, folder)
            if reference is not None:
                findings += await _stop_ids(replica, reference, folder)
                findings += await _rows(replica, model, reference)
            await replica.remember(model)
        except EngineError as error:
            findings.append(Finding("server", "wrong", str(error)))
    return findings


async def _adapters(replica: VLLMReplica, reference: Reference | None) -> list[Finding]:
    """Whether adapters can be loaded at all: a folder that is not there must be what is wrong."""
    nowhere = Path(f"/atropos-gym-check-{uuid.uuid4().hex}")
    body = {"lora_name": nowhere.name, "lora_path": str(nowhere)}
    answer = await replica.ask("POST", "/v1/load_lora_adapter", body, keep=frozenset({500}))
    if answer.status == 404 and "No adapter found" in answer.message:
        return [Finding("adapters", "ok", f"{replica.url} loads adapters while it serves")]
    detail, _, remedy = load_refusal(answer, nowhere.name, nowhere, replica.url).partition(": ")
    needless = reference is not None and reference.rank is None
    return [Finding("adapters", "note" if needless else "wrong", detail, remedy)]


async def _ids_of(replica: VLLMReplica, text: str) -> list[int] | None:
    """Returns the server's ids of a text, control tokens read as such; None if it does not say."""
    body = {"prompt": text, "add_special_tokens": False}
    answer = await replica.ask("POST", "/tokenize", body, keep=frozenset({500}))
    data = answer.data
    ids = data.get("tokens") if isinstance(data, dict) and answer.status == 200 else None
    return ids if isinstance(ids, list) else None


async def _tokenizer(replica: VLLMReplica, tokenizer: Tokenizer, folder: Path) -> list[Finding]:
    """Whether the server's tokenizer gives our ids: its model was made for the same ones."""
    for text in GOLDENS:
        ours, theirs = tokenizer.encode(text), await _ids_of(replica, text)
        if theirs is None:
            return [Finding("tokenizer", "note", f"{replica.url} does not say its ids (/tokenize)")]
        if theirs != ours:
            return [
                Finding(
                    "tokenizer",
                    "wrong",
                    f"{text!r} is {theirs[:12]} for the server ({folder}) and {ours[:12]} for "
                    f"{tokenizer.name}",
                    _ONE_FOLDER,
                )
            ]
    return [Finding("tokenizer", "ok", f"{len(GOLDENS)} texts have the same ids in {replica.url} and here")]


async def _stop_ids(replica: VLLMReplica, reference: Reference, folder: Path) -> list[Finding]:
    """Whether what ends a turn is one id, and the same one, on both sides."""
    for stop_id in reference.stop_ids:
        text = reference.tokenizer.decode([stop_id])
        theirs = await _ids_of(replica, text) if text else None
        if theirs is not None and theirs != [stop_id]:
            return [
                Finding(
                    "stop ids",
                    "wrong",
                    f"{text!r} is stop id {stop_id} for the learner ({reference.tokenizer.name}) and "
                    f"{theirs[:8]} for the server ({folder})",
                    _ONE_FOLDER,
                )
            ]
    return []


async def _rows(replica: VLLMReplica, model: str, reference: Reference) -> list[Finding]:
    """Whether the first id that the learner's embedding lacks is refused by the server too."""
    params = SamplingParams(max_tokens=1)
    body = completion_body(model, [0, reference.rows], params, 1, seed=0, max_tokens=1)
    answer = await replica.ask("POST", "/v1/completions", body, keep=frozenset({500}))
    if answer.status != 200:
        return []
    return [
        Finding(
            "vocabulary",
            "wrong",
            f"the learner has ids up to {reference.rows - 1}, and {replica.url} takes {reference.rows}",
            _ONE_FOLDER,
        )
    ]


async def read_metrics(replicas: Sequence[VLLMReplica]) -> dict[str, float]:
    """Returns ``vllm:…`` (``sglang:…``) values by name, summed over labels and replicas."""
    total: Counter[str] = Counter()
    for replica in replicas:
        answer = await replica.ask("GET", "/metrics")
        for sample in _SAMPLE.finditer(answer.body.decode("utf-8", "replace")):
            total[sample["name"]] += float(sample["value"])  # type: ignore[assignment]
    return dict(total)
