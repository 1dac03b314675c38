"""A fake of SGLang's stock server for httpx's ``MockTransport``: shapes as in its source, faults on request.

Nothing of it was recorded from a server that ran: routes, fields, statuses and sentences are those of
``http_server.py``, ``io_struct.py`` and ``lora_registry.py`` (0.5).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from atropos_gym.engines.sglang import SGLangEngine


class FakeSGLang:
    """A server of one model.

    Args:
        lora: whether --enable-lora was given.
        max_rank: as the flag.
        max_model_len: context.
        seeded: whether --enable-deterministic-inference was given: without it seeds are ignored.
        ids: that are sampled.
        mangle: changes the list of answers of a ``/generate`` before it is sent.

    Attributes:
        asked: (path, body) of all requests.
        adapters: folders by name.
        settings: whatever else its logprobs depend on.
        failures: answers that come before anything else, one a request to ``/generate``.
    """

    def __init__(
        self,
        *,
        lora: bool = True,
        max_rank: int = 16,
        max_model_len: int = 200,
        seeded: bool = True,
        ids: range = range(256),
        mangle: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        self.lora = lora
        self.max_rank = max_rank
        self.max_model_len = max_model_len
        self.seeded = seeded
        self.ids = ids
        self._random = random.Random(0)
        self.mangle = mangle or (lambda answers: answers)
        self.asked: list[tuple[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.settings = ""
        self.failures: list[httpx.Response | Exception] = []

    @contextmanager
    def engine(self, **options: Any) -> Iterator[SGLangEngine]:
        """An engine in front of it."""
        options = {"tokenizer": "bytes", "run": "r0", "retry_pause": 0.0, "cancel_grace": 0.0, **options}
        engine = SGLangEngine("http://fake", transport=httpx.MockTransport(self.answer), **options)
        try:
            yield engine
        finally:
            engine.shutdown()

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"null")
        self.asked.append((path, body))
        if path == "/generate":
            if self.failures:
                failure = self.failures.pop(0)
                if isinstance(failure, Exception):
                    raise failure
                return failure
            return self._generate(body)
        if path == "/v1/models":
            base = {"id": "m", "root": "m", "max_model_len": self.max_model_len, "parent": None}
            cards = [{"id": n, "root": f, "parent": "m"} for n, f in self.adapters.items()]
            return httpx.Response(200, json={"object": "list", "data": [base, *cards]})
        if path == "/model_info":
            return httpx.Response(200, json={"model_path": "models/m", "is_generation": True})
        if path == "/load_lora_adapter":
            return self._load(body)
        if path == "/unload_lora_adapter":
            return self._unload(body)
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": list(body["prompt"].encode())})
        if path == "/metrics":
            return httpx.Response(200, text='sglang:num_running_reqs{model_name="m"} 2.0\n')
        return httpx.Response(404, json={"detail": "Not Found"})

    def _generate(self, body: dict[str, Any]) -> httpx.Response:
        names = body.get("lora_path") or [None] * len(body["rid"])
        for name in names:
            if name is not None and name not in self.adapters:
                return _bad(
                    f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: ."
                )
        if len(body["input_ids"][0]) >= self.max_model_len:
            return _bad(
                f"The input ({len(body['input_ids'][0])} tokens) is longer than the model's context length "
                f"({self.max_model_len} tokens)."
            )
        each = zip(body["rid"], body["input_ids"], body["sampling_params"], names, strict=True)
        return httpx.Response(200, json=self.mangle([self._sample(*one) for one in each]))

    def _sample(
        self, request_id: str, prompt: list[int], params: dict[str, Any], name: str | None
    ) -> dict[str, Any]:
        seed = params["sampling_seed"] if self.seeded else self._random.random()
        weights = f"{self.settings}{prompt}{name}{params['temperature']}"
        rng = random.Random(f"{seed}{weights}")
        ids: list[int] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        for _ in range(params["max_new_tokens"]):
            ids.append(rng.choice(self.ids))
            if ids[-1] in params["stop_token_ids"]:
                finish = {"type": "stop", "matched": ids[-1]}
                break
        return {
            "text": "never read",
            "output_ids": ids,
            "meta_info": {
                "id": request_id,
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "cached_tokens": len(prompt) - 1,
                "weight_version": "default",
                "output_token_logprobs": [
                    [-random.Random(f"{weights}{ids[: place + 1]}").random(), value, None]
                    for place, value in enumerate(ids)
                ],
                "input_token_logprobs": [],
            },
        }

    def _load(self, body: dict[str, str]) -> httpx.Response:
        name, folder = body["lora_name"], body["lora_path"]
        if not self.lora:
            return self._refuse("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.adapters:
            return self._refuse(f"LoRA with name {name} already exists. Loaded LoRAs: {list(self.adapters)}")
        config = Path(folder, "adapter_config.json")
        if not config.is_file():
            return self._refuse(f"Can't find 'adapter_config.json' at '{folder}'")
        if (rank := json.loads(config.read_text())["r"]) > self.max_rank:
            return self._refuse(
                f"LoRA adapter {name} with rank {rank} is incompatible with the current LoRA memory pool "
                "configuration. Please ensure that the LoRA adapter's rank is within the configured "
                "`--max-lora-rank` and that the target modules are included in `--lora-target-modules`."
            )
        self.adapters[name] = folder
        return httpx.Response(
            200, json={"success": True, "error_message": "", "loaded_adapters": self.adapters}
        )

    def _unload(self, body: dict[str, str]) -> httpx.Response:
        if self.adapters.pop(body["lora_name"], None) is None:
            return self._refuse(f"LoRA with name {body['lora_name']} does not exist. Loaded LoRAs: .")
        return httpx.Response(
            200, json={"success": True, "error_message": "", "loaded_adapters": self.adapters}
        )

    def _refuse(self, message: str) -> httpx.Response:
        told = {"success": False, "error_message": message, "loaded_adapters": self.adapters}
        return httpx.Response(400, json=told)


def _bad(message: str) -> httpx.Response:
    return httpx.Response(400, json={"error": {"message": message}})
