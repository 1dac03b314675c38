"""vLLM in this process (``AsyncLLM``), where one environment holds both: no server, the same ids and checks.

vLLM's asynchronous engine is asked through an endpoint that has the routes of its server, so versions, lanes
and every check of an answer are those of ``VLLMEngine``. Importing this loads no vLLM.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_gym.engines._remote import Answer, Endpoint, Told
from atropos_gym.engines._vllm_adapters import served_rank
from atropos_gym.engines.base import Reference
from atropos_gym.engines.checks import check_engine
from atropos_gym.engines.vllm import VLLMEngine
from atropos_gym.errors import EngineError, MissingData
from atropos_gym.findings import Finding

if TYPE_CHECKING:
    import httpx

__all__ = ["VLLMInProcess"]


class VLLMInProcess(VLLMEngine):
    """A model that vLLM serves inside this process.

    vLLM starts processes of its own: make the engine under ``if __name__ == "__main__":``. It pins torch and
    transformers; where those are not the learner's, serve it apart and use ``VLLMEngine``.

    Args:
        model: the model's folder.
        dtype: that it computes in.
        max_context: most ids of prompt and completion; the model's own if None.
        rank: highest rank of an adapter.
        max_live_versions: most published versions at a time.
        engine_args: further arguments of vLLM's ``AsyncEngineArgs``; they win over ours.
        **options: further arguments of ``VLLMEngine``.

    Raises:
        MissingData: vllm is not installed here, or the model is not there.
        EngineError: vLLM does not start; the message has its words.

    Example:
        ``engine = VLLMInProcess("models/smollm2", dtype="float32")``, then as every engine.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        max_context: int | None = None,
        rank: int = 16,
        max_live_versions: int = 3,
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        folder = Path(model).expanduser().absolute()
        if not folder.is_dir():
            raise MissingData(f"no model folder at {folder}: give the folder that vLLM is to load")
        self._arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "enable_lora": True,
            "max_loras": 2,  # one that ends and one that begins
            "max_cpu_loras": max_live_versions + 2,  # a trial beside them
            "max_lora_rank": served_rank(rank),
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            **({} if max_context is None else {"max_model_len": max_context}),
            **(engine_args or {}),
        }
        super().__init__(
            "http://in-process", model=str(folder), max_live_versions=max_live_versions, **options
        )

    def _open(self, url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None) -> Endpoint:
        self._inside = AsyncLLMEndpoint(url, self._arguments)
        return self._inside

    async def _start(self) -> None:
        await self._inside.start()

    def __repr__(self) -> str:
        return f"VLLMInProcess({self.model!r}, newest={self.newest}, live={list(self.live_versions)})"

    async def check(self, reference: Reference | None = None) -> list[Finding]:
        """Tries everything that a run relies on; there is no server whose settings could be wrong."""
        return await check_engine(self, reference)


class AsyncLLMEndpoint(Endpoint):
    """vLLM's ``AsyncLLM``, asked and answering as its server is.

    Args:
        url: only a name.
        arguments: of ``AsyncEngineArgs``.
    """

    def __init__(self, url: str, arguments: Mapping[str, Any]) -> None:
        super().__init__(url)
        self._arguments = dict(arguments)
        self._model = str(arguments["model"])
        self._numbers = itertools.count(1)  # of adapters and of requests: never used again
        self._adapters: dict[str, Any] = {}
        self._llm: Any = None

    async def start(self) -> None:
        """Loads the model; on the loop that everything else runs on.

        Raises:
            MissingData: no vllm here.
            EngineError: it does not start.
        """
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            make_arguments = _of_vllm("vllm.engine.arg_utils", "AsyncEngineArgs")
            async_llm = _of_vllm("vllm.v1.engine.async_llm", "AsyncLLM")
        except ModuleNotFoundError as error:
            raise MissingData(
                f"vLLM in this process needs {error.name}, which is not installed here: pip install vllm, or "
                'run it apart with engine "vllm" and python= (the interpreter of vLLM\'s own environment)'
            ) from error
        try:
            self._llm = async_llm.from_engine_args(make_arguments(**self._arguments))
        except Exception as error:
            raise EngineError(f"vLLM does not start with {self._model}: {error}") from error
        self.seen = True

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """Answers as vLLM's server would.

        Raises:
            EngineError: the engine is dead.
        """
        self.running += 1
        try:
            if path == "/v1/completions":
                return await self._complete(body)
            if path == "/v1/models":
                return Told(200, self._models())
            if path == "/v1/load_lora_adapter":
                return await self._load(body["lora_name"], body["lora_path"])
            if path == "/v1/unload_lora_adapter":
                return await self._unload(body["lora_name"])
        finally:
            self.running -= 1
        return _error(404, f"{path} is no route of vLLM in this process")

    async def _complete(self, body: dict[str, Any]) -> Told:
        make_params = _of_vllm("vllm", "SamplingParams")
        output_kind = _of_vllm("vllm.sampling_params", "RequestOutputKind").FINAL_ONLY
        dead = _of_vllm("vllm.v1.engine.exceptions", "EngineDeadError")
        name = body["model"]
        if name != self._model and name not in self._adapters:
            return _error(404, f"adapter {name} does not exist")
        given = {field: body[field] for field in _SAMPLING if field in body}
        if "structured_outputs" in body:
            make_outputs = _of_vllm("vllm.sampling_params", "StructuredOutputsParams")
            given["structured_outputs"] = make_outputs(**body["structured_outputs"])
        last: Any = None
        try:
            params = make_params(
                **given,
                top_k=max(0, body["top_k"]),
                detokenize=False,
                output_kind=output_kind,
            )
            async for output in self._llm.generate(  # cancelling this task aborts the request
                {"prompt_token_ids": body["prompt"]},
                params,
                request_id=f"atropos-{next(self._numbers)}",
                lora_request=self._adapters.get(name),
            ):
                last = output
        except dead as error:
            raise EngineError(f"vLLM in this process died: {error}; make the engine anew") from error
        except ValueError as error:
            return _error(400, str(error))
        except Exception as error:
            raise EngineError(f"vLLM in this process failed: {type(error).__name__}: {error}") from error
        if last is None:
            raise EngineError("vLLM in this process ended a request without an answer")
        return Told(200, as_choices(last))

    def _models(self) -> dict[str, Any]:
        base = {
            "id": self._model,
            "root": self._model,
            "parent": None,
            "max_model_len": self._llm.model_config.max_model_len,
        }
        adapters = [
            {"id": name, "root": request.lora_path, "parent": self._model}
            for name, request in self._adapters.items()
        ]
        return {"data": [base, *adapters]}

    async def _load(self, name: str, folder: str) -> Told:
        """Adds an adapter; never left to the first request, for which a missing folder is deadly."""
        if name in self._adapters:
            return _error(400, f"{name} has already been loaded")
        request = _of_vllm("vllm.lora.request", "LoRARequest")(name, next(self._numbers), folder)
        try:
            added = await self._llm.add_lora(request)
        except Exception as error:  # of any kind, from the engine's process: its words are the advice
            if "max_lora_rank" in str(error):
                raise EngineError(
                    f"adapter {folder} does not fit ({error}): make the engine with a higher rank="
                ) from error
            return _error(500, str(error))
        if not added:
            return _error(500, f"vLLM did not add {name}")
        self._adapters[name] = request
        return Told(200, {})

    async def _unload(self, name: str) -> Told:
        request = self._adapters.pop(name, None)
        if request is None:
            return _error(404, f"{name} cannot be found")
        try:
            await self._llm.remove_lora(request.lora_int_id)
        except Exception as error:
            raise EngineError(f"vLLM in this process did not remove adapter {name}: {error}") from error
        return Told(200, {})

    async def close(self) -> None:
        """Ends vLLM and its processes. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()


_SAMPLING = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "allowed_token_ids",
)


def as_choices(output: Any) -> dict[str, Any]:
    """Returns a ``RequestOutput`` in the form of ``/v1/completions``, for ``read_completions``.

    The sampled id's logprob is looked up by its id; one that is not there stays missing, to be refused.
    """
    return {
        "choices": [
            {
                "index": sample.index,
                "token_ids": list(sample.token_ids),
                "prompt_token_ids": list(output.prompt_token_ids),
                "logprobs": None if sample.logprobs is None else {"token_logprobs": _sampled(sample)},
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ],
        "usage": {"prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}},
    }


def _sampled(sample: Any) -> list[float | None]:
    ids = list(sample.token_ids)
    found = []
    for position, by_id in enumerate(sample.logprobs):
        entry = by_id.get(ids[position]) if position < len(ids) else None
        found.append(None if entry is None else entry.logprob)
    return found


def _of_vllm(module: str, name: str) -> Any:
    """Returns something of vLLM's, which is loaded when it is needed."""
    return getattr(importlib.import_module(module), name)


def _error(status: int, message: str) -> Told:
    return Told(status, {"error": {"message": message}})
