"""What each layer loses with each choice, and how far a model is from the dense one.

A small change d of a layer's output moves the predictions by d^T E[g g^T] d / 2 nats, with g the gradient of -log p(y)
by the output, labels y drawn from the predictions (accuracy/fisher.py). Outputs taken as uncorrelated, a layer loses
half the sum over its outputs of E[g_r^2] times the mean squared error of output r in SparseGPT's solution, on inputs of
the dense model. Losses of layers are added up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.allocate import dense_inputs
from modelopt_sparse.accuracy.distill import logits_of
from modelopt_sparse.accuracy.fisher import Gradients
from modelopt_sparse.accuracy.tuning import called_with
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.sums import DeferredStats, SharedInput, part_of
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.methods.patterns import NM, Pattern, Unstructured
from modelopt_sparse.plan.budget import DENSE
from modelopt_sparse.plan.plan import LayerPlan
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.solving.solve import solve_layers

SOLVER = METHODS["sparsegpt"]
Losses = dict[str, dict[str, float]]  # layer -> choice -> nats per token

# solutions of dense inputs --------------------------------------------------------------------------------------------


def solutions(
    data: CalibrationData, wanted: Mapping[str, Sequence[Pattern]]
) -> Iterator[tuple[LayerPlan, Stats | DeferredStats | None, Tensor]]:
    """SparseGPT's solution of each layer for each of the patterns that are ``wanted`` of it, on inputs of the dense
    model: (plan with the pattern, statistics, weight as a matrix). The model stays as it is."""
    more: dict[str, Any] = {"method": SOLVER, "options": SOLVER.options, "needs": "gram", "steps": ()}
    layers = [replace(each, **more) for each in data.run.plan.layers]
    for _, shared_inputs, run in dense_inputs(data, layers):
        for shared in shared_inputs:
            variants = {
                f"{each.name} at {pattern}": replace(each, pattern=pattern)
                for each in shared.layer_plans
                for pattern in wanted[each.name]
            }
            tried = SharedInput([replace(each, name=name) for name, each in variants.items()], shared.stats)
            for solved in solve_layers([tried], run):
                yield variants[solved.layer_plan.name], shared.stats, solved.solution.weight


def losses_of(data: CalibrationData, gradients: Gradients) -> Losses:
    """The loss of each layer with each of its choices."""
    run = data.run
    for layer_plan in run.plan.layers:
        if not torch.isfinite(gradients.rows[layer_plan.name]).all():
            problem = f"layer {layer_plan.name!r}: its gradients hold NaN or inf"
            raise ValueError(f"{problem}: run the model in bfloat16 or float32, or exclude it")
    wanted = {each.name: solved_choices(each) for each in run.plan.layers}
    losses: Losses = {each.name: {DENSE: 0.0} for each in run.plan.layers}
    count = sum(map(len, wanted.values()))
    with Progress("weigh the choices", "choice", count, show=run.config.progress) as bar:
        for layer_plan, stats, weight in solutions(data, wanted):
            loss = 0.0 if stats is None else _loss(layer_plan, stats, weight, gradients)
            losses[layer_plan.name][str(layer_plan.pattern)] = float(f"{loss:.9g}")
            bar.update()
    return run.processes.broadcast("the losses of choices", [], 0, losses)


def solved_choices(layer_plan: LayerPlan) -> list[Pattern]:
    """Of many levels the lowest, the middle and the highest are solved; the losses of others follow from theirs."""
    levels = sorted((p for p in layer_plan.choices if isinstance(p, Unstructured)), key=lambda p: p.sparsity)
    levels = [levels[0], levels[len(levels) // 2], levels[-1]] if len(levels) > SOLVED else levels
    return [*levels, *(p for p in layer_plan.choices if isinstance(p, NM))]


SOLVED = 3


def _loss(layer_plan: LayerPlan, stats: Stats | DeferredStats, weight: Tensor, gradients: Gradients) -> float:
    """Half the sum over rows of E[g_r^2] times the mean squared error. ``gradients`` have the former times the mean
    square of the input, which meets errors relative to that."""
    total, rows = 0.0, gradients.rows[layer_plan.name]
    dense = layer_plan.layer.matrix(layer_plan.layer.values)
    step = layer_plan.at_once or layer_plan.matrices
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


# divergence -----------------------------------------------------------------------------------------------------------


def divergences(data: CalibrationData, numbers: Sequence[int], variants: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """The mean KL(dense || variant) per token on these calls, of all processes; a variant has weights of layers."""
    run, own = data.run, {}
    layers = [layer_plan.layer for layer_plan in run.plan.layers]
    token_mask: Tensor | None = None
    rows = torch.empty(0)

    def begin(masks: TokenMasks) -> None:
        nonlocal token_mask
        token_mask = masks.decoder

    def after(model: nn.Module, args: tuple, output: Any) -> None:
        nonlocal rows
        logits = logits_of(output)
        assert logits is not None  # there were gradients
        if token_mask is not None and token_mask.shape == logits.shape[:-1]:
            rows = logits[token_mask.to(logits.device)]
        else:
            rows = logits.flatten(0, -2)

    with run.model.register_forward_hook(after):
        for number in numbers:
            data.run_model(begin, numbers=[number])
            dense, sums = rows, []
            for weights in variants:
                with called_with(
                    {layer: partial(weights.__getitem__, layer.name) for layer in layers if layer.name in weights}
                ):
                    data.run_model(begin, numbers=[number])
                sums.append(float(kl_divergence(dense, rows).sum()))
            own[number * run.processes.size + run.processes.rank] = (len(dense), sums)
    calls = [call for of_rank in run.processes.all_gather("a divergence", own) for call in sorted(of_rank.items())]
    calls = [call for _, call in sorted(calls)]  # in one order, however many processes
    tokens = sum(tokens for tokens, _ in calls)
    return [sum(sums[i] for _, sums in calls) / max(tokens, 1) for i in range(len(variants))]
