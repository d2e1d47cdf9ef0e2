"""What a run did and measured, as values: a row for each layer, block and weight that stays dense, and all of it."""

import json
import math
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import accelerate
import safetensors
import torch
import transformers

from modelopt_sparse import __version__
from modelopt_sparse.reports.evaluate import Evaluation, TaskScores
from modelopt_sparse.reports.fold import counted

# what the error of a layer was measured with -> what its row says, and how far that goes
ERROR_FROM = {
    "gram": ("X", "exact, for X as calibration saw it"),
    "square_sums": ("norms of X", "the same with the channels of X taken as uncorrelated"),
    "weights": ("W alone", "X taken as white, for no data was used"),
}


@dataclass(frozen=True)
class Skipped:
    """A weight that stays dense: its name, the class of its module, its shape, and the reason."""

    name: str
    type: str
    shape: tuple[int, ...]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """In plain values that JSON takes."""
        return {"name": self.name, "type": self.type, "shape": list(self.shape), "reason": self.reason}


@dataclass(frozen=True)
class StepReport:
    """What one step (the method, or what followed it) left of a layer: the error then, and the time it took."""

    step: str
    error: float | None
    seconds: float

    @classmethod
    def of(cls, step: str, error: float, seconds: float) -> "StepReport":
        """``error``: NaN or inf says that none was measured."""
        return cls(step, error if math.isfinite(error) else None, round(seconds, 4))


@dataclass(frozen=True)
class LayerReport:
    """One pruned layer. ``error`` is the relative squared error of its output after the last of ``steps``, measured
    with ``error_from``; None if the method did not measure any. Reconstruction, which comes after, has an error of its
    own for each block. ``expert_tokens``: how many tokens were routed to each expert of a mixture; empty for all other
    layers."""

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
        """The error after each step, as far as they were measured."""
        errors = [step.error for step in self.steps] or [self.error]
        return [error for error in errors if error is not None]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LayerReport":
        return cls(**{**data, "steps": [StepReport(**step) for step in data.get("steps", ())]})


@dataclass(frozen=True)
class BlockReport:
    """One tuned block, or part of it: the relative squared error of its output on the calibration batches that were
    held back, before and after, and the epoch whose values were kept (0: the values from before)."""

    name: str
    error_before: float
    error_after: float
    epoch: int
    seconds: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Distilled:
    """The distillation of the whole model: the mean KL divergence from the dense model's predictions, in nats, on the
    calibration batches that were held back, before and after, and the epoch whose values were kept (0: those from
    before)."""

    kl_before: float
    kl_after: float
    epoch: int
    seconds: float
    notes: list[str] = field(default_factory=list)


R = TypeVar("R", bound="ReportValues")


@dataclass
class ReportValues:
    """What a `Report` holds; its docstring says what that is."""

    layers: list[LayerReport] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    skipped: tuple[Skipped, ...] = ()
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    distillation: Distilled | None = None
    peak_memory: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    tasks: TaskScores | None = None

    @classmethod
    def begin(cls: type[R], skipped: Sequence[Skipped], notes: Sequence[str], settings: Mapping[str, Any]) -> R:
        """The report of a run that starts now; ``skipped`` and ``notes`` are those of its plan."""
        return cls(
            skipped=tuple(skipped),
            notes=list(notes),
            settings=dict(settings),
            versions=library_versions(),
        )

    @property
    def sparsity(self) -> float:
        """Fraction pruned, over the pruned layers."""
        size = sum(layer.size for layer in self.layers)
        return sum(layer.zeros for layer in self.layers) / size if size else 0.0

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what is done within as time of this part of the run."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if spent := round(time.perf_counter() - began, 3):
                self.seconds[part] = round(self.seconds.get(part, 0.0) + spent, 3)

    def time_by_part(self) -> dict[str, float]:
        """Part of the run -> its seconds. Of one process what blocks took is told apart; of several processes, which
        solve at the same time, it is not."""
        solving, tuning = sum(layer.seconds for layer in self.layers), sum(block.seconds for block in self.blocks)
        distilling = 0.0 if self.distillation is None else self.distillation.seconds
        parts = dict(self.seconds) or {"distillation": distilling}
        permuting = parts.pop("permutation", 0.0)  # in "blocks" as well
        if "processes" not in self.settings:
            running = parts.pop("blocks", solving + tuning) - permuting - solving - tuning
            parts |= {"forwards and statistics": running, "permutation": permuting, "solving": solving}
            parts["reconstruction"] = tuning
        return {part: spent for part, spent in parts.items() if spent > 0}

    def summary(self) -> str:
        """The first line of ``text``: how many layers and zeros, how long it took, and with what."""
        pruned = sum(layer.size for layer in self.layers)
        total = pruned + sum(math.prod(skipped.shape) for skipped in self.skipped)
        said = [f"{len(self.layers)} layers pruned, {self.sparsity:.2%} zeros"]
        if total > pruned:
            said.append(f"{self.sparsity * pruned / total:.2%} of all matrix weights")
        spent = [f"{sum(layer.seconds for layer in self.layers):.1f} s of solving"]
        if self.blocks:
            spent.append(f"{sum(block.seconds for block in self.blocks):.1f} s of reconstruction")
        if self.distillation is not None:
            spent.append(f"{self.distillation.seconds:.1f} s of distillation")
        said.append(" and ".join(spent))
        if "training" in self.settings:
            algorithms = ", ".join(dict.fromkeys(layer.recipe for layer in self.layers if "algorithm" in layer.options))
            said[0] = f"After {self.settings['training']['step']} steps of training with {algorithms}: {said[0]}"
        what = counted(f"{layer.recipe} {layer.pattern}" for layer in self.layers)
        return f"{', '.join(said)}{': ' if what else ''}{what}."

    def as_dict(self) -> dict[str, Any]:
        scores = None if self.tasks is None else self.tasks.as_dict()
        return {**asdict(self), "skipped": [weight.as_dict() for weight in self.skipped], "tasks": scores}

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        layers = [LayerReport.from_dict(layer) for layer in data["layers"]]
        blocks = [BlockReport(**block) for block in data.get("blocks", ())]
        skipped = [Skipped(**{**weight, "shape": tuple(weight["shape"])}) for weight in data.get("skipped", ())]
        tuned, measured, scores = (data.get(key) for key in ("distillation", "evaluation", "tasks"))
        more: dict[str, Any] = {"layers": layers, "blocks": blocks, "skipped": tuple(skipped)}
        more["distillation"] = None if tuned is None else Distilled(**tuned)
        more["evaluation"] = None if measured is None else Evaluation.from_dict(measured)
        more["tasks"] = None if scores is None else TaskScores.from_dict(scores)
        return cls(**{**data, **more})

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, default=str)


def library_versions() -> dict[str, str]:
    return {
        "modelopt_sparse": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
