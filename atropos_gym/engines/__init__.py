"""Inference engines behind one protocol: ids in, ids and logprobs out, policy versions swapped while serving.

Importing this loads neither torch nor transformers; the engine that needs them loads them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_gym._urls import without_token
from atropos_gym.engines.base import Completion, Engine, SamplingParams
from atropos_gym.errors import ConfigError, MissingData

if TYPE_CHECKING:
    from atropos_gym.engines.hf import HFEngine
    from atropos_gym.engines.launch import VLLMServer
    from atropos_gym.engines.openai import OpenAIEngine
    from atropos_gym.engines.scripted import ScriptedEngine
    from atropos_gym.engines.sglang import SGLangEngine
    from atropos_gym.engines.text import TextEngine, as_text_engine
    from atropos_gym.engines.vllm import VLLMEngine
    from atropos_gym.engines.vllm_in_process import VLLMInProcess

__all__ = [
    "Completion",
    "Engine",
    "HFEngine",
    "OpenAIEngine",
    "SGLangEngine",
    "SamplingParams",
    "ScriptedEngine",
    "TextEngine",
    "VLLMEngine",
    "VLLMInProcess",
    "VLLMServer",
    "as_text_engine",
    "make_engine",
]

_KNOWN = (
    '"hf:PATH", "vllm:URL", "vllm" (launches one, with python=), "vllm-inprocess:PATH", "sglang:URL", '
    '"openai:MODEL" and "scripted"'
)


def make_engine(
    spec: str | Mapping[str, Any],
    *,
    model: str | Path | None = None,
    tokenizer: Any = None,
    adapter_dir: str | Path | None = None,
    python: str | Path | None = None,
    **options: Any,
) -> Engine:
    """Returns the engine that ``spec`` names.

    Args:
        spec: ``"hf:PATH"`` (a transformers model in this process; also ``"hf"`` with ``model=PATH``),
            ``"vllm:URL"`` (a server that runs; several URLs with commas between), ``"vllm"`` (one that is
            launched with ``model=`` and ``python=``, and ended with the engine), ``"vllm-inprocess:PATH"``
            (vLLM in this process), ``"sglang:URL"`` (as vLLM's), ``"openai:MODEL"`` (text of any provider,
            with ``base_url=``; for evaluation, judges and data) or ``"scripted"`` (with ``script=``; for
            tests). A mapping has ``kind``, ``url`` or ``path``, and any further argument;
            ``{"kind": "vllm", "in_process": True}`` is vLLM in this process.
        model: the model's folder, where the spec names none.
        tokenizer: as for ``load_tokenizer``; the model's own if None.
        adapter_dir: for a server elsewhere: a folder that it and this process see under one path.
        python: the interpreter of vLLM's own environment, to launch it.
        **options: further arguments of the engine, such as ``dtype`` or ``max_live_versions``.

    Raises:
        ConfigError: an unknown spec, or one that contradicts another argument.
        MissingData: the model or an optional dependency is not there.
        EngineUnreachable: no server at that URL.

    Example:
        >>> engine = make_engine({"kind": "scripted", "script": {(1, 2): [3]}})
        >>> engine.model
        'scripted'
    """
    kind, path, settings = _read_spec(spec)
    for name, value in (
        ("model", model),
        ("tokenizer", tokenizer),
        ("adapter_dir", adapter_dir),
        ("python", python),
    ):
        if value is not None:
            settings.setdefault(name, value)
    settings.update(options)
    shown = without_token(f"{kind}:{path}" if path else kind)  # a mapping may hold a key
    make = _MAKERS.get(kind)
    if make is None:
        raise ConfigError(f"engine {shown!r} is unknown; there are {_KNOWN}")
    return make(shown, path, settings)


def _read_spec(spec: str | Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Returns kind, path or URL, and what else a mapping says."""
    if isinstance(spec, str):
        kind, _, path = spec.partition(":")
        return kind, path, {}
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"engine must be one of {_KNOWN}, or a mapping with kind, got {type(spec).__name__}"
        )
    settings = dict(spec)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(
            f"engine has no kind, such as 'vllm', only {', '.join(map(str, spec)) or 'nothing'}"
        )
    path = settings.pop("url", None) or settings.pop("path", None) or ""
    return kind, path if isinstance(path, str) else ",".join(path), settings


def _make_hf(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    model = settings.pop("model", None)
    settings.pop("adapter_dir", None)  # what this process sees, it sees
    _refuse(spec, settings, "python")
    if path and model is not None and str(model) != path:
        raise ConfigError(f"engine {spec!r} and model={str(model)!r} name two models; give one")
    if not path and model is None and "base" not in settings:
        raise ConfigError('engine "hf" needs a model: write "hf:PATH" or give model=PATH')
    return _hf_engine()(path or model, **settings)


def _make_scripted(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    from atropos_gym.engines.scripted import ScriptedEngine

    settings.pop("adapter_dir", None)  # what this process sees, it sees
    _refuse(spec, settings, "python")
    if path:
        raise ConfigError(f"engine {spec!r} is unknown; there are {_KNOWN}")
    if "script" not in settings:
        raise ConfigError('engine "scripted" answers from script= (a function or a table); give one')
    if "model" in settings:
        settings["model"] = str(settings["model"])
    return ScriptedEngine(**settings)


def _make_vllm(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    from atropos_gym.engines.launch import launch_engine
    from atropos_gym.engines.vllm import VLLMEngine

    if settings.pop("in_process", False):
        return _make_in_process(spec, path, settings)
    if not path:
        return launch_engine(**settings)
    _refuse(spec, settings, "python")
    return VLLMEngine([url.strip() for url in path.split(",")], **settings)


def _make_in_process(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    from atropos_gym.engines.vllm_in_process import VLLMInProcess

    _refuse(spec, settings, "python")
    model = settings.pop("model", None)
    if path and model is not None and str(model) != path:
        raise ConfigError(f"engine {spec!r} and model={str(model)!r} name two models; give one")
    if not path and model is None:
        raise ConfigError(
            'vLLM in this process needs a model: write "vllm-inprocess:PATH" or give model=PATH'
        )
    return VLLMInProcess(path or model, **settings)


def _make_sglang(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    from atropos_gym.engines.sglang import SGLangEngine

    _refuse(spec, settings, "python")
    if not path:
        raise ConfigError('SGLang is not started here: start it, and write "sglang:URL"')
    return SGLangEngine([url.strip() for url in path.split(",")], **settings)


def _make_openai(spec: str, path: str, settings: dict[str, Any]) -> Engine:
    from atropos_gym.engines.openai import OpenAIEngine

    settings.pop("adapter_dir", None)  # no adapter of ours is served
    _refuse(spec, settings, "python")
    url = path if path.startswith(("http://", "https://")) else None  # a mapping's url
    if url is not None:
        settings.setdefault("base_url", url)
    elif path:
        settings["model"] = path
    return OpenAIEngine(str(settings.pop("model", "")), **settings)


_MAKERS: dict[str, Callable[[str, str, dict[str, Any]], Engine]] = {
    "hf": _make_hf,
    "openai": _make_openai,
    "scripted": _make_scripted,
    "sglang": _make_sglang,
    "vllm": _make_vllm,
    "vllm-inprocess": _make_in_process,
}


def _refuse(spec: str, settings: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name in settings:
            raise ConfigError(f"engine {spec!r} takes no {name}=; leave it out")


def _hf_engine() -> type[HFEngine]:
    try:
        from atropos_gym.engines.hf import HFEngine
    except ModuleNotFoundError as error:
        raise MissingData(
            f'the hf engine needs {error.name}; install it with: pip install "atropos-gym[learn]"'
        ) from error
    return HFEngine


def __getattr__(name: str) -> Any:
    """Loads the engine classes on first use."""
    if name == "HFEngine":
        return _hf_engine()
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"atropos_gym.engines.{module}"), name)


_LAZY = {
    "OpenAIEngine": "openai",
    "SGLangEngine": "sglang",
    "ScriptedEngine": "scripted",
    "TextEngine": "text",
    "VLLMEngine": "vllm",
    "VLLMInProcess": "vllm_in_process",
    "VLLMServer": "launch",
    "as_text_engine": "text",
}
