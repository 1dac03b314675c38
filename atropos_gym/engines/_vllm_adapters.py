"""What vLLM answers about adapters, as advice; and what it would not notice, found in the folder beforehand.

A server takes an adapter whose tensors have the wrong shapes with status 200 and serves wrong numbers, so the
folder is checked first: settings that vLLM does not apply, ranks, sizes, and whether the file is whole. Only
headers are read; no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atropos_gym.engines._adapter_config import check_adapter_config, read_adapter_config, target_matcher
from atropos_gym.engines._remote import Answer
from atropos_gym.errors import ConfigError, EngineError

__all__ = [
    "already_loaded",
    "check_adapter",
    "load_refusal",
    "model_shapes",
    "served_rank",
    "tensor_shapes",
]

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_RANK = re.compile(r"LoRA rank (\d+) is greater than max_lora_rank (\d+)")


def served_rank(rank: int) -> int:
    """Returns the least ``--max-lora-rank`` that vLLM knows and that holds adapters of ``rank``.

    Raises:
        ConfigError: there is none.

    Example:
        >>> served_rank(4), served_rank(32)
        (8, 32)
    """
    for known in _RANKS:
        if rank <= known:
            return known
    raise ConfigError(f"vLLM serves adapters of rank {_RANKS[-1]} at most, got {rank}")


def already_loaded(answer: Answer) -> bool:
    """Whether the server has an adapter of this name: ours only if its root is our folder."""
    return answer.status == 400 and "already been loaded" in answer.message


def load_refusal(answer: Answer, name: str, folder: Path, url: str) -> str:
    """Returns one line for a load that was refused: what is wrong and which flag or setting to change."""
    said = answer.message
    if answer.status in (404, 405) and not any(word in said.lower() for word in ("lora", "adapter")):
        return (
            f"{url} has no /v1/load_lora_adapter: start vLLM with the environment variable "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and the flag --enable-lora"
        )
    if answer.status == 404:
        return (
            f"the server at {url} cannot see the adapter folder {folder} (another machine, a container, or a "
            f"folder its user may not read): set adapter_dir to one that both see under one path ({said})"
        )
    if answer.status in (401, 403):
        return f"{url} refuses the api key ({said}): give api_key= as in vLLM's --api-key"
    if "LoRA is not enabled" in said:
        return f"{url} serves no adapters: start vLLM with --enable-lora ({said})"
    if found := _RANK.search(said):
        need, have = found.groups()
        return (
            f"the adapter has rank {need} and the server at {url} takes at most {have}: start vLLM with "
            f"--max-lora-rank {served_rank(int(need))}, or train with r={have} ({said})"
        )
    if field := _unsupported_field(said):
        return f"vLLM serves no adapters with {field}: change {field} in the learner's LoRA settings ({said})"
    if "expected target modules" in said:
        return f"target_modules of adapter {folder} are not the served model's layers ({said})"
    if "deserializ" in said:
        return f"adapter {folder} is not whole: write it elsewhere and rename it when complete ({said})"
    if "conflicts with a served base model" in said:
        return f"the adapter's name {name} is the served base model's: give another run= ({said})"
    return f"{url} refused adapter {name} from {folder}: {answer.status} {said}"


def _unsupported_field(said: str) -> str | None:
    lower = said.lower()
    for word, field in (("dora", "use_dora"), ("modules_to_save", "modules_to_save"), ("bias", "bias")):
        if word in lower:
            return field
    return None


def check_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> int:
    """Checks a folder in PEFT's form and returns its rank.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors``.
        shapes: of the model's tensors by name, if known: sizes and target modules are then checked too.

    Raises:
        EngineError: a file is missing or cut, a setting is not served, or a tensor does not fit; named.
    """
    config = read_adapter_config(folder)
    rank, _ = check_adapter_config(config, folder)
    modules = _read_modules(folder)
    if shapes is not None and not any(f"{module}.weight" in shapes for module in modules):
        shapes = None  # files of this architecture name their layers otherwise
    for module, sides in modules.items():
        _check_sides(folder, module, sides, rank)
        if shapes is not None:
            _check_sizes(folder, module, sides, shapes)
    _check_targets(folder, config, modules, shapes)
    return rank


def _read_modules(folder: Path) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of ``lora_A`` and ``lora_B`` by module."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in tensor_shapes(folder / "adapter_model.safetensors").items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise EngineError(f"adapter {folder} has {key}, which is no lora_A or lora_B of a linear layer")
        modules.setdefault(match["module"], {})[match["side"]] = shape
    if not modules:
        raise EngineError(f"adapter {folder} holds no tensors")
    return modules


def _check_sides(folder: Path, module: str, sides: Mapping[str, tuple[int, ...]], rank: int) -> None:
    for side, axis in (("A", 0), ("B", 1)):
        shape = sides.get(side)
        if shape is None:
            raise EngineError(f"adapter {folder}: {module} has no lora_{side}")
        if len(shape) != 2 or shape[axis] != rank:
            raise EngineError(
                f"adapter {folder}: {module}.lora_{side} has shape {shape}, which is not of rank r={rank}"
            )


def _check_sizes(
    folder: Path, module: str, sides: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    base = shapes.get(f"{module}.weight")
    if base is None:
        raise EngineError(f"adapter {folder}: the served model has no layer {module}")
    found = (sides["B"][0], sides["A"][1])
    if found != base:
        raise EngineError(
            f"adapter {folder}: {module} adapts a layer of {found[0]} x {found[1]} (out x in), the served "
            f"model's has {base[0]} x {base[1]}: it was trained on another model"
        )


def _check_targets(
    folder: Path,
    config: dict[str, Any],
    modules: Mapping[str, object],
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> None:
    """Every named target has tensors; with the model known, in every layer."""
    targets, means = config.get("target_modules"), target_matcher(config, folder)
    if isinstance(targets, list):
        for target in targets:
            if not any(module == target or module.endswith(f".{target}") for module in modules):
                raise EngineError(f"adapter {folder} targets {target} but has no tensors for it")
    if shapes is None or means is None:
        return
    for key in shapes:
        module = key.removesuffix(".weight")
        if key != module and means(module) and module not in modules:
            raise EngineError(f"adapter {folder} targets {module} but has no tensors for it")


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a safetensors file by name, from its header alone.

    Raises:
        EngineError: the file is not there, not of this form, or shorter than its header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size:
                raise ValueError(f"its header is {length} bytes long")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except OSError as error:
        raise EngineError(f"{file} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"{file} is no safetensors file: {error}") from error
    if end != size:
        raise EngineError(f"{file} has {size} bytes where its header says {end}: was it complete?")
    return shapes


def model_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Returns the shapes of a model's tensors by name; None where files do not tell, or are quantised."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    config = folder / "config.json"
    if config.is_file() and "quantization_config" in config.read_text(encoding="utf-8"):
        return None  # packed: shapes on disk are not those of the layers
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(tensor_shapes(file))
    return shapes or None
