"""Writing a solution into the model: the mask on every module that holds the weight, and the values."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modelopt_sparse.calibration.run import Run
from modelopt_sparse.model.masking import named_masks, set_mask
from modelopt_sparse.plan.options import SparsifyConfig
from modelopt_sparse.reports.values import PERMUTED, LayerReport
from modelopt_sparse.solving.solve import Solved, errors_name_layer

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
