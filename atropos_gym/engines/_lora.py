"""LoRA adapters of several policy versions beside one set of base weights.

Each linear layer of the engine's model is wrapped once; a version is one more pair of small matrices in each
wrapped layer. Rows of a batch are ordered by version, so that a mixed batch costs two matrix products a
version and layer and nothing is copied. Base weights are never merged with anything or written to.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from atropos_gym.engines._adapter_config import check_adapter_config, read_adapter_config, target_matcher
from atropos_gym.errors import EngineError

__all__ = ["AdapterPlan", "Adapters", "LoraLinear"]

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class AdapterPlan:
    """Which rows of the batch under way belong to which version; set before each forward.

    Attributes:
        slices: (version, first row, row after the last), versions with an adapter only.
        rows: rows of the batch.
    """

    __slots__ = ("rows", "slices")

    def __init__(self) -> None:
        self.slices: list[tuple[int, int, int]] = []
        self.rows = 0

    def set(self, versions: Sequence[int]) -> None:
        """Takes each row's version; rows of one version must stand together."""
        self.rows = len(versions)
        self.slices = []
        start = 0
        for end in range(1, len(versions) + 1):
            if end == len(versions) or versions[end] != versions[start]:
                if versions[start] != 0:
                    self.slices.append((versions[start], start, end))
                start = end


class LoraLinear(nn.Module):
    """A linear layer that adds its rows' adapters.

    Attributes:
        adapters: version to (A ``[r, in]``, scaled B ``[out, r]``).
    """

    def __init__(self, linear: nn.Linear, plan: AdapterPlan) -> None:
        super().__init__()
        self.linear = linear
        self.plan = plan
        self.adapters: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def weight(self) -> Tensor:
        """The base weight: some models look at a layer's dtype or device."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """The base bias."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x W.T + b`` plus each row's own ``x A.T B.T``."""
        y = F.linear(x, self.linear.weight, self.linear.bias)
        plan = self.plan
        if not self.adapters or not plan.slices:
            return y
        if x.shape[0] != plan.rows:
            raise EngineError(
                f"a layer was called with {x.shape[0]} rows instead of {plan.rows}: "
                "this architecture mixes rows before its linear layers, so adapters cannot be kept apart"
            )
        for version, start, end in plan.slices:
            pair = self.adapters.get(version)
            if pair is not None:
                a, b = pair
                y[start:end] += F.linear(F.linear(x[start:end].to(a.dtype), a), b).to(y.dtype)
        return y


class Adapters:
    """The adapters of all live versions of one model.

    Args:
        model: its ``nn.Linear`` modules are wrapped in place.

    Attributes:
        plan: set before each forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.plan = AdapterPlan()
        self._layers: dict[str, LoraLinear] = {}
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, child = name.rpartition(".")
                wrapped = LoraLinear(module, self.plan)
                setattr(model.get_submodule(parent), child, wrapped)
                self._layers[name] = wrapped

    def read(self, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
        """Reads a folder in PEFT's form and checks it whole; returns (A, scaled B) by layer.

        Raises:
            EngineError: a file is missing or unreadable, a setting is not supported, or a tensor does not
                fit; the message names it.
        """
        config = read_adapter_config(folder)
        rank, scale = check_adapter_config(config, folder)
        pairs = self._read_pairs(folder, rank)
        self._check_targets(config, pairs, folder)
        return {name: (a, b * scale) for name, (a, b) in pairs.items()}

    def install(self, version: int, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Makes what ``read`` returned usable as ``version``; a batch under way does not notice."""
        for name, pair in pairs.items():
            self._layers[name].adapters[version] = pair

    def unload(self, version: int) -> None:
        """Forgets a version."""
        for layer in self._layers.values():
            layer.adapters.pop(version, None)

    def _read_pairs(self, folder: Path, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        file = folder / "adapter_model.safetensors"
        if not file.is_file():
            raise EngineError(
                f"adapter folder {folder} has no adapter_model.safetensors; save it with save_pretrained"
            )
        try:
            tensors = load_file(file)
        except (SafetensorError, OSError) as error:
            raise EngineError(
                f"adapter {file} cannot be read: {error}; was it complete when published?"
            ) from error
        sides: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = _KEY.fullmatch(key.removeprefix(_PREFIX))
            if match is None or match["module"] not in self._layers:
                raise EngineError(f"adapter {folder} has {key}, which fits no linear layer of the model")
            sides.setdefault(match["module"], {})[match["side"]] = tensor
        if not sides:
            raise EngineError(f"adapter {folder} holds no tensors")
        return {name: self._check_pair(name, pair, rank, folder) for name, pair in sides.items()}

    def _check_pair(
        self, name: str, pair: dict[str, Tensor], rank: int, folder: Path
    ) -> tuple[Tensor, Tensor]:
        base = self._layers[name].weight
        wanted = {"A": (rank, base.shape[1]), "B": (base.shape[0], rank)}
        for side, shape in wanted.items():
            tensor = pair.get(side)
            if tensor is None:
                raise EngineError(f"adapter {folder}: {name} has no lora_{side}")
            if tuple(tensor.shape) != shape:
                raise EngineError(
                    f"adapter {folder}: {name}.lora_{side} has shape {tuple(tensor.shape)}, "
                    f"wanted {shape} (r={rank} and the model's layer)"
                )
            if not bool(torch.isfinite(tensor).all()):
                raise EngineError(f"adapter {folder}: {name}.lora_{side} holds a value that is not finite")
        # Copies: loaded tensors may be views of the file, which somebody may delete or write to.
        return pair["A"].to(base.device, copy=True), pair["B"].to(base.device, copy=True)

    def _check_targets(
        self, config: dict[str, Any], pairs: dict[str, tuple[Tensor, Tensor]], folder: Path
    ) -> None:
        matches = target_matcher(config, folder)
        if matches is None:
            return
        missing = [name for name in self._layers if matches(name) and name not in pairs]
        if missing:
            raise EngineError(
                f"adapter {folder} targets {missing[0]} but has no tensors for it ({len(missing)} such)"
            )
