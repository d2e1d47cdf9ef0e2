"""What was really done, per layer: for people as a table, for machines as JSON."""

import json
import math
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import safetensors
import torch
import transformers
from torch import Tensor, nn

from modelopt_sparse.reports.evaluate import Evaluation
from modelopt_sparse.reports.fold import Column, by_reason, counted, paragraph, rows_of
from modelopt_sparse.version import __version__

ATTRIBUTE = "sparsity_report"
PERMUTED, RECONSTRUCTED, DISTILLED = "permute", "reconstruct", "distill"
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


@dataclass
class Report:
    """Everything `sparsify` did to a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all
    rows; ``as_dict`` and ``to_json`` are for machines.

    Notes, settings, calibration and versions are those of the last run. ``earlier`` holds those of the runs before it,
    each with the names of its layers that still stand. ``skipped`` are the weights that stay dense, as in the plan.
    ``evaluation`` is what was measured of the whole model after the last run, if that was put there.
    """

    layers: list[LayerReport] = field(default_factory=list)
    blocks: list[BlockReport] = field(default_factory=list)
    skipped: tuple[Skipped, ...] = ()
    notes: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    earlier: list[dict[str, Any]] = field(default_factory=list)
    distillation: Distilled | None = None
    evaluation: Evaluation | None = None

    @classmethod
    def begin(cls, skipped: Sequence[Skipped], notes: Sequence[str], settings: Mapping[str, Any]) -> "Report":
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

    def allocated(self, chosen: str, measure: str | None, tried: Mapping[str, float]) -> None:
        """Say how the zeros were shared out over the layers, and what the plans that were tried measured."""
        how = self.settings["allocation"]
        self.settings["allocation"] = {"how": how, "chosen": chosen, "measure": measure, "tried": dict(tried)}
        note = f"zeros shared out over the layers by {chosen}"
        if chosen in tried:
            note += f" ({measure}: {tried[chosen]:.4f}, and {next(iter(tried.values())):.4f} for the plan as it came)"
        self.notes.append(note)

    def reconstructed(self, tuned: BlockReport, layers: Collection[str]) -> None:
        """Add a block, or part of one, that was tuned, and say so in the recipes of its ``layers``."""
        self.blocks.append(tuned)
        self._add_step(RECONSTRUCTED, layers)

    def distilled(self, distillation: Distilled) -> None:
        """Add the distillation of the model, and say so in the recipes of all layers."""
        self.distillation = distillation
        self._add_step(DISTILLED, {layer.name for layer in self.layers})

    def _add_step(self, step: str, layers: Collection[str]) -> None:
        self.layers = [
            replace(layer, recipe=f"{layer.recipe}+{step}")
            if layer.name in layers and not layer.recipe.endswith(step)
            else layer
            for layer in self.layers
        ]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "skipped": [weight.as_dict() for weight in self.skipped]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        layers = [LayerReport.from_dict(layer) for layer in data["layers"]]
        blocks = [BlockReport(**block) for block in data.get("blocks", ())]
        skipped = [Skipped(**{**weight, "shape": tuple(weight["shape"])}) for weight in data.get("skipped", ())]
        tuned, measured = data.get("distillation"), data.get("evaluation")
        more: dict[str, Any] = {"layers": layers, "blocks": blocks, "skipped": tuple(skipped)}
        more["distillation"] = None if tuned is None else Distilled(**tuned)
        more["evaluation"] = None if measured is None else Evaluation.from_dict(measured)
        return cls(**{**data, **more})

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2, default=str)

    def to_html(
        self,
        path: str | Path,
        *,
        title: str | None = None,
        masks: Mapping[str, Tensor] | None = None,
        compare: "Report | None" = None,
        compare_title: str | None = None,
    ) -> Path:
        """Write the report as one HTML file with plots and tables, which needs no network; return its path.

        path: ends in .html or .htm. A file that is there is replaced.
        title: what the page is called.
        masks: bool masks, by parameter name, to draw maps of: ``dict(mts.named_masks(model))``, or some of them. Of
          more than six those of the layers with the largest errors are drawn.
        compare: the report of another run: the page shows both side by side, and no masks.
        compare_title: what the other run is called.

        Needs plotly, which the extra ``report`` installs. Raises ValueError without it, for another suffix, for a
        folder, and for masks that are not bool.
        """
        from modelopt_sparse.reports.html import write_page  # reads this module

        return write_page(path, self, title, masks or {}, compare, compare_title)

    def __str__(self) -> str:
        return self.text()

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        names = [layer.name for layer in self.layers]
        skipped = {weight.name: weight.reason for weight in self.skipped}
        parts = [paragraph(self.summary(), all_rows=all_rows)]
        parts.append(rows_of("layer", names, _columns(self.layers), skipped, all_rows=all_rows))
        if self.blocks:
            blocks = [block.name for block in self.blocks]
            parts.append(rows_of("reconstructed", blocks, _block_columns(self.blocks), all_rows=all_rows))
        if (tuned := self.distillation) is not None:
            divergences = f"{tuned.kl_before:.4f} -> {tuned.kl_after:.4f} nats"
            said = f"distilled: KL from the dense model {divergences}, on calibration batches that it was not tuned on"
            said += f"; best epoch {tuned.epoch}, {tuned.seconds:.1f} s"
            parts.append(paragraph("; ".join([said, *tuned.notes]), all_rows=all_rows))
        if skipped:
            parts.append(by_reason("stays dense", skipped, names, all_rows=all_rows))
        notes = [note for run in self.earlier for note in run["notes"]] + self.notes
        if notes:
            parts.append("\n".join(paragraph(f"note: {note}", all_rows=all_rows) for note in notes))
        measured = {layer.error_from for layer in self.layers if layer.errors}
        how = "; ".join(f"from {short}: {text}" for key, (short, text) in ERROR_FROM.items() if key in measured)
        legend = [f"Error: ||(W - Q) X||^2 / ||W X||^2, {how}."] if how else []
        if self.blocks:
            legend.append("Error of a block: the same of its output, on calibration batches that it was not tuned on.")
        if legend:
            parts.append("\n".join(paragraph(line, all_rows=all_rows) for line in legend))
        if self.evaluation is not None:
            parts.append(paragraph(self.evaluation.beside_dense(), all_rows=all_rows))
        return "\n\n".join(parts)

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


def _columns(layers: Sequence[LayerReport]) -> list[Column]:
    """The columns of the printed report, after the name."""
    errors = [" -> ".join(f"{error:.4f}" for error in layer.errors) for layer in layers]
    return [
        Column("recipe", [layer.recipe for layer in layers]),
        Column("pattern", [layer.pattern for layer in layers], "levels"),
        Column("zeros", [f"{layer.zeros / layer.size:.2%}" for layer in layers], "range"),
        Column("error", errors, "range"),
        Column("error from", [ERROR_FROM[layer.error_from][0] if layer.errors else "" for layer in layers]),
        Column("seconds", [f"{layer.seconds:.2f}" for layer in layers], "range", shared=False),
        Column("notes", ["; ".join(layer.notes) for layer in layers], "range", below=True),
    ]


def _block_columns(blocks: Sequence[BlockReport]) -> list[Column]:
    """The columns of the printed table of blocks, after the name."""
    errors = [f"{block.error_before:.4f} -> {block.error_after:.4f}" for block in blocks]
    return [
        Column("error", errors, "range"),
        Column("best epoch", [str(block.epoch) for block in blocks], "range"),
        Column("seconds", [f"{block.seconds:.2f}" for block in blocks], "range", shared=False),
        Column("notes", ["; ".join(block.notes) for block in blocks], "range", below=True),
    ]


def merged_report(earlier: Report, new: Report) -> Report:
    """The report of a model that was pruned twice.

    Layers of the first run stand where the second did not touch them, with the circumstances of their run in
    ``earlier``; layers that were pruned again say so, because their error counts from the weights that the second run
    found.
    """
    before = {layer.name: layer for layer in earlier.layers}
    again = {layer.name for layer in new.layers}
    untouched = [layer for layer in earlier.layers if layer.name not in again]
    redone = [
        layer
        if (old := before.get(layer.name)) is None
        else replace(layer, notes=[*layer.notes, f"pruned before ({old.recipe} {old.pattern}): the error adds to that"])
        for layer in new.layers
    ]
    standing = {layer.name for layer in untouched}
    runs = [{**run, "layers": [name for name in run["layers"] if name in standing]} for run in earlier.earlier]
    older = {name for run in runs for name in run["layers"]}
    last: dict[str, Any] = {"layers": [layer.name for layer in untouched if layer.name not in older]}
    last.update({key: getattr(earlier, key) for key in ("notes", "settings", "calibration", "versions")})
    tuned = {block.name for block in new.blocks}
    return replace(
        new,
        layers=untouched + redone,
        blocks=[block for block in earlier.blocks if block.name not in tuned] + new.blocks,
        skipped=tuple(skipped for skipped in new.skipped if skipped.name not in standing),
        earlier=[run for run in (*runs, last) if run["layers"]],
    )


def attach_report(model: nn.Module, report: Report | None) -> None:
    """Leave a report on the model in place of the one that it has; None leaves none."""
    if report is not None:
        setattr(model, ATTRIBUTE, report)
    elif attached_report(model) is not None:
        delattr(model, ATTRIBUTE)


def attached_report(model: nn.Module) -> Report | None:
    """The report that `sparsify`, `restore` or `load` left on the model."""
    return getattr(model, ATTRIBUTE, None)


def library_versions() -> dict[str, str]:
    return {
        "modelopt_sparse": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
