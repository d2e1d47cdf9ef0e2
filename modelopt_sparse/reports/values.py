"""Rows of a report: a layer, a tuned block, a weight that stays dense, the distillation, what a model was shrunk by."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PERMUTED, RECONSTRUCTED, DISTILLED = "permute", "reconstruct", "distill"  # as recipes name them
REPLACED, UNMASKED = "its mask was replaced since", "it carries no mask any more"  # notes of a layer
# what the error of a layer was measured with -> what its row says, and how exact that is
ERROR_FROM = {
    "gram": ("X", "exact, for X as calibration saw it"),
    "square_sums": ("norms of X", "the same with the channels of X taken as uncorrelated"),
    "weights": ("W alone", "X taken as white, for no data was used"),
}
# divergence -> what a figure of it is called, and its unit
DIVERGENCES = {"kl": ("KL", "nats"), "squared": ("squared error", "variances"), "bernoulli": ("Bernoulli KL", "nats")}


def in_words(name: str | None) -> tuple[str, str]:
    """(what a figure of the divergence of this name is called, its unit). None: "kl"."""
    return DIVERGENCES.get(name or "kl", (f"divergence {name}", "its own unit"))


@dataclass(frozen=True)
class Skipped:
    """A weight that stays dense.

    name: of the module, or of the parameter where no module of its own holds it.
    type: class of the module.
    shape: of the weight.
    reason: why it stays.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, in plain values that JSON takes."""
        return {**vars(self), "shape": list(self.shape)}


@dataclass(frozen=True)
class StepReport:
    """One part of a layer's recipe.

    step: the method, or what followed it.
    error: the one that it left; None if none was measured.
    seconds: how long it took.
    """

    step: str
    error: float | None
    seconds: float

    @classmethod
    def of(cls, step: str, error: float | None, seconds: float) -> "StepReport":
        """``error``: None, NaN or inf if none was measured; a user's may be a tensor."""
        return cls(step, None if error is None or not math.isfinite(error) else float(error), round(seconds, 4))


@dataclass(frozen=True)
class LayerReport:
    """One pruned layer.

    name: of the layer.
    parameter: full name of its parameter.
    type: class of the module.
    shape: [R, C] or [E, R, C], as a matrix.
    recipe: what was done, for example "sparsegpt+polish+reconstruct".
    pattern: for example "2:4" or "50% per row".
    options: the method's options, defaults included.
    zeros: entries pruned.
    size: entries in all.
    error: relative squared error of its output after the last of ``steps``; None if the method measures none.
      Reconstruction comes later, and has an error of its own for each block.
    error_from: what it was measured with: "gram" (exactly), "square_sums" (the input's channels taken as uncorrelated)
      or "weights" (its channels taken as equal, too).
    tokens: calibration tokens that the layer saw.
    seconds: time to solve it.
    notes: what did not go the usual way, such as raised damping.
    steps: the method and what followed it.
    expert_tokens: the tokens that were routed to each expert of a mixture; empty for all other layers.
    """

    name: str
    parameter: str
    type: str
    shape: list[int]
    recipe: str
    pattern: str
    options: Mapping[str, Any]
    zeros: int
    size: int
    error: float | None
    error_from: str
    tokens: int
    seconds: float
    notes: list[str]
    steps: list[StepReport] = field(default_factory=list)
    expert_tokens: list[int] = field(default_factory=list)

    @property
    def errors(self) -> list[float]:
        """The errors that were measured, in the order of the steps."""
        errors = [step.error for step in self.steps] or [self.error]
        return [error for error in errors if error is not None]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LayerReport":
        return cls(**{**data, "steps": [StepReport(**step) for step in data.get("steps", ())]})


@dataclass(frozen=True)
class BlockReport:
    """One tuned block, or part of it.

    name: of the block, or of its child.
    error_before, error_after: relative squared errors of its output, on the calibration batches that were held back.
    epoch: the epoch whose values were kept; 0: those from before.
    seconds: time to tune it.
    notes: what did not go the usual way.
    way: the learning rate, whether masks moved, and in which metric errors were measured.
    """

    name: str
    error_before: float
    error_after: float
    epoch: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    way: str = ""


@dataclass(frozen=True)
class Distilled:
    """The distillation of the whole model.

    kl_before, kl_after: the divergence from the dense model's output, on the calibration batches that were held back:
      KL in nats, unless the settings name another.
    epoch: the epoch whose values were kept; 0: those from before.
    seconds: time that it took.
    notes: what did not go the usual way.
    """

    kl_before: float
    kl_after: float
    epoch: int
    seconds: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Shrunk:
    """What a model was made smaller by.

    sizes: name in the config -> [before, after].
    criterion: what channels or experts were chosen by; "given" by ``kept=``.
    kept: "mlp": layer that takes the channels, by its name before -> the indices of those that stay; "experts": layer
      of a mixture's last matrices -> the experts that stay; "blocks": stack -> the places of the blocks that stay.
    scores: layer -> the score of each of its channels or experts by ``criterion``, larger = keep.
    tokens: layer of experts -> the calibration tokens that were routed to each.
    errors: layer -> [as is, refit], the relative squared error of its output on the batches held back; of experts that
      are refit that of the mixture's output.
    tried: of each block that went, in turn: name of a block -> the divergence without it; by influence once: -> its
      influence.
    kl: step -> the divergence from the output of the model before, as `Distilled` has it, on the batches held back.
    costs: "parameters" and "bytes" -> [before, after].
    divergence: the name of the one in ``kl``; None: KL.
    """

    sizes: dict[str, list[int]]
    criterion: str
    kept: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)
    tried: list[dict[str, float]] = field(default_factory=list)
    kl: dict[str, float] = field(default_factory=dict)
    costs: dict[str, list[float]] = field(default_factory=dict)
    divergence: str | None = None

    def summary(self) -> str:
        """A sentence: what went, what it cost, and how far the output has moved."""
        sizes = ", ".join(f"{name} {old:,} -> {new:,}" for name, (old, new) in self.sizes.items())
        parts = [f"Shrunk (criterion {self.criterion!r}): {sizes}"]
        parts += [f"{cost} {old:,.4g} -> {new:,.4g} ({new / old:.1%})" for cost, (old, new) in self.costs.items()]
        if self.kl:
            steps = ", ".join(f"{value:.4f} {step}" for step, value in self.kl.items())
            measure, unit = in_words(self.divergence)
            parts.append(f"{measure} from the model before, on calibration batches held back, in {unit}: {steps}")
        return "; ".join(parts)
