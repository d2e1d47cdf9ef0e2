"""Reconstruction: better values for what a block has left, against the dense block's output; masks are frozen, or move.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned by Adam on
the squared error of the block's output, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the transformer matching of
3BASiL (arXiv 2603.01376).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.tuning import (
    BatchNumbers,
    Masks,
    Movable,
    TunedWeights,
    only_these_require_grad,
    outputs_of,
    tunable,
    tune,
)
from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.forward import INSTEAD, PaddingError, forward_context
from modelopt_sparse.calibration.inputs import AtBlock, Inputs
from modelopt_sparse.calibration.run import Run
from modelopt_sparse.reports.values import BlockReport


@dataclass(frozen=True)
class TunedModule:
    """What is tuned together: the output of ``module`` (the block itself, or a child of it) should come close to
    ``goals``, one for each calibration batch of this process. ``metric``: R, errors are those of outputs times R."""

    name: str
    module: nn.Module
    goals: list[Tensor]
    metric: Tensor | None = None


def dense_goals(block: BlockTask, inputs: Inputs, run: Run) -> list[TunedModule]:
    """What of a block is tuned, with the dense block's outputs; asked for while the block is dense. Nothing for a block
    that cannot be run by itself; the report says so."""
    options = run.config.reconstruct
    assert options is not None
    if not isinstance(inputs, AtBlock):
        return []
    modules = {block.name: inputs.block} if block.layer_plans else {}
    if options.parts == "children":
        holding = {
            name: child
            for layer_plan in block.layer_plans
            for name, child in inputs.block.named_children()
            if layer_plan.layer.owner in set(child.modules())
        }
        modules = {f"{block.name}.{name}": child for name, child in list(holding.items())[:-1]} | modules
    goals = inputs.dense_outputs(list(modules.values()))
    metrics = inputs.data.metrics
    return [
        TunedModule(name, module, of_module, metrics.get(module))
        for (name, module), of_module in zip(modules.items(), goals)
    ]


def reconstruct(
    block: BlockTask,
    tuned: list[TunedModule],
    masks: Masks,
    movable: Mapping[nn.Parameter, Movable],
    inputs: Inputs,
    run: Run,
) -> None:
    """Tune a block in place, module by module, and report it. ``masks`` are those of the weights pruned in this run
    (True = kept; None: all of it is tuned); those of ``movable`` move.

    Never worse on the batches held back, see `tune`. ``requires_grad`` and gradients are as before afterwards.
    """
    options = run.config.reconstruct
    assert options is not None
    assert isinstance(inputs, AtBlock)
    outputs = outputs_of(block.layer_plans)
    with forward_context(run):
        token_masks = _token_masks(block, inputs, tuned[-1].goals)
        batches = BatchNumbers.of_calls(inputs.data, [call.numbered.number for call in inputs.calls])
        rest = dict(tunable(run.model, inputs.block, masks, vectors=options.norms_and_biases))
        try:
            for part in tuned:
                inside = set(part.module.parameters())
                chosen = {parameter: rest.pop(parameter) for parameter in list(rest) if parameter in inside}
                if chosen:
                    weights = TunedWeights(chosen, outputs, options.learning_rate, movable, processes=run.processes)
                    with only_these_require_grad(inputs.block, chosen, masked=not movable):
                        tuned_part = _tuned(part, inputs, token_masks, batches, weights)
                    run.report.reconstructed(tuned_part, {plan.name for plan in block.layer_plans})
        except BaseException:
            run.report.notes.append(
                f"{tuned[-1].name!r}: its reconstruction was broken off; it has the best values up to then"
            )
            raise


def _token_masks(block: BlockTask, inputs: AtBlock, goals: list[Tensor]) -> list[Tensor | None]:
    """Which tokens of a block's outputs are real, on each batch; None: all."""
    side = inputs.data.sides[inputs.block]
    masks = [getattr(call.numbered.masks, side) for call in inputs.calls]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            shapes = f"an output of shape {list(goal.shape)}, and the token mask has shape {list(mask.shape)}"
            raise PaddingError(f"block {block.name!r} has {shapes}: {INSTEAD}")
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]


def _tuned(
    part: TunedModule,
    inputs: AtBlock,
    token_masks: list[Tensor | None],
    batches: BatchNumbers,
    weights: TunedWeights,
) -> BlockReport:
    config, began = inputs.data.run.config, time.perf_counter()
    assert config.reconstruct is not None

    def squared(values: Tensor, place: int) -> Tensor:
        """The squared norm of the values of real tokens, in the metric of the module."""
        token_mask = token_masks[place]
        real = values if token_mask is None else values[token_mask]
        return (real if part.metric is None else real @ part.metric.to(real.device)).square().sum()

    def error(place: int) -> Tensor:
        output = inputs.outputs_of([part.module], place)[0]
        return squared(output.float() - part.goals[place].float(), place)

    def loss(place: int) -> Tensor:
        # scaled so that neither its gradients nor those inside of the block leave float16's range
        return error(place) / max(of_step[place], 1e-30) * sizes[place] ** 0.5

    energies = [float(squared(goal.float(), place)) for place, goal in enumerate(part.goals)]
    of_step, sizes = batches.of_steps(energies), batches.of_steps([goal.numel() for goal in part.goals])
    judge = partial(batches.judged, lambda place: (float(error(place)), energies[place]))
    before = judge()
    weights.slow_down(before)
    best, epoch, notes = tune(weights, batches, config.reconstruct.epochs, config.seed, loss, judge, before)
    return BlockReport(part.name, before, best, epoch, round(time.perf_counter() - began, 3), notes)
