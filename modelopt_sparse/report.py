"""What was really done, per layer: for people as a table, for machines as JSON."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import safetensors
import torch
import transformers
from torch import nn

from modelopt_sparse.config import SparsifyConfig
from modelopt_sparse.methods.base import Solution, Stats
from modelopt_sparse.plan import LayerPlan, Plan, table
from modelopt_sparse.version import __version__

ATTRIBUTE = "sparsity_report"


@dataclass(frozen=True)
class LayerReport:
    """One pruned layer. ``error`` is the relative squared error of its output, measured with ``error_from``."""

    name: str
    parameter: str
    type: str
    shape: list[int]
    recipe: str
    pattern: str
    options: Mapping[str, Any]
    zeros: int
    size: int
    error: float
    error_from: str
    tokens: int
    seconds: float
    notes: list[str]

    @classmethod
    def of(cls, target: LayerPlan, solution: Solution, stats: Stats | None, seconds: float) -> "LayerReport":
        error_from = "weights" if stats is None else "square_sums" if stats.gram is None else "gram"
        return cls(
            name=target.name,
            parameter=target.layer.parameter_name,
            type=target.type,
            shape=list(target.shape),
            recipe=target.method.name,
            pattern=str(target.pattern),
            options=dict(target.options),
            zeros=int((~solution.mask).sum()),
            size=solution.mask.numel(),
            error=solution.error,
            error_from=error_from,
            tokens=0 if stats is None else stats.tokens,
            seconds=round(seconds, 4),
            notes=list(solution.notes),
        )


@dataclass
class Report:
    """Everything `sparsify` did to a model. ``print`` shows it; ``as_dict`` and ``to_json`` are for machines."""

    layers: list[LayerReport] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(cls, plan: Plan, config: SparsifyConfig) -> "Report":
        settings = {
            "sequential": config.sequential,
            "enforce": config.enforce,
            "seed": config.seed,
            "count_padding": config.count_padding,
        }
        return cls(skipped=plan.as_dict()["skipped"], settings=settings, versions=library_versions())

    @property
    def sparsity(self) -> float:
        """Fraction pruned, over the pruned layers."""
        size = sum(layer.size for layer in self.layers)
        return sum(layer.zeros for layer in self.layers) / size if size else 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        return cls(**{**data, "layers": [LayerReport(**layer) for layer in data["layers"]]})

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        rows = [
            (
                layer.name,
                layer.recipe,
                layer.pattern,
                f"{layer.zeros / layer.size:.2%}",
                f"{layer.error:.4f}",
                f"{layer.seconds:.2f}",
                "; ".join(layer.notes),
            )
            for layer in self.layers
        ]
        parts = [table(("layer", "recipe", "pattern", "zeros", "error", "seconds", "notes"), rows)]
        by_reason: dict[str, list[str]] = {}
        for item in self.skipped:
            by_reason.setdefault(item["reason"], []).append(item["name"])
        if by_reason:
            parts.append("\n".join(f"dense: {', '.join(names)} ({why})" for why, names in by_reason.items()))
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        measured = sorted({layer.error_from for layer in self.layers})
        parts.append(
            f"{len(self.layers)} layers, {self.sparsity:.2%} zeros. Error: ||(W - Q) X||^2 / ||W X||^2, from "
            f"{', '.join(measured)}."
        )
        return "\n\n".join(parts)


def attach_report(model: nn.Module, report: Report) -> None:
    """Leave the report on the model; layers pruned by an earlier run keep their entries."""
    earlier = getattr(model, ATTRIBUTE, None)
    if earlier is not None:
        names = {layer.name for layer in report.layers}
        report.layers[:0] = [layer for layer in earlier.layers if layer.name not in names]
        pruned = {layer.name for layer in report.layers}
        report.skipped = [item for item in report.skipped if item["name"] not in pruned]
    setattr(model, ATTRIBUTE, report)


def report(model: nn.Module | str | Path) -> Report:
    """The report of a model that `sparsify`, `restore` or `load` gave back, or of a folder that `save` wrote.

    Raises ValueError if there is none.
    """
    if isinstance(model, nn.Module):
        found = getattr(model, ATTRIBUTE, None)
        if found is None:
            raise ValueError(f"this {type(model).__name__} carries no report: it was not made sparse here")
        return found
    from modelopt_sparse.checkpoint import read_description  # checkpoint needs this file as well

    return Report.from_dict(read_description(Path(model))["report"])


def library_versions() -> dict[str, str]:
    return {
        "modelopt_sparse": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
