"""The plan: which layer gets which pattern and method, and why the other weights stay dense."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.checks import grouped
from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import Pattern
from modelopt_sparse.model.devices import full_name, stored
from modelopt_sparse.model.experts import RoutedAdapter
from modelopt_sparse.model.find import Stack
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.reports.report import library_versions
from modelopt_sparse.reports.text import Column, Printed, counted, paragraph, product_of, rows_of, table
from modelopt_sparse.reports.values import Skipped

# plan -----------------------------------------------------------------------------------------------------------------


# library that runs 2:4 weights -> (rows, columns): the shape of a weight must be a multiple of both
HARDWARE: dict[str, tuple[int, int]] = {"asp": (8, 16), "cusparselt": (16, 16), "cutlass": (32, 64)}


@dataclass(frozen=True)
class LayerPlan:
    """What will be done to one layer.

    name: the layer's name, as globs match it.
    type: the class of the module that holds the weight.
    shape: that of the weight as a matrix, [R, C] or [..., R, C]; [E, R, C] for a mixture of E experts.
    block: module path of the block that the layer lies in, None outside of the blocks.
    method, options: the method, and all of its options with their values.
    pattern: the pattern, with its scope filled in.
    needs: the statistics of the layer's input that the method and ``steps`` need, one of `methods.base.NEEDS`.
    steps: what follows the method, in order: of "dense-values", "polish", "reconstruct", "distill".
    layer: the parameter and its modules in the model.
    at_once: how many experts of a mixture are solved together under a memory limit, None if all are.
    within_mask: whether the layer carries a mask whose zeros stay: the new mask lies within it.
    choices: what the layer may become under a budget, which decides on ``pattern``; None: dense.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    block: str | None
    method: Method
    pattern: Pattern
    options: Mapping[str, Any]
    needs: str
    steps: tuple[str, ...]
    layer: Layer = field(repr=False, compare=False)
    at_once: int | None = None
    within_mask: bool = False
    choices: tuple[Pattern | None, ...] = ()

    @property
    def pattern_now(self) -> Pattern:
        """The pattern, within the mask that the layer carries now if its zeros stay."""
        return replace(self.pattern, within=self.layer.mask) if self.within_mask else self.pattern

    @property
    def recipe(self) -> str:
        """The method and the steps that follow it: "alps+polish+reconstruct"."""
        return "+".join((self.method.name, *self.steps))

    @property
    def calibrated(self) -> bool:
        """Whether the method or a step after it uses calibration data."""
        return self.needs != "nothing" or "reconstruct" in self.steps

    @property
    def matrices(self) -> int:
        """How many matrices [R, C] the layer has: 1, or the product of the leading dimensions of ``shape``."""
        return torch.Size(self.shape[:-2]).numel()

    @property
    def routed(self) -> bool:
        """Whether the layer holds experts, each of which has an input of its own."""
        return isinstance(self.layer.adapter, RoutedAdapter)

    def as_dict(self) -> dict[str, Any]:
        """What the plan says of the layer, in plain values that JSON takes."""
        return {
            "name": self.name,
            "type": self.type,
            "shape": list(self.shape),
            "block": self.block,
            "method": self.method.name,
            "recipe": self.recipe,
            "pattern": str(self.pattern),
            "options": dict(self.options),
            "hardware": self.hardware,
        }

    @property
    def size(self) -> int:
        """How many weights the layer has."""
        return torch.Size(self.shape).numel()

    @property
    def hardware(self) -> dict[str, bool]:
        """Name of a library in `HARDWARE` -> whether it takes a 2:4 weight of this shape."""
        return takes_shape(self.shape)


@dataclass(frozen=True)
class Plan(Printed):
    """What `sparsify` will do to a model. ``print(plan)`` shows it with equal rows folded, ``text(all_rows=True)`` all
    rows; ``as_dict`` and ``to_json`` are for machines.

    layers: the layers that will be pruned (``LayerPlan``: name, type, shape, block, method, pattern, options, ...), in
      model order.
    skipped: the weights that stay dense (name, type, shape, reason), in model order.
    memory: part -> bytes that a run takes at most beside the model, without calibration data of unknown size.
    stacks: the model's stacks of blocks.
    notes: sentences for the reader, such as that an option does not reach some of the layers.
    streamed: place ("host", and the device if it is another) -> part -> bytes that a run of `sparsify_checkpoint` takes
      at most, the model included; {} for a model that cannot be streamed.
    """

    layers: tuple[LayerPlan, ...]
    skipped: tuple[Skipped, ...]
    memory: Mapping[str, int]
    stacks: tuple[Stack, ...] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    streamed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def named_blocks(self) -> dict[str, nn.Module]:
        """The blocks of all stacks, by name."""
        return {name: block for stack in self.stacks for name, block in zip(stack.names, stack.blocks)}

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stacks."""
        return [*self.named_blocks.values()]

    @property
    def homes(self) -> dict[nn.Module, set[str | None]]:
        """Module -> the blocks that hold it: several may share it. Without the modules outside of all blocks."""
        homes: dict[nn.Module, set[str | None]] = {}
        for name, block in self.named_blocks.items():
            for module in block.modules():
                homes.setdefault(module, set()).add(name)
        return homes

    @property
    def by_block(self) -> dict[str | None, list[LayerPlan]]:
        """The layers of each block that has some, and those outside of the blocks (None)."""
        return grouped(self.layers, lambda layer_plan: layer_plan.block)

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes; ``memory`` as "memory_bytes", without the stacks."""
        return {
            "layers": [layer_plan.as_dict() for layer_plan in self.layers],
            "skipped": [weight.as_dict() for weight in self.skipped],
            "memory_bytes": dict(self.memory),
            "streamed_memory_bytes": {place: dict(parts) for place, parts in self.streamed.items()},
            "notes": list(self.notes),
        }

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [layer_plan.name for layer_plan in self.layers]
        stay = [weight.name for weight in self.skipped]
        pruned = sum(layer_plan.size for layer_plan in self.layers)
        total = pruned + sum(torch.Size(weight.shape).numel() for weight in self.skipped)
        recipes = counted(f"{layer_plan.recipe} {layer_plan.pattern}" for layer_plan in self.layers)
        summary = f"{len(names)} layers with {pruned:,} of {total:,} matrix weights will be pruned: {recipes}."
        layers = rows_of("layer", names, _columns(self.layers), stay, all_rows=all_rows)
        parts = [paragraph(summary, all_rows=all_rows), layers]
        if stay:
            columns = [
                Column("type", [weight.type for weight in self.skipped], shared=False),
                Column("shape", [product_of(weight.shape) for weight in self.skipped], shared=False),
                Column("why", [weight.reason for weight in self.skipped], shared=False),
            ]
            parts.append(rows_of("stays dense", stay, columns, names, all_rows=all_rows))
        parts.append(memory_table({"beside the model": self.memory}, self.streamed))
        return "\n\n".join([*parts, *(paragraph(f"Note: {note}.", all_rows=all_rows) for note in self.notes)])


def memory_table(places: Mapping[str, Mapping[str, int]], streamed: Mapping[str, Mapping[str, int]]) -> str:
    """The bytes as a table in MiB: where, what lies there, and the sum."""
    rows = []
    for place, parts in {**places, **{f"streaming, {place}": held for place, held in streamed.items()}}.items():
        for part, size in {**parts, "in all": sum(parts.values())}.items():
            rows.append((place, part.replace("_", " "), f"{size / 2**20:,.1f}"))
            place = ""  # said once
    width = max(len(size) for _, _, size in rows)
    return table(("memory, at most", "", "MiB".rjust(width)), [(*row, size.rjust(width)) for *row, size in rows])


def _columns(layers: Sequence[LayerPlan]) -> list[Column]:
    """The columns of the printed plan, after the name."""
    options = [" ".join(f"{key}={value}" for key, value in layer.options.items()) for layer in layers]
    fits = [[name for name, takes in layer.hardware.items() if takes] for layer in layers]
    return [
        Column("type", [layer.type for layer in layers]),
        Column("shape", [product_of(layer.shape) for layer in layers]),
        Column("recipe", [layer.recipe for layer in layers]),
        Column("pattern", [str(layer.pattern) for layer in layers], "levels"),
        Column("fits", [", ".join(names) or "none" for names in fits]),
        Column("options", options, below=True),
    ]


def takes_shape(shape: tuple[int, ...]) -> dict[str, bool]:
    """Name of a library in `HARDWARE` -> whether it takes a 2:4 weight of this shape, [..., R, C]."""
    rows, columns = shape[-2:]
    return {name: rows % r == 0 and columns % c == 0 for name, (r, c) in HARDWARE.items()}


# identity -------------------------------------------------------------------------------------------------------------
# What the result of a run depends on: all processes must have it in common, and a run that goes on after it was stopped
# must have what it was started with.


DATA = ("data_loader", "forward_loop", "data")


def started_with(plan: Plan, config: SparsifyConfig) -> dict[str, Any]:
    """Name -> value of all but the model's values and the data, as ``started.json`` of a streaming run holds it. A
    method of the user's own is known by its name, not by its code."""
    facts: dict[str, Any] = {}
    for layer in plan.as_dict()["layers"]:
        options = "".join(f" {key}={value!r}" for key, value in layer["options"].items())
        facts[f"layer {layer['name']}"] = f"{layer['recipe']} {layer['pattern']}{options}"
    # the kind of device: each process may have a GPU of its own
    facts.update(config.settings(), device=str(config.device and config.device.type))
    for name, mask in (config.masks or {}).items():
        facts[f"mask {name}"] = checksum(mask)
    return facts | {f"version of {name}": version for name, version in library_versions().items()}


def common_to_processes(model: nn.Module, plan: Plan, config: SparsifyConfig) -> dict[str, Any]:
    """What all processes must have in common, the coarse facts first: those of `started_with`, the type of device, and
    a checksum of each tensor of the model, among others."""
    facts = {"the class of the model": type(model).__name__, **started_with(plan, config)}
    facts["what stays dense"] = json.dumps([weight.as_dict() for weight in plan.skipped], default=str)
    facts |= {"split_data": config.split_data, "max_batches": config.max_batches}
    facts["the source of the data"] = [name for name in DATA if getattr(config, name) is not None]
    types = sorted({parameter.device.type for parameter in model.parameters()})
    facts["the kind of device"] = config.device.type if config.device is not None else types
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            facts[f"parameter {full_name(path, name)!r}"] = checksum(stored(module, name))
        for name, buffer in module.named_buffers(recurse=False):
            facts[f"buffer {full_name(path, name)!r}"] = checksum(buffer)
    return facts


def checksum(values: Tensor) -> str:
    """Dtype and shape, and the SHA-256 of the bits unless they are on the meta device."""
    described = f"{values.dtype} {list(values.shape)}"
    if values.is_meta:
        return described
    bits = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{described}, SHA-256 {hashlib.sha256(bits).hexdigest()}"
