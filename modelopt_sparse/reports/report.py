"""What was really done, per layer: for people as a table, for machines as JSON."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.reports.fold import Column, by_reason, paragraph, rows_of
from modelopt_sparse.reports.page import write_page
from modelopt_sparse.reports.values import ERROR_FROM, BlockReport, Distilled, LayerReport, ReportValues

ATTRIBUTE = "sparsity_report"
PERMUTED, RECONSTRUCTED, DISTILLED = "permute", "reconstruct", "distill"


@dataclass
class Report(ReportValues):
    """Everything `sparsify` did to a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all
    rows; ``as_dict`` and ``to_json`` are for machines.

    Notes, settings, calibration and versions are those of the last run. ``earlier`` holds those of the runs before it,
    each with the names of its layers that still stand. ``skipped`` are the weights that stay dense, as in the plan.
    ``peak_memory`` is the most that the process of the last run held in its life, on the device that blocks ran on, in
    bytes; ``seconds`` is how long its parts took, by the clock. ``evaluation`` and ``tasks`` are what was measured of
    the whole model after the last run, if that was put there.
    """

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
        if self.tasks is not None:
            parts.append(str(self.tasks))
        return "\n\n".join(parts)


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
