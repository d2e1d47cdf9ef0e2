"""What Sparse-IFT makes of a model, and what that costs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modelopt_sparse.calibration.modes import calibrating
from modelopt_sparse.reports.fold import Column, by_reason, paragraph, rows_of
from modelopt_sparse.reports.text import table
from modelopt_sparse.reports.values import Skipped
from modelopt_sparse.training.weights import Weight

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Replaced:
    """One layer: its weights before, what stands for it, the weights of that, the level, and the live weights.

    uses: how often each weight is multiplied: once for a token; in the example's forward, as often as torch counts.
    """

    name: str
    weights: int
    by: str
    new_weights: int
    level: float
    live: int
    uses: float = 1.0


@dataclass(frozen=True)
class IsoPlan:
    """What Sparse-IFT makes of a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all rows.

    layers: those that are wider or replaced, and sparse.
    skipped: all other weights, with the reason.
    parameters, new_parameters: of the whole model, before and after, pruned ones included.
    other, new_other: multiplications with weights of the other layers (heads, attention that stays), before and after.
    unit: what multiplications are counted for: "a token", or "the example". None: the model has convolutions, and
      without an example nobody knows how many pixels each of them sees.

    A multiplication and its addition are two FLOPs in a forward and six in a training step. Attention's own products
    are not counted, and neither are the dense gradients that RigL asks for (see `cost`).
    """

    layers: tuple[Replaced, ...]
    skipped: tuple[Skipped, ...]
    parameters: int
    new_parameters: int
    other: float
    new_other: float
    unit: str | None

    @property
    def live_parameters(self) -> int:
        """Parameters after, without those that are pruned."""
        return self.new_parameters - sum(layer.new_weights - layer.live for layer in self.layers)

    @property
    def ratio(self) -> float:
        """FLOPs of the sparse layers divided by those of the layers that they stand for."""
        live, dense = self._multiplications("live"), self._multiplications("weights")
        return live / dense

    @property
    def model_ratio(self) -> float | None:
        """The same of all layers that multiply. None if ``unit`` is."""
        return None if self.flops is None else self.flops[1] / self.flops[0]

    @property
    def flops(self) -> tuple[int, int] | None:
        """FLOPs of a forward before and after, in all layers that multiply. None if ``unit`` is."""
        if self.unit is None:
            return None
        before = self._multiplications("weights") + self.other
        after = self._multiplications("live") + self.new_other
        return round(2 * before), round(2 * after)

    def _multiplications(self, what: str) -> float:
        return sum(getattr(layer, what) * layer.uses for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON takes."""
        return {
            **vars(self),
            "layers": [vars(layer) for layer in self.layers],
            "skipped": [each.as_dict() for each in self.skipped],
            "live_parameters": self.live_parameters,
            "ratio": self.ratio,
            "model_ratio": self.model_ratio,
            "flops": self.flops,
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [layer.name for layer in self.layers]
        skipped = {each.name: each.reason for each in self.skipped}
        columns = [
            Column("weights", [f"{layer.weights:,}" for layer in self.layers]),
            Column("becomes", [layer.by for layer in self.layers]),
            Column("new weights", [f"{layer.new_weights:,}" for layer in self.layers]),
            Column("level", [f"{layer.level:.4f}" for layer in self.layers], "levels"),
            Column("FLOPs, times dense", [f"{layer.live / layer.weights:.4f}" for layer in self.layers], "range"),
        ]
        parts = [
            paragraph(self._summary(), all_rows=all_rows),
            rows_of("layer", names, columns, skipped, all_rows=all_rows),
            by_reason("not sparse", skipped, names, all_rows=all_rows),
            self._costs(),
        ]
        return "\n\n".join(part for part in parts if part)

    def _summary(self) -> str:
        whole = ": with example=, which says how many pixels each convolution sees"
        if self.flops is not None:
            whole = f" {self.model_ratio:.4f} times"
        return (
            f"FLOPs of the {len(self.layers)} sparse layers {self.ratio:.4f} times dense, of all layers{whole}. "
            "They count as if zeros were skipped."
        )

    def _costs(self) -> str:
        rows = [
            ("parameters", f"{self.parameters:,}", f"{self.new_parameters:,}"),
            ("of them live", f"{self.parameters:,}", f"{self.live_parameters:,}"),
        ]
        if self.flops is not None:
            before, after = self.flops
            rows.append((f"FLOPs of {self.unit}, forward", f"{before:,}", f"{after:,}"))
            rows.append((f"FLOPs of {self.unit}, training", f"{3 * before:,}", f"{3 * after:,}"))
        return table(("", "before", "after"), rows)


def unit_of(model: nn.Module, example: Any) -> str | None:
    """What multiplications in a model can be counted for, see `IsoPlan`."""
    if example is not None:
        return "the example"
    return None if any(isinstance(module, CONVOLUTIONS) for module in model.modules()) else "a token"


def call(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tuple holds positional arguments, a mapping keywords, else it is the only
    argument."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def multiplying(weight: Weight) -> bool:
    """Whether a weight is multiplied with every token: heads are, tied ones too, and embeddings are looked up."""
    looked_up_only = not any(isinstance(module, nn.Linear) for module, _ in weight.holders) and not weight.is_layer
    return len(weight.shape) > 1 and not looked_up_only


def uses_of(model: nn.Module, weights: list[Weight], example: Any) -> dict[str, float]:
    """How often each weight is multiplied in a forward of the example, by torch's counter; 1 without an example."""
    if example is None:
        return {weight.name: 1.0 for weight in weights}
    with calibrating(model), FlopCounterMode(display=False) as counter:
        call(model, example)
    counts, root = counter.get_flop_counts(), type(model).__name__
    uses = {}
    for weight in weights:
        modules = {".".join([root, *name.split(".")[:-1]]) for name in weight.names}
        flops = sum(sum(counts.get(module, {}).values()) for module in modules)
        uses[weight.name] = flops / 2 / max(1, _weights_in(weight))
    return uses


def _weights_in(weight: Weight) -> int:
    """Weights of two or more dimensions in the module that holds this one, whose products torch counts as one."""
    module, _ = weight.holders[0]
    return sum(each.numel() for each in module.parameters(recurse=False) if each.dim() > 1)


def total(weights: list[Weight]) -> int:
    return sum(weight.parameter.numel() for weight in weights)


def live_of(size: int, level: float) -> int:
    return round(size * (1 - level))


def skipped_of(weights: list[Weight], why: Mapping[str, str]) -> tuple[Skipped, ...]:
    return tuple(Skipped(weight.name, weight.type, weight.shape, why[weight.name]) for weight in weights)
