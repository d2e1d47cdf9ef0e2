"""The plan that loses least within a budget, chosen by the losses of layers, and checked once against a plain one; and
the curve of what budgets cost."""

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from modelopt_sparse.budget.costs import ChoiceCosts, Chosen, zeros_in
from modelopt_sparse.budget.losses import NoLosses, divergences, tabled
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.model.masking import remove_masks, without_masks
from modelopt_sparse.model.output import OutputError
from modelopt_sparse.plan.budget import DENSE, Budget, parse_choice
from modelopt_sparse.plan.plan import Plan
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.text import Column, Printed, paragraph, rows_of, table
from modelopt_sparse.reports.values import Skipped, in_words


def planned(plan: Plan, chosen: Chosen) -> Plan:
    """The plan with the chosen patterns; layers that stay dense are skipped."""
    layers = tuple(replace(layer, pattern=p) for layer in plan.layers if (p := chosen[layer.name]) is not None)
    dense = (layer for layer in plan.layers if chosen[layer.name] is None)
    skipped = (Skipped(layer.name, layer.type, layer.shape, "dense, by the budget") for layer in dense)
    if not layers:
        raise ValueError("budget: every layer may stay dense, and nothing is pruned: ask for less")
    return replace(plan, layers=layers, skipped=(*plan.skipped, *skipped))


# a run ----------------------------------------------------------------------------------------------------------------


def budgeted(data: CalibrationData) -> CalibrationData:
    """Data whose run has the plan that ``config.budget`` leads to, of all processes; the report says what it costs.

    A run that goes on after it was stopped takes the plan that it began with. Where losses cannot be measured, an
    optional budget leaves the plan as it is.
    """
    run, began = data.run, time.perf_counter()
    decision = run.storage.choice
    if decision is None:
        try:
            data, decision = decided(data)
        except (NoLosses, OutputError) as why:
            if run.config.budget is None or not run.config.budget.optional:
                raise
            run.report.settings.update(budget=None, choices=None)
            run.report.notes.append(f"{run.plan.layers[0].pattern} in every layer, not shared out by losses: {why}")
            return data
        decision["seconds"] = round(time.perf_counter() - began, 3)
        run.processes.check_same({"the plan of the budget": str(decision["layers"])}, "report this")
        run.storage.save_choice(decision)
    plan = planned(run.plan, {name: parse_choice(text) for name, text in decision["layers"].items()})
    if run.config.replace:  # also of layers that stay dense
        stay = {layer_plan.name for layer_plan in plan.layers}
        dense = [layer_plan.layer for layer_plan in run.plan.layers if layer_plan.name not in stay]
        remove_masks(run.model, {name for layer in dense for name in layer.parameter_names})
    run.report.skipped = plan.skipped
    run.report.budgeted(decision)
    return replace(data, run=replace(run, plan=plan))


KL_CURVATURE = 0.75  # c in: real KL = x (1 + c x), with x the sum of losses times a factor that measured plans give


def decided(data: CalibrationData) -> tuple[CalibrationData, dict[str, Any]]:
    """Choose by losses, or take the plain plan if the choice turns out worse on the batches held back -> (the data,
    with the metrics that come from the same gradients; the decision as the report has it)."""
    budget = data.run.config.budget
    assert budget is not None
    with without_masks(data.run.model) if data.run.config.replace else nullcontext():
        data, costs = tabled(data)
        if (chosen := costs.best(budget)) is None:
            left = costs.costs_NK(budget.unit).min(1).sum() / costs.dense(budget.unit)
            allowed = f"the choices leave at least {left:.1%} of {budget.unit.replace('zeros', 'the weights')}"
            raise ValueError(f"budget='{budget}': {allowed}: add sparser choices, or include layers")
        plans = {"the choice by losses": chosen, **costs.plain(budget)}
        plans = {title: costs.filled(plan, budget) for title, plan in plans.items()}
        measured = divergences(data, [*plans.values()])
    sums = [costs.loss(plan) for plan in plans.values()]
    settings = data.run.report.settings  # which a process that judges no batch does not know
    settings |= next(filter(None, data.run.processes.all_gather("what is measured", _divergence(settings))), {})
    title, chosen = [*plans.items()][measured.index(min(measured))]
    factor = sum(map(_kl_to_loss, measured)) / max(sum(sums), 1e-30)
    return data, {
        "asked": str(budget),
        "taken": title,
        **_divergence(settings),
        "tried": {name: [total, kl] for name, total, kl in zip(plans, sums, measured)},
        "costs": {budget.unit: [costs.cost(budget.unit, chosen), costs.ceiling(budget)]},
        "layers": {name: str(choice or DENSE) for name, choice in chosen.items()},
        "zeros": {layer.name: zeros_in(layer, chosen[layer.name]) / layer.size for layer in costs.plan.layers},
        "curve": _curve(costs, budget.unit, factor),
    }


def _divergence(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name == "divergence"}


def _kl_to_loss(kl: float) -> float:
    """The sum of losses, times the factor, that a measured KL stands for."""
    return (math.sqrt(1 + 4 * KL_CURVATURE * kl) - 1) / (2 * KL_CURVATURE)


# the curve ------------------------------------------------------------------------------------------------------------


POINTS = {"zeros": (20, 35, 50, 60, 70), "bytes": (90, 80, 70, 65, 60), "flops": (80, 65, 50, 40, 30)}  # in percent


@dataclass(frozen=True)
class BudgetCurve(Printed):
    """What budgets of a model cost, before anything is pruned.

    points: each [share of ``unit`` in percent, KL in nats, that of the plain plan or None, what one more point costs or
      None]. KL is the sum of the losses, corrected by the KL of the plans that were measured.
    budget: what was asked, the plans that were measured for it (``tried``), and what each of ``layers`` becomes.
    """

    unit: str
    points: list[list[Any]]
    budget: dict[str, Any]
    layers: dict[str, str]

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded. ``all_rows``: a line for each layer."""
        measure, _ = in_words(self.budget.get("divergence"))
        heads = (self.unit, measure, "of plain", f"one more point of {self.unit} costs")
        rows = [
            (f"{percent}%", f"{kl:.4f}", f"{kl / plain:.0%}" if plain else "", f"{slope:.4f}" if slope else "")
            for percent, kl, plain, slope in self.points
        ]
        measured = ", ".join(f"{name} {kl:.4f}" for name, (_, kl) in self.budget["tried"].items())
        tried = paragraph(f"At {self.budget['asked']}, {measure} as measured: {measured}.", all_rows=all_rows)
        choices = rows_of("layer", [*self.layers], [Column("choice", [*self.layers.values()])], all_rows=all_rows)
        return "\n\n".join((table(heads, rows), tried, choices))

    def to_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the curve, the plans that were measured and the choices as a page; return its path. See
        `Report.to_html`."""
        report = Report.begin((), (), {})
        report.budgeted(self.budget)
        return report.to_html(path, title=title)


def curve_of(data: CalibrationData) -> BudgetCurve:
    """The curve of the unit of ``config.budget``, with the choice for that budget. The model stays as it is."""
    _, decision = decided(data)
    return BudgetCurve(**decision["curve"], budget=decision, layers=decision["layers"])


def _curve(costs: ChoiceCosts, unit: str, factor: float) -> dict[str, Any]:
    """``unit`` and ``points`` of `BudgetCurve`. ``factor``: of the sum of losses, by the plans that were measured."""

    def kl(percent: int, *, plain: bool = False) -> float | None:
        budget = Budget(unit, Fraction(percent, 100), of_dense=True)
        chosen = next(iter(costs.plain(budget).values()), None) if plain else costs.best(budget)
        total = None if chosen is None else factor * costs.loss(chosen)
        return total and total * (1 + KL_CURVATURE * total)

    points = []
    for percent in POINTS[unit]:
        if (best := kl(percent)) is not None:
            next_kl = kl(percent + 1 if unit == "zeros" else percent - 1)
            points.append([percent, best, kl(percent, plain=True), None if next_kl is None else next_kl - best])
    return {"unit": unit, "points": points}
