"""Where zeros go: the plan that loses least within a budget, chosen by the losses of layers, and checked once against a
plain one.

A small change d of a layer's output moves the predictions by d^T E[g g^T] d / 2 nats, with g the gradient of -log p(y)
by the output, labels y drawn from the predictions; squared errors likewise (accuracy/fisher.py). Outputs taken as
uncorrelated, a layer loses half the sum over its outputs of E[g_r^2] times the mean squared error of output r in
SparseGPT's solution, on inputs of the dense model. Losses of layers are added up.

Shape letters: N groups of layers that choose together (the experts of a mixture), K choices, B units of a budget.
"""

import json
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelopt_sparse.accuracy.fisher import WEIGHED, Gradients, gradients_of, users_first, wants_metrics, with_metrics
from modelopt_sparse.accuracy.tuning import BatchNumbers, called_with
from modelopt_sparse.calibration.blocks import blocks_in_call_order
from modelopt_sparse.calibration.dense import run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import collect
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import BY_SIZE, FEWER, DeferredStats, SharedInput, part_of
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured
from modelopt_sparse.model.devices import offloaded
from modelopt_sparse.model.output import OutputError, in_words
from modelopt_sparse.plan.budget import DENSE, Budget, choose, parse_choice
from modelopt_sparse.plan.options import OF_OUTPUT, SparsifyConfig
from modelopt_sparse.plan.plan import LayerPlan, Plan, takes_shape
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.text import Column, Printed, Progress, paragraph, rows_of, table
from modelopt_sparse.reports.values import Skipped
from modelopt_sparse.solving.solve import solve_layers
from modelopt_sparse.values import grouped

# solutions that are only tried ----------------------------------------------------------------------------------------


SOLVER = METHODS["sparsegpt"]
SOLVED = 3  # levels of a layer
GRID = 10_000  # levels have four decimals
BYTES = 2  # of a weight: runtimes pack those in 16 bits, to which others are converted before
Chosen = Mapping[str, Pattern | None]  # layer -> its pattern; None: dense
Losses = dict[str, dict[Pattern | None, float]]  # layer -> choice -> divergence, such as nats per token


def solutions(
    data: CalibrationData, wanted: Mapping[str, Sequence[Pattern]]
) -> Iterator[tuple[LayerPlan, Stats | DeferredStats | None, Tensor]]:
    """SparseGPT's solution of each layer for each of the patterns that are ``wanted`` of it, on the first rows of the
    user's data in the dense model, which stays as it is: (plan of the pattern, whose name ends with it, statistics,
    weight as a matrix)."""
    data = data.only(users_first(data, WEIGHED))
    more: dict[str, Any] = {"method": SOLVER, "options": SOLVER.options, "needs": "gram", "steps": ()}
    plan = replace(data.run.plan, layers=tuple(replace(each, **more) for each in data.run.plan.layers))
    untuned = {"reconstruct": None, "distill": None, "permute": False, "polish": 0}
    config = replace(data.run.config, **untuned, sequential="none", progress=False)
    # the run itself notes what there is to say of inputs; with these notes nothing is warned of twice
    run = replace(data.run, plan=plan, config=config, report=Report(notes=[FEWER, BY_SIZE]))
    for block in blocks_in_call_order(run, replace(data, run=run)):
        inputs = block.inputs()
        with inputs.on_device():
            if not block.layer_plans:
                inputs.advance()
                continue
            shared_inputs = collect(block.layer_plans, inputs, run, one_pass=block.one_pass)
            if block.block is not None:
                run.storage.load(block.block)
            for shared in shared_inputs:
                pairs = [(each, pattern) for each in shared.layer_plans for pattern in wanted[each.name]]
                tried = [replace(each, name=f"{each.name} at {pattern}", pattern=pattern) for each, pattern in pairs]
                for solved in solve_layers([SharedInput(tried, shared.stats)], run):
                    yield solved.layer_plan, shared.stats, solved.solution.weight


# losses ---------------------------------------------------------------------------------------------------------------


def losses_of(data: CalibrationData, gradients: Gradients) -> Losses:
    """The loss of each layer with each of its choices."""
    run = data.run
    for layer_plan in run.plan.layers:
        if not torch.isfinite(gradients.rows[layer_plan.name]).all():
            raise ValueError(f"layer {layer_plan.name!r}: its gradients hold NaN or inf: run in float32, or exclude it")
    wanted = {each.name: _solved_choices(each) for each in run.plan.layers}
    losses: Losses = {each.name: {None: 0.0} for each in run.plan.layers}
    with Progress("weigh the choices", "choice", sum(map(len, wanted.values())), show=run.config.progress) as bar:
        for layer_plan, stats, weight in solutions(data, wanted):
            loss = 0.0 if stats is None else _loss(layer_plan, stats, weight, gradients, run.processes)
            losses[layer_plan.layer.name][layer_plan.pattern] = float(f"{loss:.9g}")
            bar.update()
    return run.processes.all_gather("the losses of choices", losses)[0]


def _solved_choices(layer_plan: LayerPlan) -> list[Pattern]:
    """Of many levels the lowest, the middle and the highest are solved; the losses of others follow from theirs."""
    levels = sorted((p for p in layer_plan.choices if isinstance(p, Unstructured)), key=lambda p: p.sparsity)
    levels = [levels[0], levels[len(levels) // 2], levels[-1]] if len(levels) > SOLVED else levels
    return [*levels, *(p for p in layer_plan.choices if isinstance(p, NM))]


def _loss(
    layer_plan: LayerPlan, stats: Stats | DeferredStats, weight: Tensor, gradients: Gradients, processes: Processes
) -> float:
    """Half the sum over rows of E[g_r^2] times the mean squared error. ``gradients`` have the former times the mean
    square of the input, which meets errors relative to that. Of rows that are held the first process has all."""
    layer, total = layer_plan.layer, 0.0
    dense, rows, step = (
        layer.matrix(layer.values),
        gradients.rows[layer.name],
        layer_plan.at_once or layer_plan.matrices,
    )
    for start in range(0, layer_plan.matrices if layer_plan.routed else 1, step):
        experts = range(start, min(start + step, layer_plan.matrices))
        where = slice(experts.start, experts.stop) if layer_plan.routed else slice(None)
        held = stats.sent_to(0, experts, processes) if isinstance(stats, DeferredStats) else stats
        part = part_of(held, experts) if layer_plan.routed else held
        assert isinstance(part, Stats)
        assert part.gram is not None
        error = (dense[where].to(weight.device) - weight[where]).to(part.gram.dtype)
        errors = ((error @ part.gram) * error).sum(-1).double().cpu()
        size = part.square_sums.double().sum(-1, keepdim=True).cpu().clamp_min(1e-300)
        total += float((errors / size * rows[where]).sum())
    return total / 2 / gradients.tokens


def loss_at(losses: Mapping[Pattern | None, float], choice: Pattern | None) -> float:
    """The loss of a choice; of a level that was not solved it is a power of the level between its neighbours, or beyond
    the last of them; below the first of them the third power."""
    if choice in losses or not isinstance(choice, Unstructured):
        return losses[choice]
    points = sorted((p.sparsity, loss) for p, loss in losses.items() if isinstance(p, Unstructured) and loss > 0)
    if not points or not choice.sparsity:
        return 0.0
    pairs = [*pairwise([(points[0][0] / 2, points[0][1] / 8), *points])]
    (s0, loss0), (s1, loss1) = next((pair for pair in pairs if choice.sparsity <= pair[1][0]), pairs[-1])
    return loss0 * (choice.sparsity / s0) ** (math.log(loss1 / loss0) / math.log(s1 / s0))


# divergence -----------------------------------------------------------------------------------------------------------


def divergences(data: CalibrationData, plans: Sequence[Chosen]) -> list[float]:
    """How far the output of each plan is from the dense one on the batches held back, of all processes, before any
    repair, with solutions of dense inputs."""
    run, weights = data.run, {}
    wanted = {name: [*dict.fromkeys(p for plan in plans if (p := plan[name]))] for name in plans[0]}
    for layer_plan, _, weight in solutions(data, wanted):
        layer = layer_plan.layer
        held = layer.unmatrix(weight).to(layer.values.device, layer.values.dtype)
        weights[layer.name, layer_plan.pattern] = run.storage.hold_weights(held)
    batches = BatchNumbers.of_calls(data)

    @cache
    def measured(place: int) -> list[list[float]]:
        """Of each plan."""
        dense, sums = data.counted(*data.output_of(place)), []
        for plan in plans:
            pruned = [each for each in run.plan.layers if plan[each.name]]
            with called_with({x.layer: partial(weights.__getitem__, (x.name, plan[x.name])) for x in pruned}):
                sums.append(dense.sums(data.counted(*data.output_of(place))))
        return sums

    return [batches.judged(lambda place, i=i: measured(place)[i]) for i in range(len(plans))]


# what layers may become -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """What the layers of a plan may become, what that loses, and what it costs.

    config: says what bytes are counted by, and which levels are open. rows: layer -> how many rows each of its matrices
    is multiplied with in the dense model for a token, or for a sample of a net without tokens.
    """

    plan: Plan
    losses: Losses
    config: SparsifyConfig
    rows: Mapping[str, Fraction]

    @cached_property
    def groups(self) -> list[list[LayerPlan]]:
        """Layers that choose together: the experts of a mixture that are modules in a list; else each by itself."""
        return list(grouped(self.plan.layers, lambda each: each.layer.mixture or each.name).values())

    @cached_property
    def choices(self) -> list[tuple[Pattern | None, ...]]:
        """Those of each group; a group that has fewer than another has its first one several times."""
        of_groups = [group[0].choices for group in self.groups]
        most = max(map(len, of_groups))
        return [choices + choices[:1] * (most - len(choices)) for choices in of_groups]

    def dense(self, unit: str) -> int:
        """What all layers cost as they are."""
        return self.cost(unit, dict.fromkeys(self.losses))

    def cost(self, unit: str, chosen: Chosen) -> int:
        """What all layers cost, in whole numbers: weights that stay, bytes, or FLOPs of a token or sample."""
        return sum(self._cost_of(unit, group, chosen) for group in self.groups)

    def _cost_of(self, unit: str, group: Sequence[LayerPlan], chosen: Chosen) -> int:
        total = Fraction()
        for each in group:
            choice = chosen[each.name]
            stay = each.size - _zeros(each, choice)
            if unit == "bytes":
                packed = isinstance(choice, NM) and (choice.n, choice.m) == (2, 4)
                packed = packed and takes_shape(each.shape)[str(self.config.runtime)]
                total += stay * BYTES + stay // 4 if packed else each.size * BYTES  # two bits for each that stays
            else:
                total += stay * (2 * self.rows.get(each.name, 0) if unit == "flops" else 1)
        return math.ceil(total)

    def loss(self, chosen: Chosen, layers: Sequence[LayerPlan] | None = None) -> float:
        """The sum of the losses of all layers, or of these; of a level that is no choice it is interpolated."""
        return sum(loss_at(self.losses[each.name], chosen[each.name]) for each in layers or self.plan.layers)

    def ceiling(self, budget: Budget) -> int:
        """The most that all layers may cost."""
        return budget.ceiling(self.dense(budget.unit))

    def _of_choices(self, measure: Callable[[Sequence[LayerPlan], Chosen], float]) -> np.ndarray:
        """[N, K]: what is measured of each group with each of its choices."""
        return np.array(
            [
                [measure(group, dict.fromkeys((each.name for each in group), choice)) for choice in choices]
                for group, choices in zip(self.groups, self.choices)
            ]
        )

    @cached_property
    def losses_NK(self) -> np.ndarray:
        return self._of_choices(lambda group, chosen: self.loss(chosen, group))

    def costs_NK(self, unit: str) -> np.ndarray:
        return self._of_choices(partial(self._cost_of, unit))

    def named(self, choice_N: np.ndarray) -> Chosen:
        of_groups = zip(self.groups, self.choices, choice_N)
        return {each.name: choices[k] for group, choices, k in of_groups for each in group}

    def best(self, budget: Budget) -> Chosen | None:
        """The choice within the budget whose losses have the smallest sum; None if there is none."""
        choice_N = choose(self.losses_NK, self.costs_NK(budget.unit), self.ceiling(budget))
        return None if choice_N is None else self.named(choice_N)

    @cached_property
    def open(self) -> dict[str, Unstructured]:
        """A level of each layer that may have any: no rule gives it choices of its own, or fixes one."""

        def of_config(each: LayerPlan) -> tuple[Pattern | None, ...]:
            columns, scope = each.layer.columns(each.layer.parameter), each.method.scope
            fitting = (c for c in self.config.choices or () if c is None or not c.misfit(columns))
            return tuple(choice and choice.with_scope(scope) for choice in fitting)

        free = (each for each in self.plan.layers if each.choices == of_config(each))
        return {x.name: p for x in free if isinstance(p := next(filter(_is_level, x.choices), None), Unstructured)}

    def plain(self, budget: Budget) -> dict[str, Chosen]:
        """Title -> what one does without losses: one level in all layers that may have any, and in others the sparsest
        of their choices up to it; or, where none may, the cheapest choice from the first layer on, so that the last
        ones stay dense. Empty if that is not enough."""
        cheapest = self.named(self.costs_NK(budget.unit).argmin(1))
        by_level, ceiling = bool(self.open), self.ceiling(budget)

        def up_to(choices: Sequence[Pattern | None], share: float) -> Pattern | None:
            by_share = sorted(choices, key=lambda choice: choice.sparsity if choice else 0.0)
            return next((each for each in reversed(by_share) if not each or each.sparsity <= share), by_share[0])

        def at(step: int) -> Chosen:
            if by_level:
                chosen = {each.name: up_to(each.choices, step / GRID) for each in self.plan.layers}
                return chosen | {name: replace(level, sparsity=step / GRID) for name, level in self.open.items()}
            some = {each.name for group in self.groups[step:] for each in group if None in each.choices}
            return {name: None if name in some else choice for name, choice in cheapest.items()}

        def fits(step: int) -> bool:
            return self.cost(budget.unit, at(step)) <= ceiling

        steps = range(1, GRID) if by_level else range(len(self.groups) + 1)
        if (place := bisect_left(steps, True, key=fits)) == len(steps):
            return {}
        where = "every layer" if len(self.open) == len(self.plan.layers) else "every layer that rules leave open"
        title = f"{100 * steps[place] / GRID:.3g}% in {where}" if by_level else "the last layers dense"
        return {title: at(steps[place])}

    def filled(self, chosen: Chosen, budget: Budget) -> Chosen:
        """The choice, and of one for zeros, what its levels have above them taken back from all levels alike that rules
        leave open."""
        if budget.unit != "zeros":
            return chosen
        free = [each for each in self.plan.layers if each.name in self.open]
        levels = [(each, level) for each in free if isinstance(level := chosen[each.name], Unstructured)]
        return {**chosen, **lowered(levels, self.ceiling(budget) - self.cost("zeros", chosen))}


def _zeros(layer_plan: LayerPlan, choice: Pattern | None) -> int:
    return 0 if choice is None else choice.zeros_in(layer_plan.shape)


def _is_level(choice: Pattern | None) -> bool:
    return isinstance(choice, Unstructured)


def lowered(levels: Sequence[tuple[LayerPlan, Unstructured]], surplus: int) -> dict[str, Unstructured]:
    """Layer -> its level, all lowered alike until so many zeros are gone, but for less than the finest step of a layer:
    one weight of each row or matrix, or 0.0001 of it."""
    sizes = [min(math.prod(each.shape[-1 if level.scope == "row" else -2 :]), GRID) for each, level in levels]

    def at(i: int, step: int) -> Unstructured:
        level = levels[i][1]
        return level if step == sizes[i] else replace(level, sparsity=round(step / sizes[i], 4))

    def zeros_in(i: int, step: int) -> int:
        return at(i, step).zeros_in(levels[i][0].shape)

    def shifted(shift: int) -> list[int]:
        exact = [(level.sparsity * size, (shift / 2**52 - 1) * size) for (_, level), size in zip(levels, sizes)]
        return [min(max(round(now + more), 0), math.ceil(now)) for now, more in exact]

    def zeros_of(steps: Sequence[int]) -> int:
        return sum(map(zeros_in, range(len(levels)), steps))

    zeros = sum(level.zeros_in(each.shape) for each, level in levels) - surplus
    steps = shifted(bisect_left(range(2**53), True, key=lambda shift: zeros_of(shifted(shift)) >= zeros))
    surplus, again = zeros_of(steps) - zeros, True
    while again:
        again = False
        excess = [step / size - level.sparsity for (_, level), step, size in zip(levels, steps, sizes)]
        for i in sorted(range(len(levels)), key=lambda i: -excess[i]):
            less = zeros_in(i, steps[i]) - zeros_in(i, steps[i] - 1) if steps[i] else surplus + 1
            if less <= surplus:
                steps[i], surplus, again = steps[i] - 1, surplus - less, True
    return {each.name: at(i, steps[i]) for i, (each, _) in enumerate(levels)}


def planned(plan: Plan, chosen: Chosen) -> Plan:
    """The plan with the chosen patterns; layers that stay dense are skipped."""
    layers = tuple(replace(each, pattern=p) for each in plan.layers if (p := chosen[each.name]) is not None)
    dense = (each for each in plan.layers if chosen[each.name] is None)
    skipped = (Skipped(each.name, each.type, each.shape, "dense, by the budget") for each in dense)
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
    said = run.storage.recall()
    if said is None:
        try:
            data, said = decided(data)
        except (NoLosses, OutputError) as why:
            if run.config.budget is None or not run.config.budget.optional:
                raise
            run.report.settings.update(budget=None, choices=None)
            run.report.notes.append(f"{run.plan.layers[0].pattern} in every layer, not shared out by losses: {why}")
            return data
        said["seconds"] = round(time.perf_counter() - began, 3)
        run.processes.check_same({"the plan of the budget": str(said["layers"])}, "report this")
        run.storage.keep(said)
    plan = planned(run.plan, {name: parse_choice(text) for name, text in said["layers"].items()})
    run.report.skipped = plan.skipped
    run.report.budgeted(said)
    return replace(data, run=replace(run, plan=plan))


class NoLosses(ValueError):
    """What layers lose cannot be measured."""


BEND = 0.75  # real KL = x * (1 + BEND * x), with x the sum of losses times a factor that measured plans give


def decided(data: CalibrationData) -> tuple[CalibrationData, dict[str, Any]]:
    """What the report says of the choice by losses, or, if that turns out worse on the batches held back, of the plain
    plan; and the data, which knows the metrics that come from the same gradients."""
    budget = data.run.config.budget
    assert budget is not None
    data, table = tabled(data)
    if (chosen := table.best(budget)) is None:
        share = table.costs_NK(budget.unit).min(1).sum() / table.dense(budget.unit)
        allowed = f"the choices leave at least {share:.1%} of {budget.unit.replace('zeros', 'the weights')}"
        raise ValueError(f"budget='{budget}': {allowed}: add sparser choices, or include layers")
    plans = {"the choice by losses": chosen, **table.plain(budget)}
    plans = {title: table.filled(plan, budget) for title, plan in plans.items()}
    sums, measured = [table.loss(plan) for plan in plans.values()], divergences(data, [*plans.values()])
    taken, chosen = [*plans.items()][measured.index(min(measured))]
    factor = sum(map(_unbent, measured)) / max(sum(sums), 1e-30)
    return data, {
        "asked": str(budget),
        "taken": taken,
        **{name: by for name, by in data.run.report.settings.items() if name == "divergence"},
        "tried": {title: [total, kl] for title, total, kl in zip(plans, sums, measured)},
        "costs": {budget.unit: [table.cost(budget.unit, chosen), table.ceiling(budget)]},
        "layers": {name: str(choice or DENSE) for name, choice in chosen.items()},
        "zeros": {each.name: _zeros(each, chosen[each.name]) / each.size for each in table.plan.layers},
        "curve": _curve(table, budget.unit, factor),
    }


def _unbent(kl: float) -> float:
    """The sum of losses, times the factor, of which this is the real KL."""
    return (math.sqrt(1 + 4 * BEND * kl) - 1) / (2 * BEND)


def tabled(data: CalibrationData) -> tuple[CalibrationData, Table]:
    """The losses of all choices, measured, or read from the file that ``losses`` names; and the data, which knows the
    metrics that come from the same gradients."""
    run, file = data.run, data.run.config.losses
    if data.calls is None:
        raise NoLosses("a forward_loop calls the model in its own way")
    if any(each.within_mask for each in run.plan.layers):
        raise NoLosses("layers carry masks, whose zeros stay")
    if offloaded(run.model, [run.model]) is not None:
        raise NoLosses("accelerate offloads weights, which leave no gradients then")
    if file is not None and file.exists():
        losses = _read(file, run)
    else:
        blocks = run.plan.blocks if wants_metrics(run.config) else []
        gradients = gradients_of(data, blocks, [each.layer for each in run.plan.layers])
        if gradients is None:
            raise NoLosses("no gradient of the output reaches the layers: give output= that depends on them, or rules")
        data, losses = with_metrics(data, gradients), losses_of(data, gradients)
        if file is not None and run.processes.rank == 0:
            shapes = {each.name: list(each.shape) for each in run.plan.layers}
            written = {name: {str(choice or DENSE): x for choice, x in of.items()} for name, of in losses.items()}
            facts = {"shapes": shapes, **run.config.counts(), "losses": written}
            file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return data, Table(run.plan, losses, run.config, (data.dense or run_dense(data).dense).rows.of)


def _read(file: Path, run: Run) -> Losses:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        shapes = value["shapes"]
        losses = {name: {parse_choice(text): x for text, x in of.items()} for name, of in value["losses"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"losses={str(file)!r} is no file of losses ({error!r}): give another path") from None
    before, now = {name: value[name] for name in OF_OUTPUT if name in value}, run.config.counts()
    if before != now:
        problem = f"was measured with {before or 'no output= and divergence='}, this run is with {now or 'neither'}"
        raise ValueError(f"losses={str(file)!r} {problem}: give a new path")
    for each in run.plan.layers:
        known = losses.get(each.name, {None: 0.0})
        levels = any(map(_is_level, known))  # those of others follow
        missing = [str(c) for c in each.choices if c not in known and not (levels and _is_level(c))]
        if shapes.get(each.name) != list(each.shape) or missing:
            problem = f"no losses of layer {each.name!r} {list(each.shape)} at {', '.join(missing) or 'this shape'}"
            raise ValueError(f"losses={str(file)!r} has {problem}: give that of this model and choices, or a new path")
    return losses


# the curve ------------------------------------------------------------------------------------------------------------


SHARES = {"zeros": (20, 35, 50, 60, 70), "bytes": (90, 80, 70, 65, 60), "flops": (80, 65, 50, 40, 30)}  # in percent


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
        what, _ = in_words(self.budget.get("divergence"))
        heads = (self.unit, what, "of plain", f"one more point of {self.unit} costs")
        rows = [
            (f"{share}%", f"{kl:.4f}", f"{kl / plain:.0%}" if plain else "", f"{more:.4f}" if more else "")
            for share, kl, plain, more in self.points
        ]
        measured = ", ".join(f"{name} {kl:.4f}" for name, (_, kl) in self.budget["tried"].items())
        said = paragraph(f"At {self.budget['asked']}, {what} as measured: {measured}.", all_rows=all_rows)
        choices = rows_of("layer", [*self.layers], [Column("choice", [*self.layers.values()])], all_rows=all_rows)
        return "\n\n".join((table(heads, rows), said, choices))

    def to_html(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write the curve, the plans that were measured and the choices as a page; return its path. See
        `Report.to_html`."""
        report = Report.begin((), (), {})
        report.budgeted(self.budget)
        return report.to_html(path, title=title)


def curve_of(data: CalibrationData) -> BudgetCurve:
    """The curve of the unit of ``config.budget``, with the choice for that budget. The model stays as it is."""
    _, said = decided(data)
    return BudgetCurve(**said["curve"], budget=said, layers=said["layers"])


def _curve(table: Table, unit: str, factor: float) -> dict[str, Any]:
    """See `BudgetCurve`. ``factor``: of the sum of losses, by the plans that were measured."""

    def kl(share: int, *, plain: bool = False) -> float | None:
        budget = Budget(unit, Fraction(share, 100), of_dense=True)
        chosen = next(iter(table.plain(budget).values()), None) if plain else table.best(budget)
        total = None if chosen is None else factor * table.loss(chosen)
        return total and total * (1 + BEND * total)

    points = []
    for share in SHARES[unit]:
        if (own := kl(share)) is not None:
            more = kl(share + 1 if unit == "zeros" else share - 1)
            points.append([share, own, kl(share, plain=True), None if more is None else more - own])
    return {"unit": unit, "points": points}
