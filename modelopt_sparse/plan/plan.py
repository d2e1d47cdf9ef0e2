"""The plan: which layer gets which pattern and method, and why the other weights stay dense."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import Pattern
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.stacks import Stack
from modelopt_sparse.reports.report import Skipped
from modelopt_sparse.reports.text import table

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
    steps: what follows the method, in order: of "dense-values", "refine", "polish", "reconstruct".
    layer: the parameter and its modules in the model.
    at_once: how many experts of a mixture are solved together under a memory limit, None if all are.
    within_mask: whether the layer carries a mask whose zeros stay: the new mask lies within it.
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
    def size(self) -> int:
        """How many weights the layer has."""
        return torch.Size(self.shape).numel()

    @property
    def hardware(self) -> dict[str, bool]:
        """Name of a library in `HARDWARE` -> whether it takes a 2:4 weight of this shape."""
        return takes_shape(self.shape)


@dataclass(frozen=True)
class Plan:
    """What `sparsify` will do to a model. ``print(plan)`` shows it; ``as_dict`` and ``to_json`` are for machines.

    layers: the layers that will be pruned (``LayerPlan``: name, type, shape, block, method, pattern, options, ...), in
      model order.
    skipped: the weights that stay dense (name, type, shape, reason), in model order.
    memory: an upper bound of the memory beside the model, in bytes: what the bytes hold -> how many. What calibration
      data takes is missing where its size is not known before.
    stacks: the model's stacks of blocks.
    notes: further sentences for the reader, such as that an option does not reach some of the layers.
    streamed: an upper bound of the memory of `sparsify_checkpoint`, everything included, in bytes: place ("host", and
      the device if it is another) -> what lies there -> how many. {} for a model that cannot be streamed.
    """

    layers: tuple[LayerPlan, ...]
    skipped: tuple[Skipped, ...]
    memory: Mapping[str, int]
    stacks: tuple[Stack, ...] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    streamed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stacks."""
        return [block for stack in self.stacks for block in stack.blocks]

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain values that JSON takes; ``memory`` as "memory_bytes", without the stacks."""
        layers = [
            {
                "name": layer_plan.name,
                "type": layer_plan.type,
                "shape": list(layer_plan.shape),
                "block": layer_plan.block,
                "method": layer_plan.method.name,
                "recipe": layer_plan.recipe,
                "pattern": str(layer_plan.pattern),
                "options": dict(layer_plan.options),
                "hardware": layer_plan.hardware,
            }
            for layer_plan in self.layers
        ]
        return {
            "layers": layers,
            "skipped": [weight.as_dict() for weight in self.skipped],
            "memory_bytes": dict(self.memory),
            "streamed_memory_bytes": {place: dict(parts) for place, parts in self.streamed.items()},
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`as_dict` as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        head = ("layer", "type", "shape", "recipe", "pattern", *(f"fits {name}" for name in HARDWARE))
        rows = [
            (
                layer_plan.name,
                layer_plan.type,
                " x ".join(map(str, layer_plan.shape)),
                layer_plan.recipe + "".join(f" {key}={value}" for key, value in layer_plan.options.items()),
                str(layer_plan.pattern),
                *("yes" if fits else "no" for fits in layer_plan.hardware.values()),
            )
            for layer_plan in self.layers
        ]
        parts = [table(head, rows)]
        if self.skipped:
            stay = [
                (weight.name, weight.type, " x ".join(map(str, weight.shape)), weight.reason) for weight in self.skipped
            ]
            parts.append(table(("stays dense", "type", "shape", "why"), stay))
        pruned = sum(layer_plan.size for layer_plan in self.layers)
        total = pruned + sum(torch.Size(weight.shape).numel() for weight in self.skipped)
        parts.append(f"{len(self.layers)} layers with {pruned:,} of {total:,} matrix weights will be pruned.")
        parts.append(f"Memory beside the model: {_sizes(self.memory)}.")
        parts += [
            f"Memory of a run that streams, {place}, at most {sum(held.values()) / 2**20:,.1f} MiB: {_sizes(held)}."
            for place, held in self.streamed.items()
        ]
        parts += [f"Note: {note}." for note in self.notes]
        return "\n\n".join(parts)


def _sizes(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size / 2**20:,.1f} MiB" for name, size in memory.items())


def takes_shape(shape: tuple[int, ...]) -> dict[str, bool]:
    """Name of a library in `HARDWARE` -> whether it takes a 2:4 weight of this shape, [..., R, C]."""
    rows, columns = shape[-2:]
    return {name: rows % r == 0 and columns % c == 0 for name, (r, c) in HARDWARE.items()}
