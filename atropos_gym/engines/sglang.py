"""SGLang's stock server as an engine: ids in, ids and logprobs out, adapters loaded while it serves.

An SGLang server is spoken to through an endpoint that has vLLM's routes, so versions, lanes, retries,
replicas and restarts are those of ``VLLMEngine``.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from atropos_gym.engines._remote import Answer, Endpoint, Told
from atropos_gym.engines._sglang_wire import as_choices, generate_body
from atropos_gym.engines._vllm_checks import server_findings
from atropos_gym.engines.base import Reference
from atropos_gym.engines.checks import check_engine
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import ContextFull, EngineError
from atropos_gym.findings import Finding

if TYPE_CHECKING:
    import httpx

__all__ = ["SGLangEngine"]

_START = "start SGLang with --enable-lora --lora-target-modules all --max-lora-rank R"
_HAS_IT = re.compile(r"already (exists|loaded|been loaded)")
_UNFIT = re.compile(r"with rank \d+|max-lora-rank|lora-target-modules|target[ _]modules")
_RAW = "unset SGLANG_RETURN_ORIGINAL_LOGPROB where SGLang is started"


class SGLangEngine(VLLMEngine):
    """A model behind one or several SGLang servers that are already running.

    Start them with ``--enable-lora --lora-target-modules all --max-lora-rank R --max-loaded-loras`` one above
    ``max_live_versions``; seeds count only with ``--enable-deterministic-inference``. ``allowed_ids`` are not
    possible. Arguments, attributes and errors are those of ``VLLMEngine``; ``server`` and the swaps
    ``"restart"`` and ``"in_place"`` are vLLM's alone.

    Example:
        ``engine = SGLangEngine("http://127.0.0.1:30000")``, then inside a coroutine
        ``[c] = await engine.generate(ids, SamplingParams(max_tokens=16, seed=7))``.
    """

    _seeded = False

    def _open(self, url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None) -> Endpoint:
        return SGLangEndpoint(url, api_key, transport=transport)

    def __repr__(self) -> str:
        return super().__repr__().replace("VLLMEngine", "SGLangEngine", 1)

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on; ``wrong`` findings name the flag or setting to change."""
        # No id outside the vocabulary is tried: not every release refuses it before it is looked up.
        found = server_findings(
            self._router.replicas, self.model, self._base_folder, self.max_context, self.tokenizer, None
        )
        findings = [*await self._thread.run(found), *await check_engine(self, reference)]
        return [_told_for_sglang(finding, reference) for finding in findings]


def _told_for_sglang(finding: Finding, reference: Reference | None) -> Finding:
    if "--logprobs-mode" in finding.remedy:
        return replace(finding, remedy=_RAW)
    if finding.name == "adapters" and reference is not None and reference.rank is None:
        return replace(finding, status="note" if finding.status == "wrong" else finding.status)
    return finding


def _error(status: int, message: str) -> Answer:
    return Told(status, {"error": {"message": message}})


class SGLangEndpoint(Endpoint):
    """An SGLang server that is asked, and answers, as vLLM does."""

    _bases: frozenset[str] = frozenset()

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Tries once.

        Raises:
            Passing: no connection, no whole answer, 429 or 5xx.
            EngineError: what was asked is not possible here; the message names the flag to change.
        """
        if path == "/v1/completions":
            return await self._complete(body)
        if path == "/v1/models":
            return await self._models()
        if path == "/v1/load_lora_adapter":
            return await self._load(body)
        if path == "/v1/unload_lora_adapter":
            return await self._unload(body)
        return await super().ask(method, path, body)

    async def _complete(self, body: dict[str, Any]) -> Answer:
        name, mark = body["model"], secrets.token_hex(8)
        request_ids = [f"{mark}-{i}" for i in range(body["n"])]
        adapter = None if name in self._bases else name
        answer = await super().ask("POST", "/generate", generate_body(body, request_ids, adapter))
        if answer.status == 200:
            return Told(200, as_choices(answer.data, request_ids, body["prompt"]))
        said = answer.message
        if adapter is not None and "not loaded" in said:
            return _error(404, f"adapter {adapter} does not exist: {said}")
        if "context length" in said:
            raise ContextFull(
                f"the prompt of {len(body['prompt'])} ids does not fit in the server's context: {said}"
            )
        if answer.status in (401, 403):
            raise EngineError(
                f"{self.url} refuses the api key ({said}): give api_key= as in SGLang's --api-key"
            )
        if answer.status == 404:
            raise EngineError(f"{self.url} has no /generate: is it an SGLang server?")
        return answer

    async def _models(self) -> Answer:
        """Lists what is served, base models with the folder that they were loaded from."""
        answer = await super().ask("GET", "/v1/models")
        data = answer.data
        entries = data.get("data") if isinstance(data, dict) else None
        if answer.status in (401, 403):
            return answer
        if answer.status != 200 or not isinstance(entries, list):
            raise EngineError(
                f"{self.url}/v1/models answers {answer.status} {answer.message[:80]!r}: is it an SGLang "
                "server?"
            )
        about = await super().ask("GET", "/model_info")
        if about.status == 404:
            about = await super().ask("GET", "/get_model_info")  # its name in older releases
        folder = about.data.get("model_path") if isinstance(about.data, dict) else None
        if about.status != 200 or folder is None:
            raise EngineError(f"{self.url} does not say its model_path: is it an SGLang server?")
        bases = [entry for entry in entries if isinstance(entry, dict) and not entry.get("parent")]
        for entry in bases:
            entry["root"] = folder
        self._bases = frozenset(str(entry.get("id")) for entry in bases)
        return Told(200, data)

    async def _load(self, body: dict[str, str]) -> Answer:
        name, folder = body["lora_name"], body["lora_path"]
        answer = await super().ask("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        data, said = answer.data, _reason(answer)
        if answer.status == 200 and (not isinstance(data, dict) or data.get("success", True)):
            return answer
        if answer.status in (401, 403):
            raise EngineError(
                f"{self.url} refuses the api key ({said}): give api_key= as in SGLang's --api-key"
            )
        if answer.status == 404 or "LoRA is not enabled" in said:
            raise EngineError(f"{self.url} serves no adapters: {_START} ({said})")
        if _HAS_IT.search(said):
            return _error(400, f"{name} has already been loaded: {said}")
        if _UNFIT.search(said):
            raise EngineError(f"{self.url} cannot hold adapter {name} from {folder}: {_START} ({said})")
        if "adapter_config" in said or "No such file" in said or folder in said:
            return _error(404, f"No adapter found for {name}: {said}")
        raise EngineError(f"{self.url} refused adapter {name} from {folder}: {answer.status} {said}")

    async def _unload(self, body: dict[str, str]) -> Answer:
        answer = await super().ask("POST", "/unload_lora_adapter", body)
        said = _reason(answer)
        if answer.status == 400 and ("does not exist" in said or "not loaded" in said):
            return _error(404, said)
        return answer


def _reason(answer: Answer) -> str:
    data = answer.data
    said = data.get("error_message") if isinstance(data, dict) else None
    return str(said) if said else answer.message
