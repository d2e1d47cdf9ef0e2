"""The plan: which layer gets which pattern and method, and why the others stay dense; printable, and JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from modelopt_sparse.methods.base import Method
from modelopt_sparse.methods.patterns import Pattern
from modelopt_sparse.model.layers import Layer
from modelopt_sparse.model.stacks import Stack
from modelopt_sparse.reports.text import table

# runtime -> (rows, columns) that a 2:4 weight must be multiples of
HARDWARE: dict[str, tuple[int, int]] = {"asp": (8, 16), "cusparselt": (16, 16), "cutlass": (32, 64)}


@dataclass(frozen=True)
class LayerPlan:
    """One layer that will be pruned. ``shape`` is that of its matrix, [R, C] or [E, R, C]; ``needs`` is what the method
    and the ``steps`` after it have to know of its input; ``at_once`` is how many experts of a mixture are solved
    together under a memory limit, None if all are."""

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

    @property
    def recipe(self) -> str:
        """The method and the steps that follow it: "alps+polish+reconstruct"."""
        return "+".join((self.method.name, *self.steps))

    @property
    def calibrated(self) -> bool:
        """Whether it takes calibration data."""
        return self.needs != "nothing" or "reconstruct" in self.steps

    @property
    def matrices(self) -> int:
        """How many matrices [R, C] it is."""
        return torch.Size(self.shape[:-2]).numel()

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def hardware(self) -> dict[str, bool]:
        """Whether each 2:4 runtime takes this shape."""
        return takes_shape(self.shape)


@dataclass(frozen=True)
class Skipped:
    """A weight that stays dense, and why."""

    name: str
    type: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Plan:
    """What `sparsify` will do to a model. ``print(plan)`` shows it; ``as_dict`` and ``to_json`` are for machines."""

    layers: tuple[LayerPlan, ...]
    skipped: tuple[Skipped, ...]
    memory: Mapping[str, int]
    stacks: tuple[Stack, ...] = field(repr=False, compare=False)
    notes: tuple[str, ...] = ()
    # of `sparsify_checkpoint`, in all: place -> what lies there -> bytes; empty for what cannot be streamed
    streamed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks of all stacks."""
        return [block for stack in self.stacks for block in stack.blocks]

    def as_dict(self) -> dict[str, Any]:
        layers = [
            {
                "name": item.name,
                "type": item.type,
                "shape": list(item.shape),
                "block": item.block,
                "method": item.method.name,
                "recipe": item.recipe,
                "pattern": str(item.pattern),
                "options": dict(item.options),
                "hardware": item.hardware,
            }
            for item in self.layers
        ]
        skipped = [
            {"name": item.name, "type": item.type, "shape": list(item.shape), "reason": item.reason}
            for item in self.skipped
        ]
        return {
            "layers": layers,
            "skipped": skipped,
            "memory_bytes": dict(self.memory),
            "streamed_memory_bytes": {place: dict(parts) for place, parts in self.streamed.items()},
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        head = ("layer", "type", "shape", "recipe", "pattern", *(f"fits {name}" for name in HARDWARE))
        rows = [
            (
                item.name,
                item.type,
                " x ".join(map(str, item.shape)),
                item.recipe + "".join(f" {key}={value}" for key, value in item.options.items()),
                str(item.pattern),
                *("yes" if fits else "no" for fits in item.hardware.values()),
            )
            for item in self.layers
        ]
        parts = [table(head, rows)]
        if self.skipped:
            stay = [(item.name, item.type, " x ".join(map(str, item.shape)), item.reason) for item in self.skipped]
            parts.append(table(("stays dense", "type", "shape", "why"), stay))
        pruned = sum(item.size for item in self.layers)
        total = pruned + sum(torch.Size(item.shape).numel() for item in self.skipped)
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
    rows, columns = shape[-2:]
    return {name: rows % r == 0 and columns % c == 0 for name, (r, c) in HARDWARE.items()}
