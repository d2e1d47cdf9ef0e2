"""What each layer loses with each choice, and how far whole plans are from the dense model.

A small change d of a layer's output moves the predictions by d^T E[g g^T] d / 2 nats, with g the gradient of -log p(y)
by the output, labels y drawn from the predictions (accuracy/fisher.py). Outputs taken as uncorrelated, a layer loses
half the sum over its outputs of E[g_r^2] times the mean squared error of output r in SparseGPT's solution, on inputs of
the dense model. Losses of layers are added up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from modelopt_sparse.accuracy.allocate import dense_inputs
from modelopt_sparse.accuracy.distill import logits_of, of_real_tokens
from modelopt_sparse.accuracy.fisher import WEIGHED, Gradients, users_first
from modelopt_sparse.accuracy.tuning import BatchNumbers, called_with
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.sums import DeferredStats, SharedInput, part_of
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.solving.solve import solve_layers

SOLVER = METHODS["sparsegpt"]
SOLVED = 3  # levels of a layer
Chosen = Mapping[str, Pattern | None]  # layer -> its pattern; None: dense
Losses = dict[str, dict[Pattern | None, float]]  # layer -> choice -> nats per token


def solutions(
    data: CalibrationData, wanted: Mapping[str, Sequence[Pattern]]
) -> Iterator[tuple[LayerPlan, Stats | DeferredStats | None, Tensor]]:
    """SparseGPT's solution of each layer for each of the patterns that are ``wanted`` of it, on the first rows of the
    user's data in the dense model: (plan with the pattern, statistics, weight as a matrix)."""
    more: dict[str, Any] = {"method": SOLVER, "options": SOLVER.options, "needs": "gram", "steps": ()}
    layers = [replace(each, **more) for each in data.run.plan.layers]
    for _, shared_inputs, run in dense_inputs(data.only(users_first(data, WEIGHED)), layers):
        for shared in shared_inputs:
            variants = {
                f"{each.name} at {pattern}": replace(each, pattern=pattern)
                for each in shared.layer_plans
                for pattern in wanted[each.name]
            }
            tried = SharedInput([replace(each, name=name) for name, each in variants.items()], shared.stats)
            for solved in solve_layers([tried], run):
                yield variants[solved.layer_plan.name], shared.stats, solved.solution.weight


# losses ---------------------------------------------------------------------------------------------------------------


def losses_of(data: CalibrationData, gradients: Gradients) -> Losses:
    """The loss of each layer with each of its choices."""
    run = data.run
    for layer_plan in run.plan.layers:
        if not torch.isfinite(gradients.rows[layer_plan.name]).all():
            problem = f"layer {layer_plan.name!r}: its gradients hold NaN or inf"
            raise ValueError(f"{problem}: run the model in bfloat16 or float32, or exclude it")
    wanted = {each.name: _solved_choices(each) for each in run.plan.layers}
    losses: Losses = {each.name: {None: 0.0} for each in run.plan.layers}
    with Progress("weigh the choices", "choice", sum(map(len, wanted.values())), show=run.config.progress) as bar:
        for layer_plan, stats, weight in solutions(data, wanted):
            loss = 0.0 if stats is None else _loss(layer_plan, stats, weight, gradients)
            losses[layer_plan.name][layer_plan.pattern] = float(f"{loss:.9g}")
            bar.update()
    return run.processes.broadcast("the losses of choices", [], 0, losses)


def _solved_choices(layer_plan: LayerPlan) -> list[Pattern]:
    """Of many levels the lowest, the middle and the highest are solved; the losses of others follow from theirs."""
    levels = sorted((p for p in layer_plan.choices if isinstance(p, Unstructured)), key=lambda p: p.sparsity)
    levels = [levels[0], levels[len(levels) // 2], levels[-1]] if len(levels) > SOLVED else levels
    return [*levels, *(p for p in layer_plan.choices if isinstance(p, NM))]


def _loss(layer_plan: LayerPlan, stats: Stats | DeferredStats, weight: Tensor, gradients: Gradients) -> float:
    """Half the sum over rows of E[g_r^2] times the mean squared error. ``gradients`` have the former times the mean
    square of the input, which meets errors relative to that."""
    total, rows = 0.0, gradients.rows[layer_plan.name]
    dense, step = layer_plan.layer.matrix(layer_plan.layer.values), layer_plan.at_once or layer_plan.matrices
    for start in range(0, layer_plan.matrices if layer_plan.routed else 1, step):
        experts = range(start, min(start + step, layer_plan.matrices))
        where = slice(experts.start, experts.stop) if layer_plan.routed else slice(None)
        part = part_of(stats, experts) if layer_plan.routed else stats
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
    """The mean KL(dense || plan) per token of each plan on the batches held back, of all processes, before any repair,
    with solutions of dense inputs."""
    run, calls, weights = data.run, data.calls or [], {}
    wanted = {name: [*dict.fromkeys(p for plan in plans if (p := plan[name]))] for name in plans[0]}
    for layer_plan, _, weight in solutions(data, wanted):
        layer = layer_plan.layer
        held = layer.unmatrix(weight).to(layer.values.device, layer.values.dtype)
        weights[layer.name, layer_plan.pattern] = run.storage.hold_weights(held)
    batches = BatchNumbers.of(run.processes, len(calls), data.own_among(range(len(calls))))

    @cache
    def measured(place: int) -> list[tuple[float, float]]:
        """Of each plan."""
        dense, sums = _predictions(data, place), []
        for plan in plans:
            pruned = [each for each in run.plan.layers if plan[each.name]]
            with called_with({x.layer: partial(weights.__getitem__, (x.name, plan[x.name])) for x in pruned}):
                rows = kl_divergence(dense, _predictions(data, place))
            sums.append((float(rows.sum()), len(rows)))
        return sums

    return [batches.judged(lambda place, i=i: measured(place)[i]) for i in range(len(plans))]


def _predictions(data: CalibrationData, place: int) -> Tensor:
    """The logits of a call, ``[T, V]``, of real tokens alone."""
    masks: list[TokenMasks] = []
    outputs: list[Any] = []
    with data.run.model.register_forward_hook(lambda module, args, output: outputs.append(output)):
        data.run_model(masks.append, numbers=[place])
    logits = logits_of(outputs[0])
    assert logits is not None  # there were gradients, or losses of an earlier run
    return of_real_tokens(logits, masks[0].decoder)
