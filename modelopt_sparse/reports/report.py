"""`Report`: what a run did and measured, in the rows of `values.py`; as a table, as JSON, and as an HTML page."""

import math
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelopt_sparse import __version__
from modelopt_sparse.reports.evaluate import Evaluation, task_scores
from modelopt_sparse.reports.text import Column, Printed, by_reason, counted, paragraph, rows_of, steps_text, table
from modelopt_sparse.reports.values import (
    DISTILLED,
    ERROR_FROM,
    RECONSTRUCTED,
    BlockReport,
    Distilled,
    LayerReport,
    Shrunk,
    Skipped,
    in_words,
)
from modelopt_sparse.reports.values import StepReport as StepReport  # here models of `torch.save` look for it

ATTRIBUTE = "sparsity_report"  # where a model holds its report


# the report -----------------------------------------------------------------------------------------------------------


@dataclass
class Report(Printed):
    """Everything `sparsify` did to a model. ``print`` shows it with equal rows folded, ``text(all_rows=True)`` all
    rows; ``as_dict`` and ``to_json`` are for machines.

    layers: a `LayerReport` for each layer that was pruned.
    blocks: a `BlockReport` for each block, or part of one, that was tuned.
    skipped: the weights that stay dense (`Skipped`).
    notes: what did not go the usual way in the last run, as sentences.
    settings: ``sequential``, ``enforce``, ``seed``, ``count_padding``, ``min_tokens``, ``experts``, ``memory_limit``,
      the options of accuracy, and those of text where text was used.
    calibration: its ``calls`` of the model, ``sha256`` of the data that they were given, and its ``source`` (a file's
      name without its folder); empty if no data was needed.
    versions: of this library, torch, transformers, accelerate, safetensors and Python at the time of the last run.
    earlier: notes, settings, calibration and versions of each run before it, with the names of its ``layers`` that
      still stand; none of a shrink.
    distillation: what distilling the whole model did (`Distilled`), or None.
    peak_memory: device -> the most bytes that the process of the last run held there in its life.
    seconds: part of the last run -> how long it took, by the clock: ``calibration data`` (text of the model's own too),
      ``dense run``, ``budget``, ``metrics``, ``dense predictions``, ``blocks``, of which ``permutation``,
      ``distillation``.
    evaluation: the `Evaluation` of the model after the last run, if it was put there.
    tasks: scores on tasks after it, if they were put there: the ``results`` in the JSON of lm-evaluation-harness.
    shrunk: what `shrink` took away before (`Shrunk`), or None; in JSON the key is only there if it did.
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
    peak_memory: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    tasks: dict[str, dict[str, Any]] | None = None
    shrunk: Shrunk | None = None

    # while the run goes on

    @classmethod
    def begin(cls, skipped: Sequence[Skipped], notes: Sequence[str], settings: Mapping[str, Any]) -> "Report":
        """The report of a run that starts now; ``skipped`` and ``notes`` are those of its plan."""
        return cls(skipped=tuple(skipped), notes=list(notes), settings=dict(settings), versions=library_versions())

    def budgeted(self, decision: Mapping[str, Any]) -> None:
        """Note what a budget led to: what was asked, the costs, the plans that were tried, and each layer's choice."""
        self.settings["budget"] = dict(decision)
        plans = decision["tried"].items()
        tried = ", ".join(f"{name} {kl:.4g} (sum of losses {total:.4g})" for name, (total, kl) in plans)
        measure, _ = in_words(decision.get("divergence"))
        kl = f"{measure} from dense on the batches held back, before any repair: {tried}"
        self.notes.append(f"budget {decision['asked']}: {decision['taken']}; {kl}")

    def reconstructed(self, tuned: BlockReport, layers: Collection[str]) -> None:
        """Add a block, or part of one, that was tuned, also to the recipes of its ``layers``."""
        self.blocks.append(tuned)
        self._add_step(RECONSTRUCTED, layers)

    def distilled(self, distillation: Distilled) -> None:
        """Add the distillation of the model, also to the recipes of all layers."""
        self.distillation = distillation
        self._add_step(DISTILLED, {layer.name for layer in self.layers})

    def _add_step(self, step: str, layers: Collection[str]) -> None:
        for i, layer in enumerate(self.layers):
            if layer.name in layers and not layer.recipe.endswith(step):
                self.layers[i] = replace(layer, recipe=f"{layer.recipe}+{step}")

    # sums

    @property
    def sparsity(self) -> float:
        """Fraction pruned, over the pruned layers."""
        pruned, _ = self.weights
        return sum(layer.zeros for layer in self.layers) / pruned if pruned else 0.0

    @property
    def weights(self) -> tuple[int, int]:
        """(weights of the pruned layers, weights of all matrices)."""
        pruned = sum(layer.size for layer in self.layers)
        return pruned, pruned + sum(math.prod(weight.shape) for weight in self.skipped if len(weight.shape) > 1)

    def unmasked(self, masks: Collection[str]) -> set[str]:
        """Layers that a run gave masks to, and that are not among the parameters with ``masks``; none if there are no
        masks at all, as in an exported model."""
        older = {name: run for run in self.earlier for name in run["layers"]}
        settings = {layer.name: older.get(layer.name, {}).get("settings", self.settings) for layer in self.layers}
        gone = (layer for layer in self.layers if masks and layer.parameter not in masks)
        return {layer.name for layer in gone if settings[layer.name].get("enforce", True)}

    def all_notes(self) -> list[str]:
        """The notes of earlier runs, and those of the last one."""
        return [note for run in self.earlier for note in run["notes"]] + self.notes

    def errors_from(self) -> dict[str, str]:
        """What the errors of layers were measured with, and how exact that is."""
        measured = {layer.error_from for layer in self.layers if layer.errors}
        return dict(words for key, words in ERROR_FROM.items() if key in measured)

    def time_by_part(self) -> dict[str, float]:
        """Part of the run -> its seconds. The time of blocks is split further, except for a run of several processes,
        which solve at the same time, and where layers and blocks are those of other runs as well."""
        solving, tuning = sum(layer.seconds for layer in self.layers), sum(block.seconds for block in self.blocks)
        distilling = 0.0 if self.distillation is None else self.distillation.seconds
        parts = dict(self.seconds) or {"distillation": distilling}
        permuting = parts.pop("permutation", 0.0)  # in "blocks" as well
        running = parts.get("blocks", solving + tuning) - permuting - solving - tuning
        if "processes" not in self.settings and not self.earlier and running >= 0:
            parts.pop("blocks", None)
            parts |= {"forwards and statistics": running, "permutation": permuting, "solving": solving}
            parts["reconstruction"] = tuning
        return {part: spent for part, spent in parts.items() if spent > 0}

    # as JSON, as a page and as text

    def as_dict(self) -> dict[str, Any]:
        skipped = [weight.as_dict() for weight in self.skipped]
        evaluation = None if self.evaluation is None else self.evaluation.as_dict()
        values = {**asdict(self), "skipped": skipped, "evaluation": evaluation}
        return values if self.shrunk is not None else {key: value for key, value in values.items() if key != "shrunk"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Report":
        values = dict(data)
        values["layers"] = [LayerReport.from_dict(layer) for layer in data["layers"]]
        values["blocks"] = [BlockReport(**block) for block in data.get("blocks", ())]
        values["skipped"] = tuple(
            Skipped(**{**weight, "shape": tuple(weight["shape"])}) for weight in data.get("skipped", ())
        )
        parts: dict[str, Any] = {"evaluation": Evaluation.from_dict}
        parts |= {"distillation": lambda part: Distilled(**part), "shrunk": lambda part: Shrunk(**part)}
        values |= {name: make(data[name]) for name, make in parts.items() if data.get(name) is not None}
        return cls(**values)

    def to_html(
        self,
        path: str | Path,
        *,
        title: str | None = None,
        masks: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
        compare: "Report | None" = None,
        compare_title: str | None = None,
    ) -> Path:
        """Write the report as one HTML file with plots and tables, which needs no network; return its path.

        path: ends in .html or .htm. A file that is there is replaced.
        title: what the page is called.
        masks: bool masks, by parameter name, to draw maps of: ``mts.named_masks(model)``, or some of them. Of more than
          six those of the layers with the largest errors are drawn.
        compare: the report of another run: the page shows both side by side, and no masks.
        compare_title: what the other run is called.

        Needs plotly, which the extra ``report`` installs. Raises ValueError without it, for another suffix, for a
        folder, and for masks that are not bool.
        """
        from modelopt_sparse.reports.page import write_page  # only when a page is written, as plotly is

        return write_page(path, self, title, dict(masks or ()), compare, compare_title)

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded, 100 columns. ``all_rows``: a line for each, as wide as it is."""
        return "\n\n".join(filter(None, self._sections(all_rows=all_rows)))

    def _sections(self, *, all_rows: bool) -> Iterator[str]:
        """The paragraphs and tables of ``text``; "" for those without anything."""
        say = partial(paragraph, all_rows=all_rows)
        names = [layer.name for layer in self.layers]
        reasons = {weight.name: weight.reason for weight in self.skipped}
        yield from map(say, self.summaries())
        if (shrunk := self.shrunk) is not None:
            errors = [steps_text(*layer_errors) for layer_errors in shrunk.errors.values()]
            refit = any(len(layer_errors) > 1 for layer_errors in shrunk.errors.values())
            columns = [Column("error, as is -> refit" if refit else "error, as is", errors, "range")]
            heading = "experts off" if "experts" in shrunk.kept else "channels off"
            yield rows_of(heading, list(shrunk.errors), columns, all_rows=all_rows) if errors else ""
        if layers := self.layers:
            columns = [
                Column("recipe", [layer.recipe for layer in layers]),
                Column("pattern", [layer.pattern for layer in layers], "levels"),
                Column("zeros", [f"{layer.zeros / layer.size:.2%}" for layer in layers], "range"),
                Column("error", [steps_text(*layer.errors) for layer in layers], "range"),
                Column("error from", [ERROR_FROM[layer.error_from][0] if layer.errors else "" for layer in layers]),
                Column("seconds", [f"{layer.seconds:.2f}" for layer in layers], "range", shared=False),
                Column("notes", ["; ".join(layer.notes) for layer in layers], "range", below=True),
            ]
            yield rows_of("layer", names, columns, reasons, all_rows=all_rows)
        if self.blocks:
            errors = [steps_text(block.error_before, block.error_after) for block in self.blocks]
            columns = [
                Column("error", errors, "range"),
                Column("way", [block.way or "" for block in self.blocks]),
                Column("best epoch", [str(block.epoch) for block in self.blocks], "range"),
                Column("seconds", [f"{block.seconds:.2f}" for block in self.blocks], "range", shared=False),
                Column("notes", ["; ".join(block.notes) for block in self.blocks], "range", below=True),
            ]
            blocks = [block.name for block in self.blocks]
            yield rows_of("reconstructed", blocks, columns, all_rows=all_rows)
        if (tuned := self.distillation) is not None:
            measure, unit = in_words(self.settings.get("divergence"))
            divergences = f"{measure} from the dense model {steps_text(tuned.kl_before, tuned.kl_after)} {unit}"
            sentence = f"distilled: {divergences}, on calibration batches that it was not tuned on"
            sentence += f"; best epoch {tuned.epoch}, {tuned.seconds:.1f} s"
            yield say("; ".join([sentence, *tuned.notes]))
        if reasons:
            yield by_reason("stays dense", reasons, names, all_rows=all_rows)
        yield "\n".join(say(f"note: {note}") for note in self.all_notes())
        sources = "; ".join(f"from {short}: {text}" for short, text in self.errors_from().items())
        legend = [f"Error: ||(W - Q) X||^2 / ||W X||^2, {sources}."] if sources else []
        if self.blocks:
            legend.append("Error of a block: the same of its output, on calibration batches that it was not tuned on.")
        yield "\n".join(map(say, legend))
        if self.evaluation is not None:
            yield say(self.evaluation.beside_dense())
        if self.tasks:
            rows = [(score.task, score.metric, str(score)) for score in task_scores(self.tasks)]
            yield table(("task", "metric", "score"), rows)

    def summaries(self) -> list[str]:
        """What the page and ``text`` begin with: what was pruned, and what a model was shrunk by."""
        pruned = [self.summary()] if self.layers or self.shrunk is None else []
        return pruned if self.shrunk is None else [*pruned, f"{self.shrunk.summary()}."]

    def summary(self) -> str:
        """The first line of ``text``: how many layers and zeros, how long it took, and with what."""
        parts = [f"{len(self.layers)} layers pruned, {self.sparsity:.2%} zeros"]
        if "training" in self.settings:
            algorithms = ", ".join(dict.fromkeys(layer.recipe for layer in self.layers if "algorithm" in layer.options))
            parts[0] = f"After {self.settings['training']['step']} steps of training with {algorithms}: {parts[0]}"
        pruned, total = self.weights
        if total > pruned:
            parts.append(f"{self.sparsity * pruned / total:.2%} of all matrix weights")
        spent = [f"{sum(layer.seconds for layer in self.layers):.1f} s of solving"]
        if self.blocks:
            spent.append(f"{sum(block.seconds for block in self.blocks):.1f} s of reconstruction")
        if self.distillation is not None:
            spent.append(f"{self.distillation.seconds:.1f} s of distillation")
        parts.append(" and ".join(spent))
        recipes = counted(f"{layer.recipe} {layer.pattern}" for layer in self.layers)
        return f"{', '.join(parts)}{': ' if recipes else ''}{recipes}."


# reports of models ----------------------------------------------------------------------------------------------------


def merged_report(earlier: Report, new: Report) -> Report:
    """The report of a model that was pruned twice.

    Layers of the first run stand where the second did not touch them, and ``earlier`` holds the settings and notes of
    their run. Layers that were pruned again say so: their error counts from the weights that the first run left. Blocks
    that were tuned stand as long as a layer that was tuned with them does.
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
    held = standing | {layer.parameter for layer in untouched}
    older = {name for run in earlier.earlier for name in run["layers"]}
    last: dict[str, Any] = {"layers": [layer.name for layer in earlier.layers if layer.name not in older]}
    last |= {key: getattr(earlier, key) for key in ("notes", "settings", "calibration", "versions")}
    runs = []
    for run in (*earlier.earlier, last):
        left = [name for name in run["layers"] if name in standing]
        if left or not run["layers"]:  # what a run has shrunk stands
            runs.append({**run, "layers": left})
    tuned, distilled = {block.name for block in new.blocks}, any(DISTILLED in layer.recipe for layer in untouched)
    tuned_before = {layer.name for layer in earlier.layers if RECONSTRUCTED in layer.recipe}

    def stands(block: BlockReport) -> bool:
        inside = {name for name in tuned_before if name.startswith(f"{block.name}.")} or tuned_before  # the whole model
        return block.name not in tuned and (not inside or not inside.isdisjoint(standing))

    return replace(
        new,
        layers=untouched + redone,
        blocks=[*filter(stands, earlier.blocks), *new.blocks],
        # sparse training names parameters, and so do masks of what is no layer
        skipped=tuple(x for x in new.skipped if held.isdisjoint({x.name, f"{x.name}.weight"})),
        earlier=runs,
        distillation=new.distillation or (distilled and earlier.distillation) or None,
        shrunk=new.shrunk or earlier.shrunk,
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


version = cache(metadata.version)  # it reads a file of each, as long as magnitude takes for a tiny model


def library_versions() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors")}
    return {"modelopt_sparse": __version__, **libraries, "python": platform.python_version()}
