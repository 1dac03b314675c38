"""Inference engines behind one protocol: ids in, ids and logprobs out, policy versions swapped while serving.

Importing this loads neither torch nor transformers; the engine that needs them loads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos_gym.engines.base import Completion, Engine, SamplingParams
from atropos_gym.errors import ConfigError, MissingData

if TYPE_CHECKING:
    from atropos_gym.engines.hf import HFEngine
    from atropos_gym.engines.scripted import ScriptedEngine

__all__ = ["Completion", "Engine", "HFEngine", "SamplingParams", "ScriptedEngine", "make_engine"]

_LATER = ("vllm", "sglang", "openai")


def make_engine(
    spec: str, *, model: str | Path | None = None, tokenizer: Any = None, **options: Any
) -> Engine:
    """Returns the engine that ``spec`` names.

    Args:
        spec: ``"hf:PATH"`` (a transformers model in this process; also ``"hf"`` with ``model=PATH``) or
            ``"scripted"`` (with ``script=``; for tests).
        model: the model's folder, where the spec names none.
        tokenizer: as for ``load_tokenizer``; the model's own if None.
        **options: further arguments of the engine, such as ``dtype`` or ``max_live_versions``.

    Raises:
        ConfigError: an unknown spec, or one that contradicts ``model``.
        MissingData: the model or an optional dependency is not there.

    Example:
        >>> engine = make_engine("scripted", script={(1, 2): [3]})
        >>> engine.model
        'scripted'
    """
    if not isinstance(spec, str):
        raise ConfigError(f'engine must be "hf:PATH" or "scripted", got {type(spec).__name__}')
    kind, _, path = spec.partition(":")
    if kind == "hf":
        if path and model is not None and str(model) != path:
            raise ConfigError(f"engine {spec!r} and model={str(model)!r} name two models; give one")
        if not path and model is None and "base" not in options:
            raise ConfigError('engine "hf" needs a model: write "hf:PATH" or give model=PATH')
        return _hf_engine()(path or model, tokenizer=tokenizer, **options)
    if kind == "scripted" and not path:
        from atropos_gym.engines.scripted import ScriptedEngine

        if "script" not in options:
            raise ConfigError('engine "scripted" answers from script= (a function or a table); give one')
        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        if model is not None:
            options["model"] = str(model)
        return ScriptedEngine(**options)
    if kind in _LATER:
        raise ConfigError(f'engine {spec!r} is not built yet; there are "hf:PATH" and "scripted"')
    raise ConfigError(f'engine {spec!r} is unknown; there are "hf:PATH" and "scripted"')


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
    if name == "ScriptedEngine":
        from atropos_gym.engines.scripted import ScriptedEngine

        return ScriptedEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
