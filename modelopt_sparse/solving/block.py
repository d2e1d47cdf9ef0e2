"""One block, from top to bottom."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.permute import permute
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import Movable
from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.inputs import collect
from modelopt_sparse.calibration.run import Run, refuse_non_finite
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.solving.attach import attach
from modelopt_sparse.solving.solve import Solved, solve_layers


def sparsify_block(block: BlockTask, run: Run) -> list[Callable[[], object]]:
    """Make a block sparse: permute, collect, solve, attach, reconstruct, advance.

    Returns what must be written only when the inputs of all blocks have been collected (``sequential="none"``, where
    they come through the whole model); otherwise nothing. A block that fails before its first layer is written is left
    as it was.
    """
    inputs, config = block.inputs(), run.config
    dense_goes_on = config.sequential == "none" and bool(block.layer_plans)  # `collect` sends the dense outputs on
    stays_dense = dense_goes_on and not inputs.blockwise
    masks: dict[nn.Parameter, Tensor] = {}
    movable: dict[nn.Parameter, Movable] = {}
    later: list[Callable[[], object]] = []
    with run.storage.open(block.block, run.report) as stored, inputs.on_device(), ExitStack() as undo:
        with run.report.timed("permutation"):
            permuted = permute(block, inputs, run, undo) if config.permute else {}
        tuned = dense_goals(block, inputs, run) if config.reconstruct else []
        if reused := stored.write_sparse_weights is not None:  # only what the block puts out is needed
            if dense_goes_on:
                inputs.advance()
            stored.write_sparse_weights()
        elif not run.storage.resident:
            for layer_plan in block.layer_plans:
                refuse_non_finite(layer_plan.layer)
        for stage in [] if reused else block.stages(config.sequential):
            for solved in solve_layers(collect(stage, inputs, run, one_pass=block.one_pass), run):
                movable |= _movable(solved, config)
                write = partial(attach, solved, permuted.get(solved.layer_plan.name), run)
                if stays_dense:
                    later.append(write)
                else:
                    masks |= write()
                    undo.pop_all()  # there is no way back once a layer is written
                del solved, write  # not held while the next layer is solved
        undo.pop_all()
        if masks and tuned:
            reconstruct(block, tuned, masks, movable, inputs, run)
        if not dense_goes_on:
            inputs.advance()
    return later


def _movable(solved: Solved, config: SparsifyConfig) -> dict[nn.Parameter, Movable]:
    """The weight of a layer that is to be written, if its mask is to move while the block is tuned."""
    plan, sums = solved.layer_plan, solved.input.square_sums
    if config.reconstruct is None or config.reconstruct.masks == "frozen" or config.masks is not None or sums is None:
        return {}
    if plan.layer.parameter.dtype == torch.float16:  # "auto" leaves these as they are; "move" is refused
        return {}
    return {plan.layer.parameter: Movable.of(plan.layer, plan.pattern_now, sums)}
