"""Reconstruction: better values for what is left of a block, tuned by Adam; masks are frozen, or move.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned on the
squared error of the block's output against the dense block's, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the
transformer matching of 3BASiL (arXiv 2603.01376).
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.tuning import (
    BatchNumbers,
    Masks,
    TrainableMask,
    TunedWeights,
    only_these_require_grad,
    outputs_of,
    tunable,
    tune,
)
from modelopt_sparse.calibration.calls import AtBlock, Inputs
from modelopt_sparse.calibration.dense import BlockTask
from modelopt_sparse.calibration.forward import INSTEAD, PaddingError, forward_context
from modelopt_sparse.plan.options import AUTO, HELD_BACK, HELD_BACK_FOR_OUTPUTS
from modelopt_sparse.reports.values import BlockReport
from modelopt_sparse.run import Run


@dataclass(frozen=True)
class Goals:
    """What a block is tuned towards: the dense block's ``outputs``, one for each calibration batch of this process.
    ``metric``: R, errors are those of outputs times R."""

    outputs: list[Tensor]
    metric: Tensor | None


def dense_goals(block: BlockTask, inputs: Inputs, run: Run) -> Goals | None:
    """What the block puts out while it is dense. None for a block that is not tuned: it has no layers, or cannot be run
    by itself, as the report says."""
    if not isinstance(inputs, AtBlock) or not inputs.once:
        return None
    outputs = inputs.dense_outputs(wanted=bool(block.layer_plans))
    return Goals(outputs, inputs.data.metrics.get(inputs.block)) if block.layer_plans else None


EPOCHS, WITH_OWN_TEXT = 8, 4  # what epochs="auto" stands for; own text makes each four times as long
RATES = (0.2, 0.1, 0.4)  # learning rates that are tried
AS_SOLVED = 0.0  # the rate that changes nothing


class Way(NamedTuple):
    """A way to tune a block: the learning rate, whether its masks move, and whether errors are in the Fisher metric."""

    rate: float
    moves: bool
    fisher: bool

    def __str__(self) -> str:
        if self.rate == AS_SOLVED:
            return "as solved"
        masks, metric = "move" if self.moves else "frozen", "fisher" if self.fisher else "plain"
        return f"rate {self.rate:g}, masks {masks}, {metric} metric"


# each weight with a copy of it, and of its mask if that moves
Copies = list[tuple[nn.Parameter, Tensor, Tensor | None]]


def reconstruct(
    block: BlockTask,
    goals: Goals,
    masks: Masks,
    movable: Mapping[nn.Parameter, TrainableMask],
    inputs: Inputs,
    run: Run,
    judge: Callable[[], float] | None = None,
) -> None:
    """Tune a block in place, and report it. ``masks`` are those of the weights pruned in this run (True = kept; None:
    all of it is tuned); those of ``movable`` may move.

    The first block of a stack, and the one in its middle, are tuned in the ways that `Reconstruct` leaves open
    ("auto"), one of which is not to tune them, each time for half of the epochs and with one of HELD_BACK_FOR_OUTPUTS
    steps held back. Then they are tuned in the best of them, as are the blocks after them. ``judge`` says how far the
    model's output is from the dense model's on the steps held back, with this block as it is; without it the error of
    the block decides.

    Never worse on the batches held back, see `tune`. ``requires_grad`` and gradients are as before afterwards.
    """
    options = run.config.reconstruct
    assert options is not None
    assert isinstance(inputs, AtBlock)
    weights = dict(tunable(run.model, inputs.block, masks, vectors=options.norms_and_biases))
    if not weights:
        run.report.notes.append(f"{block.name!r} is not reconstructed: modules outside of it hold all of its weights")
        return
    epochs = (WITH_OWN_TEXT if inputs.data.written else EPOCHS) if options.epochs == AUTO else options.epochs
    left_open = _left_open(inputs, movable, goals, proved=judge is not None)
    way, losses = Way(*(values[0] for values in left_open)), dict[Way, float]()
    solved = _copies(weights, movable) if max(map(len, left_open)) > 1 else []
    try:
        for part, values in zip(Way._fields, left_open):
            tried = len(values) > 1 and (part == "rate" or way.rate != AS_SOLVED)
            for candidate in [way._replace(**{part: value}) for value in values] if tried else []:
                if candidate in losses:
                    continue
                half = math.ceil(epochs / 2)
                report = _tuned(block, goals, weights, movable, inputs, candidate, half, HELD_BACK_FOR_OUTPUTS)
                loss = report.error_after if judge is None else judge()
                losses[candidate] = loss if math.isfinite(loss) else math.inf
                _write(solved, movable)
            way = min(losses, key=losses.__getitem__, default=way)
        report = _tuned(block, goals, weights, movable, inputs, way, epochs, HELD_BACK)
    except BaseException:
        run.report.notes.append(f"{block.name!r}: its reconstruction was broken off; it has the best values up to then")
        raise
    measure = "error of the block" if judge is None else "divergence of the model's output"
    notes = [f"{way}: {loss:.4g}" for way, loss in losses.items()]
    notes = [f"taken: {way}, by the {measure} on the batches held back", *notes] if notes else []
    report = replace(report, way=str(way), notes=[*report.notes, *notes])
    run.report.reconstructed(report, {layer_plan.name for layer_plan in block.layer_plans})


def _left_open(
    inputs: AtBlock, movable: Mapping[nn.Parameter, TrainableMask], goals: Goals, *, proved: bool
) -> list[list[Any]]:
    """The values to try for each field of `Way`: those that the options allow; or first, and but for the block in the
    middle alone, the one that the block before it in the stack has taken, by the report. A first block makes little of
    the model's error, and may be better off in another way. Errors in two metrics cannot be compared: unless the
    model's output is asked, the Fisher metric is taken where the block has one."""
    options = inputs.run.config.reconstruct
    assert options is not None
    rates = [*RATES, AS_SOLVED] if options.learning_rate == "auto" else [options.learning_rate]
    moves = {"frozen": [False], "move": [True], "auto": [False, True]}[options.masks] if movable else [False]
    metrics = {"plain": [False], "fisher": [True], "auto": [False, True]}[options.metric]
    metrics = [False] if goals.metric is None else metrics if proved else metrics[-1:]
    stack = inputs.again.stack_of[inputs.block]
    taken = [report.way for report in inputs.run.report.blocks if report.name.startswith(stack.names)]
    allowed: list[list[Any]] = [rates, moves, metrics]
    known = [way for way in map(Way._make, product(*allowed)) if taken and str(way) == taken[-1]]
    if not known:
        return allowed
    anew = inputs.block is stack.blocks[len(stack.blocks) // 2]
    return [[last, *(x for x in values if anew and x != last)] for last, values in zip(known[0], allowed)]


def _copies(weights: Masks, movable: Mapping[nn.Parameter, TrainableMask]) -> Copies:
    """Copies of weights, and of the masks that those carry which may move."""
    copies = []
    for weight in weights:
        mask = movable[weight].carried_mask() if weight in movable else None
        copies.append((weight, weight.detach().clone(), None if mask is None else mask.clone()))
    return copies


@torch.no_grad()
def _write(copies: Copies, movable: Mapping[nn.Parameter, TrainableMask]) -> None:
    """Write copies of weights, and of their masks, back into the model."""
    for weight, value, mask in copies:
        if mask is not None:
            movable[weight].set_mask(mask)
        weight.copy_(value)


def _tuned(
    block: BlockTask,
    goals: Goals,
    weights: Masks,
    movable: Mapping[nn.Parameter, TrainableMask],
    inputs: AtBlock,
    way: Way,
    epochs: int,
    one_of: int,
) -> BlockReport:
    """Tune the ``weights`` of a block with their masks in one way. One of ``one_of`` steps is held back."""
    began = time.perf_counter()
    movable, metric = movable if way.moves else {}, goals.metric if way.fisher else None

    def squared(values: Tensor, index: int) -> Tensor:
        """The squared norm of the values of real tokens, in the metric."""
        token_mask = token_masks[index]
        real = values if token_mask is None else values[token_mask]
        return (real if metric is None else real @ metric.to(real.device)).square().sum()

    def error(index: int) -> Tensor:
        output = inputs.outputs_of([inputs.block], index)[0]
        return squared(output.float() - goals.outputs[index].float(), index)

    def loss(index: int) -> Tensor:
        # scaled so that neither its gradients nor those inside of the block leave float16's range
        return error(index) / max(step_energies[index], 1e-30) * sizes[index] ** 0.5

    values = TunedWeights(weights, outputs_of(block.layer_plans), way.rate, movable)
    with forward_context(inputs.run), only_these_require_grad(inputs.block, weights, masked=not movable):
        token_masks = _token_masks(block, inputs, goals.outputs)
        batches = BatchNumbers.of_calls(inputs.data, [call.numbered.number for call in inputs.calls], one_of)
        energies = [float(squared(goal.float(), index)) for index, goal in enumerate(goals.outputs)]
        step_energies, sizes = batches.per_step(energies), batches.per_step([goal.numel() for goal in goals.outputs])
        judge = partial(batches.validation_error, lambda index: (float(error(index)), energies[index]))
        before = judge()
        values.scale_rate(before)
        epochs = 0 if way.rate == AS_SOLVED else epochs
        best, epoch, notes = tune(values, batches, epochs, inputs.run.config.seed, loss, judge, before)
    return BlockReport(block.name, before, best, epoch, round(time.perf_counter() - began, 3), notes)


def _token_masks(block: BlockTask, inputs: AtBlock, goals: list[Tensor]) -> list[Tensor | None]:
    """The real tokens of a block's outputs, by batch, as bool masks; None: all are real."""
    masks = [call.numbered.masks.at(inputs.data.sides[inputs.block]) for call in inputs.calls]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            shapes = f"an output of shape {list(goal.shape)}, and the token mask has shape {list(mask.shape)}"
            raise PaddingError(f"block {block.name!r} has {shapes}: {INSTEAD}")
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]
