"""What layers lose with each of their choices.

A small change d of a layer's output moves the predictions by d^T E[g g^T] d / 2 nats, with g the gradient of -log p(y)
by the output, labels y drawn from the predictions; squared errors likewise (accuracy/fisher.py). Outputs taken as
uncorrelated, a layer loses half the sum over its outputs of E[g_r^2] times the mean squared error of output r in
SparseGPT's solution, on inputs of the dense model. Losses of layers are added up.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.accuracy.fisher import LOSS_ROWS, Gradients, gradients_of, users_first, wants_metrics, with_metrics
from modelopt_sparse.accuracy.tuning import BatchNumbers, called_with
from modelopt_sparse.budget.costs import ChoiceCosts, Chosen, Losses
from modelopt_sparse.calibration.dense import blocks_in_call_order, run_dense
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.stats import BY_SIZE, FEWER, DeferredStats, SharedInput, collect
from modelopt_sparse.checks import check_number
from modelopt_sparse.distributed import Processes
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured
from modelopt_sparse.model.devices import offloaded
from modelopt_sparse.plan.budget import DENSE, parse_choice
from modelopt_sparse.plan.options import OF_OUTPUT
from modelopt_sparse.plan.plan import LayerPlan, checksum
from modelopt_sparse.reports.report import Report
from modelopt_sparse.reports.text import write_whole
from modelopt_sparse.run import Run
from modelopt_sparse.solving.solve import solve_layers

# solutions that are only tried ----------------------------------------------------------------------------------------


SOLVER = METHODS["sparsegpt"]
SOLVED = 3  # levels of a layer


def solutions(
    data: CalibrationData, wanted: Mapping[str, Sequence[Pattern]]
) -> Iterator[tuple[LayerPlan, Stats | DeferredStats | None, Tensor]]:
    """Solve each layer by SparseGPT for each of the patterns that are ``wanted`` of it, on the first rows of the user's
    data in the dense model, which stays as it is. Yields (plan of the pattern, whose name ends with it, statistics,
    weight as a matrix)."""
    data = data.only(users_first(data, LOSS_ROWS))
    settings: dict[str, Any] = {"method": SOLVER, "options": SOLVER.options, "needs": "gram", "steps": ()}
    plan = replace(data.run.plan, layers=tuple(replace(layer, **settings) for layer in data.run.plan.layers))
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
                pairs = [(layer, pattern) for layer in shared.layer_plans for pattern in wanted[layer.name]]
                tried = [replace(layer, name=f"{layer.name} at {pattern}", pattern=pattern) for layer, pattern in pairs]
                for layer_plan, solved, stats in solve_layers([SharedInput(tried, shared.stats)], run):
                    yield layer_plan, stats, solved.solution.weight


# losses ---------------------------------------------------------------------------------------------------------------


def losses_of(data: CalibrationData, gradients: Gradients) -> Losses:
    """The loss of each layer with each of its choices."""
    run = data.run
    for layer_plan in run.plan.layers:
        if not torch.isfinite(gradients.rows[layer_plan.name]).all():
            raise ValueError(f"layer {layer_plan.name!r}: its gradients hold NaN or inf: run in float32, or exclude it")
    wanted = {layer.name: _solved_choices(layer) for layer in run.plan.layers}
    losses: Losses = {layer.name: {None: 0.0} for layer in run.plan.layers}
    with run.bar("weigh the choices", "choice", sum(map(len, wanted.values()))) as bar:
        for layer_plan, stats, weight in solutions(data, wanted):
            loss = 0.0 if stats is None else _loss(layer_plan, stats, weight, gradients, run.processes)
            losses[layer_plan.layer.name][layer_plan.pattern] = float(f"{loss:.9g}")
            bar.update()
    return run.processes.all_gather("the losses of choices", losses)[0]


def _solved_choices(layer_plan: LayerPlan) -> list[Pattern]:
    """The choices to solve: of many sparsities the lowest, the middle and the highest; the others follow from them."""
    free = sorted((p for p in layer_plan.choices if isinstance(p, Unstructured)), key=lambda p: p.sparsity)
    free = [free[0], free[len(free) // 2], free[-1]] if len(free) > SOLVED else free
    return [*free, *(p for p in layer_plan.choices if isinstance(p, NM))]


def _loss(
    layer_plan: LayerPlan, stats: Stats | DeferredStats, weight: Tensor, gradients: Gradients, processes: Processes
) -> float:
    """Half the sum over rows of E[g_r^2] times the mean squared error. ``gradients`` hold the former times the mean
    square of the input, so that errors are taken relative to that. Rows that are held go to the first process."""
    layer, total, step = layer_plan.layer, 0.0, layer_plan.at_once or layer_plan.matrices
    dense, rows = layer.matrix(layer.values), gradients.rows[layer.name]
    for start in range(0, layer_plan.matrices if layer_plan.routed else 1, step):
        experts = range(start, min(start + step, layer_plan.matrices))
        where = slice(experts.start, experts.stop) if layer_plan.routed else slice(None)
        held = stats.sent_to(0, experts, processes) if isinstance(stats, DeferredStats) else stats
        part = held.part(experts) if layer_plan.routed else held
        assert part.gram is not None
        error = (dense[where].to(weight.device) - weight[where]).to(part.gram.dtype)
        errors = ((error @ part.gram) * error).sum(-1).double().cpu()
        size = part.square_sums.double().sum(-1, keepdim=True).cpu().clamp_min(1e-300)
        total += float((errors / size * rows[where]).sum())
    return total / 2 / gradients.tokens


# divergence -----------------------------------------------------------------------------------------------------------


def divergences(data: CalibrationData, plans: Sequence[Chosen]) -> list[float]:
    """Measure the divergence of each plan from the dense model on the batches held back, of all processes, with
    solutions of dense inputs and without any repair."""
    run, weights = data.run, {}
    wanted = {name: [*dict.fromkeys(p for plan in plans if (p := plan[name]))] for name in plans[0]}
    for layer_plan, _, weight in solutions(data, wanted):
        layer = layer_plan.layer
        held = layer.unmatrix(weight).to(layer.values.device, layer.values.dtype)
        weights[layer.name, layer_plan.pattern] = run.storage.hold(held, weights=True)
    batches = BatchNumbers.of_calls(data)

    @cache
    def measured(call: int) -> list[list[float]]:
        """The divergence sums of each plan."""
        dense, sums = data.counted(*data.output_of(call)), []
        for plan in plans:
            pruned = [x for x in run.plan.layers if plan[x.name]]
            with called_with({x.layer: partial(weights.__getitem__, (x.name, plan[x.name])) for x in pruned}):
                sums.append(dense.sums(data.counted(*data.output_of(call))))
        return sums

    return [batches.validation_error(lambda call, i=i: measured(call)[i]) for i in range(len(plans))]


# all losses -----------------------------------------------------------------------------------------------------------


class NoLosses(ValueError):
    """What layers lose cannot be measured."""


def tabled(data: CalibrationData) -> tuple[CalibrationData, ChoiceCosts]:
    """Measure the losses of all choices, or read them from the file that ``losses`` names -> (the data, with the
    metrics that come from the same gradients; losses and costs)."""
    run, file = data.run, data.run.config.losses
    if data.calls is None:
        raise NoLosses("a forward_loop calls the model in its own way")
    if any(layer_plan.within_mask for layer_plan in run.plan.layers):
        raise NoLosses("layers carry masks, whose zeros stay")
    if offloaded(run.model, [run.model]) is not None:
        raise NoLosses("accelerate offloads weights, which leave no gradients then")
    if file is not None and file.exists():
        losses = _read(file, run)
    else:
        blocks = run.plan.blocks if wants_metrics(run) else []
        gradients = gradients_of(data, blocks, [layer_plan.layer for layer_plan in run.plan.layers])
        if gradients is None:
            raise NoLosses("no gradient of the output reaches the layers: give output= that depends on them, or rules")
        data, losses = with_metrics(data, gradients) if blocks else data, losses_of(data, gradients)
        if file is not None and run.processes.rank == 0:
            written = {name: {str(choice or DENSE): x for choice, x in row.items()} for name, row in losses.items()}
            facts = {"weights": _checksums(run), **run.config.counts(), "losses": written}
            write_whole(file, json.dumps(facts, indent=1) + "\n")
    return data, ChoiceCosts(run.plan, losses, run.config, (data.dense or run_dense(data).dense).rows_of_a_unit)


def _checksums(run: Run) -> dict[str, str]:
    """Of each layer's weight. One block after the other is read."""
    sums: dict[str, str] = {}
    for name, layer_plans in run.plan.by_block.items():
        if name is not None:
            run.storage.load(run.plan.named_blocks[name])
        sums |= {layer_plan.name: checksum(layer_plan.layer.values) for layer_plan in layer_plans}
    return sums


def _read(file: Path, run: Run) -> Losses:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        weights = dict(value["weights"])
        losses = {name: {parse_choice(text): x for text, x in row.items()} for name, row in value["losses"].items()}
        for loss in (x for row in losses.values() for x in row.values()):
            check_number("a loss", loss, "(-inf, inf)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"losses={str(file)!r} is no file of losses ({error!r}): give another path") from None
    before, asked = {name: value[name] for name in OF_OUTPUT if name in value}, run.config.counts()
    if before != asked:
        problem = f"was measured with {before or 'no output= and divergence='}, this run is with {asked or 'neither'}"
        raise ValueError(f"losses={str(file)!r} {problem}: give a new path")
    current = _checksums(run)
    for layer_plan in run.plan.layers:
        known = losses.get(layer_plan.name, {None: 0.0})
        interpolated = any(isinstance(choice, Unstructured) for choice in known)  # those of others follow
        unknown = [choice for choice in layer_plan.choices if choice not in known]
        missing = [str(choice) for choice in unknown if not (interpolated and isinstance(choice, Unstructured))]
        if weights.get(layer_plan.name) != current[layer_plan.name] or missing:
            layer = f"layer {layer_plan.name!r} {list(layer_plan.shape)}"
            problem = f"no losses of {layer} at {', '.join(missing) or 'these weights'}"
            raise ValueError(f"losses={str(file)!r} has {problem}: give that of this model and choices, or a new path")
    return losses
