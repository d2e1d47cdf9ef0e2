"""What processes that make one model sparse together must have in common, compared before any work."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.model.offload import stored
from modelopt_sparse.plan.config import SparsifyConfig
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.report import Report, library_versions

OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OF_LAYERS = ("shape", "block", "recipe", "pattern", "options")
DATA = ("data_loader", "forward_loop", "data")


def fingerprint(model: nn.Module, plan: Plan, config: SparsifyConfig) -> dict[str, Any]:
    """Name -> value, the coarse ones first: versions, plan, settings, kind of device, and a checksum of each tensor."""
    items: dict[str, Any] = {f"the version of {name}": value for name, value in library_versions().items()}
    items["the class of the model"] = type(model).__name__
    described = plan.as_dict()
    items["the layers to prune"] = [layer["name"] for layer in described["layers"]]
    for layer in described["layers"]:
        for key in OF_LAYERS:
            items[f"the {key} of layer {layer['name']!r}"] = str(layer[key])
    items["what stays dense"] = json.dumps(described["skipped"], default=str)
    items.update({f"option {name!r}": str(value) for name, value in Report.begin(plan, config).settings.items()})
    items["the source of the data"] = [name for name in DATA if getattr(config, name) is not None]
    for name in ("split_data", "max_batches"):
        items[f"option {name!r}"] = str(getattr(config, name))
    items["the kind of device"] = config.device.type if config.device is not None else _kinds(model)
    for name, mask in (config.masks or {}).items():
        items[f"masks[{name!r}]"] = checksum(mask)
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            values = stored(module, name)
            items[f"parameter {f'{path}.{name}'.removeprefix('.')!r}"] = checksum(values)
        for name, buffer in module.named_buffers(recurse=False):
            items[f"buffer {f'{path}.{name}'.removeprefix('.')!r}"] = checksum(buffer)
    return items


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
    sums = rows.contiguous().view(OF_SIZE[values.element_size()]).sum(-1, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(sums), 2, dtype=torch.int64, device=sums.device)
    return f"{described}, checksum {int((sums * weights).sum()) & (2**64 - 1):016x}"


def _kinds(model: nn.Module) -> list[str]:
    return sorted({parameter.device.type for parameter in model.parameters()})
