"""What the result of a run depends on, in one place.

Processes that make one model sparse together compare it before any work. A streaming run that goes on after it was
stopped compares it with what it was started with.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelopt_sparse.model.offload import stored
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.values import library_versions

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COMPARED = ("shape", "block", "recipe", "pattern", "options")  # of each layer
DATA = ("data_loader", "forward_loop", "data")


@dataclass(frozen=True)
class Identity:
    """Everything but the model's values and the calibration data. The code of a user's own method is known by its name
    alone."""

    layers: Mapping[str, Mapping[str, Any]]  # name -> the layer as the plan's JSON has it
    settings: Mapping[str, Any]
    masks: Mapping[str, str]  # of the user's own: parameter name -> SHA-256
    versions: Mapping[str, str]

    @classmethod
    def of(cls, plan: Plan, config: SparsifyConfig) -> "Identity":
        layers = {layer["name"]: layer for layer in plan.as_dict()["layers"]}
        masks = {name: _hash(mask) for name, mask in (config.masks or {}).items()}
        return cls(layers, config.settings(), masks, library_versions())

    def started_with(self) -> dict[str, Any]:
        """Name -> value, as ``started.json`` of a streaming run holds it."""
        facts: dict[str, Any] = {}
        for name, layer in self.layers.items():
            options = "".join(f" {key}={value!r}" for key, value in layer["options"].items())
            facts[f"layer {name}"] = f"{layer['recipe']} {layer['pattern']}{options}"
        facts.update(self.settings)
        facts.update({f"mask {name}": sha256 for name, sha256 in self.masks.items()})
        return facts | {f"version of {name}": version for name, version in self.versions.items()}


def common_to_processes(model: nn.Module, plan: Plan, config: SparsifyConfig) -> dict[str, Any]:
    """Name -> value of what all processes must have in common, the coarse ones first: versions, plan, settings, type of
    device, and a checksum of each tensor of the model."""
    identity = Identity.of(plan, config)
    facts: dict[str, Any] = {f"the version of {name}": value for name, value in identity.versions.items()}
    facts["the class of the model"] = type(model).__name__
    facts["the layers to prune"] = list(identity.layers)
    for name, layer in identity.layers.items():
        facts.update({f"the {key} of layer {name!r}": str(layer[key]) for key in COMPARED})
    facts["what stays dense"] = json.dumps(plan.as_dict()["skipped"], default=str)
    facts.update({f"option {name!r}": str(value) for name, value in identity.settings.items()})
    facts["the source of the data"] = [name for name in DATA if getattr(config, name) is not None]
    facts.update({f"option {name!r}": str(getattr(config, name)) for name in ("split_data", "max_batches")})
    types = sorted({parameter.device.type for parameter in model.parameters()})
    facts["the kind of device"] = config.device.type if config.device is not None else types
    facts.update({f"masks[{name!r}]": sha256 for name, sha256 in identity.masks.items()})
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            facts[f"parameter {f'{path}.{name}'.removeprefix('.')!r}"] = checksum(stored(module, name))
        for name, buffer in module.named_buffers(recurse=False):
            facts[f"buffer {f'{path}.{name}'.removeprefix('.')!r}"] = checksum(buffer)
    return facts


def checksum(values: Tensor) -> str:
    """Shape, dtype and a sum of the bits, in 64-bit integers that wrap around: exact, whatever the order and the
    threads. Each row has a weight of its own, so that rows that have changed places show."""
    values = values.detach()
    described = f"{values.dtype} {list(values.shape)}"
    if values.device.type == "meta" or not values.numel():
        return described
    if values.is_complex():
        values = torch.view_as_real(values)
    rows = values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)
    sums = rows.contiguous().view(INTEGER_OF_SIZE[values.element_size()]).sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=sums.device)
    return f"{described}, checksum {int((sums * weights).sum()) & (2**64 - 1):016x}"


def _hash(mask: Tensor) -> str:
    """SHA-256 of the bits, packed as a folder holds them."""
    return hashlib.sha256(np.packbits(mask.flatten().cpu().numpy(), bitorder="little").tobytes()).hexdigest()
