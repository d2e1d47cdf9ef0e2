"""Reconstruction: better values for what is left of a block, tuned by Adam; masks are frozen, or move.

After the layers of a block are solved, their kept weights, and the norms and biases around them, are tuned on the
squared error of the block's output against the dense block's, as in EBFT (Guo et al. 2024, arXiv 2402.12419) and the
transformer matching of 3BASiL (arXiv 2603.01376).
"""

import time
from collections.abc import Mapping
from functools import partial
from textwrap import shorten

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
from modelopt_sparse.calibration.forward import forward_context
from modelopt_sparse.calibration.padding import INSTEAD, PaddingError
from modelopt_sparse.model.devices import is_out_of_memory
from modelopt_sparse.model.masking import without_masks
from modelopt_sparse.reports.values import BlockReport
from modelopt_sparse.run import Run


def dense_goals(block: BlockTask, inputs: Inputs, run: Run) -> dict[int, Tensor] | None:
    """What the block puts out while it is dense, by the number of the calibration call in this process. None for a
    block that is not tuned: it has no layers, or cannot be run by itself, as the report says."""
    if not isinstance(inputs, AtBlock) or not inputs.once:
        return None
    outputs = inputs.dense_outputs(wanted=bool(block.layer_plans))
    return outputs if block.layer_plans else None


def reconstruct(
    block: BlockTask,
    dense_outputs: Mapping[int, Tensor],
    masks: Masks,
    movable: Mapping[nn.Parameter, TrainableMask],
    inputs: Inputs,
    run: Run,
) -> None:
    """Tune a block in place towards its ``dense_outputs`` (`dense_goals`), and report it. ``masks`` are those of the
    weights pruned in this run (True = kept; None: all of it is tuned); those of ``movable`` move.

    Never worse on the batches held back, see `tune`; where no epoch is better, all are made again at a quarter of the
    rate. ``requires_grad`` and gradients are as before afterwards. A block that cannot be run backward stays.
    """
    options, began = run.config.reconstruct, time.perf_counter()
    assert options is not None
    assert isinstance(options.epochs, int)
    assert isinstance(inputs, AtBlock)
    # a call may go another way now than through dense blocks
    inputs = inputs.only({call.number for call in inputs.calls if inputs.block in call.way} & dense_outputs.keys())
    goals = [dense_outputs[call.number] for call in inputs.calls]
    metric = inputs.data.metrics.get(inputs.block)  # R, errors are those of outputs times R
    weights = dict(tunable(run.model, inputs.block, masks, vectors=options.norms_and_biases))
    if not weights:
        run.report.notes.append(f"{block.name!r} is not reconstructed: modules outside of it hold all of its weights")
        return

    def error(index: int) -> Tensor:
        output = inputs.outputs_of([inputs.block], index)[0]
        return _squared(output.float() - goals[index].float(), token_masks[index], metric)

    def loss(index: int) -> Tensor:
        # scaled so that neither its gradients nor those inside of the block leave float16's range
        return error(index) / max(step_energies[index], 1e-30) * sizes[index] ** 0.5

    # pruned weights are zeros; to let masks see to it in each call takes a twentieth of a step
    with forward_context(run), without_masks(inputs.block), only_these_require_grad(inputs.block, weights):
        token_masks = _token_masks(block, inputs, goals)
        batches = BatchNumbers.of_calls(inputs.data, [call.number for call in inputs.calls])
        energies = [float(_squared(goal.float(), real, metric)) for goal, real in zip(goals, token_masks)]
        step_energies, sizes = batches.per_step(energies), batches.per_step([goal.numel() for goal in goals])
        judge = partial(batches.validation_error, lambda index: (float(error(index)), energies[index]))
        try:
            before = judge()
            for rate in (options.learning_rate, options.learning_rate / 4):
                values = TunedWeights(weights, outputs_of(block.layer_plans), rate, movable)
                values.scale_rate(before)
                best, epoch, notes = tune(values, batches, options.epochs, run.config.seed, loss, judge, before)
                del values  # the next ones take as much memory
                if epoch:  # else larger steps lost more than they gained
                    break
        except BaseException as failed:
            if (why := _why_untrained(failed, run)) is not None:
                run.report.notes.append(f"{block.name!r} is not reconstructed: {why}")
                return
            run.report.notes.append(f"{block.name!r}: its reconstruction was broken off; it has the best values so far")
            raise
    way = f"rate {rate:g}, masks {'move' if movable else 'frozen'}, {'plain' if metric is None else 'fisher'} metric"
    report = BlockReport(block.name, before, best, epoch, round(time.perf_counter() - began, 3), notes, way)
    run.report.reconstructed(report, {layer_plan.name for layer_plan in block.layer_plans})


def _why_untrained(failed: BaseException, run: Run) -> str | None:
    """Why a block cannot be run backward; None for any other failure."""
    cause = failed.__cause__ or failed  # `errors_name_batch` blames the data
    if not isinstance(cause, RuntimeError) or is_out_of_memory(cause) or run.processes.size > 1:
        return None
    return f"to train it fails ({shorten(str(cause), 120)})"


def _squared(values: Tensor, token_mask: Tensor | None, metric: Tensor | None) -> Tensor:
    """The squared norm of the values of real tokens, in the metric."""
    real = values if token_mask is None else values[token_mask]
    return (real if metric is None else real @ metric.to(real.device)).square().sum()


def _token_masks(block: BlockTask, inputs: AtBlock, goals: list[Tensor]) -> list[Tensor | None]:
    """The real tokens of a block's outputs, by batch, as bool masks; None: all are real."""
    masks = [call.masks.at(inputs.data.sides[inputs.block]) for call in inputs.calls]
    for mask, goal in zip(masks, goals):
        if mask is not None and goal.shape[:-1] != mask.shape:
            shapes = f"an output of shape {list(goal.shape)}, and the token mask has shape {list(mask.shape)}"
            raise PaddingError(f"block {block.name!r} has {shapes}: {INSTEAD}")
    return [None if mask is None else mask.to(goal.device, torch.bool) for mask, goal in zip(masks, goals)]
