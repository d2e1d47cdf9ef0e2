"""What each layer loses with each choice, and how far a model is from the dense one.

A small change d of a layer's output moves the predictions by d^T E[g g^T] d / 2 nats, with g the gradient of -log p(y)
by the output, labels y drawn from the predictions (accuracy/fisher.py). Outputs taken as uncorrelated, a layer loses
half the sum over its outputs of E[g_r^2] times the mean squared error of output r in SparseGPT's solution, on inputs of
the dense model. Losses of layers are added up.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.distill import logits_of
from modelopt_sparse.accuracy.fisher import Gradients
from modelopt_sparse.calibration.blocks import blocks_in_call_order
from modelopt_sparse.calibration.forward import CalibrationData
from modelopt_sparse.calibration.inputs import collect
from modelopt_sparse.calibration.padding import TokenMasks
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.calibration.sums import BY_SIZE, FEWER, DeferredStats, SharedInput, part_of
from modelopt_sparse.methods import METHODS
from modelopt_sparse.methods.base import Stats
from modelopt_sparse.methods.kl import kl_divergence
from modelopt_sparse.methods.patterns import Pattern
from modelopt_sparse.plan.budget import DENSE
from modelopt_sparse.plan.plan import LayerPlan, Plan
from modelopt_sparse.reports.progress import Progress
from modelopt_sparse.reports.report import Report
from modelopt_sparse.solving.solve import solve_layers

SOLVER = METHODS["sparsegpt"]
Losses = dict[str, dict[str, float]]  # layer -> choice -> nats per token

# solutions of dense inputs --------------------------------------------------------------------------------------------


def solutions(
    data: CalibrationData, wanted: Mapping[str, Sequence[Pattern]]
) -> Iterator[tuple[LayerPlan, Pattern, Stats | DeferredStats | None, Tensor]]:
    """SparseGPT's solution of each layer for each of the patterns that are ``wanted`` of it, on inputs of the dense
    model: (layer, pattern, statistics, weight as a matrix). The model stays as it is."""
    run = data.run
    layers = [replace(each, method=SOLVER, options=SOLVER.options, needs="gram", steps=()) for each in run.plan.layers]
    tuned = {"reconstruct": None, "distill": None, "permute": False, "allocation": "uniform", "progress": False}
    config = replace(run.config, **tuned, sequential="none", refine=0, polish=0)
    # what is noted of inputs is noted by the run itself; notes that are there keep warnings from being made twice
    report = replace(Report(), notes=[FEWER, BY_SIZE])
    run = replace(run, plan=replace(run.plan, layers=tuple(layers)), config=config, report=report)
    data = replace(data, run=run)
    with ExitStack() as ending:
        for block in blocks_in_call_order(run, data, ending):
            inputs = block.inputs()
            with inputs.on_device():
                if not block.layer_plans:
                    inputs.advance()
                    continue
                shared_inputs = collect(block.layer_plans, inputs, run, one_pass=block.one_pass)
                for shared in shared_inputs:
                    names = {
                        f"{plan.name!r} at '{pattern}'": replace(plan, pattern=pattern)
                        for plan in shared.layer_plans
                        for pattern in wanted[plan.name]
                    }
                    variants = [replace(plan, name=name) for name, plan in names.items()]
                    if block.block is not None:
                        run.storage.load(block.block)
                    for solved in solve_layers([SharedInput(variants, shared.stats)] if variants else [], run):
                        plan = names[solved.layer_plan.name]
                        yield plan, plan.pattern, shared.stats, solved.solution.weight


def losses_of(data: CalibrationData, found: Gradients) -> Losses:
    """The loss of each layer with each of its choices."""
    run = data.run
    for layer_plan in run.plan.layers:
        if not torch.isfinite(found.rows[layer_plan.name]).all():
            problem = "the gradients of its outputs hold NaN or inf"
            raise ValueError(
                f"layer {layer_plan.name!r}: {problem}: run the model in bfloat16 or float32, or exclude it"
            )
    wanted = {each.name: [choice for choice in each.choices if choice is not None] for each in run.plan.layers}
    losses: Losses = {each.name: {DENSE: 0.0} for each in run.plan.layers}
    count = sum(map(len, wanted.values()))
    with Progress("weigh the choices", "choice", count, show=run.config.progress) as bar:
        for layer_plan, pattern, stats, weight in solutions(data, wanted):
            loss = 0.0 if stats is None else _loss(layer_plan, stats, weight, found, run)
            losses[layer_plan.name][str(pattern)] = float(f"{loss:.9g}")
            bar.update()
    return run.processes.broadcast("the losses of choices", [], 0, losses)


def _loss(layer_plan: LayerPlan, stats: Stats | DeferredStats, weight: Tensor, found: Gradients, run: Run) -> float:
    """``found`` has sums of g_r^2 over tokens, which meet mean squared errors; or such sums times the mean square of
    the input, which meet errors relative to it."""
    total, rows = 0.0, found.rows[layer_plan.name]
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
        if layer_plan.name in found.seen:
            # few rows of an expert in a list were filled up with those of others
            size: Any = max(part.tokens, run.config.min_tokens) if layer_plan.layer.mixture else part.tokens
        else:
            size = part.gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).double().cpu().clamp_min(1e-300)
        total += float((errors / size * rows[where]).sum())
    return total / 2 / found.tokens


# divergence -----------------------------------------------------------------------------------------------------------


@contextmanager
def in_place(plan: Plan, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """While entered, layers are called with these weights in the place of their own.

    A weight is put in place when its module is called, and the dense one put back after the call, so that one layer at
    a time is held twice. Whatever happens, the weights end as they were.
    """
    dense: dict[str, Tensor] = {}

    def before(layer_plan: LayerPlan, *_: Any) -> None:
        if layer_plan.name not in dense:  # else in a call that has not ended, or that failed and was gone over
            values = layer_plan.layer.values
            dense[layer_plan.name] = values.clone()
            values.copy_(weights[layer_plan.name])

    def after(layer_plan: LayerPlan, *_: Any) -> None:
        if layer_plan.name in dense:
            layer_plan.layer.values.copy_(dense.pop(layer_plan.name))

    with ExitStack() as hooks:
        for layer_plan in plan.layers:
            if layer_plan.name in weights:
                hooks.callback(after, layer_plan)
                for module in layer_plan.layer.hooked_modules:
                    hooks.enter_context(module.register_forward_pre_hook(partial(before, layer_plan)))
                    hooks.enter_context(module.register_forward_hook(partial(after, layer_plan)))
        yield


def divergences(data: CalibrationData, numbers: Sequence[int], variants: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """The mean KL(dense || variant) per token on these calls, of all processes; a variant has weights of layers."""
    run, own = data.run, {}
    token_mask: Tensor | None = None
    rows = torch.empty(0)

    def begin(masks: TokenMasks) -> None:
        nonlocal token_mask
        token_mask = masks.decoder

    def after(model: nn.Module, args: tuple, output: Any) -> None:
        nonlocal rows
        logits = logits_of(output)
        assert logits is not None  # gradients were found
        real = token_mask is not None and token_mask.shape == logits.shape[:-1]
        rows = logits[token_mask.to(logits.device)] if real else logits.flatten(0, -2)  # type: ignore[union-attr]

    with run.model.register_forward_hook(after):
        for number in numbers:
            data.run_model(begin, numbers=[number])
            dense, sums = rows, []
            for weights in variants:
                with in_place(run.plan, weights):
                    data.run_model(begin, numbers=[number])
                sums.append(float(kl_divergence(dense, rows).sum()))
            own[number * run.processes.size + run.processes.rank] = (len(dense), sums)
    calls = [call for of_rank in run.processes.all_gather("a divergence", own) for call in sorted(of_rank.items())]
    calls = [call for _, call in sorted(calls)]  # in one order, however many processes
    tokens = sum(tokens for tokens, _ in calls)
    return [sum(sums[i] for _, sums in calls) / max(tokens, 1) for i in range(len(variants))]
