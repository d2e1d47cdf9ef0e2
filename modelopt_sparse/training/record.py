"""What a report says of sparse training: an entry for each parameter, and the step to go on from."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from modelopt_sparse.methods.patterns import NM, Unstructured
from modelopt_sparse.model.masking import named_masks
from modelopt_sparse.reports.report import Report, attach_report, attached_report
from modelopt_sparse.reports.values import LayerReport
from modelopt_sparse.training.planner import Planned
from modelopt_sparse.training.weights import Weight

SETTING = "training"  # in the settings of a report


def entries(planned: Planned, masks: Mapping[str, Tensor], step: int) -> Report:
    """A report of all parameters that an algorithm has made sparse. ``masks``: theirs, by name."""
    settings = {SETTING: {"step": step, **planned.description}}
    report = Report.begin(planned.plan.skipped, planned.plan.notes, settings)
    report.layers = [_entry(weight, algorithm, masks[weight.name]) for weight, algorithm in planned.chosen]
    return report


def _entry(weight: Weight, algorithm: Any, mask: Tensor) -> LayerReport:
    return LayerReport(
        name=weight.layer.name,
        parameter=weight.name,
        type=weight.type,
        shape=list(weight.layer.matrix(mask).shape),
        recipe=type(algorithm).__name__.lower(),
        options=algorithm.describe(),
        size=mask.numel(),
        error=None,
        error_from="weights",
        tokens=0,
        seconds=0.0,
        notes=[],
        **counted(weight, algorithm, mask),
    )


def counted(weight: Weight, algorithm: Any, mask: Tensor) -> dict[str, Any]:
    """The zeros of a mask, and the pattern that it can be held to: N:M, or the level that all rows or matrices have."""
    matrix = weight.layer.matrix(mask)
    zeros = int((~mask).sum())
    if algorithm.pattern is not None and not algorithm.pattern.count_nonzero_wrong(matrix):
        return {"zeros": zeros, "pattern": str(NM(algorithm.pattern.n, algorithm.pattern.m))}
    scope = "row" if algorithm.scope.kind == "row" else "matrix"
    scopes = matrix if scope == "row" else matrix.flatten(-2)
    fewest, size = int((~scopes).sum(-1).min()), scopes.shape[-1]
    return {"zeros": zeros, "pattern": str(Unstructured(min(fewest / size, 1 - 2**-40), scope))}


def rewrite(model: nn.Module, weight: Weight, algorithm: Any, mask: Tensor) -> None:
    """Bring the entry of one parameter in the model's report up to date."""
    report = attached_report(model)
    if report is not None:
        now = counted(weight, algorithm, mask)
        layers = [replace(layer, **now) if layer.parameter == weight.name else layer for layer in report.layers]
        attach_report(model, replace(report, layers=layers))


def remember_step(model: nn.Module, step: int) -> None:
    """Write the number of finished steps into the model's report."""
    report = attached_report(model)
    if report is not None and SETTING in report.settings:
        report.settings[SETTING]["step"] = step


def record_of(model: nn.Module, planned: Planned) -> int | None:
    """The step to go on from, if the same algorithm has trained the model before; else None."""
    report = attached_report(model)
    record = None if report is None else report.settings.get(SETTING)
    if not record or {key: record.get(key) for key in planned.description} != planned.description:
        return None
    masked = dict(named_masks(model))
    return int(record["step"]) if all(weight.name in masked for weight, _ in planned.chosen) else None
