"""One block, from top to bottom, and how a solution is written into the model: masks and values."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from modelopt_sparse.accuracy.permute import permute
from modelopt_sparse.accuracy.reconstruct import dense_goals, reconstruct
from modelopt_sparse.accuracy.tuning import Movable
from modelopt_sparse.calibration.blocks import BlockTask
from modelopt_sparse.calibration.inputs import collect
from modelopt_sparse.calibration.run import Run, refuse_non_finite
from modelopt_sparse.model.masking import named_masks, set_mask
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.reports.values import PERMUTED, LayerReport
from modelopt_sparse.solving.solve import Solved, errors_name_layer, solve_layers


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


# writing a solution into the model ------------------------------------------------------------------------------------


# what became of experts with fewer tokens than min_tokens, by the option ``experts``
FEW_TOKENS = {
    "pool": "were filled up to {} from the tokens of all experts",
    "all_tokens": "were solved as if every token were routed to them",
    "weight_only": "were solved by their weights alone",
}


@torch.no_grad()
def attach(solved: Solved, permuted: str | None, run: Run) -> dict[nn.Parameter, Tensor]:
    """Write a layer's solution, in place, and report it -> for reconstruction, if that follows, the parameter's mask.

    A layer is written whole or not at all, whatever fails: Ctrl-C waits.
    """
    layer, model, config = solved.layer_plan.layer, run.model, run.config
    mask, values = layer.unmatrix(solved.solution.mask), layer.values
    tied = [
        f"{path}.{layer.param}"
        for path, module in (model.named_modules() if layer.tied_modules else ())
        if module in layer.tied_modules
    ]
    # where an earlier run left a mask, it is replaced even if none is asked for now: it would prune by the old solution
    enforce = config.enforce or layer.param in dict(named_masks(layer.owner))
    with errors_name_layer(solved.layer_plan, "while its solution was written into the model"), _uninterrupted():
        # what takes memory comes before the first write, so that a layer is never left half written
        new, pruned = layer.unmatrix(solved.solution.weight), ~mask.to(values.device)
        for name in (layer.parameter_name, *tied) if enforce else ():
            set_mask(model, name, mask)
        values.copy_(new)
        values.masked_fill_(pruned, 0)
        run.report.layers.append(layer_report(solved, permuted, config))
    return {} if config.reconstruct is None else {layer.parameter: mask}


def layer_report(solved: Solved, permuted: str | None, config: SparsifyConfig) -> LayerReport:
    plan, solution, steps = solved.layer_plan, solved.solution, solved.steps
    notes = [*solution.notes, *([permuted] if permuted else []), *_few_tokens(solved, config)]
    if dead := solved.input.dead:
        notes.append(f"{dead} of {solved.input.channels} input channels were zero on all calibration data (dead)")
    return LayerReport(
        name=plan.name,
        parameter=plan.layer.parameter_name,
        type=plan.type,
        shape=list(plan.shape),
        recipe="+".join([*([PERMUTED] if permuted else []), *(step.step for step in steps)]),
        pattern=str(plan.pattern),
        options=dict(plan.options),
        zeros=solution.mask.numel() - int(solution.mask.count_nonzero()),  # a sum would be of 8-byte copies
        size=solution.mask.numel(),
        error=steps[-1].error,
        error_from=solved.input.error_from,
        tokens=solved.input.tokens,
        seconds=round(sum(step.seconds for step in steps), 4),
        notes=notes,
        steps=steps,
        expert_tokens=solved.input.expert_tokens,
    )


def _few_tokens(solved: Solved, config: SparsifyConfig) -> list[str]:
    """Which experts got fewer tokens than `min_tokens`, and what was done about that."""
    what = f"experts with fewer than {config.min_tokens} tokens {FEW_TOKENS[config.experts].format(config.min_tokens)}"
    counts = enumerate(solved.input.expert_tokens)
    few = [f"{expert} ({count})" for expert, count in counts if count < config.min_tokens]
    notes = [f"{what}: {', '.join(few)}"] if few else []
    calibrated = solved.input.error_from != "weights"
    if solved.layer_plan.layer.mixture is not None and calibrated and solved.input.tokens < config.min_tokens:
        notes.append(f"{what}: this one ({solved.input.tokens})")
    return notes


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the end, so that it never leaves a layer half written."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and callable(before):
        before(*pressed[0])
