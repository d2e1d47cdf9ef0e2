"""The plan that loses least within a budget: chosen by the losses of layers, and checked once against a plain one.

Shape letters: N layers (the experts of a mixture are one), K choices.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from modelopt_sparse.accuracy.allocate import allocate
from modelopt_sparse.accuracy.fisher import WEIGHED, gradients_of, users_first, wants_metrics, with_metrics
from modelopt_sparse.calibration.data import judging
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured, parse_pattern
from modelopt_sparse.model.devices import offloaded_after_errors
from modelopt_sparse.model.hf import text_config_of
from modelopt_sparse.plan.budget import DENSE, Budget, choose, parse_budget
from modelopt_sparse.plan.plan import LayerPlan, Plan, takes_shape
from modelopt_sparse.reports.fold import Column, Printed, paragraph, rows_of, table
from modelopt_sparse.reports.report import Skipped
from modelopt_sparse.solving.sensitivity import Losses, divergences, losses_of, solutions

Chosen = dict[str, Pattern | None]  # layer -> its pattern; None: dense

# what a choice costs, and from losses to a choice ---------------------------------------------------------------------


@dataclass(frozen=True)
class Counting:
    """What costs depend on beside a layer and its choice.

    runtime: the library whose packed 2:4 weights are counted in bytes. seconds: layer -> (dense, 2:4), of one call at
    each token count, summed up. experts_per_token: of a mixture.
    """

    runtime: str | None = None
    seconds: Mapping[str, tuple[float, float]] | None = None
    experts_per_token: int | None = None

    def cost(self, unit: str, layer_plan: LayerPlan, choice: Pattern | None, siblings: int = 1) -> int:
        """What a layer costs with a choice, in whole numbers: weights that stay, bytes, FLOPs of a token, nanoseconds.
        ``siblings``: layers that are the experts of one mixture."""
        packed = isinstance(choice, NM) and (choice.n, choice.m) == (2, 4)
        stay = layer_plan.size - (0 if choice is None else choice.zeros_in(layer_plan.shape))
        if unit == "zeros":
            return stay
        if unit == "flops":
            experts = siblings if siblings > 1 else layer_plan.matrices if layer_plan.routed else 1
            return -(-2 * stay * min(self.experts_per_token or experts, experts) // experts)
        if unit == "bytes":
            size = layer_plan.layer.parameter.element_size()
            if packed and takes_shape(layer_plan.shape)[str(self.runtime)]:
                return layer_plan.size * size // 2 + layer_plan.size // 8  # two bits for each weight that stays
            return layer_plan.size * size
        dense, sparse = (self.seconds or {})[layer_plan.name]
        return round(1e9 * (min(dense, sparse) if packed else dense))


@dataclass(frozen=True)
class Table:
    """What the layers of a plan may become, what that loses, and how costs are counted."""

    plan: Plan
    losses: Losses
    counting: Counting

    @property
    def groups(self) -> list[list[LayerPlan]]:
        """Layers that choose together: the experts of a mixture that are modules in a list; else each by itself."""
        groups: dict[str, list[LayerPlan]] = {}
        for layer_plan in self.plan.layers:
            groups.setdefault(layer_plan.layer.mixture or layer_plan.name, []).append(layer_plan)
        return list(groups.values())

    def ceilings(self, budget: Budget) -> dict[str, int]:
        """Unit -> the most that it may cost; of zeros, the weights that may stay."""
        ceilings = {}
        for limit in budget.limits:
            dense = self.cost(limit.unit, dict.fromkeys(each.name for each in self.plan.layers))
            amount = limit.amount * (dense if limit.of_dense else 10**6 if limit.unit == "ms" else 1)
            ceilings[limit.unit] = dense - math.ceil(amount) if limit.unit == "zeros" else math.floor(amount)
        return ceilings

    def cost(self, unit: str, chosen: Mapping[str, Pattern | None]) -> int:
        return sum(
            self.counting.cost(unit, each, chosen[each.name], len(group)) for group in self.groups for each in group
        )

    def loss(self, chosen: Mapping[str, Pattern | None]) -> float:
        """The sum of the losses; of a level that is no choice it is interpolated."""
        return sum(loss_at(self.losses[each.name], chosen[each.name]) for each in self.plan.layers)

    def best(self, ceilings: Mapping[str, int]) -> Chosen | None:
        """The choice within the ceilings whose losses have the smallest sum; None if there is none."""
        groups = self.groups
        shape = len(groups), max(len(group[0].choices) for group in groups)
        losses, costs = np.full(shape, np.inf), np.zeros((len(ceilings), *shape), np.int64)
        for n, group in enumerate(groups):
            for k, choice in enumerate(group[0].choices):
                losses[n, k] = sum(loss_at(self.losses[each.name], choice) for each in group)
                for b, unit in enumerate(ceilings):
                    costs[b, n, k] = sum(self.counting.cost(unit, each, choice, len(group)) for each in group)
        chosen = choose(losses, costs, list(ceilings.values()))
        if chosen is None:
            return None
        return {each.name: group[0].choices[k] for group, k in zip(groups, chosen) for each in group}

    def plain(self, ceilings: Mapping[str, int]) -> tuple[str, Chosen] | None:
        """What one does without losses: one level in all layers. Where not all may have a level: the cheapest choice
        from the first layer on, so that the last ones stay dense. None if it does not fit."""

        def fits(chosen: Mapping[str, Pattern | None]) -> bool:
            return all(self.cost(unit, chosen) <= ceiling for unit, ceiling in ceilings.items())

        some = {each.name: [p for p in each.choices if isinstance(p, Unstructured)] for each in self.plan.layers}
        if all(some.values()):

            def level(k: int) -> Chosen:
                return {name: replace(patterns[0], sparsity=k / STEPS) for name, patterns in some.items()}

            low, high = 0, STEPS
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(level(middle)) else (middle, high)
            return None if high == STEPS else (f"{100 * high / STEPS:.3g}% in every layer", level(high))
        chosen: Chosen = dict.fromkeys(some)
        for group in self.groups:
            if fits(chosen):
                break
            cost = {choice: self.counting.cost(next(iter(ceilings)), group[0], choice) for choice in group[0].choices}
            chosen |= dict.fromkeys((each.name for each in group), min(cost, key=cost.__getitem__))
        return ("the last layers dense", chosen) if fits(chosen) else None

    def filled(self, chosen: Chosen, ceilings: Mapping[str, int]) -> Chosen:
        """The choice for zeros alone, with what its levels leave above them taken back from all levels alike."""
        plan = planned(self.plan, chosen)
        levels = {each.name: each.pattern.sparsity for each in plan.layers if isinstance(each.pattern, Unstructured)}
        if [*ceilings] != ["zeros"] or not levels:
            return chosen
        zeros = self.cost("zeros", dict.fromkeys(chosen)) - ceilings["zeros"]
        fixed = sum(each.pattern.zeros_in(each.shape) for each in plan.layers if each.name not in levels)
        return {**chosen, **{each.name: each.pattern for each in allocate(plan, levels, zeros - fixed).layers}}


def planned(plan: Plan, chosen: Mapping[str, Pattern | None]) -> Plan:
    """The plan with the chosen patterns; layers that stay dense are skipped."""
    layers = [replace(each, pattern=p) for each in plan.layers if (p := chosen[each.name]) is not None]
    dense = [each for each in plan.layers if chosen[each.name] is None]
    skipped = (Skipped(each.name, each.type, each.shape, "dense, by the budget") for each in dense)
    if not layers:
        raise ValueError("budget: every layer may stay dense, so that nothing is pruned: ask for less")
    return replace(plan, layers=tuple(layers), skipped=(*plan.skipped, *skipped))


STEPS = 10_000  # levels have four decimals


def loss_at(losses: Mapping[str, float], choice: Pattern | None) -> float:
    """The loss of a choice; of a level that was not solved it is a power of the level between its neighbours, or beyond
    the last of them."""
    text = DENSE if choice is None else str(choice)
    if text in losses or not isinstance(choice, Unstructured):
        return losses[text]
    solved = {parse_pattern(text): loss for text, loss in losses.items() if text != DENSE}
    points = sorted((p.sparsity, loss) for p, loss in solved.items() if isinstance(p, Unstructured) and loss > 0)
    if len(points) < 2 or not choice.sparsity:
        return sum(loss for _, loss in points) * (choice.sparsity / points[0][0]) ** 3 if points else 0.0
    pairs = list(pairwise(points))
    (s0, loss0), (s1, loss1) = next((pair for pair in pairs if choice.sparsity <= pair[1][0]), pairs[-1])
    return loss0 * (choice.sparsity / s0) ** (math.log(loss1 / loss0) / math.log(s1 / s0))


# a run ----------------------------------------------------------------------------------------------------------------


def budgeted(data: CalibrationData) -> CalibrationData:
    """Data whose run has the plan that ``config.budget`` leads to, of all processes; the report says what it costs.

    A run that goes on after it was stopped takes the plan that it began with.
    """
    run, began = data.run, time.perf_counter()
    assert run.config.budget is not None
    said = run.storage.recall()
    if said is None:
        with offloaded_after_errors(run.model):
            data, table = tabled(data)
            chosen, said = _checked(data, table, run.config.budget)
        said["layers"] = {each.name: str(chosen.get(each.name) or DENSE) for each in run.plan.layers}
        said["seconds"] = round(time.perf_counter() - began, 3)
        run.processes.check_same({"the plan of the budget": str(said["layers"])}, "report this")
        run.storage.keep(said)
    patterns = {name: None if text == DENSE else parse_pattern(text) for name, text in said["layers"].items()}
    plan = planned(run.plan, patterns)
    run.report.skipped = plan.skipped
    run.report.budgeted(said)
    return replace(data, run=replace(run, plan=plan))


def tabled(data: CalibrationData) -> tuple[CalibrationData, Table]:
    """The losses of all choices, measured, or read from the file that ``losses`` names; and the data, which knows the
    metrics that come from the same gradients."""
    run, file = data.run, data.run.config.losses
    counting = Counting(
        run.config.runtime, run.config.timings, getattr(text_config_of(run.model), "num_experts_per_tok", None)
    )
    if file is not None and file.exists():
        return data, Table(run.plan, _read(file, run.plan), counting)
    gradients = gradients_of(
        data, run.plan.blocks if wants_metrics(run.config) else [], [each.layer for each in run.plan.layers]
    )
    if gradients is None:
        problem = f"budget: the output of a {type(run.model).__name__} has no logits, which losses are measured by"
        raise ValueError(f"{problem}: give allocation='owl', or rules")
    data = with_metrics(data, gradients)
    losses = losses_of(_first(data), gradients)
    if file is not None and run.processes.rank == 0:
        shapes = {each.name: list(each.shape) for each in run.plan.layers}
        file.write_text(json.dumps({"shapes": shapes, "losses": losses}, indent=1) + "\n", encoding="utf-8")
    return data, Table(run.plan, losses, counting)


def _first(data: CalibrationData) -> CalibrationData:
    """The first rows of the user's data, those that gradients are of."""
    assert data.calls is not None
    return replace(data, calls=[data.calls[number] for number in users_first(data, WEIGHED)], own=0)


def _read(file: Path, plan: Plan) -> Losses:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        shapes, losses = value["shapes"], value["losses"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"losses={str(file)!r} is no file of losses ({error!r}): give another path") from None
    for each in plan.layers:
        known = [parse_pattern(text) for text in losses.get(each.name, ()) if text != DENSE]
        levels = any(isinstance(c, Unstructured) for c in known)
        missing = [
            str(c) for c in each.choices if c and c not in known and not (isinstance(c, Unstructured) and levels)
        ]
        if shapes.get(each.name) != list(each.shape) or missing:
            problem = f"has no losses of layer {each.name!r} {list(each.shape)} at {', '.join(missing) or 'this shape'}"
            raise ValueError(f"losses={str(file)!r} {problem}: give the file of this model and choices, or a new path")
    return losses


BEND = 0.75  # real KL = x * (1 + BEND * x), with x the sum of losses times a factor that measured plans give
TRIES = 4  # plans that are measured for a budget of kl
CLOSE = 0.95  # of that budget is close enough


def _checked(data: CalibrationData, table: Table, budget: Budget) -> tuple[Chosen, dict[str, Any]]:
    """The patterns that the run takes, and what the report says of them: the choice by losses, or, if it turns out
    worse on the batches held back, the plain one."""
    goal = next((float(limit.amount) for limit in budget.limits if limit.unit == "kl"), None)
    taken, factor = None, 1.0
    for _ in range(1 if goal is None else TRIES):
        ceilings = table.ceilings(budget) if goal is None else _within(table, _unbent(goal) / max(factor, 1e-9))
        chosen = table.best(ceilings)
        if chosen is None:
            raise ValueError(_unmet(table, budget))
        plans = {"the choice by losses": table.filled(chosen, ceilings)}
        if (plain := table.plain(ceilings)) is not None:
            plans[plain[0]] = table.filled(plain[1], ceilings)
        sums, measured = [table.loss(each) for each in plans.values()], divergences_of(data, [*plans.values()])
        factor = sum(map(_unbent, measured)) / max(sum(sums), 1e-30)
        best = min(range(len(measured)), key=measured.__getitem__)
        title, chosen = [*plans.items()][best]
        if goal is None or measured[best] <= goal:
            costs = {unit: [table.cost(unit, chosen), ceiling] for unit, ceiling in ceilings.items()}
            tried = {name: [total, kl] for name, total, kl in zip(plans, sums, measured)}
            taken = chosen, {"asked": str(budget), "taken": title, "tried": tried, "costs": costs, "factor": factor}
            if goal is None or measured[best] >= CLOSE * goal:
                break
    if taken is None:
        raise ValueError(f"budget='{budget}': the plans that were measured have more KL: give more, or finer choices")
    return taken


def _unbent(kl: float) -> float:
    """The sum of losses, times the factor, of which this is the real KL."""
    return (math.sqrt(1 + 4 * BEND * kl) - 1) / (2 * BEND)


def _within(table: Table, goal: float) -> dict[str, int]:
    """The most zeros at which the sum of losses stays within ``goal``."""
    low, high = 0, table.cost("zeros", dict.fromkeys(each.name for each in table.plan.layers))
    while high - low > max(high // STEPS, 1):
        middle = (low + high) // 2
        chosen = table.best({"zeros": middle})
        total = math.inf if chosen is None else table.loss(chosen)
        low, high = (low, middle) if total <= goal else (middle, high)
    return {"zeros": high}


def _unmet(table: Table, budget: Budget) -> str:
    """What to say of a budget that no choice keeps."""
    names = dict.fromkeys(each.name for each in table.plan.layers)
    said = []
    for limit in budget.limits:
        dense = table.cost(limit.unit, names)
        least = {
            n.name: min(n.choices, key=lambda c, n=n: table.counting.cost(limit.unit, n, c)) for n in table.plan.layers
        }
        share = table.cost(limit.unit, least) / max(dense, 1)
        said.append(
            f"{1 - share:.1%} zeros at most" if limit.unit == "zeros" else f"{share:.1%} of {limit.unit} at least"
        )
    together = " (each alone)" if len(said) > 1 else ""
    return (
        f"budget='{budget}': the choices allow {' and '.join(said)}{together}: add sparser choices, or include layers"
    )


def divergences_of(data: CalibrationData, plans: Sequence[Chosen]) -> list[float]:
    """The KL from the dense model that each plan leaves on the batches held back, before any repair, with solutions of
    dense inputs."""
    run, calls = data.run, data.calls or []
    wanted = {name: [*dict.fromkeys(p for plan in plans if (p := plan[name]))] for name in plans[0]}
    weights: dict[tuple[str, str], Tensor] = {}
    for layer_plan, _, weight in solutions(_first(data), wanted):
        values = layer_plan.layer.values
        held = layer_plan.layer.unmatrix(weight).to(values.device, values.dtype)
        weights[layer_plan.name, str(layer_plan.pattern)] = run.storage.hold_weights(held)
    counts = run.processes.all_gather("the batches of the check", (len(calls), data.own_among(range(len(calls)))))
    places = sorted((i, rank) for rank, (count, _) in enumerate(counts) for i in range(count))
    held_back = places[-judging(len(places) - sum(own for _, own in counts)) :]
    numbers = [i for i, rank in held_back if rank == run.processes.rank]
    variants = [{name: weights[name, str(p)] for name, p in plan.items() if p is not None} for plan in plans]
    return divergences(data, numbers, variants)


# the curve ------------------------------------------------------------------------------------------------------------


SHARES = {"zeros": (20, 35, 50, 60, 70), "bytes": (90, 80, 70, 65, 60), "flops": (80, 65, 50, 40, 30)}  # in percent


@dataclass(frozen=True)
class BudgetCurve(Printed):
    """What budgets of a model cost, before anything is pruned.

    points: (share of ``unit`` in percent, KL in nats, that of the plain plan or None, what one more point costs). KL is
      the sum of the losses, corrected by the KL of the plans that were measured.
    budget: what was asked, the plans that were measured for it (``tried``), and what each of ``layers`` becomes.
    """

    unit: str
    points: list[tuple[int, float, float | None, float | None]]
    budget: dict[str, Any]
    layers: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def text(self, *, all_rows: bool = False) -> str:
        """What ``print`` shows: equal rows folded. ``all_rows``: a line for each layer."""
        heads = (self.unit, "KL", "of plain", f"one more point of {self.unit} costs")
        rows = [
            (f"{share}%", f"{kl:.4f}", f"{kl / plain:.0%}" if plain else "", f"{more:.4f}" if more else "")
            for share, kl, plain, more in self.points
        ]
        measured = ", ".join(f"{name} {kl:.4f}" for name, (_, kl) in self.budget["tried"].items())
        said = paragraph(f"At {self.budget['asked']}, KL as measured: {measured}.", all_rows=all_rows)
        choices = rows_of("layer", [*self.layers], [Column("choice", [*self.layers.values()])], all_rows=all_rows)
        return "\n\n".join((table(heads, rows), said, choices))


def curve_of(data: CalibrationData) -> BudgetCurve:
    """The curve of the first unit of ``config.budget``, with the choice for that budget. The model stays as it is."""
    budget = data.run.config.budget
    assert budget is not None
    unit = budget.limits[0].unit if budget.limits[0].unit in SHARES else "zeros"
    with offloaded_after_errors(data.run.model):
        data, losses = tabled(data)
        chosen, said = _checked(data, losses, budget)

    def kl(share: int, *, plain: bool = False) -> float | None:
        asked = parse_budget(f"{share}% {unit}")
        assert asked is not None
        ceilings = losses.ceilings(asked)
        chosen_there = losses.best(ceilings) if not plain else (losses.plain(ceilings) or (None, None))[1]
        if chosen_there is None:
            return None
        total = said["factor"] * losses.loss(chosen_there)
        return total * (1 + BEND * total)

    points = []
    for share in SHARES[unit]:
        if (own := kl(share)) is not None:
            more = kl(share + 1 if unit == "zeros" else share - 1)
            points.append((share, own, kl(share, plain=True), None if more is None else more - own))
    return BudgetCurve(unit, points, said, {name: str(choice or DENSE) for name, choice in chosen.items()})
